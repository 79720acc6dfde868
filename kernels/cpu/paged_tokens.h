// Rows of K or V as floats, found through a block table: what the statistics share.
#pragma once

#include "simd.h"

namespace pagedkv {

inline bool valid_length(const PagedTokens& t, int64_t seq) {
  return t.seq_lens[seq] >= 0 && t.seq_lens[seq] <= t.max_blocks * t.block_size;
}

// Tokens that place `place` of a sequence's table holds; 0 where the length cannot be.
inline int64_t tokens_at(const PagedTokens& t, int64_t seq, int64_t place) {
  if (!valid_length(t, seq)) return 0;
  const int64_t left = t.seq_lens[seq] - place * t.block_size;
  return left < 0 ? 0 : left < t.block_size ? left : t.block_size;
}

// The block at a place, or -1 if it lies outside the pool.
inline int64_t block_at(const PagedTokens& t, int64_t seq, int64_t place) {
  const int64_t block = t.block_tables[seq * t.block_tables_stride + place];
  return block < t.num_blocks && block >= 0 ? block : -1;
}

// Eight elements at a time, `f(channel, values)`.
template <class T, class F>
inline void for_channels(const PagedTokens& t, int64_t block, int64_t token, int64_t head, const F& f) {
  const T* row = static_cast<const T*>(t.cache) + block * t.stride_block + token * t.stride_token + head * t.stride_head;
  const simd::Floats scale = simd::broadcast(
      t.scale ? t.scale[block * t.scale_stride_block + token * t.scale_stride_token + head * t.scale_stride_head] : 1.0f);
  for (int64_t d = 0; d < t.head_dim; d += simd::kLanes) f(d, simd::load(row + d) * scale);
}

// Calls f(T{}) with the C++ type of the cache's elements.
template <class F>
void dispatch_cache(DType dtype, const F& f) {
  if (dtype == DType::kInt8) {
    f(int8_t{});
  } else {
    dispatch_float(dtype, f);
  }
}

}  // namespace pagedkv
