#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Python package against a finished build that was installed into an empty folder, and runs its test. Exit
# status 77 says that there is no nanobind or no header of Python here.
# Usage: python_package_test.sh CMAKE BUILD_DIR GENERATOR CXX
set -euo pipefail
cmake=$1 build=$2 generator=$3 cxx=$4
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

needs='import nanobind, numpy, os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
for python in "$source_dir/build/peers-venv/bin/python" python3 none; do
  command -v "$python" >/dev/null && "$python" -c "$needs" 2>/dev/null && break
done
if [ "$python" = none ]; then
  echo "no Python with nanobind, numpy and its headers (scripts/peers.sh; Debian's python3-dev)"
  exit 77
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log" || { cat "$work/install.log"; exit 1; }
# Nanobind's files are compiled as one, and soon rather than fast: a sixth of the time. Ours are not, so that each shows
# what it includes, and as nanobind has them optimised in a release.
"$cmake" -S "$source_dir/python" -B "$work/build" -G "$generator" -DCMAKE_CXX_COMPILER="$cxx" \
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O0 -DCMAKE_CXX_FLAGS=-Werror -DCMAKE_UNITY_BUILD=ON \
  -DCMAKE_PREFIX_PATH="$work/prefix" -DPython_EXECUTABLE="$(command -v "$python")" >"$work/cmake.log" ||
  { cat "$work/cmake.log"; exit 1; }
"$cmake" --build "$work/build" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
# All of it is installed, as pip does for a wheel: what the test below finds in the build, the types too.
"$cmake" --install "$work/build" --component python --prefix "$work/wheel" >"$work/wheel.log" ||
  { cat "$work/wheel.log"; exit 1; }
diff <(ls "$work/build/treeattn") <(ls "$work/wheel/treeattn")
export PYTHONPATH=$work/build
"$python" "$source_dir/tests/python_test.py" "$source_dir/tools/demo_model/model"

# The same result on processes, where the library has MPI.
if "$python" -c 'import treeattn; treeattn.mpi_communicator()' 2>/dev/null && command -v mpirun >/dev/null; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  loop=$source_dir/examples/python/decode.py
  alone=$("$python" "$loop")
  together=$(mpirun -n 3 "$python" "$loop")
  echo "one process: $alone; three: $together"
  [ -n "$alone" ] && [ "$alone" = "$together" ]
fi
