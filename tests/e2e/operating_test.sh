#!/usr/bin/env bash
# A server as its owner starts it: addresses, sizes that are refused, the CPUs that are ours.
. "$(dirname "$0")/lib.sh"

attend() { "$bin/attend" --server="$1" --timeout=5m "${@:2}"; }

# Several addresses, a socket among them; a second server may have neither.
start_server --measure_peak=false --drain_delay=0s --listen="unix:$work/socket"
exits 0 SERVING attend "unix:$work/socket" health
first=$(grep -o 'gRPC on [^ ]*' "$work/server.log" | sed 's/gRPC on //')
exits 0 SERVING attend "$first" health
exits 1 "cannot serve gRPC on --listen=$first" "$bin/attendant" --measure_peak=false --listen="$first" \
  --metrics_listen=127.0.0.1:0
exits 1 "cannot serve gRPC on --listen=unix:$work/socket" "$bin/attendant" --measure_peak=false \
  --listen="unix:$work/socket" --metrics_listen=127.0.0.1:0
exits 0 SERVING attend "unix:$work/socket" health
exits 1 "cannot serve gRPC on --listen=unix:$work/no/socket: the folder $work/no does not exist" \
  "$bin/attendant" --measure_peak=false --listen="unix:$work/no/socket" --metrics_listen=127.0.0.1:0
exits 2 "127.0.0.1:1. is given in --listen, too" "$bin/attendant" --listen=127.0.0.1:1 \
  --metrics_listen=127.0.0.1:1

# A socket that a killed server left behind is replaced.
kill -KILL "$server_pid"
wait "$server_pid" 2> /dev/null || true
[ -S "$work/socket" ] || fail "no socket was left behind"
start_server --measure_peak=false --drain_delay=0s --listen="unix:$work/socket"
exits 0 SERVING attend "unix:$work/socket" health
kill -TERM "$server_pid"
wait "$server_pid" || fail "exit code $?"
server_pid=
[ ! -e "$work/socket" ] || fail "the socket outlived its server"

# Sizes that cannot hold together are refused, with the arithmetic.
exits 2 '2 x 2097152 = 4194304 bytes, do not fit' "$bin/attendant" --max_message_bytes=2MiB \
  --memory_budget=3MiB
exits 2 'raise it to at least that$' "$bin/attendant" --memory_budget=100000
exits 2 'from 65536 .64KiB.' "$bin/attendant" --max_message_bytes=1KiB
exits 2 'that is more than the [0-9]* bytes of memory that are ours' "$bin/attendant" \
  --memory_budget=1EiB

# --check_config looks at all that and serves nothing; --print_config is a file for --config.
exits 0 'the settings hold together: 2 compute threads' "$bin/attendant" --check_config --compute_threads=2
exits 2 '2 x 2097152 = 4194304 bytes, do not fit' "$bin/attendant" --check_config \
  --max_message_bytes=2MiB --memory_budget=3MiB
ATTENDANT_MAX_QUEUE=7 "$bin/attendant" --drain_delay=2s --print_config > "$work/printed.conf"
exits 0 "max_queue=\"7\"  # file $work/printed.conf, line [0-9]*$" "$bin/attendant" \
  --config="$work/printed.conf" --print_config
exits 2 'ATTENDANT_MAX_QEUE: is no setting; the nearest is ATTENDANT_MAX_QUEUE' \
  env ATTENDANT_MAX_QEUE=7 "$bin/attendant"

# The CPUs that are ours.
if [ "$(nproc)" -gt 1 ]; then
  cpu=$(taskset -cp $$ | sed 's/.*: *\([0-9]*\).*/\1/')
  bin_of_one=$work/bin
  mkdir "$bin_of_one"
  printf '#!/bin/sh\nexec taskset -c %s "%s" "$@"\n' "$cpu" "$bin/attendant" > "$bin_of_one/attendant"
  chmod +x "$bin_of_one/attendant"
  bin=$bin_of_one start_server --measure_peak=false --drain_delay=0s
  grep -q ' 1 compute threads' "$work/server.log" || fail "affinity was not followed"
  kill -TERM "$server_pid"
  wait "$server_pid" || fail "exit code $?"
  server_pid=
fi

echo "passed"
