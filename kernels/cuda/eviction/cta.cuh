// Building blocks of selection: ordered keys, a sort within a CTA, and teams of CTAs.
#pragma once

#include <cooperative_groups.h>

#include "common.cuh"

namespace pagedkv::eviction {

constexpr int kThreads = 1024;  // of every CTA that selects
constexpr int kWarps = kThreads / 32;

// Unsigned integers that order like the scores: -0.0 equals 0.0, NaN comes last.
__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0xffffffffu;
  if (magnitude == 0) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// (key, block id) as one integer: every element is different, so ties need no thought below. The id takes
// `id_bits`, no more than the pool needs, so that integers between two elements of one key are about as many as blocks.
__device__ __forceinline__ uint64_t element_of(float score, int64_t id, int id_bits) {
  return static_cast<uint64_t>(key_of(score)) << id_bits | static_cast<uint64_t>(id);
}

// The CTAs that work on a selection: the whole grid.
struct Team {
  int rank, size;
  __device__ __forceinline__ void sync() const { cooperative_groups::this_grid().sync(); }
};

// Lanes of the warp that hold the same kBits-bit value. Ballots take a fraction of the time of __match_any_sync.
template <int kBits>
__device__ __forceinline__ unsigned lanes_that_share(uint32_t value) {
  unsigned peers = ~0u;
#pragma unroll
  for (int bit = 0; bit < kBits; ++bit) {
    const bool set = value >> bit & 1;
    const unsigned holders = __ballot_sync(~0u, set);
    peers &= set ? holders : ~holders;
  }
  return peers;
}

// Sorts in place, ascending, any number of elements: Batcher's bitonic network in the form whose comparators all
// point one way, so elements past the end act as +infinity and need not exist. Steps whose comparators stay within
// a warp's 64 elements need no barrier of the CTA. Ends with one.
__device__ inline void sort_shared(uint64_t* elements, int count) {
  int half = 1;  // comparators of a step
  while (2 * half < count) half *= 2;
  for (int size = 2; size <= 2 * half; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int pair = threadIdx.x; pair < half; pair += kThreads) {
        const int offset = pair & (stride - 1);
        const int low = 2 * pair - offset;
        const int high = stride == size / 2 ? low + size - 1 - 2 * offset : low + stride;
        if (high < count) {
          const uint64_t a = elements[low], b = elements[high];
          if (b < a) elements[low] = b, elements[high] = a;
        }
      }
      const int next = stride > 1 ? stride / 2 : size;
      if (stride <= 32 && next <= 32) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    }
  }
  __syncthreads();
}

}  // namespace pagedkv::eviction
