// The rotation of a cache: K, V and q are multiplied over head_dim by the orthonormal block-diagonal Hadamard matrix, which is
// its own inverse. The blocks have the size of the largest power of two that divides head_dim, in Sylvester's order.
//
// Every backend takes the same float32 steps: first the factor, then butterflies of stride 1, 2, 4, ... So a rotated cache has
// the same bits whoever writes it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PAGEDKV_HD_CONSTEXPR __host__ __device__ constexpr
#else
#define PAGEDKV_HD_CONSTEXPR constexpr
#endif

namespace pagedkv {

PAGEDKV_HD_CONSTEXPR int hadamard_size(int64_t head_dim) { return static_cast<int>(head_dim & -head_dim); }

// size^-1/2 of a power of two.
PAGEDKV_HD_CONSTEXPR float hadamard_factor(int size) {
  float factor = 1.f;
  for (; size >= 4; size /= 4) factor *= 0.5f;
  return size == 2 ? factor * 0.70710678118654752f : factor;
}

}  // namespace pagedkv
