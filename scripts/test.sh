#!/usr/bin/env bash
# Installs packages, builds, and runs the tests.
#
#   scripts/test.sh [preset] [ctest arguments...]     preset: release (default), asan or tsan
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$root"

preset=release
case "${1:-}" in
  release | asan | tsan)
    preset=$1
    shift
    ;;
esac
VERBOSE=1 step "packages" scripts/setup.sh
VERBOSE=1 step "build $preset" build "$preset"
VERBOSE=1 step "tests $preset" ctest --preset "$preset" "$@"
