// SPDX-License-Identifier: Apache-2.0
// Where the keys of a chunk lie in a view, and their scales, gathered as softmax wants them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/tile_ops.h"
#include "kernels/cpu/unit.h"
#include "kernels/problem.h"
#include "treeattn/dtype.h"
#include "treeattn/views.h"

namespace treeattn::kernels {

// Mostly a chunk lies in one page: then a row is a product away, and not a division.
class RowsOfChunk {
 public:
  RowsOfChunk(const KvView& view, const Unit& unit, const KeyRange& chunk)
      : view_(view),
        unit_(unit),
        begin_(chunk.begin),
        first_(kv_row(view, unit.batch, chunk.begin, unit.head0)),
        first_scale_(view.scales ? kv_scale_address(view, unit.batch, chunk.begin, unit.head0) : nullptr),
        stride_(view.token_stride * static_cast<std::int64_t>(dtype_size(view.dtype))),
        one_page_(view.page_tokens == 0 || chunk.begin / view.page_tokens == (chunk.end - 1) / view.page_tokens) {}

  const std::byte* operator[](std::int64_t key) const {
    return one_page_ ? first_ + (key - begin_) * stride_ : kv_row(view_, unit_.batch, key, unit_.head0);
  }
  const float* scale(std::int64_t key) const {
    return one_page_ ? first_scale_ + (key - begin_) * view_.scale_token_stride
                     : kv_scale_address(view_, unit_.batch, key, unit_.head0);
  }

 private:
  const KvView& view_;
  const Unit& unit_;
  const std::int64_t begin_;
  const std::byte* const first_;
  const float* const first_scale_;
  const std::int64_t stride_;
  const bool one_page_;
};

// to[head][token] = the scale of a head, `stride` after that of the head before, of a token. Four tokens at a time, and
// four heads that lie side by side: one at a time came to a twelfth of a decode.
inline void gather_scales(const float* const* from, int tokens, int heads, std::int64_t stride, float* to) {
  typedef float Four __attribute__((vector_size(16)));
  const auto load = [](const float* at) {
    Four v;
    std::memcpy(&v, at, sizeof(v));
    return v;
  };
  const auto put = [&](int head, int token, Four v) { std::memcpy(to + head * kTileTokens + token, &v, sizeof(v)); };
  int t = 0;
  for (; t + 4 <= tokens; t += 4) {
    const float *a = from[t], *b = from[t + 1], *c = from[t + 2], *d = from[t + 3];
    int h = 0;
    for (; stride == 1 && h + 4 <= heads; h += 4) {
      const Four w = load(a + h), x = load(b + h), y = load(c + h), z = load(d + h);
      const Four wx = __builtin_shufflevector(w, x, 0, 4, 1, 5), WX = __builtin_shufflevector(w, x, 2, 6, 3, 7);
      const Four yz = __builtin_shufflevector(y, z, 0, 4, 1, 5), YZ = __builtin_shufflevector(y, z, 2, 6, 3, 7);
      put(h, t, __builtin_shufflevector(wx, yz, 0, 1, 4, 5));
      put(h + 1, t, __builtin_shufflevector(wx, yz, 2, 3, 6, 7));
      put(h + 2, t, __builtin_shufflevector(WX, YZ, 0, 1, 4, 5));
      put(h + 3, t, __builtin_shufflevector(WX, YZ, 2, 3, 6, 7));
    }
    for (; h < heads; ++h) put(h, t, Four{a[h * stride], b[h * stride], c[h * stride], d[h * stride]});
  }
  for (; t < tokens; ++t) {
    for (int h = 0; h < heads; ++h) to[h * kTileTokens + t] = from[t][h * stride];
  }
}

}  // namespace treeattn::kernels
