// SPDX-License-Identifier: Apache-2.0
// Attention in double precision by plain loops, and beside every output the error bound a float32 backend must meet.
#pragma once

#include <span>
#include <vector>

#include "kernels/problem.h"

namespace treeattn::kernels {

// What the bound has to know of the backend it judges. docs/exactness.md derives each term.
struct ErrorModel {
  double unit_roundoff = 0x1p-24;  // of one float32 operation (2^-23 where the hardware rounds to odd)
  double weight_error = 0x1p-22;   // relative error of exp2 and of storing one softmax weight
  double query_error = 0;          // error of an element of q, relative to the largest of its row
  double weight_floor = 0;         // error of a weight, relative to the largest (value scales included)
  double logit_floor = 0;          // error of a logit, whatever its size
  double product_floor = 0;        // error of a weight times a value, whatever its size, relative to the largest weight
  double least_factor = 0;         // products of q and K are cut as if none of their factors were smaller
  int serial_terms = 64;           // most terms of one tile that one accumulator adds up
  double additions_per_key = 1;    // those of an accumulator for each of its terms
  bool carried = true;             // an accumulator goes on from tile to tile through its branch, unmerged
  int tile_tokens = 64;            // fewest keys between two moves of the running maximum, chunk ends apart
  double exp2_error = 0x1p-22;     // relative error of exp2 where nothing is stored: rescaling, soft-cap
  double extra_merges = 0;         // merges beyond those of the canonical tree
  double lse_error = 0;            // relative error of a part's lse, where parts are weighed by that instead of (m, l)

  bool operator==(const ErrorModel&) const = default;
};

struct ReferenceResult {
  std::vector<double> out;        // [batch, queries, heads, v_dim]
  std::vector<double> lse;        // [batch, queries, heads]
  std::vector<double> out_bound;  // largest |backend - out| allowed, same shape as out
  std::vector<double> lse_bound;  // likewise
};

// Reads only keys and values that some query may see. Every number a row depends on being finite, its bound is what
// rounding can do; where rounding can overflow float32 on the way, the bound is infinite; where the result is NaN or
// infinite, the bound is 0.
ReferenceResult reference_attention(const Problem& problem, const ErrorModel& model);

// |got - want| as a multiple of the bound: at most 1 is right. 0 if both are NaN or the same infinity, or the bound is
// infinite; infinity if only one of them is finite.
double error_in_bounds(double got, double want, double bound);
// The largest of all outputs and log-sum-exps.
double worst_in_bounds(std::span<const float> out, std::span<const float> lse, const ReferenceResult& want);

}  // namespace treeattn::kernels
