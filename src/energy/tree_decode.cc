// SPDX-License-Identifier: Apache-2.0
// Algorithms 1, 2 and 3 of the paper, line by line, over processors played one after another.
#include <algorithm>
#include <cmath>
#include <utility>

#include "energy/checks.h"
#include "energy/softmax.h"
#include "treeattn/energy.h"

namespace treeattn {

using namespace energy_internal;

namespace {

struct Chunk {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The paper's t = N / p. Where p does not divide N the first N mod p chunks have one key more.
Chunk chunk_of(std::int64_t keys, int chunks, int c) {
  const std::int64_t size = keys / chunks;
  const std::int64_t longer = keys % chunks;
  const std::int64_t begin = c * size + std::min<std::int64_t>(c, longer);
  return {begin, begin + size + (c < longer ? 1 : 0)};
}

// How many chunks to play. Empty ones come last and add nothing to any sum, but take memory.
int chunks_with_keys(const EnergyInput& in, int chunks) {
  check_chunks(chunks);
  return static_cast<int>(std::clamp<std::int64_t>(in.keys, 1, chunks));
}

// Reduce(op, parts): neighbours pairwise, then neighbours of those, in ceil(log2 p) rounds; the lower index is always
// the left operand. Requires at least one part.
template <typename T, typename Op>
T tree_reduce(std::vector<T> parts, Op op) {
  for (std::size_t stride = 1; stride < parts.size(); stride *= 2) {
    for (std::size_t i = 0; i + stride < parts.size(); i += 2 * stride) {
      parts[i] = op(std::move(parts[i]), parts[i + stride]);
    }
  }
  return std::move(parts.front());
}

double larger(double a, double b) { return std::max(a, b); }
double plus(double a, double b) { return a + b; }

std::vector<double> plus_vectors(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

// What Flash Attention returns for one chunk. No keys: o = 0 and lse = -inf, not the 0 / 0 of the printed formula.
struct ChunkAttention {
  std::vector<double> o;
  double lse = kMinusInfinity;
};

ChunkAttention attend_chunk(const EnergyInput& in, Chunk chunk) {
  OnlineSoftmax sum(in.v_dim);
  for (std::int64_t a = chunk.begin; a < chunk.end; ++a) sum.add(logit(in, {}, a), row_of(in.v, a, in.v_dim));
  ChunkAttention result{std::vector<double>(index(in.v_dim), 0.0), sum.energy()};
  if (!sum.empty()) sum.mean(result.o);
  return result;
}

}  // namespace

EnergyForward energy_forward(const EnergyInput& in, std::span<const double> zeta, int chunks) {
  check_input(in, zeta);
  chunks = chunks_with_keys(in, chunks);
  std::vector<double> r(index(in.keys));  // lines 1 to 3
  std::vector<double> local(static_cast<std::size_t>(chunks), kMinusInfinity);
  for (int c = 0; c < chunks; ++c) {
    const Chunk chunk = chunk_of(in.keys, chunks, c);
    double& local_max = local[static_cast<std::size_t>(c)];
    for (std::int64_t a = chunk.begin; a < chunk.end; ++a) {
      r[index(a)] = logit(in, zeta, a);
      local_max = std::max(local_max, r[index(a)]);
    }
  }
  const double m = tree_reduce(local, larger);  // line 4

  for (int c = 0; c < chunks; ++c) {
    const Chunk chunk = chunk_of(in.keys, chunks, c);
    double sum = 0.0;
    for (std::int64_t a = chunk.begin; a < chunk.end; ++a) sum += std::exp(r[index(a)] - m);  // line 5
    // A chunk far below m may underflow to log 0 = -inf. That loses nothing: the chunk that holds m has lse >= 0.
    local[static_cast<std::size_t>(c)] = std::log(sum);
  }
  const double lse = tree_reduce(std::move(local), logaddexp);  // line 6
  return {lse, m};                                              // lines 7 and 8
}

EnergyGradient tree_decode_algorithm2(const EnergyInput& in, int chunks) {
  check_input(in, {});
  check_has_keys(in);
  chunks = chunks_with_keys(in, chunks);
  const EnergyForward forward = energy_forward(in, {}, chunks);  // lines 1 and 2
  std::vector<std::vector<double>> partial;                      // line 3
  partial.reserve(static_cast<std::size_t>(chunks));
  for (int c = 0; c < chunks; ++c) {
    const Chunk chunk = chunk_of(in.keys, chunks, c);
    std::vector<double>& sum = partial.emplace_back(index(in.v_dim), 0.0);
    for (std::int64_t a = chunk.begin; a < chunk.end; ++a) {
      const double r = logit(in, {}, a) - forward.m;  // line 4
      // Line 5. Both r and lse are relative to m, so this is exp(logit - F), without F's rounding at large |m|.
      const double probability = std::exp(r - forward.lse);
      const auto v = row_of(in.v, a, in.v_dim);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += probability * v[i];
    }
  }
  return {forward.energy(), tree_reduce(std::move(partial), plus_vectors)};  // lines 6 and 7
}

EnergyGradient tree_decode_algorithm3(const EnergyInput& in, int chunks) {
  check_input(in, {});
  check_has_keys(in);
  chunks = chunks_with_keys(in, chunks);
  std::vector<std::vector<double>> numerators;
  std::vector<double> lse;
  for (int c = 0; c < chunks; ++c) {  // lines 1 and 2
    ChunkAttention part = attend_chunk(in, chunk_of(in.keys, chunks, c));
    numerators.push_back(std::move(part.o));
    lse.push_back(part.lse);
  }
  // Line 3. Finite, since some chunk has a key. It is the largest lse, not the largest logit: any such shift will do.
  const double m = tree_reduce(lse, larger);
  std::vector<double> denominators(lse.size());
  for (std::size_t c = 0; c < lse.size(); ++c) {  // line 4
    denominators[c] = std::exp(lse[c] - m);
    for (double& n : numerators[c]) n *= denominators[c];
  }
  EnergyGradient result;
  result.gradient = tree_reduce(std::move(numerators), plus_vectors);  // line 5
  const double denominator = tree_reduce(std::move(denominators), plus);
  for (double& z : result.gradient) z /= denominator;  // line 6
  result.energy = m + std::log(denominator);
  return result;
}

}  // namespace treeattn
