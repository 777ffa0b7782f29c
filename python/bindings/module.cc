// SPDX-License-Identifier: Apache-2.0
// The module treeattn._core: the public headers for Python. treeattn/__init__.py is what users see of it.
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "treeattn/error.h"
#include "treeattn/version.h"

namespace treeattn::python {

namespace nb = nanobind;

namespace {

// The most general one first: of translators the last one added is asked first.
void add_errors(nb::module_& module) {
  const nb::object error = nb::exception<Error>(module, "Error", PyExc_RuntimeError);
  const auto with = [&](PyObject* standard) { return nb::make_tuple(error, nb::handle(standard)); };
  nb::exception<InvalidArgument>(module, "InvalidArgument", with(PyExc_ValueError));
  nb::exception<Unavailable>(module, "Unavailable", error);
  nb::exception<LostRanks>(module, "LostRanks", with(PyExc_ConnectionError));
  nb::exception<BadFile>(module, "BadFile", with(PyExc_OSError));
}

}  // namespace
}  // namespace treeattn::python

NB_MODULE(_core, module) {
  using namespace treeattn::python;
  module.attr("__version__") = treeattn::kVersion;
  add_errors(module);
  add_attention(module);
  add_ranks(module);
  add_llama(module);
}
