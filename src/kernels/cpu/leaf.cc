// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/leaf.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>

#include "base/round_up.h"
#include "kernels/cpu/chunk_rows.h"
#include "kernels/limb_range.h"
#include "merge/exp2_polynomial.h"
#include "merge/rows.h"
#include "treeattn/state.h"

namespace treeattn::kernels {
namespace {

// Hands out aligned pieces of one allocation; a first pass with no memory adds up the sizes.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t count) {
    std::byte* piece = base_ ? base_ + used_ : nullptr;
    used_ += base::round_up(static_cast<std::size_t>(count) * sizeof(T), base::Buffer::kLine);
    return reinterpret_cast<T*>(piece);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

int to_int(std::int64_t x) { return static_cast<int>(x); }

const TileOps& ops_of(const CpuTarget& target, DType dtype) { return target.ops[static_cast<int>(dtype)]; }

// A matter of the shape, not of where things lie: the order of a tile's keys is part of the result's bits.
int streams_of(const TileOps& ops, const KvView& k) {
  const std::int64_t row_bytes = k.kv_heads * k.head_dim * static_cast<std::int64_t>(dtype_size(k.dtype));
  return row_bytes < kPageBytes && ops.streams_of_short_rows ? ops.streams_of_short_rows : ops.streams;
}

// For tiles of this type that many rows share, or for the float32 they become.
const TileOps& ops_of(const CpuTarget& target, DType dtype, bool many_rows, bool promoted) {
  if (promoted) dtype = DType::kFloat32;
  const TileOps* own = target.many_rows[static_cast<int>(dtype)];
  return many_rows && own ? *own : ops_of(target, dtype);
}

bool is_for_many_rows(const CpuTarget& target, const TileOps& ops) {
  return std::find(std::begin(target.many_rows), std::end(target.many_rows), &ops) != std::end(target.many_rows);
}

// A visible key has another weight, or -0 where its value's scale makes it vanish.
bool is_hidden(float weight) { return std::bit_cast<std::uint32_t>(weight) == 0; }

// A loop of vectors: nothing is left out where a number is found that is not.
bool all_finite(const float* x, std::int64_t count) {
  constexpr std::uint32_t kExponent = std::bit_cast<std::uint32_t>(std::numeric_limits<float>::infinity());
  std::uint32_t special = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    special |= (std::bit_cast<std::uint32_t>(x[i]) & kExponent) == kExponent ? ~0u : 0u;
  }
  return special == 0;
}

}  // namespace

// Up to kTileTokens keys and values: where their rows for the unit's first head lie, in the order they are worked on.
struct LeafWorker::Tile {
  const std::byte* k[kTileTokens];
  const std::byte* v[kTileTokens];
  const float* k_scale[kTileTokens];
  const float* v_scale[kTileTokens];
  std::int64_t first = 0;  // local index of its first key
  int tokens = 0;
  bool any_hidden = false;  // some weight is 0
};

LeafWorker::LeafWorker(const CpuTarget& target, const Problem& problem, std::int64_t max_heads, std::int64_t max_rows)
    : target_(target),
      problem_(problem),
      many_rows_(max_rows / max_heads >= kPromoteFromRows),
      promote_k_(many_rows_ && !target.many_rows[static_cast<int>(problem.k.dtype)]),
      promote_v_(many_rows_ && !target.many_rows[static_cast<int>(problem.v.dtype)]),
      k_ops_(ops_of(target, problem.k.dtype, many_rows_, promote_k_)),
      v_ops_(ops_of(target, problem.v.dtype, many_rows_, promote_v_)),
      leaves_rows_out_(is_for_many_rows(target, k_ops_) && is_for_many_rows(target, v_ops_)),
      may_use_limbs_(target.plain &&
                     (k_ops_.dot != ops_of(*target.plain, problem.k.dtype, many_rows_, promote_k_).dot ||
                      v_ops_.accumulate != ops_of(*target.plain, problem.v.dtype, many_rows_, promote_v_).accumulate)),
      streams_(streams_of(ops_of(target, problem.k.dtype), problem.k)),
      max_heads_(max_heads),
      max_rows_(max_rows) {
  const std::int64_t head_rows = max_rows / max_heads;
  const std::int64_t k_dim = problem.k.head_dim;
  const std::int64_t v_dim = problem.v.head_dim;
  packed_query_bytes_ =
      base::round_up(k_ops_.packed_query_bytes(to_int(head_rows), to_int(k_dim)), base::Buffer::kLine);
  sum_floats_ = v_ops_.sum_floats(to_int(v_dim));
  const std::int64_t softmax_rows = base::round_up(max_rows, kSoftmaxRows);
  const auto carve = [&](Carver carver) {
    q_packed_ = carver.take<std::byte>(max_heads * static_cast<std::int64_t>(packed_query_bytes_));
    q_rows_ = carver.take<float>(head_rows * k_dim);
    m_log2_ = carver.take<float>(softmax_rows);
    l_ = carver.take<float>(softmax_rows);
    o_ = carver.take<float>(max_rows * sum_floats_);
    logits_ = carver.take<float>(max_rows * kTileTokens);
    shrink_ = carver.take<float>(softmax_rows);
    slopes_ = carver.take<float>(max_rows);
    distance_ = carver.take<float>(head_rows);
    k_scales_ = carver.take<float>(max_heads * kTileTokens);
    v_scales_ = carver.take<float>(max_heads * kTileTokens);
    promoted_ = carver.take<float>(promote_k_ || promote_v_ ? kTileTokens * std::max(k_dim, v_dim) : 0);
    begin_ = carver.take<std::int32_t>(head_rows);
    end_ = carver.take<std::int32_t>(head_rows);
    return carver.used();
  };
  scratch_ = base::Buffer(carve(Carver(nullptr)));
  carve(Carver(scratch_.as<std::byte>()));
  // Vectors may run past a short tile's tokens; what they read there is masked, but it must be a number.
  std::fill(k_scales_, k_scales_ + max_heads * kTileTokens, 0.0f);
  std::fill(v_scales_, v_scales_ + max_heads * kTileTokens, 0.0f);
  std::fill(logits_, logits_ + max_rows * kTileTokens, 0.0f);
  // The same past the last row.
  std::fill(m_log2_, m_log2_ + softmax_rows, 0.0f);
  std::fill(l_, l_ + softmax_rows, 0.0f);
}

void LeafWorker::begin_unit(const Unit& unit) {
  if (unit == unit_) return;
  unit_ = unit;
  seen_by_all_ = unit.visible_to_all(problem_);
  rows_ = to_int(unit.rows_per_head(problem_));
  without_limbs_.assign(static_cast<std::size_t>(unit.heads * rows_), 0);
  const std::int64_t group = problem_.group();
  const std::int64_t dim = problem_.q.head_dim;
  for (std::int64_t h = 0; h < unit.heads; ++h) {
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int64_t head = (unit.head0 + h) * group + r % group;
      const std::byte* row = query_row(problem_.q, unit.batch, unit.query0 + r / group, head);
      ops_of(target_, problem_.q.dtype).promote({&row, 0}, 1, to_int(dim), q_rows_ + r * dim);
      if (!problem_.alibi_slopes.empty()) {
        slopes_[h * rows_ + r] = problem_.alibi_slopes[static_cast<std::size_t>(head)] * merge::kLog2E;
      }
      without_limbs_[static_cast<std::size_t>(h * rows_ + r)] =
          may_use_limbs_ && k_ops_.logit_floor > 0 && loses_subnormals(q_rows_ + r * dim);
    }
    k_ops_.pack_queries(q_rows_, problem_.q.dtype, rows_, to_int(dim),
                        q_packed_ + static_cast<std::size_t>(h) * packed_query_bytes_);
  }
}

void LeafWorker::leaf(int leaf, float* states) {
  const std::int64_t rows = unit_.rows(problem_);
  const std::int64_t v_dim = problem_.v.head_dim;
  std::fill(m_log2_, m_log2_ + rows, merge::kEmptyMax);
  std::fill(l_, l_ + rows, 0.0f);
  std::fill(o_, o_ + rows * sum_floats_, 0.0f);

  // A tile is folded when the next one is known.
  Tile tiles[2];
  Tile *now = &tiles[0], *next = &tiles[1];
  for_each_tile(leaf, [&](const KeyRange& chunk, const KeyRange& keys) {
    load_tile(chunk, keys, *next);
    if (now->tokens > 0) fold_tile(*now, next);
    std::swap(now, next);
  });
  if (now->tokens > 0) fold_tile(*now, nullptr);

  const std::int64_t row_floats = static_cast<std::int64_t>(state_floats(v_dim));
  for (std::int64_t h = 0; h < unit_.heads; ++h) {
    float* of_head = states + h * rows_ * row_floats;
    plainly_.clear();
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int64_t row = h * rows_ + r;
      float* state = of_head + r * row_floats;
      state[0] = m_log2_[row];
      state[1] = l_[row];
      v_ops_.unpack_sums(o_ + row * sum_floats_, to_int(r), rows_, to_int(v_dim), state + 2);
      if (!may_use_limbs_) continue;
      if (without_limbs_[static_cast<std::size_t>(row)] || !all_finite(state + 1, row_floats - 1)) {
        plainly_.push_back(r);
      }
    }
    if (!plainly_.empty()) redo_without_limbs(leaf, h, of_head);
  }
}

// Whether a logit of a row of queries could lose more than logit_floor by subnormal numbers (docs/exactness.md).
bool LeafWorker::loses_subnormals(const float* q) const {
  // A loop of vectors: bits of magnitudes are in their order. A NaN, larger than all, is the plain target's as well.
  constexpr auto kLeast = std::bit_cast<std::uint32_t>(kLeastWithLimbs);
  std::uint32_t largest = std::bit_cast<std::uint32_t>(1.0f), small = 0;
  for (std::int64_t i = 0; i < problem_.q.head_dim; ++i) {
    const std::uint32_t size = std::bit_cast<std::uint32_t>(q[i]) & 0x7fffffffu;
    small |= std::uint32_t{size - 1 < kLeast - 1};  // 0 is not: it wraps round
    largest = std::max(largest, size);
  }
  const float most = kMostWithLimbs / std::max(1e-30f, std::fabs(problem_.scale));
  return small != 0 || !(std::bit_cast<float>(largest) <= most);
}

// The rows of one head that plainly_ names: a row's bits must not depend on what others see, or what it was grouped
// with.
void LeafWorker::redo_without_limbs(int leaf, std::int64_t head, float* states) {
  if (!plain_) plain_ = std::make_unique<LeafWorker>(*target_.plain, problem_, 1, max_rows_ / max_heads_);
  Unit alone = unit_;
  alone.head0 += head;
  alone.heads = 1;
  plain_->begin_unit(alone);
  const auto row_floats = static_cast<std::int64_t>(state_floats(problem_.v.head_dim));
  redone_.resize(static_cast<std::size_t>(rows_ * row_floats));
  plain_->leaf(leaf, redone_.data());
  for (const std::int64_t r : plainly_) {
    std::copy_n(redone_.data() + r * row_floats, row_floats, states + r * row_floats);
  }
}

// Calls body(keys of the chunk, keys of the tile) for the leaf's visible keys in order. Tiles lie on the grid of
// global positions, so a growing or sliding range never moves their boundaries.
template <class Body>
void LeafWorker::for_each_tile(int leaf, const Body& body) const {
  const KeyRange visible = unit_.visible(problem_);
  if (visible.empty()) return;
  const ReductionOrder& order = problem_.order;
  const std::int64_t first = plan::chunk_of(order, problem_.first_key + visible.begin);
  const std::int64_t last = plan::chunk_of(order, problem_.first_key + visible.end - 1);
  for (std::int64_t chunk = plan::first_chunk(order, leaf, first); chunk <= last;
       chunk = plan::next_chunk(order, leaf, chunk)) {
    const KeyRange keys = keys_in_chunk(problem_, visible, chunk);
    for (std::int64_t key = keys.begin; key < keys.end;) {
      const std::int64_t to_grid = kTileTokens - (problem_.first_key + key) % kTileTokens;
      const std::int64_t end = std::min(keys.end, key + to_grid);
      body(keys, KeyRange{key, end});
      key = end;
    }
  }
}

// A whole chunk that every row sees whole is read as the target's number of sequential streams side by side: tile i
// takes the i-th part of each stream, and neighbours in the tile come from different streams. Where masks or positions
// matter, the order is the natural one.
void LeafWorker::load_tile(const KeyRange& chunk, const KeyRange& keys, Tile& tile) const {
  tile.first = keys.begin;
  tile.tokens = to_int(keys.end - keys.begin);
  tile.any_hidden = false;
  const bool whole =
      chunk.end - chunk.begin == problem_.order.chunk_tokens && needs_no_positions(chunk.begin, chunk.end);
  // A power of two, and divisions of unknown numbers would take longer than all else here.
  const unsigned shift = whole ? static_cast<unsigned>(std::countr_zero(static_cast<unsigned>(streams_))) : 0;
  const int streams = 1 << shift;
  const std::int64_t stream = problem_.order.chunk_tokens >> shift;
  const std::int64_t first = chunk.begin + ((keys.begin - chunk.begin) >> shift);
  const RowsOfChunk k_rows(problem_.k, unit_, chunk), v_rows(problem_.v, unit_, chunk);
  for (int t = 0; t < tile.tokens; ++t) {
    const std::int64_t key = first + (t & (streams - 1)) * stream + (t >> shift);
    tile.k[t] = k_rows[key];
    tile.v[t] = v_rows[key];
    if (problem_.k.scales) tile.k_scale[t] = k_rows.scale(key);
    if (problem_.v.scales) tile.v_scale[t] = v_rows.scale(key);
  }
  for (int t = tile.tokens; t % kTokenBlock != 0; ++t) {
    tile.k[t] = tile.k[t - 1];
    tile.v[t] = tile.v[t - 1];
  }
}

void LeafWorker::fold_tile(Tile& tile, const Tile* next) {
  // Wanted when the keys have been scored; nothing else would bring them.
  for (int t = 0; t < tile.tokens && problem_.k.scales; ++t) __builtin_prefetch(tile.k_scale[t]);
  for (int t = 0; t < tile.tokens && problem_.v.scales; ++t) __builtin_prefetch(tile.v_scale[t]);
  mask_rows(tile);
  score_keys(tile);
  weigh(tile);
  sum_values(tile, next);
}

Ahead LeafWorker::ahead_of(const KvView& view, const std::byte* const* rows) const {
  const std::int64_t row_bytes = view.head_dim * static_cast<std::int64_t>(dtype_size(view.dtype));
  return {rows, rows_of(view, rows).head_bytes, to_int(row_bytes)};
}

void LeafWorker::score_keys(const Tile& tile) {
  DotArgs args;
  args.q = q_packed_;
  args.q_head_bytes = packed_query_bytes_;
  args.heads = to_int(unit_.heads);
  args.rows = tile_rows_;
  args.first_row = first_row_;
  args.dim = to_int(problem_.k.head_dim);
  args.tokens = tile.tokens;
  args.k = rows_of(problem_.k, tile.k);
  args.logits = logits_ + first_row_ * kTileTokens;
  if (tile.tokens == kTileTokens) args.ahead = ahead_of(problem_.v, tile.v);
  const std::byte* promoted[kTileTokens];
  if (promote_k_) args.k = promote(problem_.k, args.k, args.tokens, promoted);
  k_ops_.dot(args);
}

void LeafWorker::sum_values(const Tile& tile, const Tile* next) {
  AccumulateArgs args;
  args.weights = logits_ + first_row_ * kTileTokens;
  args.shrink = shrink_ + first_row_;
  args.heads = to_int(unit_.heads);
  args.rows = tile_rows_;
  args.head_rows = tile_rows_;
  args.dim = to_int(problem_.v.head_dim);
  args.tokens = tile.tokens;
  args.v = rows_of(problem_.v, tile.v);
  args.o = o_ + first_row_ * sum_floats_;
  if (tile.tokens == kTileTokens && next && next->tokens == kTileTokens) args.ahead = ahead_of(problem_.k, next->k);
  const std::byte* promoted[kTileTokens];
  if (promote_v_) args.v = promote(problem_.v, args.v, args.tokens, promoted);
  if (tile.any_hidden) {
    accumulate_visible(args);
  } else {
    v_ops_.accumulate(args);
  }
}

TileRows LeafWorker::rows_of(const KvView& view, const std::byte* const* rows) const {
  return {rows, view.head_stride * static_cast<std::int64_t>(dtype_size(view.dtype))};
}

// Many rows share one head (attention_cpu.cc gives such units no second one): its rows become float32 once for all.
TileRows LeafWorker::promote(const KvView& view, const TileRows& from, int tokens, const std::byte** table) {
  const int dim = to_int(view.head_dim);
  ops_of(target_, view.dtype).promote(from, tokens, dim, promoted_);
  for (int t = 0; t < kTileTokens; ++t) {
    table[t] = reinterpret_cast<const std::byte*>(promoted_ + std::min(t, tokens - 1) * dim);
  }
  return {table, 0};
}

// Which tokens of the tile each row sees, and how far they are, where masks or ALiBi need it. Of many rows those before
// the first and behind the last that sees any of them are left out.
void LeafWorker::mask_rows(const Tile& tile) {
  masked_ = false;
  first_row_ = 0;
  tile_rows_ = rows_;
  if (needs_no_positions(tile.first, tile.first + tile.tokens)) return;
  const std::int64_t group = problem_.group();
  for (std::int64_t q = 0; q < unit_.queries; ++q) {
    const KeyRange seen = problem_.visible(unit_.batch, unit_.query0 + q);
    const int begin = to_int(std::clamp<std::int64_t>(seen.begin - tile.first, 0, tile.tokens));
    const int end = std::max(begin, to_int(std::clamp<std::int64_t>(seen.end - tile.first, 0, tile.tokens)));
    masked_ |= begin > 0 || end < tile.tokens;
    const std::int64_t position = problem_.first_query[static_cast<std::size_t>(unit_.batch)] + unit_.query0 + q;
    const float distance = static_cast<float>(problem_.first_key + tile.first - position);
    for (std::int64_t r = q * group; r < (q + 1) * group; ++r) {
      begin_[r] = begin;
      end_[r] = end;
      distance_[r] = distance;
    }
  }
  if (!leaves_rows_out_ || !masked_) return;
  const auto sees_any = [&](int r) { return begin_[r] < end_[r]; };
  int end = rows_;
  while (end > 0 && !sees_any(end - 1)) --end;
  while (first_row_ < end && !sees_any(first_row_)) ++first_row_;
  first_row_ -= first_row_ % kSoftmaxRows;  // softmax writes the states of so many
  tile_rows_ = std::min(rows_, base::round_up(end, kSoftmaxRows)) - first_row_;
}

// The logits become weights.
void LeafWorker::weigh(Tile& tile) {
  SoftmaxArgs softmax;
  softmax.logits = logits_ + first_row_ * kTileTokens;
  softmax.heads = to_int(unit_.heads);
  softmax.rows = tile_rows_;
  softmax.tokens = tile.tokens;
  softmax.factor = problem_.softcap > 0 ? problem_.scale / problem_.softcap : problem_.scale * merge::kLog2E;
  softmax.cap_log2 = problem_.softcap * merge::kLog2E;
  const auto gather = [&](const float* const* from, std::int64_t stride, float* to) {
    gather_scales(from, tile.tokens, to_int(unit_.heads), stride, to);
    return to;
  };
  if (problem_.k.scales) softmax.key_scales = gather(tile.k_scale, problem_.k.scale_head_stride, k_scales_);
  if (problem_.v.scales) softmax.value_scales = gather(tile.v_scale, problem_.v.scale_head_stride, v_scales_);
  if (!problem_.alibi_slopes.empty()) {
    softmax.slopes_log2 = slopes_ + first_row_;
    softmax.distance = distance_ + first_row_;
  }
  if (masked_) {
    softmax.begin = begin_ + first_row_;
    softmax.end = end_ + first_row_;
  }
  softmax.m_log2 = m_log2_ + first_row_;
  softmax.l = l_ + first_row_;
  softmax.shrink = shrink_ + first_row_;
  softmax.any_hidden = &tile.any_hidden;
  target_.softmax(softmax);
}

// Some weights are 0 because the key is hidden. 0 * v is 0 unless v is NaN or infinite: only then each row of that head
// is added by itself, with zeros in place of what it does not see.
void LeafWorker::accumulate_visible(const AccumulateArgs& args) {
  bool finite = true;
  for (int h = 0; h < args.heads; ++h) finite = finite && hidden_values_finite(args, h);
  if (finite) return v_ops_.accumulate(args);

  for (int h = 0; h < args.heads; ++h) {
    const std::byte* rows[kTileTokens];
    for (int t = 0; t < args.tokens; ++t) rows[t] = args.v.rows[t] + h * args.v.head_bytes;
    AccumulateArgs head = args;
    head.ahead = {};
    head.heads = 1;
    head.v = {rows, 0};
    head.weights = args.weights + h * args.rows * kTileTokens;
    head.shrink = args.shrink + h * args.rows;
    head.o = args.o + h * args.rows * sum_floats_;
    if (hidden_values_finite(args, h)) {
      v_ops_.accumulate(head);
    } else {
      for (int r = 0; r < args.rows; ++r) accumulate_alone(head, r);
    }
  }
}

// Whether all values of a head are numbers that a weight of 0 in any of its rows makes vanish.
bool LeafWorker::hidden_values_finite(const AccumulateArgs& args, int head) const {
  const TileOps& promote_ops = ops_of(target_, promote_v_ ? DType::kFloat32 : problem_.v.dtype);
  for (int t = 0; t < args.tokens; ++t) {
    bool hidden = false;
    for (int r = 0; r < args.rows && !hidden; ++r) {
      hidden = is_hidden(args.weights[(head * args.rows + r) * kTileTokens + t]);
    }
    if (!hidden) continue;
    float values[kMaxHeadDim];
    const std::byte* row = args.v.rows[t] + head * args.v.head_bytes;
    promote_ops.promote({&row, 0}, 1, args.dim, values);
    if (!all_finite(values, args.dim)) return false;
  }
  return true;
}

// Row r of one head, with the bits that it has beside the others where what it does not see is finite.
void LeafWorker::accumulate_alone(const AccumulateArgs& args, int r) const {
  alignas(base::Buffer::kLine) static constexpr std::byte kZeros[kMaxHeadDim * sizeof(float)] = {};
  AccumulateArgs row = args;
  row.rows = 1;
  row.row = r;
  row.weights = args.weights + r * kTileTokens;
  row.shrink = args.shrink + r;
  row.o = args.o + r * sum_floats_;
  const std::byte* seen[kTileTokens];
  for (int t = 0; t < args.tokens; ++t) seen[t] = is_hidden(row.weights[t]) ? kZeros : args.v.rows[t];
  row.v = {seen, 0};
  v_ops_.accumulate(row);
}

}  // namespace treeattn::kernels
