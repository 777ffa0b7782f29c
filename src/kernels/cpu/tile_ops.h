// SPDX-License-Identifier: Apache-2.0
// The operations on one tile of keys, behind one table per instruction set. Everything above (chunks, branches, masks,
// pages, threads) is plain C++ written once; everything below is SIMD.
//
// A tile is up to kTileTokens keys, for one or several KV heads, each with `rows` query rows that share it:
//   dot         logits[head][row][token] = q[head][row] . k[token][head]
//   softmax     logits -> weights 2^(logit - m), running m and l, and the factor the old sums shrink by
//   accumulate  o[head][row] = o[head][row] * shrink[head][row] + sum over tokens of weight * v[token][head]
//   promote     rows of any type -> float32, for prefill, where one tile serves many rows
//
// dot and accumulate take a few tokens at a time and go through the heads of those, so that keys stored as
// [tokens, heads, dim] are read as one or a few sequential streams. Head by head, with rows kilobytes apart, half of
// the memory bandwidth was lost, and software prefetch did not win it back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/model_kernels.h"
#include "kernels/head_dims.h"
#include "treeattn/dtype.h"

namespace treeattn::kernels {

inline constexpr int kTileTokens = 64;
inline constexpr int kTokenBlock = 4;
inline constexpr int kPageBytes = 4096;  // what a processor's prefetchers do not reach beyond
inline constexpr int kMaxHeadDim = static_cast<int>(kMostHeadDim);
// Rows whose maxima, and whose sums, softmax finds together.
inline constexpr int kSoftmaxRows = 16;
// Most heads * rows of one call, except on float32 keys and values, which have no such limit.
inline constexpr int kMaxRowsPerCall = 128;
// From this many rows per head on, a unit must have one head only: its tiles are packed, or converted to float32, once
// for all rows.
inline constexpr int kPromoteFromRows = 24;

// A tile's rows: head h of token t is at rows[t] + h * head_bytes. The table is padded to a multiple of kTokenBlock
// with copies of its last entry, so that dot may compute whole blocks; nothing may come of the padding.
struct TileRows {
  const std::byte* const* rows = nullptr;
  std::ptrdiff_t head_bytes = 0;
};

// The rows of a whole tile that will be wanted when those at work are done, to be fetched into a nearer cache
// meanwhile. A processor's own prefetchers stop at the end of a page and pause with the loads; memory that is asked for
// at an even rate, in whatever a core does, is never idle (docs/cpu_notes.md).
struct Ahead {
  const std::byte* const* rows = nullptr;  // null: nothing
  std::ptrdiff_t head_bytes = 0;
  int row_bytes = 0;  // of one head
};

struct DotArgs {
  const std::byte* q = nullptr;  // packed by pack_queries, q_head_bytes a head
  std::size_t q_head_bytes = 0;
  int heads = 0;
  int rows = 0;  // per head
  // Those asked for begin here, in q: a multiple of kSoftmaxRows, and 0 but for operations of CpuTarget::many_rows.
  int first_row = 0;
  int dim = 0;
  int tokens = 0;
  TileRows k;
  float* logits = nullptr;  // [heads, rows, kTileTokens]; entries up to the padded token count are written
  Ahead ahead;              // the values of these keys; may be ignored
};

// m_log2, l and shrink have room for a multiple of kSoftmaxRows rows.
struct SoftmaxArgs {
  float* logits = nullptr;  // [heads, rows, kTileTokens]: logits in, weights out; padding comes out as 0
  int heads = 0;
  int rows = 0;  // per head
  int tokens = 0;
  float factor = 0.0f;                  // softmax scale * log2 e, or, with a cap, scale / cap
  float cap_log2 = 0.0f;                // > 0: soft-cap * log2 e
  const float* key_scales = nullptr;    // [heads, kTileTokens] or null
  const float* value_scales = nullptr;  // [heads, kTileTokens] or null: multiplied into the weights, not into l
  const float* slopes_log2 = nullptr;   // [heads, rows] ALiBi slopes * log2 e, or null
  const float* distance = nullptr;      // [rows] (position of token 0) - (position of the row's query), with slopes
  const std::int32_t* begin = nullptr;  // [rows] first visible token, or null: all tokens are visible to all rows
  const std::int32_t* end = nullptr;    // [rows]
  float* m_log2 = nullptr;              // [heads, rows] running max
  float* l = nullptr;                   // [heads, rows] running sum
  float* shrink = nullptr;              // [heads, rows] out: factor for what was summed before
  bool* any_hidden = nullptr;           // set if some (row, token) has weight +0: its value must not be multiplied
};

struct AccumulateArgs {
  const float* weights = nullptr;  // [heads, rows, kTileTokens]
  const float* shrink = nullptr;   // [heads, rows]
  int heads = 0;
  int rows = 0;  // per head
  int dim = 0;
  int tokens = 0;
  // Either all rows of each head are given, or one row of one head: its number, among how many.
  int row = 0;
  int head_rows = 0;
  TileRows v;
  float* o = nullptr;  // [heads, rows, sum_floats(dim)]
  Ahead ahead;         // the next keys; may be ignored
};

struct TileOps {
  // Bytes of `rows` packed queries, and the packing itself, from float32 rows [rows, dim]. q_dtype is what the rows
  // were before they were promoted.
  std::size_t (*packed_query_bytes)(int rows, int dim);
  void (*pack_queries)(const float* q, DType q_dtype, int rows, int dim, void* packed);
  void (*dot)(const DotArgs&);
  void (*accumulate)(const AccumulateArgs&);
  // Floats that hold the sums of one row in the layout accumulate likes; all zero is the empty sum. Neighbours of a
  // head may lie in each other's place: unpack_sums gives the dim sums of one of a head's rows in order, sums being
  // where its own place begins.
  int (*sum_floats)(int dim);
  void (*unpack_sums)(const float* sums, int row, int head_rows, int dim, float* out);
  // out [tokens, dim] float32, head 0 of the rows
  void (*promote)(const TileRows& in, int tokens, int dim, float* out);
  double unit_roundoff;  // of the operations in dot and accumulate
  double weight_error;   // relative error of a float32 weight as accumulate uses it
  double query_error;    // error of a query's element as dot uses it, relative to the row's largest
  double weight_floor;   // error of a weight as accumulate uses it, relative to the tile's largest
  // Not 0: dot takes subnormal numbers, of q, its limbs, K and the products, for 0, and that may cost a logit so much.
  // A head where it could be more is computed by CpuTarget::plain.
  double logit_floor = 0;
  double product_floor = 0;      // error of a weight times a value, whatever its size, relative to the largest weight
  double additions_per_key = 1;  // of accumulate, to a sum
  // Sequential streams, 1, 2 or 4, that keys of this type, and their values, are read in, chunk by chunk. On Neoverse
  // V1 four are a fifth faster than one where nothing is fetched ahead, and with that, one is 3 % faster in the 16-bit
  // types. On Neoverse N1 four are a third slower.
  int streams = 4;
  // The same where a token's keys of all heads take less than kPageBytes; 0: no other. On Xeons neighbours that share a
  // page are read at two thirds of the rate.
  int streams_of_short_rows = 0;
  // Runs the products of dot and accumulate at full rate, limbs and all; returns the flops of attention done. Null
  // where they are float32 multiply-adds.
  double (*product_burst)(long iterations) = nullptr;
};

// One instruction set.
struct CpuTarget {
  const char* name;
  bool (*supported)();  // by this processor
  TileOps ops[5];       // by DType of K or V
  // The same for one head with many rows (kPromoteFromRows), with the same errors; null where such tiles are converted
  // to float32 for ops of that type.
  const TileOps* many_rows[5];
  void (*softmax)(const SoftmaxArgs&);
  double (*fma_burst)(long iterations);  // runs float32 fused multiply-adds at full rate; returns flops done
  const ModelKernels* model;             // the operations beside attention
  // Some operations split numbers into limbs, which makes inf - inf out of an infinite value. A leaf that comes out not
  // finite is computed again with this target, which does not; null where the target itself does not.
  const CpuTarget* plain;
};

}  // namespace treeattn::kernels
