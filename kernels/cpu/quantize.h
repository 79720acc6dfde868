// The int8 encoding, shared by quantize_kv and reshape_and_cache: symmetric, one float32 scale a group.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace pagedkv {
namespace simd {

// The larger magnitude, lane by lane, by bit patterns: they order like the numbers and put inf and NaN on top.
inline Floats max_magnitude(Floats a, Floats b) {
#if defined(PAGEDKV_AVX2)
  return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(abs(a).v), _mm256_castps_si256(abs(b).v)))};
#else
  return map([&](int i) { return bits_to_float(std::max(float_to_bits(a.v[i]) & 0x7fffffffu, float_to_bits(b.v[i]) & 0x7fffffffu)); });
#endif
}

inline bool all_less(Floats a, Floats b) {
#if defined(PAGEDKV_AVX2)
  return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)) == 0xff;
#else
  bool all = true;
  for (int i = 0; i < kLanes; ++i) all &= a.v[i] < b.v[i];
  return all;
#endif
}

}  // namespace simd

// The largest magnitude of a group that grows row by row. A value that is not finite cannot get lost.
class MaxAbs {
 public:
  template <class T>
  void add(const T* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += simd::kLanes) lanes_ = simd::max_magnitude(lanes_, simd::load(row + i));
  }

  // NaN where the group holds NaN or inf.
  float value() const {
    uint32_t lanes[simd::kLanes];
    std::memcpy(lanes, &lanes_, sizeof lanes);
    const uint32_t bits = *std::max_element(lanes, lanes + simd::kLanes);
    if (bits >= 0x7f800000u) return std::numeric_limits<float>::quiet_NaN();
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }

 private:
  simd::Floats lanes_ = simd::broadcast(0.0f);
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
// The remainder decides: it is exact, and where it is less than half a step the nearest integer is found, however it was come
// by. Else the rounded quotient may have landed on a tie that x / scale only comes near, and the remainder says on which side x lies.
template <class T>
void encode_row(const T* x, float scale, int8_t* q, int64_t dim) {
  if (std::isnan(scale)) {
    std::memset(q, 0, dim);
    return;
  }
  using namespace simd;
  const Floats step = broadcast(scale), half = broadcast(0.5f), one = broadcast(1.0f), limit = broadcast(127.0f);
  const Floats inverse = one / step;  // inf for the smallest steps: no n, no remainder, the careful way
  const auto twice_remainder = [&](Floats n, Floats value) {
    const Floats remainder = fma(n * broadcast(-1.0f), step, value);
    return remainder + remainder;
  };
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Floats value = load(x + i);
    Floats n = round(value * inverse);
    if (!all_less(abs(twice_remainder(n, value)), step)) {
      n = round(value / step);
      const Floats twice = twice_remainder(n, value);
      const Floats excess = abs(twice) - step;                            // > 0: n is one off; 0: a tie
      // n +- 1 is even where n is odd, and the only odd n on a tie is one that has to go.
      const Floats odd = abs(n - round(n * half) * broadcast(2.0f));
      const Floats is_off = select_less(broadcast(0.0f), excess, one, select_less(excess, broadcast(0.0f), broadcast(0.0f), odd));
      n = n + copysign(is_off, twice);
    }
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
