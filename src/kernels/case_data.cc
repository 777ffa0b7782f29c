// SPDX-License-Identifier: Apache-2.0
// The buffers of a case: numbers where a backend should read, NaN everywhere else.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "base/half.h"
#include "base/round_up.h"
#include "kernels/case_list.h"
#include "kernels/problem.h"

namespace treeattn::kernels {

namespace {

// Every type but int8 reads this byte, repeated, as NaN.
constexpr std::byte kNanByte{0xff};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kSparePages = 3;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Nearly standard normal, the same on every platform: the sum of four uniform 16-bit integers.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : engine_(seed) {}
  float operator()() {
    const std::uint64_t bits = engine_();
    const std::uint64_t sum =
        (bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + ((bits >> 48) & 0xffff);
    return (static_cast<float>(sum) * 0x1p-16f - 2.0f) * 1.7320508f;
  }
  std::uint64_t below(std::uint64_t n) { return engine_() % n; }

 private:
  std::mt19937_64 engine_;
};

// Room for `rows` rows, one element into the allocation so that nothing is aligned by luck, and not a byte beyond.
std::vector<std::byte> nan_rows(std::int64_t rows, std::int64_t dim, std::int64_t padding, DType dtype) {
  const std::int64_t elements = rows == 0 ? 0 : 1 + rows * (dim + padding) - padding;
  return std::vector<std::byte>(index(elements) * dtype_size(dtype), kNanByte);
}

const std::byte* first_row(const std::vector<std::byte>& bytes, DType dtype) {
  return bytes.empty() ? nullptr : bytes.data() + dtype_size(dtype);
}

}  // namespace

KvView CaseData::KvStore::bound() const {
  KvView bound = view;
  bound.data = first_row(bytes, view.dtype);
  bound.scales = scales.empty() ? nullptr : scales.data();
  bound.page_table = page_table.empty() ? nullptr : page_table.data();
  return bound;
}

void CaseData::KvStore::allocate(const Case& shape, Layout layout, DType dtype, std::int64_t dim, std::uint64_t seed) {
  const std::int64_t batch = shape.batch, tokens = shape.tokens, heads = shape.kv_heads;
  std::int64_t rows = batch * tokens * heads;
  if (layout == Layout::kTokensFirst) view = KvView::tokens_first(nullptr, dtype, batch, tokens, heads, dim);
  if (layout == Layout::kHeadsFirst) view = KvView::heads_first(nullptr, dtype, batch, tokens, heads, dim);
  if (layout == Layout::kPaged) {
    const auto pages_for = [&](std::int64_t count) { return base::divide_up(count, shape.page_tokens); };
    const std::int64_t per_sequence = pages_for(tokens);
    std::vector<std::int64_t> used(index(batch), per_sequence);
    for (std::size_t b = 0; b < shape.lengths.size(); ++b) used[b] = pages_for(shape.lengths[b]);
    const std::int64_t pages = std::accumulate(used.begin(), used.end(), kSparePages);
    std::vector<std::int32_t> order(index(pages));
    std::iota(order.begin(), order.end(), 0);
    Normal random(seed);
    for (std::size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
    page_table.assign(index(batch * per_sequence), -1);
    std::size_t next = 0;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t slot = 0; slot < used[index(b)]; ++slot) {
        page_table[index(b * per_sequence + slot)] = order[next++];
      }
    }
    view = KvView::paged(nullptr, dtype, pages, shape.page_tokens, heads, dim, batch, per_sequence, nullptr);
    view.tokens = tokens;  // the last page need not be full
    rows = pages * shape.page_tokens * heads;
  }
  if (dtype == DType::kInt8 || (dtype == DType::kFp8E4M3 && shape.fp8_scales)) {
    view = view.with_scales(nullptr);
    scales.assign(index(rows), kNan);
  }
  bytes = nan_rows(rows, dim, shape.row_padding, dtype);
  // Dense strides count whole rows.
  for (std::int64_t* stride : {&view.batch_stride, &view.token_stride, &view.head_stride, &view.page_stride}) {
    *stride = *stride / dim * (dim + shape.row_padding);
  }
}

void CaseData::KvStore::set_scale(RowAt at, float value) {
  scales[index(kv_scale_address(bound(), at.batch, at.token, at.head) - scales.data())] = value;
}

std::byte* CaseData::KvStore::row(RowAt at) {
  return bytes.data() + (kv_row(bound(), at.batch, at.token, at.head) - bytes.data());
}

void CaseData::KvStore::store_row(RowAt at, const float* values) {
  const auto dim = index(view.head_dim);
  const std::size_t size = dtype_size(view.dtype);
  std::byte* to = row(at);
  float scale = 1.0f;
  if (view.dtype == DType::kInt8) {
    base::quantize_row_int8(values, dim, reinterpret_cast<std::int8_t*>(to), &scale, base::kScaleOfZeroRow);
  } else {
    if (!scales.empty()) {
      float largest = 0.0f;
      for (std::size_t d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(values[d]));
      scale = largest > 0 ? largest / base::kMaxFp8 : 1.0f;
    }
    for (std::size_t d = 0; d < dim; ++d) base::store_from_float(to + d * size, values[d] / scale, view.dtype);
  }
  if (!scales.empty()) set_scale(at, scale);
}

CaseData::CaseData(const Case& shape, std::uint64_t seed) : shape_(shape) {
  k_.allocate(shape, shape.k_layout, shape.k_type, shape.head_dim, seed + 3);
  v_.allocate(shape, shape.v_layout, shape.v_type, shape.v_dim, seed + 4);
  fill_queries(seed);
  fill_keys_and_values(seed + 1);
  Normal normal(seed + 2);
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    const double share = static_cast<double>(h + 1) / static_cast<double>(shape.heads);
    if (shape.alibi) slopes_.push_back(static_cast<float>(std::exp2(-8.0 * share)));
    const float size = shape.data == DataKind::kLargeLogits ? 1e5f : 2.0f;
    // -inf is how a head says that it has no sink.
    if (shape.sinks) sinks_.push_back(h == 1 ? -std::numeric_limits<float>::infinity() : size * normal());
  }
}

void CaseData::fill_queries(std::uint64_t seed) {
  q_view_ = QueryView::dense(nullptr, shape_.q_type, shape_.batch, shape_.queries, shape_.heads, shape_.head_dim);
  q_ = nan_rows(shape_.batch * shape_.queries * shape_.heads, shape_.head_dim, shape_.row_padding, shape_.q_type);
  for (std::int64_t* stride : {&q_view_.batch_stride, &q_view_.query_stride, &q_view_.head_stride}) {
    *stride = *stride / shape_.head_dim * (shape_.head_dim + shape_.row_padding);
  }
  Normal normal(seed);
  const float size = shape_.data == DataKind::kLargeLogits ? 1000.0f : 1.0f;
  for (std::int64_t b = 0; b < shape_.batch; ++b) {
    for (std::int64_t i = 0; i < shape_.queries; ++i) {
      for (std::int64_t h = 0; h < shape_.heads; ++h) {
        for (std::int64_t d = 0; d < shape_.head_dim; ++d) set_q(b, i, h, d, size * normal());
      }
    }
  }
}

void CaseData::fill_keys_and_values(std::uint64_t seed) {
  Normal normal(seed);
  std::vector<float> k_row(index(shape_.head_dim)), v_row(index(shape_.v_dim));
  const auto draw = [&](std::vector<float>& row, float size) {
    for (float& x : row) x = size * normal();
  };
  const float k_size = shape_.data == DataKind::kLargeLogits ? 100.0f : 1.0f;
  draw(k_row, k_size);
  draw(v_row, 1.0f);
  for (std::int64_t b = 0; b < shape_.batch; ++b) {
    for (std::int64_t h = 0; h < shape_.kv_heads; ++h) {
      const std::int64_t tokens = length(b);
      const std::uint64_t draws = static_cast<std::uint64_t>(std::max<std::int64_t>(tokens, 1));
      const auto peak = static_cast<std::int64_t>(normal.below(draws));
      for (std::int64_t t = 0; t < tokens; ++t) {
        if (shape_.data != DataKind::kConstant) {
          draw(k_row, k_size);
          draw(v_row, 1.0f);
        }
        if (shape_.data == DataKind::kPeaked && t == peak) {
          // Along the last query of the group's first head: a logit of 3 sqrt(head_dim) there.
          const std::int64_t head = h * (shape_.heads / shape_.kv_heads);
          const std::byte* q = query_row(bound_queries(), b, shape_.queries - 1, head);
          base::load_row_as_float(q, shape_.q_type, shape_.head_dim, k_row.data());
          for (float& x : k_row) x *= 3.0f;
        }
        k_.store_row({b, t, h}, k_row.data());
        v_.store_row({b, t, h}, v_row.data());
      }
    }
  }
}

QueryView CaseData::bound_queries() const {
  QueryView bound = q_view_;
  bound.data = first_row(q_, q_view_.dtype);
  return bound;
}

AttentionInput CaseData::input() const {
  AttentionInput in;
  in.q = bound_queries();
  in.k = k_.bound();
  in.v = v_.bound();
  in.lengths = shape_.lengths;
  in.first_key = shape_.first_key;
  in.first_query = shape_.first_query;
  in.order = shape_.order;
  return in;
}

AttentionOptions CaseData::options() const {
  AttentionOptions options;
  if (shape_.scale != 1.0f) options.scale = shape_.scale / std::sqrt(static_cast<float>(shape_.head_dim));
  options.causal = shape_.causal;
  options.window = shape_.window;
  options.softcap = shape_.softcap;
  options.alibi_slopes = slopes_;
  options.sinks = sinks_;
  return options;
}

std::int64_t CaseData::length(std::int64_t batch) const {
  return shape_.lengths.empty() ? shape_.tokens : shape_.lengths[index(batch)];
}

void CaseData::set_q(std::int64_t batch, std::int64_t query, std::int64_t head, std::int64_t d, float value) {
  const auto offset = index(query_row(bound_queries(), batch, query, head) - q_.data());
  base::store_from_float(q_.data() + offset + index(d) * dtype_size(q_view_.dtype), value, q_view_.dtype);
}

void CaseData::set_k(std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t d, float value) {
  base::store_from_float(k_.row({batch, token, head}) + index(d) * dtype_size(k_.view.dtype), value, k_.view.dtype);
}

void CaseData::set_v(std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t d, float value) {
  base::store_from_float(v_.row({batch, token, head}) + index(d) * dtype_size(v_.view.dtype), value, v_.view.dtype);
}

void CaseData::set_k_scale(std::int64_t batch, std::int64_t token, std::int64_t head, float value) {
  k_.set_scale({batch, token, head}, value);
}

void CaseData::set_v_scale(std::int64_t batch, std::int64_t token, std::int64_t head, float value) {
  v_.set_scale({batch, token, head}, value);
}

}  // namespace treeattn::kernels
