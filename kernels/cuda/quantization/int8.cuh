// The int8 encoding, shared by quantize_kv and reshape_and_cache: symmetric, one float32 scale a group.
//
// The arithmetic is spelled out in correctly rounded steps, so that contraction flags cannot change a result.
#pragma once

#include <cfloat>
#include <type_traits>

#include "common.cuh"
#include "hadamard.cuh"

namespace pagedkv {

// What a lane keeps of a row between finding the scale and encoding: as it came, or rotated, in float32.
template <bool kRotated, class T>
using Held = Unit<std::conditional_t<kRotated, float, T>>;

// By all the lanes of a warp, of which neighbours have neighbouring units; what is past the data is zeros.
template <bool kRotated, class T>
__device__ __forceinline__ Held<kRotated, T> hold(const Unit<T>& unit, int head_dim) {
  if constexpr (!kRotated) return unit;
  float x[kUnit];
  to_floats(unit, x);
  hadamard_transform<32>(x, hadamard_size(head_dim), threadIdx.x % 32);
  Unit<float> rotated;
  from_floats(x, rotated);
  if constexpr (kRotated) return rotated;
}

// The larger of two magnitudes; NaN if either is.
__device__ __forceinline__ float max_magnitude(float magnitude, float x) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(magnitude), "f"(fabsf(x)));
  return result;
#else  // as bit patterns: they order like the numbers, with inf and NaN on top
  return __uint_as_float(max(__float_as_uint(magnitude), __float_as_uint(x) & 0x7fffffffu));
#endif
}

// The same over eight elements.
__device__ __forceinline__ float max_magnitude(float magnitude, const float (&x)[kUnit]) {
#pragma unroll
  for (int j = 0; j < kUnit; ++j) magnitude = max_magnitude(magnitude, x[j]);
  return magnitude;
}

template <class T>
__device__ __forceinline__ float max_magnitude(float magnitude, const Unit<T>& unit) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2) {  // in pairs: half the instructions
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const Pair* pairs = reinterpret_cast<const Pair*>(unit.words);
    Pair largest = __habs2(pairs[0]);
#pragma unroll
    for (int i = 1; i < kUnit / 2; ++i) largest = __hmax2_nan(largest, __habs2(pairs[i]));
    return max_magnitude(max_magnitude(magnitude, __low2float(largest)), __high2float(largest));
  }
#endif
  float x[kUnit];
  to_floats(unit, x);
  return max_magnitude(magnitude, x);
}

// Over a warp, or over aligned groups of kLanes (a power of two) lanes of it. All lanes take part.
template <int kLanes = 32>
__device__ __forceinline__ float group_max_magnitude(float magnitude) {
#pragma unroll
  for (int delta = kLanes / 2; delta > 0; delta /= 2) magnitude = max_magnitude(magnitude, __shfl_xor_sync(~0u, magnitude, delta));
  return magnitude;
}

// max|x| / 127: 0 for an all-zero group, NaN where a value is not finite. Two corners move it by one place:
// rounding down a subnormal scale could lose most of a step, and at FLT_MAX 127 * scale would overflow.
__device__ __forceinline__ float scale_for(float max_abs) {
  if (!(max_abs <= FLT_MAX)) return __uint_as_float(0x7fc00000u);
  const float scale = __fdiv_rn(max_abs, 127.f);
  if (scale < FLT_MIN && __fmaf_rn(127.f, scale, -max_abs) < 0.f) return __uint_as_float(__float_as_uint(scale) + 1);
  if (__fmul_rn(127.f, scale) > FLT_MAX) return __uint_as_float(__float_as_uint(scale) - 1);
  return scale;
}

// round(x / scale), half to even, for many x.
struct Encoder {
  float scale, inverse;

  __device__ __forceinline__ explicit Encoder(float scale_) : scale(scale_) { inverse = __frcp_rn(scale_); }

  // |x| / scale must not exceed 127.5, but for a NaN scale, which encodes everything as 0.
  __device__ __forceinline__ Unit<int8_t> operator()(const float (&x)[kUnit]) const {
    uint32_t bits[kUnit];
    if (!(scale >= 0x1p-96f)) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) bits[i] = level_of_small(x[i], scale);
      return pack(bits);
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      // The quotient, correctly rounded: one Newton step on x * inverse, exact remainder (Markstein, 1990).
      // Nothing under- or overflows at these scales.
      const float guess = __fmul_rn(x[i], inverse);
      const float quotient = __fmaf_rn(__fmaf_rn(-guess, scale, x[i]), inverse, guess);
      bits[i] = __float_as_uint(__fadd_rn(quotient, 0x1.8p23f));  // the low byte is the integer nearest to it
    }
    return pack(bits);
  }

 private:
  // A call that takes no address: given x as an array, the compiler kept it in local memory, also where nobody calls.
  __device__ static __noinline__ uint32_t level_of_small(float x, float scale) {
    const float n = fminf(127.f, fmaxf(-127.f, rintf(__fdiv_rn(x, scale))));
    return isnan(scale) ? 0 : static_cast<uint32_t>(static_cast<int>(n));
  }

  __device__ static __forceinline__ Unit<int8_t> pack(const uint32_t (&bits)[kUnit]) {
    Unit<int8_t> unit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = __byte_perm(bits[4 * i], bits[4 * i + 1], 0x0040);
      const uint32_t high = __byte_perm(bits[4 * i + 2], bits[4 * i + 3], 0x0040);
      unit.words[i] = __byte_perm(low, high, 0x5410);
    }
    return unit;
  }
};

}  // namespace pagedkv
