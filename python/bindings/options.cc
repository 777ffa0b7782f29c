// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include "treeattn/error.h"

namespace treeattn::python {

void refuse(const std::string& name, const std::string& what, const std::string& accepted) {
  throw InvalidArgument(name + ": " + what + "; accepted: " + accepted);
}

std::string shown(nb::handle value) {
  constexpr std::size_t kLong = 60;
  std::string text;
  const bool has_utf8 = nb::try_cast(nb::repr(value), text);  // half of a surrogate pair has none
  return has_utf8 && text.size() <= kLong ? text : nb::repr(value.type()).c_str();
}

bool is_torch(nb::handle value) {
  for (const nb::handle type : nb::tuple(value.type().attr("__mro__"))) {
    std::string module;
    if (nb::try_cast(type.attr("__module__"), module) && module == "torch") return true;
  }
  return false;
}

void refuse_lazy_tensor(const std::string& name, nb::handle value) {
  if (nb::hasattr(value, "hardmask")) refuse(name, "a masked array", "one without a mask, as of filled()");
  if (!is_torch(value) || !nb::hasattr(value, "requires_grad")) return;
  if (nb::cast<bool>(value.attr("requires_grad")) &&
      nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")())) {
    refuse(name, "a tensor that asks for a gradient", "one that does not, as of detach(); any under torch.no_grad()");
  }
  // DLPack passes the numbers on, and not that they count with the other sign.
  if (nb::cast<bool>(value.attr("is_neg")())) {
    refuse(name, "a view whose sign is still to be changed", "that of resolve_neg()");
  }
}

void set_options(const nb::kwargs& given, const std::map<std::string, Setter>& known) {
  for (const auto [key, value] : given) {
    std::string name;
    if (!nb::try_cast(key, name)) name = nb::repr(key).c_str();  // half of a surrogate pair has no UTF-8
    const auto option = known.find(name);
    if (option == known.end()) {
      std::string accepted;
      for (const auto& [other, set] : known) accepted += (accepted.empty() ? "" : ", ") + other;
      throw nb::type_error(("no option '" + name + "'; accepted: " + accepted).c_str());
    }
    if (!value.is_none()) option->second(name, value);
  }
}

}  // namespace treeattn::python
