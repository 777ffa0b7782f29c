// SPDX-License-Identifier: Apache-2.0
// The module treeattn._core: the public headers for Python. treeattn/__init__.py is what users see of it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <exception>

#include "bindings.h"
#include "treeattn/error.h"
#include "treeattn/version.h"

namespace treeattn::python {

namespace nb = nanobind;

namespace {

// Puts who was lost beside the message.
void raise_lost_ranks(const std::exception_ptr& thrown, void* type) {
  try {
    std::rethrow_exception(thrown);
  } catch (const LostRanks& lost) {
    const nb::handle lost_ranks(static_cast<PyObject*>(type));
    const nb::object error = lost_ranks(lost.what());
    error.attr("ranks") = lost.ranks();
    error.attr("lost_so_far") = lost.lost_so_far();
    PyErr_SetObject(lost_ranks.ptr(), error.ptr());
  }
}

// The most general one first: of translators the last one added is asked first.
void add_errors(nb::module_& module) {
  const nb::object error = nb::exception<Error>(module, "Error", PyExc_RuntimeError);
  const auto with = [&](PyObject* standard) { return nb::make_tuple(error, nb::handle(standard)); };
  nb::exception<InvalidArgument>(module, "InvalidArgument", with(PyExc_ValueError));
  nb::exception<Unavailable>(module, "Unavailable", error);
  const nb::object lost_ranks = nb::exception<LostRanks>(module, "LostRanks", with(PyExc_ConnectionError));
  for (const char* who : {"ranks", "lost_so_far"}) lost_ranks.attr(who) = nb::list();  // of one that Python code makes
  nb::register_exception_translator(&raise_lost_ranks, lost_ranks.ptr());
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
