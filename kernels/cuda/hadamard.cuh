// The Hadamard rotation of rows that lie in the registers of a warp's lanes (kernels/hadamard.h says which).
#pragma once

#include "hadamard.h"

namespace pagedkv {

// kLanes neighbouring lanes hold a row, kHeld consecutive elements each, over and over: x[piece][i] of lane l is element
// kHeld * (l + kLanes * piece) + i. All the lanes of `mask` call it; elements past the row are ignored as long as no block of
// the matrix has a part in them, and a lane may hold parts of any row whose first element is a multiple of `size`.
template <int kPieces, int kHeld, int kLanes>
__device__ __forceinline__ void hadamard_transform(float (&x)[kPieces][kHeld], int size, int lane, unsigned mask = ~0u) {
  const float factor = hadamard_factor(size);
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) x[c][i] = __fmul_rn(x[c][i], factor);  // not contracted with the sum that follows
#pragma unroll
    for (int stride = 1; stride < kHeld; stride *= 2) {
      if (stride >= size) break;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (i & stride) continue;
        const float a = x[c][i], b = x[c][i + stride];
        x[c][i] = a + b, x[c][i + stride] = a - b;
      }
    }
#pragma unroll
    for (int delta = 1; delta < kLanes; delta *= 2) {
      if (delta * kHeld >= size) break;  // the same for all lanes
      const float sign = lane & delta ? -1.f : 1.f;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) x[c][i] = fmaf(x[c][i], sign, __shfl_xor_sync(mask, x[c][i], delta));
    }
  }
#pragma unroll
  for (int step = 1; step < kPieces; step *= 2) {
    if (step * kLanes * kHeld >= size) break;
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      if (c & step) continue;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const float a = x[c][i], b = x[c + step][i];
        x[c][i] = a + b, x[c + step][i] = a - b;
      }
    }
  }
}

template <int kLanes, int kHeld>
__device__ __forceinline__ void hadamard_transform(float (&x)[kHeld], int size, int lane) {
  hadamard_transform<1, kHeld, kLanes>(reinterpret_cast<float (&)[1][kHeld]>(x), size, lane);
}

}  // namespace pagedkv
