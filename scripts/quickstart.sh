#!/usr/bin/env bash
# From a bare Debian machine to the lesson's table out of a real server.
#
#   scripts/quickstart.sh [--bin=DIR]
#
# Installs packages, builds, starts a server on loopback, runs the lesson, shows what the call cost,
# and stops the server. With --bin the programs in DIR are used as they are: no set-up, no build.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$root"

bin=
for argument in "$@"; do
  case "$argument" in
    --bin=*) bin=${argument#--bin=} ;;
    *)
      echo "usage: scripts/quickstart.sh [--bin=DIR]" >&2
      exit 2
      ;;
  esac
done

if [ -z "$bin" ]; then
  VERBOSE=1 step "packages" scripts/setup.sh
  VERBOSE=1 step "build" build release attendant attend
  bin=build/release/bin
fi

log=$(mktemp)
server=
stop_server() {
  if [ -n "$server" ]; then
    kill -KILL "$server" 2> /dev/null || true
  fi
  rm -f "$log"
}
trap stop_server EXIT

echo "== server" >&2
"$bin/attendant" --listen=127.0.0.1:0 --metrics_listen=127.0.0.1:0 --drain_delay=0s 2> "$log" &
server=$!
# The server's first line says where it listens.
for _ in $(seq 300); do
  grep -q 'serves gRPC on' "$log" && break
  kill -0 "$server" 2> /dev/null || break
  sleep 0.1
done
if ! grep -q 'serves gRPC on' "$log"; then
  cat "$log" >&2
  echo "quickstart: the server did not start" >&2
  exit 1
fi
cat "$log" >&2
address=$(grep -o 'gRPC on [^,]*' "$log" | sed 's/gRPC on //')
metrics=$(grep -o 'http://[^;]*' "$log")

echo "== lesson" >&2
"$bin/attend" lesson --server="$address"

echo
echo "what the call cost, from $metrics:"
curl --silent --show-error --fail "$metrics" |
  grep -E '^attendant_(requests_total|flops_total|peak_workspace_bytes|compute_duration_seconds_(sum|count)|explicit_equivalent_bytes_total)' |
  grep -vE ' 0$'

kill -TERM "$server"
wait "$server"
server=
printf '== done in %d s\n' "$SECONDS" >&2
