// SPDX-License-Identifier: Apache-2.0
// The checks of an attention call, and the addresses of its rows.
#include "kernels/problem.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>

#include "base/check.h"
#include "kernels/head_dims.h"
#include "plan/node_chunks.h"

namespace treeattn::kernels {

namespace {

using base::require;

constexpr std::int64_t kMaxDim = std::numeric_limits<std::int32_t>::max();
// Query heads of one KV head are worked on together, and kernels count what they have of them, 256 floats of each and
// more, in int.
constexpr std::int64_t kMaxGroup = 1 << 20;
// Far beyond any cache, and small enough that sums and differences of a few positions stay inside int64.
constexpr std::int64_t kMaxPosition = std::int64_t{1} << 60;
// Factors outside this range would leave float32 when they are multiplied by log2(e) or inverted.
constexpr float kMaxFactor = 0x1p100f;
constexpr float kMinFactor = 0x1p-100f;
constexpr float kMaxSlope = 0x1p60f;

// One dimension of a view: how many, and how far apart.
struct Axis {
  std::string_view stride_name;
  std::int64_t size;
  std::int64_t stride;
};

void require_dim(std::string_view view, std::string_view name, std::int64_t value) {
  require(value >= 1 && value <= kMaxDim, "{}.{} = {}; accepted: 1 to {}", view, name, value, kMaxDim);
}

void require_head_dim(std::string_view view, std::int64_t head_dim) {
  require(takes_head_dim(head_dim), "{}.head_dim = {}; accepted: {} to {} in steps of {}", view, head_dim,
          kLeastHeadDim, kMostHeadDim, kHeadDimStep);
}

void require_equal(std::string_view name, std::int64_t value, std::string_view other_name, std::int64_t other) {
  require(value == other, "{} = {} differs from {} = {}; accepted: equal values", name, value, other_name, other);
}

void require_pointer(std::string_view name, const void* pointer, std::size_t alignment, std::string_view element) {
  require(pointer != nullptr, "{} = null; accepted: the address of {} values", name, element);
  require(reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0,
          "{} = {} is not a multiple of {}; accepted: an address aligned to {}", name, pointer, alignment, element);
}

// Checks the strides and that the last byte of `data` they reach has an address.
void require_strides(std::string_view view, std::initializer_list<Axis> axes, std::int64_t row_elements,
                     std::size_t element_size, const void* data) {
  std::int64_t last = 0;
  bool overflow = false;
  for (const Axis& axis : axes) {
    if (axis.size == 0) return;
  }
  for (const Axis& axis : axes) {
    require(axis.stride >= 0, "{}.{} = {}; accepted: 1 or more", view, axis.stride_name, axis.stride);
    require(axis.stride > 0 || axis.size == 1, "{}.{} = 0 with {} rows along it; accepted: 1 or more", view,
            axis.stride_name, axis.size);
    std::int64_t offset = 0, offset_bytes = 0;
    overflow |= __builtin_mul_overflow(axis.size - 1, axis.stride, &offset);
    overflow |= __builtin_mul_overflow(offset, static_cast<std::int64_t>(element_size), &offset_bytes);
    overflow |= __builtin_add_overflow(last, offset, &last);
    require(!overflow, "{}.{} = {} with {} rows along it overflows; accepted: offsets below 2^63 bytes", view,
            axis.stride_name, axis.stride, axis.size);
  }
  std::int64_t bytes = 0;
  std::uintptr_t end = 0;
  overflow |= __builtin_add_overflow(last, row_elements, &last);
  overflow |= __builtin_mul_overflow(last, static_cast<std::int64_t>(element_size), &bytes);
  overflow |= __builtin_add_overflow(reinterpret_cast<std::uintptr_t>(data), bytes, &end);
  require(!overflow, "{} reaches {} elements of {} bytes beyond its data; accepted: offsets below 2^63 bytes", view,
          last, element_size);
}

void check_queries(const QueryView& q) {
  require_dim("q", "batch", q.batch);
  require_dim("q", "queries", q.queries);
  require_dim("q", "heads", q.heads);
  require_head_dim("q", q.head_dim);
  const std::string_view type = dtype_name(q.dtype);
  require(q.dtype == DType::kFloat32 || q.dtype == DType::kFloat16 || q.dtype == DType::kBFloat16,
          "q.dtype = {}; accepted: float32, float16, bfloat16", type);
  require_pointer("q.data", q.data, dtype_size(q.dtype), type);
  require_strides("q",
                  {{"batch_stride", q.batch, q.batch_stride},
                   {"query_stride", q.queries, q.query_stride},
                   {"head_stride", q.heads, q.head_stride}},
                  q.head_dim, dtype_size(q.dtype), q.data);
}

// The dimensions of one view, before lengths are known.
void check_kv_dims(std::string_view name, const KvView& view) {
  require_dim(name, "batch", view.batch);
  require_dim(name, "kv_heads", view.kv_heads);
  require_head_dim(name, view.head_dim);
  require(view.tokens >= 0 && view.tokens <= kMaxPosition, "{}.tokens = {}; accepted: 0 to 2^60", name, view.tokens);
  const bool has_pages = view.page_table != nullptr || view.pages != 0 || view.pages_per_sequence != 0;
  require(view.page_tokens >= (has_pages ? 1 : 0), "{}.page_tokens = {}; accepted: 1 or more, or 0 and no pages", name,
          view.page_tokens);
  if (view.page_tokens == 0) return;
  require(view.pages >= 0, "{}.pages = {}; accepted: 0 or more", name, view.pages);
  require(view.pages_per_sequence >= 0, "{}.pages_per_sequence = {}; accepted: 0 or more", name,
          view.pages_per_sequence);
  std::int64_t capacity = 0;
  const bool unbounded = __builtin_mul_overflow(view.pages_per_sequence, view.page_tokens, &capacity);
  require(unbounded || view.tokens <= capacity,
          "{}.tokens = {} is more than pages_per_sequence * page_tokens = {}; accepted: at most that", name,
          view.tokens, capacity);
}

// Whether some of the tokens [begin, end) of a sequence belong to leaves that are asked for.
bool any_in_nodes(const Problem& problem, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = plan::chunk_of(problem.order, problem.first_key + begin);
  const std::int64_t last = plan::chunk_of(problem.order, problem.first_key + end - 1);
  return std::any_of(problem.nodes.begin(), problem.nodes.end(), [&](const plan::TreeNode& node) {
    return plan::chunks_of_node(problem.order, node).from(first) <= last;
  });
}

// Calls check(slot) for the slots of a sequence's page table that lengths and leaves use. A decoding step does this for
// a million tokens, so it goes through what is used and not through all that is there.
template <class Check>
void for_used_slots(const KvView& view, const Problem& problem, std::int64_t length, const Check& check) {
  if (length == 0) return;
  const std::int64_t last_slot = (length - 1) / view.page_tokens;
  if (problem.whole_tree()) {
    for (std::int64_t slot = 0; slot <= last_slot; ++slot) check(slot);
    return;
  }
  const std::int64_t chunk_tokens = problem.order.chunk_tokens;
  for (const plan::TreeNode& node : problem.nodes) {
    const plan::NodeChunks chunks = plan::chunks_of_node(problem.order, node);
    const std::int64_t last = std::min(chunks.last, plan::chunk_of(problem.order, problem.first_key + length - 1));
    for (std::int64_t c = chunks.from(plan::chunk_of(problem.order, problem.first_key)); c <= last; c += chunks.step) {
      const std::int64_t begin = std::max<std::int64_t>(0, c * chunk_tokens - problem.first_key);
      const std::int64_t end = std::min(length, (c + 1) * chunk_tokens - problem.first_key);
      for (std::int64_t slot = begin / view.page_tokens; slot <= (end - 1) / view.page_tokens; ++slot) check(slot);
    }
  }
}

// The table is read only as far as lengths and leaves use it: the rest may be anything.
void check_page_table(std::string_view name, const KvView& view, const Problem& problem) {
  std::int64_t entries = 0;
  require(!__builtin_mul_overflow(view.batch, view.pages_per_sequence, &entries) &&
              entries <= std::numeric_limits<std::int64_t>::max() / 4,
          "{}.pages_per_sequence = {} with batch {} overflows; accepted: tables below 2^63 bytes", name,
          view.pages_per_sequence, view.batch);
  for (std::int64_t b = 0; b < view.batch; ++b) {
    for_used_slots(view, problem, problem.lengths[static_cast<std::size_t>(b)], [&](std::int64_t slot) {
      const std::int64_t page = view.page_table[b * view.pages_per_sequence + slot];
      require(page >= 0 && page < view.pages, "{}.page_table[{}, {}] = {}; accepted: 0 to pages - 1 = {}", name, b,
              slot, page, view.pages - 1);
    });
  }
}

void check_kv_memory(std::string_view name, const KvView& view, const Problem& problem) {
  const std::string_view type = dtype_name(view.dtype);
  const bool used = std::any_of(problem.lengths.begin(), problem.lengths.end(),
                                [&](std::int64_t length) { return length > 0 && any_in_nodes(problem, 0, length); });

  require(view.scales == nullptr || has_scales(view.dtype),
          "{}.scales = {} with {} values; accepted: scales for int8 and fp8 only", name,
          static_cast<const void*>(view.scales), type);
  if (used) require_pointer(fmt::format("{}.data", name), view.data, dtype_size(view.dtype), type);
  if (used && view.dtype == DType::kInt8) {
    require(view.scales != nullptr, "{}.scales = null with int8 values; accepted: one float32 per token and head",
            name);
  }
  check_kv_layout(name, view);
  if (!used || view.page_tokens == 0) return;
  require_pointer(fmt::format("{}.page_table", name), view.page_table, 4, "int32");
  check_page_table(name, view, problem);
}

// The states of all rows, the largest thing made from the dimensions, must be addressable.
void check_result_size(const QueryView& q, std::int64_t v_dim) {
  std::int64_t count = q.batch;
  bool overflow = false;
  for (const std::int64_t factor : {q.queries, q.heads, v_dim + 2, static_cast<std::int64_t>(sizeof(float))}) {
    overflow |= __builtin_mul_overflow(count, factor, &count);
  }
  require(!overflow, "q.batch * q.queries * q.heads = {} * {} * {} rows overflow; accepted: results below 2^63 bytes",
          q.batch, q.queries, q.heads);
}

std::vector<std::int64_t> checked_lengths(const AttentionInput& in) {
  const auto batch = static_cast<std::size_t>(in.q.batch);
  if (in.lengths.empty()) return std::vector<std::int64_t>(batch, in.k.tokens);
  require(in.lengths.size() == batch, "lengths has {} values; accepted: 0 or batch = {}", in.lengths.size(), batch);
  base::require_address("lengths", in.lengths);
  for (std::size_t b = 0; b < batch; ++b) {
    require(in.lengths[b] >= 0 && in.lengths[b] <= in.k.tokens, "lengths[{}] = {}; accepted: 0 to k.tokens = {}", b,
            in.lengths[b], in.k.tokens);
  }
  return {in.lengths.begin(), in.lengths.end()};
}

std::vector<std::int64_t> checked_first_query(const AttentionInput& in, std::span<const std::int64_t> lengths) {
  const auto batch = static_cast<std::size_t>(in.q.batch);
  require(in.first_key >= 0 && in.first_key <= kMaxPosition - in.k.tokens,
          "first_key = {} with k.tokens = {}; accepted: 0 or more, last position at most 2^60", in.first_key,
          in.k.tokens);
  std::vector<std::int64_t> first(batch);
  if (in.first_query.empty()) {
    for (std::size_t b = 0; b < batch; ++b) first[b] = in.first_key + lengths[b] - in.q.queries;
    return first;
  }
  require(in.first_query.size() == batch, "first_query has {} values; accepted: 0 or batch = {}", in.first_query.size(),
          batch);
  base::require_address("first_query", in.first_query);
  for (std::size_t b = 0; b < batch; ++b) {
    first[b] = in.first_query[b];
    require(first[b] >= -kMaxPosition && first[b] <= kMaxPosition - in.q.queries,
            "first_query[{}] = {} with q.queries = {}; accepted: positions from -2^60 to 2^60", b, first[b],
            in.q.queries);
  }
  return first;
}

// scale: the one that holds, given or not.
void check_options(const AttentionOptions& options, float scale, std::int64_t heads) {
  require(scale == 0.0f || (std::fabs(scale) >= kMinFactor && std::fabs(scale) <= kMaxFactor),
          "scale = {}; accepted: 0 or a magnitude of 2^-100 to 2^100", scale);
  require(options.window >= 0, "window = {}; accepted: 0 (none) or more", options.window);
  const float cap = options.softcap;
  require(cap == 0.0f || (cap >= kMinFactor && cap <= kMaxFactor),
          "softcap = {}; accepted: 0 (none) or 2^-100 to 2^100", cap);
  if (cap > 0.0f && scale != 0.0f) {
    const float ratio = std::fabs(scale) / cap;
    require(ratio >= kMinFactor && ratio <= kMaxFactor,
            "softcap = {} with scale = {}; accepted: a quotient of 2^-100 to 2^100", cap, scale);
  }
  const auto slopes = options.alibi_slopes;
  require(slopes.empty() || slopes.size() == static_cast<std::size_t>(heads),
          "alibi_slopes has {} values; accepted: 0 or q.heads = {}", slopes.size(), heads);
  base::require_address("alibi_slopes", slopes);
  for (std::size_t h = 0; h < slopes.size(); ++h) {
    require(std::fabs(slopes[h]) <= kMaxSlope, "alibi_slopes[{}] = {}; accepted: a magnitude of at most 2^60", h,
            slopes[h]);
  }
  const auto sinks = options.sinks;
  require(sinks.empty() || sinks.size() == static_cast<std::size_t>(heads),
          "sinks has {} values; accepted: 0 or q.heads = {}", sinks.size(), heads);
  base::require_address("sinks", sinks);
  for (std::size_t h = 0; h < sinks.size(); ++h) {
    const bool none = sinks[h] == -std::numeric_limits<float>::infinity();
    require(none || std::fabs(sinks[h]) <= kMaxFactor,
            "sinks[{}] = {}; accepted: -inf (none) or a magnitude of at most 2^100", h, sinks[h]);
  }
}

}  // namespace

void check_kv_layout(std::string_view name, const KvView& view) {
  const std::size_t element_size = dtype_size(view.dtype);
  const bool paged = view.page_tokens > 0;
  if (view.data != nullptr) {
    require_pointer(fmt::format("{}.data", name), view.data, element_size, dtype_name(view.dtype));
  }
  if (view.scales != nullptr) require_pointer(fmt::format("{}.scales", name), view.scales, 4, "float32");
  require_strides(
      name,
      {paged ? Axis{"page_stride", view.pages, view.page_stride} : Axis{"batch_stride", view.batch, view.batch_stride},
       {"token_stride", paged ? view.page_tokens : view.tokens, view.token_stride},
       {"head_stride", view.kv_heads, view.head_stride}},
      view.head_dim, element_size, view.data);
  if (view.scales == nullptr) return;
  require_strides(name,
                  {paged ? Axis{"scale_page_stride", view.pages, view.scale_page_stride}
                         : Axis{"scale_batch_stride", view.batch, view.scale_batch_stride},
                   {"scale_token_stride", paged ? view.page_tokens : view.tokens, view.scale_token_stride},
                   {"scale_head_stride", view.kv_heads, view.scale_head_stride}},
                  1, sizeof(float), view.scales);
}

void check_sizes(const AttentionInput& in) {
  check_queries(in.q);
  check_kv_dims("k", in.k);
  check_kv_dims("v", in.v);
  require_equal("k.batch", in.k.batch, "q.batch", in.q.batch);
  require_equal("v.batch", in.v.batch, "q.batch", in.q.batch);
  require_equal("v.tokens", in.v.tokens, "k.tokens", in.k.tokens);
  require_equal("v.kv_heads", in.v.kv_heads, "k.kv_heads", in.k.kv_heads);
  require_equal("k.head_dim", in.k.head_dim, "q.head_dim", in.q.head_dim);
  const std::int64_t kv_heads = in.k.kv_heads;
  require(in.q.heads % kv_heads == 0, "q.heads = {} is not a multiple of k.kv_heads = {}; accepted: {}, {}, {}, ...",
          in.q.heads, kv_heads, kv_heads, 2 * kv_heads, 3 * kv_heads);
  check_result_size(in.q, in.v.head_dim);
  require(in.q.heads / kv_heads <= kMaxGroup,
          "q.heads = {} with k.kv_heads = {}; accepted: at most {} for each of these", in.q.heads, kv_heads, kMaxGroup);
}

Problem make_problem(const AttentionInput& in, const AttentionOptions& options, const plan::NodeSet* nodes) {
  check_sizes(in);
  Problem problem;
  problem.q = in.q;
  problem.k = in.k;
  problem.v = in.v;
  plan::check_order(in.order);
  problem.order = in.order;
  problem.nodes = nodes != nullptr ? *nodes : plan::NodeSet{{plan::log2_exact(in.order.branches), 0}};
  problem.lengths = checked_lengths(in);
  problem.first_key = in.first_key;
  problem.first_query = checked_first_query(in, problem.lengths);  // positions first: what follows adds them up
  check_kv_memory("k", in.k, problem);
  check_kv_memory("v", in.v, problem);

  problem.scale =
      options.scale ? *options.scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(in.q.head_dim)));
  check_options(options, problem.scale, in.q.heads);
  problem.causal = options.causal;
  // No two positions are this far apart, so a wider window hides nothing more, and sums with it cannot overflow.
  problem.window = std::min(options.window, 4 * kMaxPosition);
  problem.softcap = options.softcap;
  problem.alibi_slopes = options.alibi_slopes;
  problem.sinks = options.sinks;
  return problem;
}

KeyRange Problem::visible(std::int64_t batch, std::int64_t query) const {
  const auto b = static_cast<std::size_t>(batch);
  const std::int64_t own = first_query[b] + query - first_key;  // where the query stands, as a local key index
  KeyRange range{0, lengths[b]};
  if (causal) range.end = std::min(range.end, own + 1);
  if (window > 0) {
    range.begin = std::max(range.begin, own - window + 1);
    range.end = std::min(range.end, own + window);
  }
  if (range.begin >= range.end) return {0, 0};
  return range;
}

KeyRange Problem::visible_to_any(std::int64_t batch, std::int64_t first, std::int64_t count) const {
  KeyRange all;
  for (std::int64_t i = 0; i < count; ++i) {
    const KeyRange one = visible(batch, first + i);
    if (one.empty()) continue;
    all = all.empty() ? one : KeyRange{std::min(all.begin, one.begin), std::max(all.end, one.end)};
  }
  return all;
}

const std::byte* kv_row(const KvView& view, std::int64_t batch, std::int64_t token, std::int64_t head) {
  std::int64_t offset = head * view.head_stride;
  if (view.page_tokens == 0) {
    offset += batch * view.batch_stride + token * view.token_stride;
  } else {
    const std::int64_t page = view.page_table[batch * view.pages_per_sequence + token / view.page_tokens];
    offset += page * view.page_stride + token % view.page_tokens * view.token_stride;
  }
  return static_cast<const std::byte*>(view.data) + offset * static_cast<std::int64_t>(dtype_size(view.dtype));
}

const float* kv_scale_address(const KvView& view, std::int64_t batch, std::int64_t token, std::int64_t head) {
  const std::int64_t offset = head * view.scale_head_stride;
  if (view.page_tokens == 0) {
    return view.scales + (offset + batch * view.scale_batch_stride + token * view.scale_token_stride);
  }
  const std::int64_t page = view.page_table[batch * view.pages_per_sequence + token / view.page_tokens];
  return view.scales + (offset + page * view.scale_page_stride + token % view.page_tokens * view.scale_token_stride);
}

float kv_scale(const KvView& view, std::int64_t batch, std::int64_t token, std::int64_t head) {
  return view.scales == nullptr ? 1.0f : *kv_scale_address(view, batch, token, head);
}

const std::byte* query_row(const QueryView& view, std::int64_t batch, std::int64_t query, std::int64_t head) {
  const std::int64_t offset = batch * view.batch_stride + query * view.query_stride + head * view.head_stride;
  return static_cast<const std::byte*>(view.data) + offset * static_cast<std::int64_t>(dtype_size(view.dtype));
}

}  // namespace treeattn::kernels
