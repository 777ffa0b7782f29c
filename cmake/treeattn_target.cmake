# SPDX-License-Identifier: Apache-2.0
# What all our targets share. Functions, not interface targets: an installed static library must not drag the name of a
# private dependency into its CMake package.

# Language level and warnings of a target of ours.
function(treeattn_compile_defaults target)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  target_compile_features(${target} PUBLIC cxx_std_20)
  # Bits must not depend on which products the compiler likes to fuse: where we want an FMA we write it. Never
  # -ffast-math: it deletes the -inf guard of the merge, and two empty states merge into NaN.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off -Wall -Wextra -Wpedantic -Wshadow -Wconversion>
    $<$<COMPILE_LANG_AND_ID:CXX,Clang,AppleClang>:-Wno-sign-conversion>  # not part of GCC's -Wconversion
    # CMake 3.25 does not know that nvcc has C++20, so CUDA_STANDARD would do nothing.
    $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 --fmad=false --expt-relaxed-constexpr -Xcompiler=-ffp-contract=off,-Wall,-Wextra,-Wshadow>)
  if(NOT PROJECT_IS_TOP_LEVEL)
    # Nor where a parent project has it for itself.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fno-fast-math>)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC bug 105651: `"text" + std::string()` warns at -O3.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  endif()
  if(TREEATTN_PCH AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Up to 1 GB that the compiler does not look through for what it needs no more: 4 to 9 % of its time.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1000000>)
  endif()
  if(TREEATTN_WERROR)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror>
      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Werror>)
  endif()
endfunction()

# treeattn_use_headers(target folder...): lets a target include header-only libraries (hwy, fmt, CLI, nlohmann).
# They may sit in /usr/include, which must never be on a cross compiler's include path, so each is linked into a folder
# of its own in the build tree and that folder is used.
function(treeattn_use_headers target)
  set(header_hwy highway.h)
  set(header_fmt format.h)
  set(header_CLI CLI.hpp)
  set(header_nlohmann json.hpp)
  set(package_hwy libhwy-dev)
  set(package_fmt libfmt-dev)
  set(package_CLI libcli11-dev)
  set(package_nlohmann nlohmann-json3-dev)
  foreach(name IN LISTS ARGN)
    # Headers do not depend on the processor: looked for outside the cross root too.
    find_path(TREEATTN_${name}_INCLUDE_DIR ${name}/${header_${name}} PATHS /usr/include /usr/local/include
      NO_CMAKE_FIND_ROOT_PATH)
    mark_as_advanced(TREEATTN_${name}_INCLUDE_DIR)
    if(NOT TREEATTN_${name}_INCLUDE_DIR)
      message(FATAL_ERROR "${name}/${header_${name}} not found. Debian package: ${package_${name}}; elsewhere set "
        "TREEATTN_${name}_INCLUDE_DIR to the folder that holds ${name}/.")
    endif()
    set(folder ${treeattn_BINARY_DIR}/headers/${name})
    file(MAKE_DIRECTORY ${folder})
    file(CREATE_LINK ${TREEATTN_${name}_INCLUDE_DIR}/${name} ${folder}/${name} SYMBOLIC)
    target_include_directories(${target} SYSTEM PRIVATE ${folder})
    # Of fmt 9 the functions are compiled once, in src/base/fmt_library.cc; of other versions in every file.
    if(name STREQUAL "fmt")
      file(STRINGS ${TREEATTN_fmt_INCLUDE_DIR}/fmt/core.h version REGEX "define FMT_VERSION 9....$")
      if(NOT version)
        target_compile_definitions(${target} PRIVATE FMT_HEADER_ONLY)
      endif()
    endif()
  endforeach()
endfunction()

# treeattn_optional(NAME help): the option TREEATTN_NAME for something that may be absent: AUTO, ON or OFF.
function(treeattn_optional name help)
  set(TREEATTN_${name} AUTO CACHE STRING "${help}, ON or OFF")
  set_property(CACHE TREEATTN_${name} PROPERTY STRINGS AUTO ON OFF)
  if(NOT TREEATTN_${name} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "TREEATTN_${name} is \"${TREEATTN_${name}}\"; accepted: AUTO, ON or OFF")
  endif()
endfunction()

# treeattn_precompile(target header...), or (target REUSE_FROM other): headers of other people that most files of a target
# include, parsed once for all of them. Not for what is compiled for another instruction set.
option(TREEATTN_PCH "Parse other people's headers once for each target: for builds that are run once, without ccache" OFF)
function(treeattn_precompile target)
  if(TREEATTN_PCH)
    if(ARGV1 STREQUAL "REUSE_FROM")
      target_precompile_headers(${target} ${ARGN})
    else()
      target_precompile_headers(${target} PRIVATE ${ARGN})
    endif()
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # As above; and in a precompiled header GCC forgets that the place is the system's. Other builds look at ours.
      target_compile_options(${target} PRIVATE -Wno-stringop-overflow -Wno-stringop-overread -Wno-array-bounds)
    endif()
  endif()
endfunction()
