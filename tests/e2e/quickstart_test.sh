#!/usr/bin/env bash
# scripts/quickstart.sh with programs that are built: the lesson, the cost, a clean end.
. "$(dirname "$0")/lib.sh"

quickstart=$(dirname "$0")/../../scripts/quickstart.sh
exits 0 'chai +0\.221 +0\.248 +0\.193 +0\.155 +0\.184' "$quickstart" --bin="$bin"
grep -q 'attendant_requests_total{code="OK",method="Head",path="chunked"} 1' "$work/out" ||
  fail "the call's cost is not shown"
grep -q 'attendant_peak_workspace_bytes{path="chunked",tokens="64"}' "$work/out" ||
  fail "the call's workspace is not shown"
exits 2 'usage' "$quickstart" --bogus
echo "passed"
