// SPDX-License-Identifier: Apache-2.0
// In place of the CUDA files in a build without them.
#include "kernels/cuda/ranks/peer_exchange.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {

struct PeerExchange::Impl {
  ExchangePlan plan;
};

PeerExchange::PeerExchange(int, int, ExchangePlan) { throw Unavailable(cuda_problem()); }
PeerExchange::~PeerExchange() = default;
const ExchangePlan& PeerExchange::plan() const { return impl_->plan; }
LentMemory& PeerExchange::mailbox() { throw Unavailable(cuda_problem()); }
float* PeerExchange::own() const { return nullptr; }
void PeerExchange::exchange(double, FinishedRows, void*) {}
bool PeerExchange::is_recorded(void*) { return false; }
void PeerExchange::push(void*) {}
void PeerExchange::merge(double, FinishedRows, void*) {}
const float* PeerExchange::root() const { return nullptr; }
std::vector<int> PeerExchange::missing() const { return {}; }

}  // namespace treeattn::kernels::cuda
