// Rows of K or V, found through a block table: what the statistics share.
//
// A row (one head of one token) is read by `lanes` neighbouring lanes of a warp, a piece each: 16 bytes of int8 where rows
// consist of such, else eight channels. `lanes` is a power of two: lanes past the end of the row have a piece of zeros, and
// sums over a row are butterflies.
#pragma once

#include <type_traits>

#include "common.cuh"

namespace pagedkv {

constexpr int kTokenThreads = 256;

// How a lane reads its piece of a row.
template <class Element_, int kUnits_, bool kAligned_>
struct RowLayout {
  using Element = Element_;
  using Sum = std::conditional_t<std::is_same_v<Element, int8_t>, int, float>;  // sums of int8, and of their squares, are exact
  static constexpr int kUnits = kUnits_, kChannels = kUnits * kUnit;
  static constexpr bool kAligned = kAligned_;
};

template <class Layout>
int lanes_of_row(const PagedTokens& t) {
  int lanes = 1;
  while (lanes * Layout::kChannels < t.head_dim) lanes *= 2;
  return lanes;
}

__device__ __forceinline__ bool valid_length(const PagedTokens& t, int32_t len) { return len >= 0 && len <= t.max_blocks * t.block_size; }

// The block at a place, or -1 if it lies outside the pool.
__device__ __forceinline__ int32_t block_at(const PagedTokens& t, int64_t seq, int64_t place) {
  const int32_t block = t.block_tables[seq * t.block_tables_stride + place];
  return block >= 0 && block < t.num_blocks ? block : -1;
}

// A lane's piece, as it is stored, and what to multiply it by. Loads of several are under way before the first is looked at.
template <class Layout>
struct Piece {
  alignas(16) Unit<typename Layout::Element> units[Layout::kUnits] = {};
  float scale = 1.f;

  __device__ __forceinline__ void load(const PagedTokens& t, int64_t block, int64_t token, int64_t head, int part) {
    const auto* row = static_cast<const typename Layout::Element*>(t.cache) + (block * t.stride_block + token * t.stride_token + head * t.stride_head);
    if constexpr (Layout::kUnits == 2) {
      *reinterpret_cast<uint4*>(units) = reinterpret_cast<const uint4*>(row)[part];
    } else {
      units[0] = load_unit<Layout::kAligned>(row + part * kUnit);
    }
    if (t.scale) scale = t.scale[block * t.scale_stride_block + token * t.scale_stride_token + head * t.scale_stride_head];
  }

  // As stored: the scale is left to the caller.
  __device__ __forceinline__ void values(float (&x)[Layout::kChannels]) const {
#pragma unroll
    for (int u = 0; u < Layout::kUnits; ++u) {
      float unit[kUnit];
      to_floats(units[u], unit);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) x[u * kUnit + i] = unit[i];
    }
  }

  // Sum, and sum of squares, of the values as stored.
  __device__ __forceinline__ void moments(typename Layout::Sum& sum, typename Layout::Sum& squares) const {
    sum = squares = 0;
    if constexpr (std::is_same_v<typename Layout::Element, int8_t>) {
#pragma unroll
      for (int u = 0; u < Layout::kUnits; ++u) {
        for (uint32_t word : units[u].words) {
          sum = __dp4a(static_cast<int>(word), 0x01010101, sum);
          squares = __dp4a(static_cast<int>(word), static_cast<int>(word), squares);
        }
      }
    } else {
      float x[Layout::kChannels];
      values(x);
#pragma unroll
      for (float value : x) sum += value, squares = fmaf(value, value, squares);
    }
  }
};

// Over the lanes of a row; all get the same bits. Every lane of the warp takes part.
template <class Sum>
__device__ __forceinline__ Sum row_sum(Sum value, int lanes) {
  for (int delta = lanes / 2; delta > 0; delta /= 2) value += __shfl_xor_sync(~0u, value, delta);
  return value;
}

// Calls use(RowLayout{}) with the widest one that fits.
template <class Use>
void dispatch_layout(const PagedTokens& t, const Use& use) {
  auto with = [&](auto element) {
    using Element = decltype(element);
    if (units_aligned<Element>(t.cache, {t.stride_block, t.stride_token, t.stride_head})) {
      use(RowLayout<Element, 1, true>{});
    } else {
      use(RowLayout<Element, 1, false>{});
    }
  };
  if (t.dtype != DType::kInt8) return dispatch_float(t.dtype, with);
  const bool whole = (reinterpret_cast<uintptr_t>(t.cache) | t.stride_block | t.stride_token | t.stride_head | t.head_dim) % 16 == 0;
  whole ? use(RowLayout<int8_t, 2, true>{}) : with(int8_t{});
}

}  // namespace pagedkv
