// SPDX-License-Identifier: Apache-2.0
// The library's refusals know no options: here they get the name of the one they are about.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "treeattn/error.h"

namespace treeattn::tools {

// What body() returns. Where it refuses the option's value, the library's own name of it gives way: from
// `strategy = "x"; accepted: ...` to `--strategy is "x"; accepted: ...`.
template <class Body>
auto with_option(std::string_view option, std::string_view value, const Body& body) {
  try {
    return body();
  } catch (const InvalidArgument& error) {
    const std::string_view what = error.what();
    const std::size_t accepted = what.find("; accepted: ");
    throw InvalidArgument(accepted == what.npos ? fmt::format("{} is \"{}\": {}", option, value, what)
                                                : fmt::format("{} is \"{}\"{}", option, value, what.substr(accepted)));
  }
}

// The same where what is refused is in a file, or not on this machine, which the message goes on to name.
template <class Body>
auto inside_option(std::string_view option, const Body& body) {
  const auto named = [&](const Error& error) { return fmt::format("{}: {}", option, error.what()); };
  try {
    return body();
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(named(error));
  } catch (const BadFile& error) {
    throw BadFile(named(error));
  } catch (const Unavailable& error) {
    throw Unavailable(named(error));
  }
}

}  // namespace treeattn::tools
