#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs a finished build into an empty folder, then builds and runs the examples against what was installed, as a
# stranger would who wants no warning, not from our headers either. Usage: install_test.sh CMAKE BUILD_DIR GENERATOR CXX
set -euo pipefail
cmake=$1 build=$2 generator=$3 cxx=$4
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log" || { cat "$work/install.log"; exit 1; }
for example in single_machine mpi_decode; do
  "$cmake" -S "$source_dir/examples/$example" -B "$work/$example" -G "$generator" \
    -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/prefix" \
    -DCMAKE_NO_SYSTEM_FROM_IMPORTED=ON -DCMAKE_CXX_FLAGS="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"
  # What was found must be what was just installed, not a copy elsewhere on the machine.
  grep -q "^treeattn_DIR:PATH=$work/prefix/" "$work/$example/CMakeCache.txt"
  "$cmake" --build "$work/$example"
done
"$work/single_machine/single_machine"

# One process needs no launcher; a library without MPI says so.
status=0
alone=$("$work/mpi_decode/mpi_decode") || status=$?
if [ $status -eq 3 ]; then
  echo "mpi_decode not run: the library has no MPI"
elif command -v mpirun >/dev/null; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  together=$(mpirun -n 3 "$work/mpi_decode/mpi_decode")
  echo "one process: $alone; three: $together"
  [ $status -eq 0 ] && [ -n "$alone" ] && [ "$alone" = "$together" ]
fi

if [ -x "$build/bin/treeattn" ]; then
  "$work/prefix/bin/treeattn" --version
fi

# What ./run builds has the simulator too, where there is one.
if [ -x "$build/bin/treeattn-sim" ] && [ "$generator" = Ninja ]; then
  target=$(sed -n 's/.* --target \([a-z_]*\) .*/\1/p' "$source_dir/run")
  ninja -C "$build" -t inputs "$target" | grep /tools/sim/main.cc
fi
