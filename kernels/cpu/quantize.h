// The int8 encoding, shared by quantize_kv and reshape_and_cache: symmetric, one float32 scale a group.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace pagedkv {

// The largest magnitude of a group that grows row by row. Magnitudes are compared as bit patterns, which
// order like the numbers and put inf and NaN on top, so a value that is not finite cannot get lost.
class MaxAbs {
 public:
  template <class T>
  void add(const T* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += simd::kLanes) {
      uint32_t bits[simd::kLanes];
      const simd::Floats x = simd::load(row + i);
      std::memcpy(bits, &x, sizeof bits);
      for (int l = 0; l < simd::kLanes; ++l) lanes_[l] = std::max(lanes_[l], bits[l] & 0x7fffffffu);
    }
  }

  // NaN where the group holds NaN or inf.
  float value() const {
    const uint32_t bits = *std::max_element(lanes_, lanes_ + simd::kLanes);
    if (bits >= 0x7f800000u) return std::numeric_limits<float>::quiet_NaN();
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }

 private:
  uint32_t lanes_[simd::kLanes] = {};
};

// max|x| / 127: 0 for an all-zero group, NaN for NaN. Two corners move it by one place: rounding down a
// subnormal scale could lose most of a step, and at FLT_MAX 127 * scale would overflow.
inline float scale_for(float max_abs) {
  const float scale = max_abs / 127.0f;
  if (scale < std::numeric_limits<float>::min() && 127.0 * static_cast<double>(scale) < static_cast<double>(max_abs)) {
    return std::nextafter(scale, std::numeric_limits<float>::infinity());
  }
  return std::isinf(127.0f * scale) ? std::nextafter(scale, 0.0f) : scale;
}

// round(x / scale), half to even, in [-127, 127]; zeros for a NaN scale.
//
// The rounded quotient may land on a tie that x / scale only comes near, so the remainder decides: it is
// exact, and says on which side of the tie x lies.
template <class T>
void encode_row(const T* x, float scale, int8_t* q, int64_t dim) {
  if (std::isnan(scale)) {
    std::memset(q, 0, dim);
    return;
  }
  using namespace simd;
  const Floats step = broadcast(scale), half = broadcast(0.5f), one = broadcast(1.0f), limit = broadcast(127.0f);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Floats value = load(x + i);
    Floats n = round(value / step);
    const Floats remainder = fma(n * broadcast(-1.0f), step, value);
    const Floats twice = remainder + remainder;
    const Floats excess = abs(twice) - step;                              // > 0: n is one off; 0: a tie
    // n +- 1 is even where n is odd, and the only odd n on a tie is one that has to go.
    const Floats odd = abs(n - round(n * half) * broadcast(2.0f));
    const Floats is_off = select_less(broadcast(0.0f), excess, one, select_less(excess, broadcast(0.0f), broadcast(0.0f), odd));
    n = n + copysign(is_off, twice);
    store(q + i, max(broadcast(-127.0f), min(limit, n)));
  }
}

// What a block already holds, carried over to a larger scale: one further rounding, and no other error.
inline void reencode_row(int8_t* q, float from, float to, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) {
    const double n = std::nearbyint(q[i] * static_cast<double>(from) / static_cast<double>(to));
    q[i] = static_cast<int8_t>(std::clamp(n, -127.0, 127.0));
  }
}

}  // namespace pagedkv
