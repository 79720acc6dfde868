// Scores of KV blocks, shared by eviction_scores and evict_blocks: the same steps in the same order, so that both
// give the same bits.
//
// Four lanes share a block, so a warp reads eight rows at once, 16 bytes a lane, and has four such loads in
// flight. Lane l of the four ends up with the sum of row 8 l + (its quad) of the warp's 32 rows: one coalesced
// load of recency and frequency and one coalesced store for all 32.
#pragma once

#include "common.cuh"

namespace pagedkv::eviction {

constexpr int kTileRows = 32;
constexpr int kRowsInFlight = 4;

// Adds, over the four lanes of a quad, four values of each; lane l of the quad gets the sum of value l.
template <class T>
__device__ __forceinline__ T transpose_sum(const T (&values)[4], int lane) {
  const bool upper = lane & 2, odd = lane & 1;
  T keep0 = upper ? values[2] : values[0], keep1 = upper ? values[3] : values[1];
  const T send0 = upper ? values[0] : values[2], send1 = upper ? values[1] : values[3];
  keep0 += __shfl_xor_sync(~0u, send0, 2);
  keep1 += __shfl_xor_sync(~0u, send1, 2);
  const T keep = odd ? keep1 : keep0, send = odd ? keep0 : keep1;
  return keep + __shfl_xor_sync(~0u, send, 1);
}

// kAligned: rows of attention_mass start at multiples of 16 bytes and rows of valid_mask at multiples of 4, and
// block_size is a multiple of 4. kWhole: no row of the tile lies past the pool.
template <bool kAligned, bool kWhole, class Use>
__device__ __forceinline__ void score_tile(const ScoreParams& p, int64_t tile, const Use& use) {
  const int lane = threadIdx.x % 32, quad = lane / 4, part = lane % 4;
  const int64_t first = tile * kTileRows;
  const int64_t mine = first + part * 8 + quad;
  const bool has_row = kWhole || mine < p.num_blocks;
  const float recency = has_row ? p.recency[mine] : 0.f;
  const float frequency = has_row ? p.frequency[mine] : 0.f;

  float sum[kRowsInFlight] = {};
  int count[kRowsInFlight] = {};
  const int block_size = static_cast<int>(p.block_size);
  for (int column = part * 4; column < block_size; column += 16) {
    float mass[kRowsInFlight][4];
    uint32_t valid[kRowsInFlight];  // one byte a token
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      const int64_t row = first + r * 8 + quad;
      valid[r] = 0;
      if (!kWhole && row >= p.num_blocks) continue;
      const float* from = p.attention_mass + row * p.attention_mass_stride + column;
      const bool* flags = p.valid_mask + row * p.valid_mask_stride + column;
      if constexpr (kAligned) {
        const float4 four = __ldcs(reinterpret_cast<const float4*>(from));  // read once
        mass[r][0] = four.x, mass[r][1] = four.y, mass[r][2] = four.z, mass[r][3] = four.w;
        valid[r] = __ldcs(reinterpret_cast<const uint32_t*>(flags));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (column + i >= block_size) continue;
          mass[r][i] = from[i];
          valid[r] |= (flags[i] ? 1u : 0u) << (8 * i);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((valid[r] >> (8 * i) & 0xff) == 0) continue;
        sum[r] = __fadd_rn(sum[r], mass[r][i]);
        ++count[r];
      }
    }
  }

  const float total = transpose_sum(sum, lane);
  const int tokens = transpose_sum(count, lane);
  const float mean = tokens == 0 ? 0.f : __fdiv_rn(total, static_cast<float>(tokens));
  const float score = __fmaf_rn(p.w_attention, mean, __fmaf_rn(p.w_frequency, frequency, __fmul_rn(p.w_recency, recency)));
  if (has_row) p.scores[mine] = score;
  use(mine, has_row, score);
}

// Every warp of the grid takes part, and calls use(block, whether there is one, score) on all lanes for each 32 blocks. Tiles go
// round the CTAs before the warps, so that all SMs read a small pool; warp 0 comes last, for it waits at barriers of the grid.
template <class Use>
__device__ __forceinline__ void score_blocks(const ScoreParams& p, bool aligned, const Use& use) {
  const int64_t tiles = (p.num_blocks + kTileRows - 1) / kTileRows, whole = p.num_blocks / kTileRows;
  const int warps = blockDim.x / 32, warp = (threadIdx.x / 32 + warps - 1) % warps;
  for (int64_t tile = int64_t{warp} * gridDim.x + blockIdx.x; tile < tiles; tile += int64_t{gridDim.x} * warps) {
    if (!aligned) {
      score_tile<false, false>(p, tile, use);
    } else if (tile < whole) {
      score_tile<true, true>(p, tile, use);
    } else {
      score_tile<true, false>(p, tile, use);
    }
  }
}

inline bool rows_aligned(const ScoreParams& p) {
  return p.block_size % 4 == 0 && reinterpret_cast<uintptr_t>(p.attention_mass) % 16 == 0 && p.attention_mass_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(p.valid_mask) % 4 == 0 && p.valid_mask_stride % 4 == 0;
}

}  // namespace pagedkv::eviction
