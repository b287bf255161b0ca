# Shared by the scripts beside it: progress and timing. Sourced, not run.

# The repository's root.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# step <what> <command...>: says what is being done and how long it took. The command's output goes
# to a log that is shown where it fails, and to the terminal as it comes where VERBOSE is set.
step() {
  local what=$1 begin=$SECONDS log
  shift
  printf '== %s\n' "$what" >&2
  if [ -n "${VERBOSE:-}" ]; then
    "$@" || return
  else
    log=$(mktemp)
    if ! "$@" > "$log" 2>&1; then
      cat "$log" >&2
      rm -f "$log"
      printf '== %s: failed after %d s\n' "$what" $((SECONDS - begin)) >&2
      return 1
    fi
    rm -f "$log"
  fi
  printf '== %s: %d s\n' "$what" $((SECONDS - begin)) >&2
}

# build <preset> [ninja targets...]: configures and builds.
build() {
  local preset=$1
  shift
  cmake -S "$root" --preset "$preset" > /dev/null && ninja -C "$root/build/$preset" "$@"
}
