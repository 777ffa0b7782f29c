// SPDX-License-Identifier: Apache-2.0
// Attention on one machine, and states.
#include "treeattn/attention.h"

#include <algorithm>
#include <string>

#include "arrays.h"
#include "bindings.h"
#include "treeattn/cuda.h"
#include "treeattn/state.h"

namespace treeattn::python {
namespace {

constexpr char kAttention[] =
    R"(attention(q, k, v, **options) -> out, lse

out [batch, queries, heads, v_dim] and lse [batch, queries, heads] of q [batch, queries, heads, dim] and k, v
[batch, tokens, kv_heads, dim].

Options, as in treeattn/attention.h: scale, causal, window, softcap, alibi_slopes, sinks, lengths, first_key,
first_query; chunk_tokens and branches, the order of the reduction; k_scales and v_scales, for int8 and fp8;
page_table, int32 [batch, pages of a sequence], and then k and v are [pages, page_tokens, kv_heads, dim].)";

constexpr char kStates[] =
    R"(states(q, k, v, **options) -> [batch, queries, heads, v_dim + 2]

What these keys contribute to attention, for merge and finalize. The options are those of attention without sinks;
first_key and first_query say where keys and queries stand in the whole.)";

// A call, its arrays, and the GPU they are on or -1.
struct Input {
  Input(const nb::object& query, const nb::object& keys, const nb::object& values, const nb::kwargs& given)
      : call(Call::of(given, Call::kOptions | Call::kFirstQuery | Call::kInput | Call::kScales)),
        q(array_of("q", query)),
        k(array_of("k", keys)),
        v(array_of("v", values)) {
    views = {.q = query_view(q),
             .k = kv_view("k", k, call.k_scales, call.page_table),
             .v = kv_view("v", v, call.v_scales, call.page_table),
             .lengths = call.lengths,
             .first_key = call.first_key,
             .first_query = call.first_query,
             .order = call.order};
    gpu = gpu_of(call, {&q, &k, &v});
    if (gpu >= 0 && !is_torch(query)) refuse("q", "on a GPU, and not torch's", "a tensor of torch");
    stream = stream_of(query);
  }

  std::vector<std::int64_t> shape(std::int64_t last) const {
    return {views.q.batch, views.q.queries, views.q.heads, last};
  }
  // The end of a plan waits for the GPU.
  CudaPlan plan() const { return CudaPlan(gpu, views, call.options()); }

  Call call;
  Array q, k, v;
  AttentionInput views;
  int gpu;
  void* stream;
};

nb::object attend(const nb::object& q, const nb::object& k, const nb::object& v, const nb::kwargs& options) {
  const Input in(q, k, v, options);
  nb::object out = empty_like(q, in.shape(in.views.v.head_dim));
  nb::object lse = empty_like(q, {in.views.q.batch, in.views.q.queries, in.views.q.heads});
  auto outs = nb::cast<Floats>(out), lses = nb::cast<Floats>(lse);
  {
    const nb::gil_scoped_release others_go_on;
    if (in.gpu < 0) {
      attention(in.views, in.call.options(), span_of(outs), span_of(lses), default_pool());
    } else {
      in.plan().attention(outs.data(), lses.data(), in.stream);
    }
  }
  return nb::make_tuple(out, lse);
}

nb::object states_of(const nb::object& q, const nb::object& k, const nb::object& v, const nb::kwargs& options) {
  const Input in(q, k, v, options);
  nb::object states = empty_like(q, in.shape(in.views.v.head_dim + 2));
  auto packed = nb::cast<Floats>(states);
  const nb::gil_scoped_release others_go_on;
  if (in.gpu < 0) {
    attention_states(in.views, in.call.options(), span_of(packed), default_pool());
  } else {
    in.plan().attention_states(packed.data(), in.stream);
  }
  return states;
}

constexpr char kHostFloats[] = "a dense float32 array in the host's memory";

// Of rows that each hold a state.
std::int64_t v_dim_of(const ConstHostFloats& states) {
  const std::int64_t floats = states.ndim() == 0 ? 0 : static_cast<std::int64_t>(states.shape(states.ndim() - 1));
  if (floats > 2) return floats - 2;
  refuse("states", "rows of " + std::to_string(floats) + " floats", "v_dim + 2, at least 3");
}

std::vector<std::int64_t> shape_of(const ConstHostFloats& states, std::int64_t last) {
  std::vector<std::int64_t> shape;
  for (std::size_t i = 0; i < states.ndim(); ++i) shape.push_back(static_cast<std::int64_t>(states.shape(i)));
  shape.back() = last;
  return shape;
}

nb::object merge(const nb::object& lower, const nb::object& higher) {
  const auto from = value_of<ConstHostFloats>("lower", lower, kHostFloats, false);
  const auto with = value_of<ConstHostFloats>("higher", higher, kHostFloats, false);
  const std::int64_t v_dim = v_dim_of(from);
  const auto all = shape_of(from, v_dim + 2);
  if (with.ndim() != all.size() || shape_of(with, v_dim_of(with) + 2) != all) {
    refuse("higher", "of another shape than lower", "states of the same queries");
  }
  nb::object merged = empty_like(lower, all);
  auto to = nb::cast<HostFloats>(merged);
  {
    const nb::gil_scoped_release others_go_on;
    std::copy_n(from.data(), from.size(), to.data());
    merge_states(span_of(to), span_of(with), v_dim);
  }
  return merged;
}

nb::object finalize(const nb::object& states, const nb::object& given_sinks) {
  const auto from = value_of<ConstHostFloats>("states", states, kHostFloats, false);
  const std::int64_t v_dim = v_dim_of(from);
  std::vector<float> sinks;
  if (!given_sinks.is_none()) sinks = value_of<std::vector<float>>("sinks", given_sinks, kPerHead);
  const std::size_t heads = from.ndim() > 1 ? from.shape(from.ndim() - 2) : 1;
  if (!sinks.empty() && sinks.size() != heads) {
    refuse("sinks", std::to_string(sinks.size()) + " values", "0 or the heads of the states, " + std::to_string(heads));
  }
  std::vector<std::int64_t> rows = shape_of(from, v_dim);
  nb::object out = empty_like(states, rows);
  rows.pop_back();
  nb::object lse = empty_like(states, rows);
  auto outs = nb::cast<HostFloats>(out), lses = nb::cast<HostFloats>(lse);
  {
    const nb::gil_scoped_release others_go_on;
    finalize_states(span_of(from), v_dim, sinks, span_of(outs), span_of(lses));
  }
  return nb::make_tuple(out, lse);
}

}  // namespace

void add_attention(nb::module_& module) {
  module.def("attention", &attend, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("options"), kAttention);
  module.def("states", &states_of, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("options"), kStates);
  module.def("merge", &merge, nb::arg("lower"), nb::arg("higher"),
             "The states of two sets of keys as those of both, in a new array. lower comes first in the tree.");
  module.def("finalize", &finalize, nb::arg("states"), nb::arg("sinks") = nb::none(),
             "out and lse of states; sinks, a logit for each head, are no part of a state.");
  module.def("cuda_problem", &cuda_problem, "Empty where there is a GPU to use; else why not.");
  module.def(
      "active_isa", [] { return std::string(active_isa()); }, "The instruction set in use.");
}

}  // namespace treeattn::python
