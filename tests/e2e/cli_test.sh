#!/usr/bin/env bash
# attend against a real server: what it prints, and what it exits with.
. "$(dirname "$0")/lib.sh"

start_server --drain_delay=0s
export ATTENDANT_SERVER=$address

exits 0 '^attend [0-9]+\.[0-9]+\.[0-9]+$' "$bin/attend" --version
exits 0 'lesson' "$bin/attend" --help
exits 0 '^SERVING$' "$bin/attend" health
exits 0 '^compute threads +[0-9]+' "$bin/attend" info
grep -qE '^calls at a time +8$' "$work/out" && grep -qE '^calls waiting +256 at most$' "$work/out" ||
  fail "info does not show the queue"

exits 0 'chai +0\.221 +0\.248 +0\.193 +0\.155 +0\.184 +1\.000000' "$bin/attend" lesson
for array in 'X +\(5, 8\)' 'Q +\(5, 4\)' 'K +\(5, 4\)' 'V +\(5, 4\)' 'logits +\(5, 5\)' \
  'A +\(5, 5\)' 'context +\(5, 4\)' 'output +\(5, 8\)'; do
  grep -qE "^$array" "$work/out" || fail "the lesson does not show $array"
done
difference=$(sed -n 's/^largest difference from LibTorch.*: //p' "$work/out")
awk -v d="$difference" 'BEGIN { exit !(d <= 4.5e-16) }' || fail "difference $difference"

# Random inputs, both paths, each figure.
for path in explicit chunked; do
  exits 0 "^path +$path " "$bin/attend" call --shape=1,2,64,16 --random=7 --path=$path \
    --causal=top-left --out="$work/$path.npy"
  grep -qE '^workspace +[1-9][0-9]* bytes' "$work/out" || fail "no workspace bytes"
  grep -qE '^FLOPs +266240$' "$work/out" || fail "not 2 * 2 * (64 * 65 / 2) * (16 + 16) FLOPs"
  grep -qE '^GFLOP/s +[0-9.]+' "$work/out" || fail "no GFLOP/s"
done
[ "$(stat -c %s "$work/explicit.npy")" = "$((128 + 4 * 2 * 64 * 16))" ] || fail "size of the output"

# Files of rank 2 and 3 come back with theirs.
exits 0 '^output +\(1, 2, 64, 16\)' "$bin/attend" call --query="$work/explicit.npy" \
  --key="$work/chunked.npy" --value="$work/explicit.npy" --out="$work/o.npy" --scale=0
exits 0 '^output +\(6, 5\)' "$bin/attend" call --shape=6,5 --random=1 --dtype=float64
exits 0 '^output +\(6, 5, 4\)' "$bin/attend" call --shape=6,5,4 --random=1 --layout=bthd

# Every option of a call.
exits 0 '^output +\(1, 1, 3, 4\)' "$bin/attend" call --shape=1,1,3,4 --random=1 --softcap=5 \
  --alibi_slopes=0.5 --sinks=-1 --window_left=1 --window_right=0 --causal=bottom-right \
  --key_lengths=2

# Half precision: the output has its type, or float32 where NumPy has none.
exits 0 '^output +\(6, 5\)' "$bin/attend" call --shape=6,5 --random=1 --dtype=float16 \
  --out="$work/half.npy"
[ "$(stat -c %s "$work/half.npy")" = "$((128 + 2 * 6 * 5))" ] || fail "size of the float16 output"
exits 0 '^output +\(6, 5\)' "$bin/attend" call --query="$work/half.npy" --key="$work/half.npy" \
  --value="$work/half.npy"
exits 0 '^output +\(6, 5\)' "$bin/attend" call --shape=6,5 --random=1 --dtype=bfloat16 \
  --out="$work/brain.npy"
[ "$(stat -c %s "$work/brain.npy")" = "$((128 + 4 * 6 * 5))" ] || fail "size of the bfloat16 output"

# What else is computed, of the query's rank.
exits 0 '^output +\(2, 6, 5\)' "$bin/attend" call --shape=2,6,5 --random=1 \
  --out_weights="$work/weights.npy" --out_logsumexp="$work/logsumexp.npy" \
  --out_key_sums="$work/key_sums.npy"
grep -q "'shape': (2, 6, 6)" "$work/weights.npy" || fail "shape of the weights"
grep -q "'shape': (2, 6)" "$work/logsumexp.npy" || fail "shape of the logsumexp"
grep -q "'shape': (2, 6)" "$work/key_sums.npy" || fail "shape of the key sums"

# A number that does not fit is not taken for the nearest that does.
exits 2 'softcap: .1e-400. is no number that fits' "$bin/attend" call --shape=1,1 --random=1 \
  --softcap=1e-400
exits 2 'key_lengths: .99999999999999999999. is no whole number of 64 bits' "$bin/attend" call \
  --shape=1,1 --random=1 --key_lengths=1,99999999999999999999
exits 5 'options.softcap: is 1e-39, must be 0 .none., or at least 1.17549e-38' "$bin/attend" call \
  --shape=1,1 --random=1 --softcap=1e-39

# A map of the weights: causal, and every key a row sees weighs as much.
exits 0 '^weights +head 1: 4 queries by 4 keys, @ = 1$' "$bin/attend" call --shape=1,2,4,3 \
  --random=1 --scale=0 --causal=top-left --print-weights=1
tail -4 "$work/out" > "$work/map"
[ "$(sed -n 1p "$work/map")" = '@   ' ] && [ "$(sed -n 4p "$work/map")" = '----' ] ||
  { cat "$work/map"; fail "not the map of a causal mean"; }
exits 2 'must be below the 2 heads' "$bin/attend" call --shape=1,2,4,3 --random=1 --print-weights=2

# A mask of the caller's.
printf '%s' "{'descr': '|b1', 'fortran_order': False, 'shape': (2, 3), }" > "$work/header"
{ printf '\223NUMPY\001\000%b\000' "\\0$(printf %o "$(stat -c %s "$work/header")")"
  cat "$work/header"; printf '\001\000\000\000\001\001'; } > "$work/mask.npy"
sed 's/(2, 3)/(6, ) /' "$work/mask.npy" > "$work/row_mask.npy"
exits 0 '^output +\(6, 4\)' "$bin/attend" call --shape=6,4 --random=1 --mask="$work/row_mask.npy"
exits 5 'options.mask.shape.1.: is 3, must be 1 or 2 .the key.s tokens' "$bin/attend" call \
  --shape=2,4 --random=1 --mask="$work/mask.npy"
exits 4 'no_mask.npy: No such file' "$bin/attend" call --shape=2,4 --random=1 \
  --mask="$work/no_mask.npy"

# What is wrong gets one line and its own exit code; arrays are looked at before a server is.
one_line() { [ "$(wc -l < "$work/out")" = 1 ] || { cat "$work/out" >&2; fail "more than one line"; }; }
exits 2 'is required|required' "$bin/attend"
exits 2 'bogus' "$bin/attend" call --bogus
exits 2 'none of' "$bin/attend" call --shape=1,1 --random=1 --causal=sideways
exits 2 'give --query' "$bin/attend" call
exits 2 'must be 0 or more' "$bin/attend" call --shape=1,-1 --random=1 --server=127.0.0.1:1
one_line
exits 2 'must have 2 to 4' "$bin/attend" call --shape=8 --random=1
one_line
exits 2 'bytes of arrays, at most' "$bin/attend" call --shape=1,8,40000000,64 --random=1
one_line
exits 2 'dtype' "$bin/attend" call --query=a --key=b --value=c --dtype=float64
exits 3 'no server answered at 127.0.0.1:1 ' "$bin/attend" --server=127.0.0.1:1 \
  --connect_timeout=200ms health
one_line
exits 4 'missing.npy: No such file' "$bin/attend" call --query="$work/missing.npy" \
  --key="$work/missing.npy" --value="$work/missing.npy"
one_line
exits 4 'no .npy file' "$bin/attend" call --query="$0" --key="$0" --value="$0"
one_line
exits 4 'cannot be written' "$bin/attend" call --shape=1,1 --random=1 --out=/no/such/folder/o.npy
one_line
exits 5 'options.key_lengths\[1\]: is 4, must be 0 to 3' "$bin/attend" call --shape=2,1,3,4 \
  --random=1 --key_lengths=3,4
one_line
exits 5 "no service 'nobody'" "$bin/attend" health --service=nobody
one_line
exits 6 '[Dd]eadline' "$bin/attend" call --shape=1,8,8192,64 --random=1 --timeout=20ms
one_line

[ "$(metric 'attendant_requests_total{code="OK",method="Head",path="chunked"}')" = 1 ] ||
  fail "the lesson is not on the metrics page"
kill -TERM "$server_pid"
wait "$server_pid" || fail "the server did not exit 0"
exits 3 'no server' "$bin/attend" --connect_timeout=200ms health
exits 3 'no server .* within 150ms' "$bin/attend" --timeout=150ms health
server_pid=
echo "passed"
