# What the end-to-end tests share. Sourced with the folder of the programs as $1.
set -euo pipefail
bin=$1
work=$(mktemp -d)
server_pid=

# Ends only what this test started.
cleanup() {
  if [ -n "$server_pid" ]; then kill -KILL "$server_pid" 2> /dev/null || true; fi
  rm -rf "$work"
}
trap cleanup EXIT

fail() {
  echo "FAILED: $*" >&2
  [ ! -f "$work/server.log" ] || sed 's/^/server: /' "$work/server.log" >&2
  exit 1
}

# start_server [flags...]: on free loopback ports, or for gRPC at $listen where that is set; sets
# server_pid, address and metrics.
start_server() {
  "$bin/attendant" --listen="${listen:-127.0.0.1:0}" --metrics_listen=127.0.0.1:0 "$@" 2> "$work/server.log" &
  server_pid=$!
  for _ in $(seq 600); do
    if grep -q 'serves gRPC on' "$work/server.log"; then
      address=$(grep -o 'gRPC on [^,]*' "$work/server.log" | sed 's/gRPC on //')
      metrics=$(grep -o 'http://[^;]*' "$work/server.log")
      return
    fi
    kill -0 "$server_pid" 2> /dev/null || break
    sleep 0.1
  done
  fail "the server did not start"
}

# metric <series>: its value on the metrics page.
metric() {
  curl --silent --show-error --fail "$metrics" | awk -v series="$1" '$1 == series { print $2 }'
}

# exits <code> <pattern> <command...>: the command exits with the code, and what it prints matches.
exits() {
  local expected=$1 pattern=$2 code=0
  shift 2
  "$@" > "$work/out" 2>&1 || code=$?
  [ "$code" = "$expected" ] || { cat "$work/out" >&2; fail "'$*' exited $code, not $expected"; }
  grep -qE -- "$pattern" "$work/out" || { cat "$work/out" >&2; fail "'$*' did not print '$pattern'"; }
}
