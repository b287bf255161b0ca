#!/usr/bin/env bash
# SIGTERM: with work running, with too much of it, when idle, and twice. A taken port.
. "$(dirname "$0")/lib.sh"

# Until the server has a job in hand.
await_job() {
  for _ in $(seq 600); do
    [ "$(metric attendant_inflight_flops)" != 0 ] && return
    sleep 0.05
  done
  fail "no job arrived"
}

long_call() { "$bin/attend" --server="$address" --timeout=5m --attempts=1 call --shape=1,8,"$1",32 --random=1; }

# Work that is running is finished, and readiness goes first.
# oneDNN's tiles: a sanitizer build does not slow them down.
start_server --measure_peak=false --drain_delay=1s --drain_timeout=250s --kernel=onednn
long_call 8192 > "$work/call.out" 2>&1 &
call=$!
await_job
kill -TERM "$server_pid"
for _ in $(seq 100); do
  "$bin/attend" --server="$address" health > "$work/health.out" 2>&1 || break
  sleep 0.05
done
grep -q NOT_SERVING "$work/health.out" || { cat "$work/health.out" >&2; fail "health stayed ready"; }
wait "$call" || { cat "$work/call.out" >&2; fail "the running call did not finish"; }
wait "$server_pid" || fail "exit code $? with work running"
server_pid=

# Work that outlives the timeout is cancelled, and the exit code is 0 all the same.
start_server --measure_peak=false --drain_delay=0s --drain_timeout=0s --kernel=onednn
long_call 32768 > "$work/call.out" 2>&1 &
call=$!
await_job
kill -TERM "$server_pid"
wait "$server_pid" || fail "exit code $? with too much work"
server_pid=
code=0
wait "$call" || code=$?
[ "$code" = 3 ] || { cat "$work/call.out" >&2; fail "the cancelled call exited $code, not 3"; }
grep -q 'shut down' "$work/call.out" || { cat "$work/call.out" >&2; fail "no reason given"; }

# Idle, it exits right after the delay.
start_server --measure_peak=false --drain_delay=0s --drain_timeout=100s
kill -TERM "$server_pid"
begin=$SECONDS
wait "$server_pid" || fail "exit code $? when idle"
server_pid=
[ $((SECONDS - begin)) -lt 50 ] || fail "an idle server waited for the timeout"

# A second signal ends it at once.
start_server --measure_peak=false --drain_delay=100s
kill -TERM "$server_pid"
for _ in $(seq 100); do
  grep -q 'not ready any more' "$work/server.log" && break
  sleep 0.05
done
sleep 0.2
kill -TERM "$server_pid"
code=0
wait "$server_pid" || code=$?
server_pid=
[ "$code" = 143 ] || fail "exit code $code after the second signal"

# A taken port is named, and the exit code says so.
start_server --measure_peak=false --drain_delay=0s
exits 1 "cannot serve gRPC on --listen=$address" "$bin/attendant" --listen="$address" \
  --metrics_listen=127.0.0.1:0
metrics_address=$(echo "$metrics" | sed 's|http://||; s|/metrics||')
exits 1 "cannot serve metrics on --metrics_listen=$metrics_address" "$bin/attendant" --listen=127.0.0.1:0 \
  --metrics_listen="$metrics_address"
kill -TERM "$server_pid"
wait "$server_pid" || fail "exit code $?"
server_pid=
echo "passed"
