# SPDX-License-Identifier: Apache-2.0
# Debian's cross compiler for x86_64; what it builds runs here under qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR x86_64)

set(CMAKE_C_COMPILER x86_64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER x86_64-linux-gnu-g++)

set(CMAKE_FIND_ROOT_PATH /usr/x86_64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# "max" is all that qemu can emulate: with qemu 7.2, AVX2 but not AVX-512; NEON with bf16 and i8mm, and SVE.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-x86_64;-cpu;max;-L;/usr/x86_64-linux-gnu)
