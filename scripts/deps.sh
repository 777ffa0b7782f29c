#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs Debian packages this project needs, and only those that are missing.
# Usage: scripts/deps.sh [build] [test] [browser]      (default: build)
set -euo pipefail

build=(g++ cmake ninja-build python3 libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev libgtest-dev libhwloc-dev
  libopenmpi-dev libpcre2-dev libsimgrid-dev openmpi-bin)
# Also the compiler and the emulator for the other architecture, and what the Python package and its peers need.
tests=(clang-format googletest iproute2 python3-dev python3-venv qemu-user)
case $(uname -m) in
  aarch64) tests+=(g++-x86-64-linux-gnu) ;;
  x86_64) tests+=(g++-aarch64-linux-gnu) ;;
esac
# For the test that looks at the report. Apart from the others: 423 MB with what it needs.
browser=(chromium fonts-dejavu-core)

wanted=()
for set in "${@:-build}"; do
  case $set in
    build) wanted+=("${build[@]}") ;;
    test) wanted+=("${build[@]}" "${tests[@]}") ;;
    browser) wanted+=("${browser[@]}") ;;
    *) echo "deps.sh: unknown set '$set'; accepted: build, test, browser" >&2; exit 2 ;;
  esac
done

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "deps.sh: not a Debian system, nothing installed. Needed: ${wanted[*]}" >&2
  exit 0
fi

missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | sort -u) || true
  grep -qx installed <<<"$status" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi

echo "deps.sh: installing ${missing[*]}" >&2
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "deps.sh: needs root or sudo to install: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{
  "${as_root[@]}" apt-get update -q &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
} >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
