// How q and the softmax weights become integers times a power of two, for the tile kernels that multiply integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"

namespace pagedkv {

// Whether integers of 16 bits hold each row of q as well as its half precision does: 2^-15 of the largest element is too
// coarse for the others where that one is an outlier, as channels of real models are.
inline bool sixteen_bits_serve(const AttentionParams& p) {
  if (p.q_dtype == DType::kFloat32) return false;
  alignas(64) float row[kMaxHeadDim] = {};
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (int64_t h = 0; h < p.num_heads; ++h) {
      load_query_row(p, seq, h, row);
      float peak = 0.0f;
      for (int64_t d = 0; d < p.head_dim; ++d) peak = std::max(peak, std::fabs(row[d]));
      int64_t small = 0;
      for (int64_t d = 0; d < p.head_dim; ++d) small += row[d] != 0.0f && std::fabs(row[d]) * 32.0f < peak;
      if (small * 4 > p.head_dim) return false;  // of Gaussian elements, a tenth
    }
  }
  return true;
}

// The smallest power of two of which an element of these bits, the largest, holds at most `most`; NaN if it is not finite.
inline float unit_for(uint32_t max_bits, float most) {
  if (max_bits >= 0x7f800000u) return NAN;
  float max_abs, unit;
  std::memcpy(&max_abs, &max_bits, sizeof max_abs);
  uint32_t bits;
  const float quotient = std::max(max_abs / most, 0x1p-126f);
  std::memcpy(&bits, &quotient, sizeof bits);
  bits = (bits + 0x7fffff) & 0xff800000u;  // up to the next power of two
  std::memcpy(&unit, &bits, sizeof unit);
  return unit;
}

}  // namespace pagedkv
