#!/usr/bin/env bash
# attend lesson --all against a real server: a line for each claim, and all of them hold.
. "$(dirname "$0")/lib.sh"

start_server --measure_peak=false --drain_delay=0s
export ATTENDANT_SERVER=$address

claims="float64 rows symmetric qk-circuit ov-circuit row-constant paths float32 overflow
  explicit-memory chunked-memory"
exits 0 '^qk-circuit +\(W_q M, W_k M\^-T\) leaves the head unchanged +off by ' \
  "$bin/attend" lesson --all
cp "$work/out" "$work/all"
[ "$(wc -l < "$work/all")" = "$(echo $claims | wc -w)" ] ||
  { cat "$work/all" >&2; fail "not one line a claim"; }
[ "$(grep -c ' ok$' "$work/all")" = "$(wc -l < "$work/all")" ] ||
  { cat "$work/all" >&2; fail "a claim without its ok"; }

# The default kernel has the same bits on every CPU with AVX2, and they are within the lesson's 1e-7.
awk '$1 == "float32" { for (i = 1; i < NF; ++i) if ($i == "by") seen = $(i + 1) }
     END { exit !(seen > 0 && seen <= 1e-7) }' "$work/all" ||
  { cat "$work/all" >&2; fail "float32 is further away than 1e-7"; }

# Each alone prints its line, and the same number again.
for claim in $claims; do
  exits 0 "^$claim .* ok\$" "$bin/attend" lesson "$claim"
  [ "$(cat "$work/out")" = "$(grep "^$claim " "$work/all")" ] ||
    { cat "$work/out" >&2; fail "$claim alone is not $claim of --all"; }
done
exits 2 'not expected: nonsense' "$bin/attend" lesson nonsense
exits 2 'excludes' "$bin/attend" lesson --all symmetric
exits 0 'chunked-memory' "$bin/attend" lesson --help

kill -TERM "$server_pid"
wait "$server_pid" || fail "the server did not exit 0"
server_pid=
exits 3 'no server answered' "$bin/attend" --connect_timeout=200ms lesson --all
echo "passed"
