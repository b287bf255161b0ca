#!/usr/bin/env bash
# Formats the C++ code by .clang-format; with --check it only says what is not formatted.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=(-i)
if [ "${1:-}" = --check ]; then
  mode=(--dry-run --Werror)
fi
git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cc' |
  xargs -0 clang-format "${mode[@]}"
