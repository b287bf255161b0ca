#!/usr/bin/env bash
# buf lint over the contract. buf comes from PyPI, into build/venv.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/venv
if [ ! -x $venv/bin/buf ]; then
  python3 -m venv $venv
  $venv/bin/pip install --quiet --disable-pip-version-check buf-bin==1.75.0
fi
cd proto
"../$venv/bin/buf" lint
"../$venv/bin/buf" format --diff --exit-code
