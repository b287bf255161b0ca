#!/usr/bin/env bash
# Compares attend_bench with other libraries and writes docs/performance.md: compare.py in its own
# virtual environment under build/. Takes compare.py's arguments; see --help.
#
#   bench/compare/run.sh [--torch] [--rounds=N] [--seconds=S] [--cases=...] [--output=FILE]
#
# Needs a built build/release/bin/attend_bench.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/compare/venv
requirements=(-r bench/compare/requirements.txt)
for argument in "$@"; do
  if [ "$argument" = --torch ]; then
    requirements+=(-r bench/compare/requirements-torch.txt)
  fi
done
[ -x $venv/bin/python ] || python3 -m venv $venv
$venv/bin/pip install --quiet --disable-pip-version-check "${requirements[@]}"
# NumPy would ask for huge pages, and the peers would read other memory than attend_bench does: up to
# a quarter faster.
export NUMPY_MADVISE_HUGEPAGE=0
exec $venv/bin/python bench/compare/compare.py "$@"
