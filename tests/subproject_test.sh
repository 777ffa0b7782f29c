#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Configures the library as a part of another project whose own habits would break it, and looks at what would be
# compiled and installed: nothing is built. Usage: subproject_test.sh CMAKE CXX
set -euo pipefail
cmake=$1 cxx=$2
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat >"$work/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_FLAGS "-ffast-math")
set(CMAKE_UNITY_BUILD ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(BUILD_SHARED_LIBS ON)
add_subdirectory("$source_dir" treeattn)
add_executable(parent main.cc)
target_link_libraries(parent PRIVATE treeattn::treeattn)
END
echo '#include "treeattn/treeattn.h"
int main() {}' >"$work/main.cc"
"$cmake" -S "$work" -B "$work/build" -G "Unix Makefiles" -DCMAKE_CXX_COMPILER="$cxx" \
  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DTREEATTN_INSTALL=ON
commands=$work/build/compile_commands.json

# Every file by itself, all of it shown, and no -ffast-math that is not taken back.
ours=$(grep '"command".*/treeattn.dir/' "$commands")
if grep 'unity_\|visibility.*hidden' <<<"$ours" || grep -v -- '-ffast-math .*-fno-fast-math ' <<<"$ours"; then
  exit 1
fi
grep -q '/src/comm/tcp_transport.cc' <<<"$ours"
# The parent's own targets are as it wants them, in the language that the headers need.
grep -q -- '-fvisibility=hidden .*-std=gnu++20 .*/parent.dir/Unity/unity_' "$commands"

# Versions that do not promise the same interface are not taken for each other.
grep -q -- '-soname,libtreeattn[.]so[.][0-9]*[.][0-9]* ' "$work/build/treeattn/src/CMakeFiles/treeattn.dir/link.txt"

# Who uses the shared library needs nothing of what it was linked with. (The targets are those of an installed package.)
mkdir "$work/user"
touch "$work/build/treeattn/treeattnTargets.cmake"
printf 'cmake_minimum_required(VERSION 3.25)\nproject(user LANGUAGES CXX)\nfind_package(treeattn REQUIRED)\n' \
  >"$work/user/CMakeLists.txt"
"$cmake" -S "$work/user" -B "$work/user/build" -G "Unix Makefiles" -DCMAKE_CXX_COMPILER="$cxx" \
  -Dtreeattn_DIR="$work/build/treeattn" -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON

# What may be absent can be left out where it is installed. An installed command finds its library and its demo.
"$cmake" "$work/build" -DTREEATTN_MPI=OFF -DTREEATTN_HWLOC=OFF -DTREEATTN_PCRE2=OFF -DTREEATTN_BUILD_TOOLS=ON \
  -DCMAKE_INSTALL_LIBDIR=lib/here -DCMAKE_INSTALL_DATADIR=share/there
for absent in comm/no_mpi.cc comm/no_hwloc_topology.cc model/no_pcre2.cc; do
  grep -q "/src/$absent" "$commands"
done
grep -q '/tools/demo[.]cc' <<<"$(grep -F '../share/there/treeattn/demo_model' "$commands")"
grep -qF 'NEW_RPATH "\$ORIGIN/../lib/here"' "$work/build/treeattn/tools/cmake_install.cmake"
if complaint=$("$cmake" "$work/build" -DTREEATTN_HWLOC=no 2>&1); then
  exit 1
fi
grep -q 'TREEATTN_HWLOC is "no"; accepted: AUTO, ON or OFF' <<<"$complaint"
