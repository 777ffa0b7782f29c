// SPDX-License-Identifier: Apache-2.0
// Keyword arguments. What is wrong with one is said by its name.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <map>
#include <string>

namespace treeattn::python {

namespace nb = nanobind;

inline constexpr char kNumber[] = "a number", kWholeNumber[] = "a whole number", kChoice[] = "True or False";

[[noreturn]] void refuse(const std::string& name, const std::string& what, const std::string& accepted);
// A value as an error shows it: itself, or its type where that is long.
std::string shown(nb::handle value);

// An argument as T. Throws InvalidArgument.
template <class T>
T value_of(const std::string& name, nb::handle value, const char* accepted) {
  try {
    return nb::cast<T>(value);
  } catch (const nb::cast_error&) {
    refuse(name, shown(value), accepted);
  }
}

using Setter = std::function<void(const std::string& name, nb::handle value)>;

// Puts an argument where it belongs, which must outlive this.
template <class T>
Setter sets(T& to, const char* accepted) {
  return [&to, accepted](const std::string& name, nb::handle value) { to = value_of<T>(name, value, accepted); };
}

// Sets what is given and is not None. Throws TypeError for names that are not known.
void set_options(const nb::kwargs& given, const std::map<std::string, Setter>& known);

}  // namespace treeattn::python
