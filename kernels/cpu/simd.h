// Eight floats at a time: AVX2 where the build allows it, else plain loops that any compiler vectorises.
//
// Head dimensions are multiples of 8, so rows need no tail code. Wider registers would not help: two 256-bit
// FMAs a cycle already outrun memory. (The int8 attention tile is the exception: see tile_vnni.h.)
// NaN: min and max return their second operand where either is NaN; exp2 and tanh pass NaN on.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "../ops.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PAGEDKV_AVX2 1
#include <immintrin.h>
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PAGEDKV_VNNI 1
#endif
#endif

namespace pagedkv {

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

// Calls f(T{}) with the C++ type of a floating dtype.
template <class F>
void dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: return f(Half{});
    case DType::kBFloat16: return f(BFloat16{});
    default: return f(float{});
  }
}

namespace simd {

constexpr int kLanes = 8;

// Lists which of eight integers are at most `bound`, counted from `number`. Returns how many; all eight of `list` are written.
int list_at_most(const uint32_t* x, uint32_t bound, uint32_t number, uint32_t* list);

// ------------------------------------------------------------------------------- ISA-specific part
#if defined(PAGEDKV_AVX2)

struct Floats { __m256 v; };

inline Floats broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return fma(a, b, c); }
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Floats round(Floats a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Floats abs(Floats a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Floats copysign(Floats magnitude, Floats sign) {
  return {_mm256_or_ps(magnitude.v, _mm256_and_ps(sign.v, _mm256_set1_ps(-0.0f)))};
}
// a < b ? yes : no, lane by lane.
inline Floats select_less(Floats a, Floats b, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
// Lane i of the result is lane i ^ Distance of a.
template <int Distance>
inline Floats swap_lanes(Floats a) {
  static_assert(Distance == 1 || Distance == 2 || Distance == 4);
  if constexpr (Distance == 4) return {_mm256_permute2f128_ps(a.v, a.v, 1)};
  return {_mm256_permute_ps(a.v, Distance == 1 ? 0xb1 : 0x4e)};
}
// x * 2^n for integral n in [-126, 127].
inline Floats scale_by_power(Floats x, Floats n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)))};
}

inline Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Floats load(const Half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline Floats load(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline Floats load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
// x where the flag is set, 0 elsewhere.
inline Floats load_where(const float* x, const bool* flags) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(flags)));
  return {_mm256_and_ps(_mm256_loadu_ps(x), _mm256_castsi256_ps(_mm256_cmpgt_epi32(wide, _mm256_setzero_si256())))};
}

inline void store(float* p, Floats a) { _mm256_storeu_ps(p, a.v); }
inline void store(Half* p, Floats a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// Integral lanes in [-128, 127].
inline void store(int8_t* p, Floats a) {
  const __m256i wide = _mm256_cvtps_epi32(a.v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

// For each of 256 masks, the numbers of the bits that are set, in order, a byte each.
struct BitNumbers {
  uint64_t of_mask[256] = {};
  constexpr BitNumbers() {
    for (int mask = 0; mask < 256; ++mask) {
      for (int bit = 7; bit >= 0; --bit) {
        if (mask >> bit & 1) of_mask[mask] = of_mask[mask] << 8 | static_cast<uint64_t>(bit);
      }
    }
  }
};
inline constexpr BitNumbers kBitNumbers;

inline int list_at_most(const uint32_t* x, uint32_t bound, uint32_t number, uint32_t* list) {
  const __m256i bounds = _mm256_set1_epi32(static_cast<int>(bound));
  const __m256i larger = _mm256_max_epu32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), bounds);
  const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(larger, bounds)));
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&kBitNumbers.of_mask[mask])));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(list), _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(number))));
  return __builtin_popcount(static_cast<unsigned>(mask));
}

inline float sum(Floats a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float max_lane(Floats a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// Lane i of the result is the sum of the lanes of rows[i].
inline Floats row_sums(const Floats rows[kLanes]) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(rows[0].v, rows[1].v), _mm256_hadd_ps(rows[2].v, rows[3].v));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(rows[4].v, rows[5].v), _mm256_hadd_ps(rows[6].v, rows[7].v));
  return {_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31))};
}

#else  // portable

struct Floats { float v[kLanes]; };

template <class F>
inline Floats map(F f) {
  Floats r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline Floats broadcast(float x) { return map([=](int) { return x; }); }
inline Floats operator+(Floats a, Floats b) { return map([&](int i) { return a.v[i] + b.v[i]; }); }
inline Floats operator-(Floats a, Floats b) { return map([&](int i) { return a.v[i] - b.v[i]; }); }
inline Floats operator*(Floats a, Floats b) { return map([&](int i) { return a.v[i] * b.v[i]; }); }
inline Floats operator/(Floats a, Floats b) { return map([&](int i) { return a.v[i] / b.v[i]; }); }
// Rounded once (the product is exact in double precision), which multiply_add does only where it costs nothing.
inline Floats fma(Floats a, Floats b, Floats c) {
  return map([&](int i) { return static_cast<float>(static_cast<double>(a.v[i]) * b.v[i] + c.v[i]); });
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline Floats max(Floats a, Floats b) { return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline Floats min(Floats a, Floats b) { return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
// |a| < 2^22: adding 1.5 * 2^23 leaves no fraction bits, and rounds half to even.
inline Floats round(Floats a) {
  constexpr float kMagic = 12582912.0f;
  return map([&](int i) { return (a.v[i] + kMagic) - kMagic; });
}
inline Floats abs(Floats a) { return map([&](int i) { return std::fabs(a.v[i]); }); }
inline Floats copysign(Floats magnitude, Floats sign) { return map([&](int i) { return std::copysign(magnitude.v[i], sign.v[i]); }); }
inline Floats select_less(Floats a, Floats b, Floats yes, Floats no) {
  return map([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
template <int Distance>
inline Floats swap_lanes(Floats a) {
  return map([&](int i) { return a.v[i ^ Distance]; });
}
inline Floats scale_by_power(Floats x, Floats n) {
  return map([&](int i) { return x.v[i] * bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23); });
}

inline float to_float(Half h) {
  // Shift exponent and mantissa into place and let a multiplication by 2^112 fix the bias, subnormals included.
  const uint32_t magnitude = static_cast<uint32_t>(h.bits & 0x7fff) << 13;
  const float finite = bits_to_float(magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // inf and NaN keep an all-ones exponent
  return bits_to_float(float_to_bits(finite) | special | static_cast<uint32_t>(h.bits & 0x8000) << 16);
}
inline Half to_half(float x) {
  const uint32_t sign = float_to_bits(x) >> 16 & 0x8000;
  const uint32_t magnitude = float_to_bits(x) & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00;
  } else if (magnitude < 0x38800000u) {  // subnormal half: adding 0.5 aligns its last place with the float's
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

inline Floats load(const float* p) { return map([=](int i) { return p[i]; }); }
inline Floats load(const Half* p) { return map([=](int i) { return to_float(p[i]); }); }
inline Floats load(const BFloat16* p) { return map([=](int i) { return bits_to_float(static_cast<uint32_t>(p[i].bits) << 16); }); }
inline Floats load(const int8_t* p) { return map([=](int i) { return static_cast<float>(p[i]); }); }
inline Floats load_where(const float* x, const bool* flags) { return map([=](int i) { return flags[i] ? x[i] : 0.0f; }); }

inline void store(float* p, Floats a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store(Half* p, Floats a) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_half(a.v[i]);
}
inline void store(int8_t* p, Floats a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(static_cast<int32_t>(a.v[i]));
}

inline int list_at_most(const uint32_t* x, uint32_t bound, uint32_t number, uint32_t* list) {
  int count = 0;
  for (int i = 0; i < kLanes; ++i) {  // no branch predictor knows which: write all, step past some
    list[count] = number + static_cast<uint32_t>(i);
    count += x[i] <= bound;
  }
  return count;
}

inline float sum(Floats a) { return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7])); }
inline float max_lane(Floats a) {
  float m = a.v[0];
  for (int i = 1; i < kLanes; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}
inline Floats row_sums(const Floats rows[kLanes]) { return map([=](int i) { return sum(rows[i]); }); }

#endif
// ------------------------------------------------------------------------------------ common part

// Round to nearest even; a NaN stays a NaN, which rounding its bits up could turn into an infinity.
inline void store(BFloat16* p, Floats a) {
  uint32_t bits[kLanes];
  std::memcpy(bits, &a, sizeof bits);
  for (int i = 0; i < kLanes; ++i) {
    const bool nan = (bits[i] & 0x7fffffff) > 0x7f800000u;
    p[i].bits = static_cast<uint16_t>(nan ? 0x7fc0u : (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16);
  }
}

// 2^x within 2 units in the last place; 0 below -126, where the result would be subnormal.
inline Floats exp2(Floats x) {
  const Floats lowest = broadcast(-126.0f);
  const Floats clamped = max(lowest, min(broadcast(127.0f), x));
  const Floats n = round(clamped);
  const Floats r = clamped - n;  // exact, in [-0.5, 0.5]
  Floats y = broadcast(1.535336188319500e-4f);
  for (float c : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f,
                  1.0f}) {
    y = multiply_add(y, r, broadcast(c));
  }
  return select_less(x, lowest, broadcast(0.0f), scale_by_power(y, n));
}

// An odd polynomial near 0 keeps the relative precision that 1 - 2 / (exp(2x) + 1) loses there.
inline Floats tanh(Floats x) {
  const Floats a = abs(x), one = broadcast(1.0f), two = broadcast(2.0f);
  const Floats large = one - two / (exp2(broadcast(2 * 1.44269504f) * a) + one);
  const Floats z = x * x;
  Floats y = broadcast(-5.70498872745e-3f);
  for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) y = multiply_add(y, z, broadcast(c));
  return select_less(a, broadcast(0.625f), multiply_add(y * z, x, x), copysign(large, x));
}

}  // namespace simd
}  // namespace pagedkv
