// SPDX-License-Identifier: Apache-2.0
// What every function of the energy asks of its input. Each throws InvalidArgument.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "treeattn/energy.h"

namespace treeattn::energy_internal {

// Every element is a finite number; the message names the first that is not.
void check_finite(std::string_view name, std::span<const double> values);

// Exactly rows * width elements; zero rows want an empty span. Requires rows >= 0 and width >= 1, checked before.
void check_size(std::string_view name, std::span<const double> values, std::int64_t rows, std::int64_t width);

// Sizes and finiteness of the input, and of zeta unless it is empty.
void check_input(const EnergyInput& in, std::span<const double> zeta);
void check_input(const CausalEnergyInput& in, std::span<const double> zeta);

// keys >= 1: a mean over no keys does not exist.
void check_has_keys(const EnergyInput& in);

// chunks >= 1.
void check_chunks(int chunks);

}  // namespace treeattn::energy_internal
