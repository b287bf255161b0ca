#!/usr/bin/env bash
# clang-tidy by .clang-tidy over what we ship, with clang's -Wthread-safety among its errors. Tests are
# left to the compilers' warnings and the sanitizers: GoogleTest's headers would double the time.
# Needs a configured and built release preset: the generated headers and compile_commands.json.
set -euo pipefail
cd "$(dirname "$0")/.."
# SIMD code is looked at once, not once for each instruction set.
git ls-files -z --cached --others --exclude-standard -- '*.cc' ':!tests' |
  xargs -0 -P "$(nproc)" -n 1 clang-tidy -p build/release --quiet --extra-arg=-DHWY_COMPILE_ONLY_STATIC
