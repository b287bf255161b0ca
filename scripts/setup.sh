#!/usr/bin/env bash
# Installs the Debian packages that Attendant needs: the one list of them. Debian 12 and 13.
#
#   scripts/setup.sh            all that building and testing needs
#   scripts/setup.sh --runtime  only what a running server and client need
#   scripts/setup.sh --check    with either: installs nothing, fails where something is missing
#
# Quiet and quick where everything is there already. Works as root, and through sudo.
set -euo pipefail

build_packages=(
  build-essential ca-certificates ccache cmake git ninja-build pkg-config
  libabsl-dev libcivetweb-dev libcli11-dev libdnnl-dev libgmock-dev libgrpc++-dev libgtest-dev libhwy-dev
  libopenblas-openmp-dev libprotobuf-dev libspdlog-dev prometheus-cpp-dev
  protobuf-compiler protobuf-compiler-grpc
  # The tests read the metrics page with it.
  curl
  # .ci/run: the checks beside the tests.
  clang-format clang-tidy python3-venv
)

# Debian 13 renamed the libraries whose time_t changed. libprometheus-cpp-pull brings civetweb, whose
# name they do not share.
runtime_packages() {
  . /etc/os-release
  case "${VERSION_ID:-}" in
    12) echo libgrpc++1.51 libdnnl2 libspdlog1.10 libhwy1 libprometheus-cpp-core1.0 \
      libprometheus-cpp-pull1.0 libopenblas0-openmp libprotobuf32 libgomp1 ;;
    *) echo libgrpc++1.51t64 libdnnl3.6 libspdlog1.15 libhwy1t64 libprometheus-cpp-core1.0 \
      libprometheus-cpp-pull1.0 libopenblas0-openmp libprotobuf32t64 libgomp1 ;;
  esac
}

check=false
packages=("${build_packages[@]}")
for argument in "$@"; do
  case "$argument" in
    --runtime) read -ra packages <<< "$(runtime_packages)" ;;
    --check) check=true ;;
    *)
      echo "usage: scripts/setup.sh [--runtime] [--check]" >&2
      exit 2
      ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
if $check; then
  echo "missing: ${missing[*]}" >&2
  exit 1
fi

as_root=()
if [ "$(id -u)" != 0 ]; then
  as_root=(sudo)
fi
echo "installing ${#missing[@]} packages: ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 "$@" \
    > "$log" 2>&1 || {
    cat "$log" >&2
    echo "setup: apt-get $* failed" >&2
    exit 1
  }
}
run update
run install --yes --no-install-recommends "${missing[@]}"
