// SPDX-License-Identifier: Apache-2.0
// The one list of attention calls that every backend is checked on, by the tests and by `treeattn verify`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "treeattn/attention.h"

namespace treeattn::kernels {

enum class Layout : std::uint8_t { kTokensFirst, kHeadsFirst, kPaged };

// What the numbers look like.
enum class DataKind : std::uint8_t {
  kNormal,       // standard normal: logits of about 1
  kLargeLogits,  // logits of about 1e5, of either sign
  kPeaked,       // one key of each sequence takes nearly all the weight
  kConstant,     // all keys equal, all values equal: the answer is that value
};

// One call, small enough to compute in double by plain loops.
struct Case {
  std::string name;
  std::int64_t batch = 1;
  std::int64_t queries = 1;
  std::int64_t heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t tokens = 257;  // capacity
  std::int64_t head_dim = 64;
  std::int64_t v_dim = 64;
  DType q_type = DType::kFloat32;
  DType k_type = DType::kFloat32;
  DType v_type = DType::kFloat32;
  bool fp8_scales = false;  // row scales for fp8 K and V; int8 always has them
  Layout k_layout = Layout::kTokensFirst;
  Layout v_layout = Layout::kTokensFirst;
  std::int64_t page_tokens = 16;
  std::int64_t row_padding = 0;       // unused elements after every row of q, K and V
  std::vector<std::int64_t> lengths;  // [batch] or empty: all tokens
  std::int64_t first_key = 0;
  std::vector<std::int64_t> first_query;  // [batch] or empty: the queries are the last tokens
  bool causal = false;
  std::int64_t window = 0;
  float softcap = 0.0f;
  bool alibi = false;
  bool sinks = false;
  float scale = 1.0f;  // in units of 1 / sqrt(head_dim); 1: the default of the options
  ReductionOrder order;
  DataKind data = DataKind::kNormal;
};

// Always the same cases, in the same order; names are unique.
std::vector<Case> case_list();

// n cases of random shape: the same for the same seed.
std::vector<Case> random_cases(std::uint64_t seed, std::size_t n);

// The buffers of one case. Everything a correct backend has no business reading, that is rows beyond a sequence's
// length, unused pages, padding, and the scales of those, holds NaN (or, where there is no NaN, a row of scale NaN);
// unused page table entries hold -1. Rows are aligned to their element size and to nothing more.
class CaseData {
 public:
  CaseData(const Case& shape, std::uint64_t seed);

  // Views of this object's memory: valid while it lives and is not moved.
  AttentionInput input() const;
  AttentionOptions options() const;

  const Case& shape() const { return shape_; }
  std::int64_t length(std::int64_t batch) const;

  // For tests that spoil single elements: element d of row (batch, token, head) of K or V, and of query row
  // (batch, query, head). The value is rounded to the stored type.
  void set_k(std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t d, float value);
  void set_v(std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t d, float value);
  void set_q(std::int64_t batch, std::int64_t query, std::int64_t head, std::int64_t d, float value);
  // The row scale; requires a view that has them.
  void set_k_scale(std::int64_t batch, std::int64_t token, std::int64_t head, float value);
  void set_v_scale(std::int64_t batch, std::int64_t token, std::int64_t head, float value);

 private:
  // Where a row of K or V is.
  struct RowAt {
    std::int64_t batch, token, head;
  };
  struct KvStore {
    std::vector<std::byte> bytes;
    std::vector<float> scales;
    std::vector<std::int32_t> page_table;
    KvView view;  // without its pointers, which input() fills in

    KvView bound() const;
    void allocate(const Case& shape, Layout layout, DType dtype, std::int64_t dim, std::uint64_t seed);
    std::byte* row(RowAt at);
    void store_row(RowAt at, const float* values);
    void set_scale(RowAt at, float value);
  };
  QueryView bound_queries() const;
  void fill_queries(std::uint64_t seed);
  void fill_keys_and_values(std::uint64_t seed);

  Case shape_;
  std::vector<std::byte> q_;
  QueryView q_view_;
  KvStore k_;
  KvStore v_;
  std::vector<float> slopes_;
  std::vector<float> sinks_;
};

}  // namespace treeattn::kernels
