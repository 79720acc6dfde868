// Rows of K or V as floats, found through a block table: what the statistics share.
//
// A row (one head of one token) is read by `lanes` neighbouring lanes of a warp, eight channels each, where lanes is
// the power of two at or above head_dim / 8: lanes past the end of the row stay idle, and sums are butterflies.
#pragma once

#include "common.cuh"

namespace pagedkv {

constexpr int kTokenThreads = 256;

inline int lanes_of_row(const PagedTokens& t) {
  int lanes = 1;
  while (lanes * kUnit < t.head_dim) lanes *= 2;
  return lanes;
}

__device__ __forceinline__ bool valid_length(const PagedTokens& t, int64_t seq) {
  return t.seq_lens[seq] >= 0 && t.seq_lens[seq] <= t.max_blocks * t.block_size;
}

// The block at a place, or -1 if it lies outside the pool.
__device__ __forceinline__ int64_t block_at(const PagedTokens& t, int64_t seq, int64_t place) {
  const int64_t block = t.block_tables[seq * t.block_tables_stride + place];
  return block >= 0 && block < t.num_blocks ? block : -1;
}

template <class T, bool kAligned>
__device__ __forceinline__ void load_row_part(const PagedTokens& t, int64_t block, int64_t token, int64_t head, int part, float (&x)[kUnit]) {
  const T* row = static_cast<const T*>(t.cache) + block * t.stride_block + token * t.stride_token + head * t.stride_head;
  to_floats(load_unit<kAligned>(row + part * kUnit), x);
  if (t.scale) {
    const float scale = t.scale[block * t.scale_stride_block + token * t.scale_stride_token + head * t.scale_stride_head];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] *= scale;
  }
}

// Over the lanes of a row; all get the same bits. Every lane of the warp takes part.
__device__ __forceinline__ float row_sum(float value, int lanes) {
  for (int delta = lanes / 2; delta > 0; delta /= 2) value += __shfl_xor_sync(~0u, value, delta);
  return value;
}

// Calls use(T{}, aligned) with the C++ type of the cache's elements and a std::bool_constant.
template <class Use>
void dispatch_cache(const PagedTokens& t, const Use& use) {
  auto with = [&](auto element) {
    if (units_aligned<decltype(element)>(t.cache, {t.stride_block, t.stride_token, t.stride_head})) {
      use(element, std::true_type{});
    } else {
      use(element, std::false_type{});
    }
  };
  if (t.dtype == DType::kInt8) {
    with(int8_t{});
  } else {
    dispatch_float(t.dtype, with);
  }
}

}  // namespace pagedkv
