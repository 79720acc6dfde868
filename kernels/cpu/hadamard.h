// The Hadamard rotation of a row (kernels/hadamard.h says which).
#pragma once

#include "../hadamard.h"
#include "simd.h"

namespace pagedkv {

inline void hadamard_transform(float* row, int64_t dim) {
  using namespace simd;
  const int64_t size = hadamard_size(dim);  // at least kLanes: head_dim is a multiple of it
  const Floats factor = broadcast(hadamard_factor(static_cast<int>(size)));
  constexpr float kSigns[3][kLanes] = {{1, -1, 1, -1, 1, -1, 1, -1}, {1, 1, -1, -1, 1, 1, -1, -1}, {1, 1, 1, 1, -1, -1, -1, -1}};
  for (int64_t d = 0; d < dim; d += kLanes) {
    Floats x = load(row + d) * factor;
    x = fma(x, load(kSigns[0]), swap_lanes<1>(x));
    x = fma(x, load(kSigns[1]), swap_lanes<2>(x));
    store(row + d, fma(x, load(kSigns[2]), swap_lanes<4>(x)));
  }
  for (int64_t stride = kLanes; stride < size; stride *= 2) {
    for (int64_t pair = 0; pair < dim; pair += 2 * stride) {
      for (int64_t d = pair; d < pair + stride; d += kLanes) {
        const Floats a = load(row + d), b = load(row + d + stride);
        store(row + d, a + b);
        store(row + d + stride, a - b);
      }
    }
  }
}

// x as float32, rotated, in `to`.
template <class T>
void hadamard_transform(const T* x, float* to, int64_t dim) {
  for (int64_t d = 0; d < dim; d += simd::kLanes) simd::store(to + d, simd::load(x + d));
  hadamard_transform(to, dim);
}

}  // namespace pagedkv
