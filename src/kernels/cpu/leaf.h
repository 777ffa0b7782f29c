// SPDX-License-Identifier: Apache-2.0
// One leaf of the tree on the CPU: the states that the keys of one branch give to a unit of query rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "kernels/cpu/tile_ops.h"
#include "kernels/cpu/unit.h"
#include "kernels/problem.h"

namespace treeattn::kernels {

// Computes leaves with one thread's scratch memory, which is sized once and does not depend on the number of keys.
class LeafWorker {
 public:
  // Requires every unit given to it to have at most max_heads heads and max_rows rows.
  LeafWorker(const CpuTarget& target, const Problem& problem, std::int64_t max_heads, std::int64_t max_rows);

  // Loads the unit's queries; the leaves that follow are for this unit.
  void begin_unit(const Unit& unit);
  // states [unit rows, v_dim + 2]: the state of all visible keys of a leaf of the tree, folded chunk by chunk in order.
  void leaf(int leaf, float* states);

 private:
  struct Tile;
  template <class Body>
  void for_each_tile(int leaf, const Body& body) const;
  void load_tile(const KeyRange& chunk, const KeyRange& keys, Tile& tile) const;
  void fold_tile(Tile& tile, const Tile* next);
  void score_keys(const Tile& tile);
  void sum_values(const Tile& tile, const Tile* next);
  Ahead ahead_of(const KvView& view, const std::byte* const* rows) const;
  TileRows rows_of(const KvView& view, const std::byte* const* rows) const;
  TileRows promote(const KvView& view, const TileRows& from, int tokens, const std::byte** table);
  void weigh(Tile& tile);
  // Whether every row sees all of keys [begin, end), and none asks how far away they are.
  bool needs_no_positions(std::int64_t begin, std::int64_t end) const {
    return begin >= seen_by_all_.begin && end <= seen_by_all_.end && problem_.alibi_slopes.empty();
  }
  void mask_rows(const Tile& tile);
  void accumulate_visible(const AccumulateArgs& args);
  bool hidden_values_finite(const AccumulateArgs& args, int head) const;
  void accumulate_alone(const AccumulateArgs& args, int r) const;
  bool loses_subnormals(const float* q) const;
  void redo_without_limbs(int leaf, std::int64_t head, float* states);

  const CpuTarget& target_;
  const Problem& problem_;
  const bool many_rows_;              // share a tile, which is prepared once for them:
  const bool promote_k_, promote_v_;  // converted to float32, where the target has nothing of its own
  const TileOps& k_ops_;
  const TileOps& v_ops_;
  const bool leaves_rows_out_;  // where they see nothing of a tile
  const bool may_use_limbs_;    // these are not the plain target's
  const int streams_;           // that a chunk is read in
  const std::int64_t max_heads_;
  const std::int64_t max_rows_;
  std::unique_ptr<LeafWorker> plain_;  // for one head; made when a leaf is not finite
  Unit unit_;
  KeyRange seen_by_all_;               // keys that every query of the unit sees
  int rows_ = 0;                       // per head
  int sum_floats_ = 0;                 // of one row of o_
  std::vector<char> without_limbs_;    // [rows] whether one must be computed by the plain target
  std::vector<std::int64_t> plainly_;  // rows of a head that are
  std::vector<float> redone_;          // states of that head by the plain target

  base::Buffer scratch_;
  std::byte* q_packed_ = nullptr;  // [heads] of packed_query_bytes_
  std::size_t packed_query_bytes_ = 0;
  float* q_rows_ = nullptr;        // [rows per head, head_dim]
  float* m_log2_ = nullptr;        // [rows]
  float* l_ = nullptr;             // [rows]
  float* o_ = nullptr;             // [rows, sum_floats_]
  float* logits_ = nullptr;        // [rows, kTileTokens], then weights
  float* shrink_ = nullptr;        // [rows]
  float* slopes_ = nullptr;        // [rows] log2 units
  float* distance_ = nullptr;      // [rows per head]
  float* k_scales_ = nullptr;      // [heads, kTileTokens]
  float* v_scales_ = nullptr;      // [heads, kTileTokens]
  float* promoted_ = nullptr;      // [kTileTokens, head_dim or v_dim]
  std::int32_t* begin_ = nullptr;  // [rows per head]
  std::int32_t* end_ = nullptr;    // [rows per head]
  bool masked_ = false;
  int first_row_ = 0, tile_rows_ = 0;  // of a head: those that see something of the tile, and some more
};

}  // namespace treeattn::kernels
