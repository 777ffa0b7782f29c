#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Configures the library as a part of another project whose own habits would break it, and looks at the commands that
# compile it: nothing is built. Usage: subproject_test.sh CMAKE CXX
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
add_subdirectory($source_dir treeattn)
add_executable(parent main.cc)
target_link_libraries(parent PRIVATE treeattn::treeattn)
END
echo '#include "treeattn/treeattn.h"
int main() {}' >"$work/main.cc"
"$cmake" -S "$work" -B "$work/build" -G "Unix Makefiles" -DCMAKE_CXX_COMPILER="$cxx" \
  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
commands=$work/build/compile_commands.json

# Every file by itself, all of it shown, and no -ffast-math that is not taken back.
ours=$(grep '"command".*/treeattn.dir/' "$commands")
if grep 'unity_\|visibility.*hidden' <<<"$ours" || grep -v -- '-ffast-math .*-fno-fast-math ' <<<"$ours"; then
  exit 1
fi
grep -q '/src/comm/tcp_transport.cc' <<<"$ours"
# The parent's own targets are as it wants them, in the language that the headers need.
grep -q -- '-fvisibility=hidden .*-std=gnu++20 .*/parent.dir/Unity/unity_' "$commands"
