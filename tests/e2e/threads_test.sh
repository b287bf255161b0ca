#!/usr/bin/env bash
# What hundreds of calls at once take of a server, and what stays of it.
. "$(dirname "$0")/lib.sh"

# Threads follow the machine's CPUs, not the calls. Beside the 2 that compute 12 are of a fixed number;
# gRPC's pools take up to 4 a CPU.
start_server --measure_peak=false --drain_delay=0s --compute_threads=2 --max_queue=1000
threads_allowed=$((2 + 12 + 4 * $(nproc --all)))
"$bin/attend_load" --server="$address" --rate=4000 --duration=3s --warmup=0s --attempts=1 \
  --most_calls=512 --sizes=1x1x2048x8 > "$work/load.out" 2>&1 &
load=$!
most_threads=0
most_calls=0
while kill -0 "$load" 2> /dev/null; do
  threads=$(find "/proc/$server_pid/task" -mindepth 1 -maxdepth 1 2> /dev/null | wc -l)
  calls=$(metric attendant_inflight_requests)
  [ "$threads" -le "$most_threads" ] || most_threads=$threads
  [ "$calls" -le "$most_calls" ] || most_calls=$calls
  sleep 0.05
done
wait "$load" || { cat "$work/load.out" >&2; fail "attend_load exited $?"; }
echo "$most_threads threads at up to $most_calls calls at once"
[ "$most_calls" -ge 100 ] || fail "at most $most_calls calls were in flight"
[ "$most_threads" -le "$threads_allowed" ] || fail "$most_threads threads, not $threads_allowed"

# A load of which nothing would count is no load.
exits 2 '--duration: 1s is not longer than --warmup=1s' "$bin/attend_load" --server="$address" \
  --duration=1s
exits 2 '--phases: 2s is not longer than --warmup=3s' "$bin/attend_load" --server="$address" \
  --phases=1:1s,2:1s --warmup=3s
exits 1 'no call was counted' "$bin/attend_load" --server="$address" --rate=0.001 --duration=50ms \
  --warmup=0s --strict

# And none of it stays when they are gone.
for series in inflight_requests memory_reserved_bytes queue_depth; do
  for _ in $(seq 600); do
    [ "$(metric "attendant_$series")" = 0 ] && break
    sleep 0.05
  done
  [ "$(metric "attendant_$series")" = 0 ] || fail "attendant_$series did not come back to 0"
done
kill -TERM "$server_pid"
wait "$server_pid" || fail "exit code $?"
server_pid=
echo "passed"
