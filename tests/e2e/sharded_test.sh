#!/usr/bin/env bash
# attend call over three servers: by batch, heads and keys, by a list and by one name; and what it
# says where one of them is gone.
. "$(dirname "$0")/lib.sh"

folder=$work
pids=()
end_all() {
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2> /dev/null || true; done
  work=$folder
  server_pid=
  cleanup
}
trap end_all EXIT

servers=
for server in 1 2 3; do
  work=$folder/$server
  mkdir "$work"
  start_server --measure_peak=false --drain_delay=0s
  pids+=("$server_pid")
  servers=$servers${servers:+,}$address
done
last=$address
work=$folder

call() { "$bin/attend" call --shape=2,6,70,16 --random=3 "$@"; }
# largest_difference <npy> <npy>: of float32 arrays.
largest_difference() {
  paste <(od -An -v -tf4 -w4 -j128 "$1") <(od -An -v -tf4 -w4 -j128 "$2") |
    awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > most) most = d } END { print most + 0 }'
}

exits 0 '^output' call --server="$last" --causal=bottom-right --out="$work/one.npy" \
  --out_weights="$work/one_weights.npy"
grep -q '^shards' "$work/out" && fail "shards where there is one server"

# By rows: every bit.
for by in batch heads auto; do
  shards=3
  [ "$by" != batch ] || shards=2
  exits 0 "^shards +$shards, by (batch|heads)\$" call --server="$servers" --shard="$by" \
    --causal=bottom-right --out="$work/$by.npy" --out_weights="$work/weights.npy"
  cmp "$work/one.npy" "$work/$by.npy" || fail "the output by $by has other bits"
  cmp "$work/one_weights.npy" "$work/weights.npy" || fail "the weights by $by have other bits"
done
grep -q '^shards.*by heads' "$work/out" || fail "auto did not take the heads"
exits 0 '^shards +3, by heads$' call --server="ipv4:$servers" --shards=3 --causal=bottom-right \
  --out="$work/balanced.npy"
cmp "$work/one.npy" "$work/balanced.npy" || fail "the output by one name has other bits"

# By keys: to within rounding.
exits 0 '^shards +3, by keys$' call --server="$servers" --shard=keys --causal=bottom-right \
  --out="$work/keys.npy"
difference=$(largest_difference "$work/one.npy" "$work/keys.npy")
awk -v d="$difference" 'BEGIN { exit !(d < 1e-5) }' || fail "by keys the difference is $difference"
exits 0 '^output' call --server="$servers" --out="$work/other.npy"
difference=$(largest_difference "$work/one.npy" "$work/other.npy")
awk -v d="$difference" 'BEGIN { exit !(d > 1e-2) }' || fail "another problem differs by $difference"
exits 5 'options.return_weights: .*shard by heads' call --server="$servers" --shard=keys \
  --out_weights="$work/weights.npy"
exits 5 'shard [1-3] of 3 .key heads .* at 127.0.0.1:[0-9]+: options.softcap: is -1' call \
  --server="$servers" --softcap=-1
exits 2 'only call takes more than one' "$bin/attend" --server="$servers" health
exits 2 'shards must be 1 or more' call --server="$servers" --shards=3
exits 2 'is none of' call --server="$servers" --shard=tokens

# A server that is gone is named.
kill -TERM "${pids[2]}"
wait "${pids[2]}" || fail "exit code $?"
exits 3 "no server answered at $last within" call --server="$servers" --connect_timeout=200ms
kill -TERM "${pids[0]}" "${pids[1]}"
wait "${pids[0]}" "${pids[1]}" || fail "exit code $?"
pids=()
echo "passed"
