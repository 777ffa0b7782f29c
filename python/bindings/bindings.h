// SPDX-License-Identifier: Apache-2.0
// What each file adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace treeattn::python {

void add_attention(nanobind::module_& module);
void add_ranks(nanobind::module_& module);
void add_llama(nanobind::module_& module);

}  // namespace treeattn::python
