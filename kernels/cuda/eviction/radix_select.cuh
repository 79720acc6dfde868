// Exact selection by radix, whatever the scores are: the path for large k and n, and the one that a failed sample
// falls back to.
//
// Four passes find the key of the k-th lowest block a byte at a time; one pass collects what lies below it, and
// the first of its ties, in block order; four stable passes of an LSD radix sort order what was collected. The
// algorithm is a list of stages with a grid-wide barrier between any two: one cooperative launch, or a launch a
// stage where the device has no cooperative ones.
#pragma once

#include "eviction/cta.cuh"

namespace pagedkv::eviction {

constexpr int kDigits = 256;
constexpr int kMaxCtas = 512;  // of a team
constexpr int kRadixStages = 15;

struct RadixParams {
  const float* scores;
  int64_t num_blocks, k;
  int64_t* ids;
  uint32_t* histograms;  // [4][kDigits]: bytes of the keys, the most significant first
  uint32_t* counts;      // [2][team]: keys below the threshold and equal to it, in each CTA's chunk
  uint32_t* digits;      // [kDigits][team]: of each CTA's chunk, in a pass of the sort
  uint64_t *ping, *pong;  // [k]: key << 32 | id
};

struct RadixShared {
  uint32_t warp_digits[kWarps][kDigits];
  uint32_t base[kDigits];
  uint64_t scan[kWarps + 1];
  uint32_t small_scan[kWarps + 1];
  uint32_t prefix, wanted;
};

// The contiguous part of `count` elements that a CTA takes, in whole tiles of a CTA's threads.
struct Chunk {
  int64_t begin, end;
  __device__ Chunk(int64_t count, const Team& team) {
    const int64_t tiles = (count + kThreads - 1) / kThreads;
    const int64_t tiles_each = (tiles + team.size - 1) / team.size;
    begin = min(count, team.rank * tiles_each * kThreads);
    end = min(count, begin + tiles_each * kThreads);
  }
};

// shared.prefix: the threshold's leading `bytes` bytes; shared.wanted: how many of the keys with that prefix are selected.
__device__ inline void find_prefix(const RadixParams& p, RadixShared& shared, int bytes) {
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    uint32_t prefix = 0, wanted = static_cast<uint32_t>(p.k);
    for (int level = 0; level < bytes; ++level) {
      uint32_t count[kDigits / 32], own = 0;
#pragma unroll
      for (int i = 0; i < kDigits / 32; ++i) own += count[i] = __ldcg(p.histograms + level * kDigits + lane * (kDigits / 32) + i);
      uint32_t below = warp_inclusive_sum(own) - own;
      const unsigned holder = __ballot_sync(~0u, below < wanted && wanted <= below + own);
      uint32_t digit = 0;
#pragma unroll
      for (int i = 0; i < kDigits / 32; ++i) {
        const bool passes = below + count[i] < wanted;
        if (digit == static_cast<uint32_t>(i) && passes) below += count[i], ++digit;
      }
      const int source = __ffs(holder) - 1;
      prefix = prefix << 8 | __shfl_sync(~0u, lane * (kDigits / 32) + digit, source);
      wanted -= __shfl_sync(~0u, below, source);
    }
    if (lane == 0) shared.prefix = prefix, shared.wanted = wanted;
  }
  __syncthreads();
}

// A histogram in shared memory; lanes that share a digit add once, so equal keys don't serialise.
__device__ __forceinline__ void count_digit(uint32_t* histogram, bool active, uint32_t digit) {
  const unsigned peers = lanes_that_share<8>(digit) & __ballot_sync(~0u, active);
  if (active && (threadIdx.x % 32) == __ffs(peers) - 1) atomicAdd(histogram + digit, __popc(peers));
}

__device__ inline void histogram_byte(const RadixParams& p, const Team& team, RadixShared& shared, int level) {
  find_prefix(p, shared, level);
  uint32_t* histogram = shared.base;
  for (int d = threadIdx.x; d < kDigits; d += kThreads) histogram[d] = 0;
  __syncthreads();
  const int shift = 24 - 8 * level;
  const Chunk chunk(p.num_blocks, team);
  for (int64_t tile = chunk.begin; tile < chunk.end; tile += 4 * kThreads) {
    float score[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t id = tile + i * kThreads + threadIdx.x;
      score[i] = id < chunk.end ? __ldcg(p.scores + id) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t key = key_of(score[i]);
      const bool matches = level == 0 || key >> (shift + 8) == shared.prefix;
      count_digit(histogram, tile + i * kThreads + threadIdx.x < chunk.end && matches, key >> shift & 0xff);
    }
  }
  __syncthreads();
  for (int d = threadIdx.x; d < kDigits; d += kThreads) {
    if (histogram[d] > 0) atomicAdd(p.histograms + level * kDigits + d, histogram[d]);
  }
}

__device__ inline void count_chunk(const RadixParams& p, const Team& team, RadixShared& shared) {
  find_prefix(p, shared, 4);
  const Chunk chunk(p.num_blocks, team);
  uint64_t counts = 0;  // below << 32 | equal
  for (int64_t id = chunk.begin + threadIdx.x; id < chunk.end; id += kThreads) {
    const uint32_t key = key_of(__ldcg(p.scores + id));
    counts += (key < shared.prefix ? uint64_t{1} << 32 : 0) + (key == shared.prefix ? 1 : 0);
  }
  uint64_t total;
  block_exclusive_sum<kThreads>(counts, shared.scan, &total);
  if (threadIdx.x == 0) p.counts[team.rank] = total >> 32, p.counts[kMaxCtas + team.rank] = static_cast<uint32_t>(total);
}

__device__ inline void collect(const RadixParams& p, const Team& team, RadixShared& shared) {
  find_prefix(p, shared, 4);
  uint64_t before = 0;
  for (int cta = threadIdx.x; cta < team.rank; cta += kThreads) {
    before += static_cast<uint64_t>(__ldcg(p.counts + cta)) << 32 | __ldcg(p.counts + kMaxCtas + cta);
  }
  uint64_t carry;
  block_exclusive_sum<kThreads>(before, shared.scan, &carry);
  __syncthreads();
  const Chunk chunk(p.num_blocks, team);
  for (int64_t tile = chunk.begin; tile < chunk.end; tile += kThreads) {
    const int64_t id = tile + threadIdx.x;
    const uint32_t key = id < chunk.end ? key_of(__ldcg(p.scores + id)) : 0xffffffffu;
    const bool below = id < chunk.end && key < shared.prefix, equal = id < chunk.end && key == shared.prefix;
    uint64_t total;
    const uint64_t position = carry + block_exclusive_sum<kThreads>((below ? uint64_t{1} << 32 : 0) + (equal ? 1 : 0), shared.scan, &total);
    carry += total;
    const uint32_t ties = static_cast<uint32_t>(position);  // that come before this block
    if (below || (equal && ties < shared.wanted)) {
      p.ping[(position >> 32) + min(ties, shared.wanted)] = static_cast<uint64_t>(key) << 32 | static_cast<uint64_t>(id);
    }
    __syncthreads();
  }
}

__device__ inline void histogram_digit(const RadixParams& p, const Team& team, RadixShared& shared, int pass) {
  const uint64_t* from = pass % 2 == 0 ? p.ping : p.pong;
  for (int d = threadIdx.x; d < kDigits; d += kThreads) shared.base[d] = 0;
  __syncthreads();
  const Chunk chunk(p.k, team);
  for (int64_t tile = chunk.begin; tile < chunk.end; tile += kThreads) {
    const int64_t i = tile + threadIdx.x;
    const uint64_t element = i < chunk.end ? __ldcg(from + i) : 0;
    count_digit(shared.base, i < chunk.end, element >> (32 + 8 * pass) & 0xff);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < kDigits; d += kThreads) p.digits[d * team.size + team.rank] = shared.base[d];
}

__device__ inline void scatter_digit(const RadixParams& p, const Team& team, RadixShared& shared, int pass) {
  const uint64_t* from = pass % 2 == 0 ? p.ping : p.pong;
  uint64_t* to = pass % 2 == 0 ? p.pong : p.ping;

  // Where this CTA's elements of each digit begin: after all lower digits, and this digit in lower chunks.
  constexpr int kShare = kThreads / kDigits;  // threads a digit
  const int digit = threadIdx.x / kShare;
  uint32_t total = 0, before = 0;
  for (int cta = threadIdx.x % kShare; cta < team.size; cta += kShare) {
    const uint32_t count = __ldcg(p.digits + digit * team.size + cta);
    total += count;
    if (cta < team.rank) before += count;
  }
#pragma unroll
  for (int delta = 1; delta < kShare; delta *= 2) {
    total += __shfl_xor_sync(~0u, total, delta);
    before += __shfl_xor_sync(~0u, before, delta);
  }
  uint32_t all;
  const bool leads = threadIdx.x % kShare == 0;
  const uint32_t below = block_exclusive_sum<kThreads>(leads ? total : 0u, shared.small_scan, &all);
  if (leads) shared.base[digit] = below + before;
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Chunk chunk(p.k, team);
  for (int64_t tile = chunk.begin; tile < chunk.end; tile += kThreads) {
    const int64_t i = tile + threadIdx.x;
    const bool active = i < chunk.end;
    const uint64_t element = active ? __ldcg(from + i) : 0;
    const uint32_t own = element >> (32 + 8 * pass) & 0xff;
    for (int d = lane; d < kDigits; d += 32) shared.warp_digits[warp][d] = 0;
    __syncwarp();
    const unsigned peers = lanes_that_share<8>(own) & __ballot_sync(~0u, active);
    const uint32_t rank = __popc(peers & ((1u << lane) - 1));
    if (active && rank == 0) shared.warp_digits[warp][own] = __popc(peers);
    __syncthreads();
    {
      // Counts become positions: digit's share of threads scans kWarps / kShare warps each.
      constexpr int kEach = kWarps / kShare;
      const int first = threadIdx.x % kShare * kEach;
      uint32_t count[kEach], sum = 0;
#pragma unroll
      for (int w = 0; w < kEach; ++w) sum += count[w] = shared.warp_digits[first + w][digit];
      const uint32_t inclusive = warp_inclusive_sum<kShare>(sum);
      const uint32_t base = shared.base[digit];
      uint32_t position = base + inclusive - sum;
#pragma unroll
      for (int w = 0; w < kEach; ++w) {
        shared.warp_digits[first + w][digit] = position;
        position += count[w];
      }
      __syncwarp();
      if (threadIdx.x % kShare == kShare - 1) shared.base[digit] = base + inclusive;
    }
    __syncthreads();
    if (active) {
      const uint32_t position = shared.warp_digits[warp][own] + rank;
      if (pass < 3) {
        to[position] = element;
      } else {
        p.ids[position] = static_cast<int64_t>(element & 0xffffffffu);
      }
    }
    __syncwarp();
  }
}

__device__ inline void radix_stage(const RadixParams& p, const Team& team, RadixShared& shared, int stage) {
  if (stage == 0) {
    for (int i = team.rank * kThreads + threadIdx.x; i < 4 * kDigits; i += team.size * kThreads) p.histograms[i] = 0;
  } else if (stage <= 4) {
    histogram_byte(p, team, shared, stage - 1);
  } else if (stage == 5) {
    count_chunk(p, team, shared);
  } else if (stage == 6) {
    collect(p, team, shared);
  } else if (stage % 2 == 1) {
    histogram_digit(p, team, shared, (stage - 7) / 2);
  } else {
    scatter_digit(p, team, shared, (stage - 8) / 2);
  }
}

__device__ inline void radix_select(const RadixParams& p, const Team& team, RadixShared& shared) {
  for (int stage = 0; stage < kRadixStages; ++stage) {
    radix_stage(p, team, shared, stage);
    team.sync();
  }
}

}  // namespace pagedkv::eviction
