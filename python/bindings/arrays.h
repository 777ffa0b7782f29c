// SPDX-License-Identifier: Apache-2.0
// Arrays of Python as views of the library: numpy, torch, jax, whatever speaks DLPack. Nothing is copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "options.h"
#include "treeattn/attention.h"
#include "treeattn/thread_pool.h"

namespace treeattn::python {

using Array = nb::ndarray<nb::ro>;                // any type, any device
using Floats = nb::ndarray<float, nb::c_contig>;  // for results, any device
using HostFloats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ConstHostFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class A>
auto span_of(A& array) {
  return std::span(array.data(), array.size());
}

// Whatever may be said of a call beside q, k and v. Holds what AttentionOptions and AttentionInput point to.
struct Call {
  // What a function takes of it, joined by |.
  enum Part : unsigned {
    kOptions = 1,  // what AttentionOptions has
    kFirstQuery = 2,
    kInput = 4,  // the rest of AttentionInput
    kScales = 8,
  };
  static Call of(const nb::kwargs& given, unsigned parts);

  AttentionOptions options() const;

  std::optional<float> scale{};
  bool causal = false;
  std::int64_t window = 0;
  float softcap = 0;
  std::vector<float> alibi_slopes{}, sinks{};
  std::vector<std::int64_t> lengths{};
  std::int64_t first_key = 0;
  std::vector<std::int64_t> first_query{};
  ReductionOrder order{};
  std::optional<Array> k_scales{}, v_scales{};
  std::optional<Table> page_table{};
};

Array array_of(const char* name, const nb::object& array);
// [batch, queries, heads, head_dim]
QueryView query_view(const Array& q);
// [batch, tokens, kv_heads, head_dim], or with a table [pages, page_tokens, kv_heads, head_dim]. Scales have the same
// shape without the last dimension. name: what the array is called in an error.
KvView kv_view(const char* name, const Array& rows, const std::optional<Array>& scales,
               const std::optional<Table>& page_table = {});

// The GPU that all of them, and the call's scales, are on, or -1. Throws InvalidArgument where they are not together.
int gpu_of(const Call& call, std::initializer_list<const Array*> arrays);
// What torch puts its work on, for its tensors on a GPU; a cudaStream_t.
void* stream_of(const nb::object& array);

// A new float32 array for results: a torch tensor on the same device where `like` is one, else one of numpy.
nb::object empty_like(const nb::object& like, const std::vector<std::int64_t>& shape);

// All cores that the calling thread may use, made by its first call. So a rank that is a thread has its own.
ThreadPool& default_pool();

}  // namespace treeattn::python
