#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs a finished build into an empty folder, then builds and runs examples/single_machine against what was
# installed, as a stranger would. Usage: install_test.sh CMAKE BUILD_DIR GENERATOR CXX
set -euo pipefail
cmake=$1 build=$2 generator=$3 cxx=$4
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log" || { cat "$work/install.log"; exit 1; }
"$cmake" -S "$source_dir/examples/single_machine" -B "$work/build" -G "$generator" \
  -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/prefix"
# What was found must be what was just installed, not a copy elsewhere on the machine.
grep -q "^treeattn_DIR:PATH=$work/prefix/" "$work/build/CMakeCache.txt"
"$cmake" --build "$work/build"
"$work/build/single_machine"

if [ -x "$build/bin/treeattn" ]; then
  "$work/prefix/bin/treeattn" --version
fi
