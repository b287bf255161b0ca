#!/usr/bin/env bash
# attend check against a real server: verdicts, findings, and what it exits with.
. "$(dirname "$0")/lib.sh"

start_server --measure_peak=false --drain_delay=0s
export ATTENDANT_SERVER=$address

# Arrays to ask about: outputs of other calls.
array() { # array <name> <shape> <seed>
  exits 0 '^output' "$bin/attend" call --shape="$2" --random="$3" --dtype=float64 \
    --out="$work/$1.npy"
}
array q 2,6,4 1; array k 2,6,4 2; array v 2,6,4 3
inputs=(--query="$work/q.npy" --key="$work/k.npy" --value="$work/v.npy")
answer() { # answer <name> <flags...>
  local name=$1
  shift
  exits 0 '^output' "$bin/attend" call "${inputs[@]}" --out="$work/$name.npy" "$@"
}
answer right
answer unscaled --scale=1
answer causal --causal=top-left
answer unscaled_causal --scale=1 --causal=top-left
answer softcapped --softcap=0.7

check() { "$bin/attend" check "${inputs[@]}" "$@"; }
exits 0 '^verdict +MATCH: ' check --candidate="$work/right.npy"
exits 0 '^difference +[0-9.e-]+ at output\[[01], [0-5], [0-3]\], where yours is ' check \
  --candidate="$work/right.npy"
exits 0 '^verdict +MATCH' check --candidate="$work/causal.npy" --causal=top-left
exits 1 '^verdict +MISMATCH: ' check --candidate="$work/unscaled.npy"
grep -qE '^scale_missing \(options.scale\), which leaves a difference of [0-9.e-]+$' "$work/out" ||
  { cat "$work/out"; fail "the missing scale is not named"; }
exits 1 '^causal_ignored \(options.causal\)' check --candidate="$work/right.npy" --causal=top-left
exits 1 '^causal_not_asked_for ' check --candidate="$work/causal.npy"
exits 1 '^scale_missing\+causal_not_asked_for \(options.scale, options.causal\)' check \
  --candidate="$work/unscaled_causal.npy"
exits 1 'two mistakes at once: ' check --candidate="$work/unscaled_causal.npy"
exits 1 '^softcap_ignored ' check --candidate="$work/right.npy" --softcap=0.7
exits 1 '^no known mistake, nor two of them, ' check --candidate="$work/q.npy"
exits 1 '"code": "scale_missing"' check --candidate="$work/unscaled.npy" --json
grep -q '"verdict": "VERDICT_MISMATCH"' "$work/out" || fail "no verdict in the JSON"

# A head, whose output is not this.
array x 5,8 4; array w 8,4 5; array o 4,8 6; array logits 5,5 7
head=(--x="$work/x.npy" --w_q="$work/w.npy" --w_k="$work/w.npy" --w_v="$work/w.npy"
  --w_o="$work/o.npy")
exits 1 '^departs at +output$' "$bin/attend" check "${head[@]}" --candidate="$work/x.npy"
exits 1 '^departs at +logits$' "$bin/attend" check "${head[@]}" --candidate="$work/x.npy" \
  --candidate_logits="$work/logits.npy"
exits 1 'at logits\[[0-4], [0-4]\], where yours is ' "$bin/attend" check "${head[@]}" \
  --candidate_logits="$work/logits.npy"

# What is wrong gets its own exit code.
exits 2 'give --query, --key, --value and --candidate, or --x' "$bin/attend" check
exits 2 'requires --candidate' check
exits 2 'give --candidate, or any --candidate_' "$bin/attend" check "${head[@]}"
exits 4 'missing.npy: No such file' check --candidate="$work/missing.npy"
array wide 2,6,8 8
exits 5 "candidate.shape\[3\]: is 8, must be 4 .the value.s width" check --candidate="$work/wide.npy"
exits 5 'head_candidate.logits.shape\[3\]: is 8, must be 5 .the tokens of x' "$bin/attend" check \
  "${head[@]}" --candidate_logits="$work/x.npy"

kill -TERM "$server_pid"
wait "$server_pid" || fail "the server did not exit 0"
server_pid=
echo "passed"
