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
#include <type_traits>

namespace treeattn::python {

namespace nb = nanobind;

inline constexpr char kNumber[] = "a number", kWholeNumber[] = "a whole number", kChoice[] = "True or False",
                      kPerHead[] = "numbers, one for each head";

[[noreturn]] void refuse(const std::string& name, const std::string& what, const std::string& accepted);
// A value as an error shows it: itself, or its type where that is long.
std::string shown(nb::handle value);

// Of torch, or of a class made from torch's.
bool is_torch(nb::handle value);
// Throws InvalidArgument for a tensor of torch that is more than its numbers say.
void refuse_lazy_tensor(const std::string& name, nb::handle value);

// An argument as T; without `convert` only what is one already. Throws InvalidArgument.
template <class T>
T value_of(const std::string& name, nb::handle value, const char* accepted, bool convert = true) {
  refuse_lazy_tensor(name, value);
  try {
    // To nanobind a tensor is no sequence, and numpy's True no bool.
    constexpr bool kListOrBool = std::is_same_v<T, bool> || requires(T list) { list.push_back(list.front()); };
    if (kListOrBool && nb::hasattr(value, "tolist")) return nb::cast<T>(nb::object(value.attr("tolist")()));
    return nb::cast<T>(value, convert);
  } catch (const nb::cast_error&) {
    refuse(name, shown(value), accepted);
  }
}

using Setter = std::function<void(const std::string& name, nb::handle value)>;

// Puts an argument where it belongs, which must outlive this.
template <class T>
Setter sets(T& to, const char* accepted, bool convert = true) {
  return [&to, accepted, convert](const std::string& name, nb::handle value) {
    to = value_of<T>(name, value, accepted, convert);
  };
}

// Sets what is given and is not None. Throws TypeError for names that are not known.
void set_options(const nb::kwargs& given, const std::map<std::string, Setter>& known);

}  // namespace treeattn::python
