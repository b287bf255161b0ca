#!/usr/bin/env bash
# Three servers, each restarted in turn while calls go on through the shipped client: none fails.
#
#   rolling_restart_test.sh BIN [--rounds=N]     restarts; 3 by default
. "$(dirname "$0")/lib.sh"
rounds=3
for argument in "${@:2}"; do
  case "$argument" in
    --rounds=*) rounds=${argument#--rounds=} ;;
    *) fail "'$argument' is not --rounds=N" ;;
  esac
done

folder=$work
pids=()
load=
end_all() {
  for pid in "${pids[@]}" $load; do kill -KILL "$pid" 2> /dev/null || true; done
  work=$folder
  server_pid=
  cleanup
}
trap end_all EXIT

# start <index>: with a log of its own, and at the address that it had, if it had one.
addresses=()
start() {
  local index=$1
  work=$folder/$index
  mkdir -p "$work"
  listen=${addresses[$index]:-}
  start_server --measure_peak=false --drain_delay=300ms
  pids[$index]=$server_pid
  addresses[$index]=$address
  server_pid=
  work=$folder
}
for index in 0 1 2; do start "$index"; done

# Ends when it is told to, and counts.
"$bin/attend_load" --server="ipv4:${addresses[0]},${addresses[1]},${addresses[2]}" --round_robin \
  --rate=40 --duration=1h --warmup=0s --sizes=1x8x128x64:9,1x8x1024x64:1 --strict \
  --json="$work/load.json" > "$work/load.out" 2>&1 &
load=$!
# answered <server>: calls that it has answered since its start.
answered() {
  curl --silent --fail "$(grep -o 'http://[^;]*' "$folder/$1/server.log")" |
    awk '/^attendant_requests_total/ && /method="Attend"/ && /code="OK"/ { n += $2 } END { print n + 0 }'
}
await_calls() {
  for _ in $(seq 600); do
    [ "$(answered "$1")" -ge 5 ] && return
    kill -0 "$load" 2> /dev/null || { cat "$work/load.out" >&2; fail "the load ended"; }
    sleep 0.1
  done
  fail "server $1 gets no calls"
}
for index in 0 1 2; do await_calls "$index"; done

for round in $(seq "$rounds"); do
  index=$((round % 3))
  kill -TERM "${pids[$index]}"
  wait "${pids[$index]}" || fail "server $index exited $? in round $round"
  start "$index"
  # It takes part again before the next one goes.
  await_calls "$index"
done

kill -INT "$load"
code=0
wait "$load" || code=$?
load=
cat "$work/load.out"
[ "$code" = 0 ] || fail "calls failed: attend_load exited $code"
grep -qE '"all": \{.*"failed": 0' "$work/load.json" || fail "the report counts failed calls"
grep -qE '"statuses": \{"OK": [1-9][0-9]+\}' "$work/load.json" || fail "the report has no calls"
for pid in "${pids[@]}"; do kill -TERM "$pid"; done
for pid in "${pids[@]}"; do wait "$pid" || fail "exit code $?"; done
pids=()
echo "passed"
