// Selection from a pool that one CTA holds: buckets as in bucket_select.cuh, of one element each on average and all in
// shared memory. Where one is crowded, the CTA sorts the pool instead.
#pragma once

#include "eviction/bucket_select.cuh"
#include "eviction/score.cuh"

namespace pagedkv::eviction {

constexpr int kSmallItems = 4;  // elements a thread, at most
constexpr int kSmallPool = kSmallItems * kThreads;
constexpr uint32_t kCrowd = 32;

template <int kItems>
struct SmallShared {
  union {
    uint32_t starts[kCoarseBins + 1];    // first a histogram
    uint64_t elements[kItems * kThreads];  // key << 32 | id
  };
  uint32_t begin[kItems * kThreads + 1];  // first keys, then counts, then where each bucket begins
  uint32_t scan[kWarps + 1];
};

// kScore: p.scores is written first; otherwise it is the input. One CTA.
template <bool kScore, int kItems>
__global__ void __launch_bounds__(kThreads, 1) select_small(const __grid_constant__ ScoreParams p, bool aligned, uint32_t k, int64_t* ids) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<SmallShared<kItems>*>(memory);
  const uint32_t count = static_cast<uint32_t>(p.num_blocks);
  uint32_t key[kItems];
  for (int i = threadIdx.x; i <= kCoarseBins; i += kThreads) shared.starts[i] = 0;
  __syncthreads();
  if constexpr (kScore) {
    score_blocks(p, aligned, [&](int64_t block, bool is_one, float score) {
      if (!is_one) return;
      count_coarse(shared.starts, score);
      shared.begin[block] = key_of(score);
    });
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t id = threadIdx.x + i * kThreads;
    if (kScore || id >= count) continue;
    const float score = p.scores[id];
    count_coarse(shared.starts, score);
    key[i] = key_of(score);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {  // its own words only: no barrier between the two
    const uint32_t id = threadIdx.x + i * kThreads;
    if (kScore) key[i] = shared.begin[id];
    shared.begin[id] = 0;
  }
  uint32_t total;
  {
    static_assert(kCoarseBins == 4 * kThreads);
    uint4& bins = reinterpret_cast<uint4*>(shared.starts)[threadIdx.x];
    const uint4 here = bins;
    const uint32_t start = block_exclusive_sum<kThreads>(here.x + here.y + here.z + here.w, shared.scan, &total);
    bins = make_uint4(start, start + here.x, start + here.x + here.y, start + here.x + here.y + here.z);
    if (threadIdx.x == 0) shared.starts[kCoarseBins] = total;
  }
  __syncthreads();

  uint32_t bucket[kItems], slot[kItems];
  bool crowded = false;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (threadIdx.x + i * kThreads >= count) continue;
    bucket[i] = expected_rank(shared.starts, key[i]);
    slot[i] = atomicAdd(shared.begin + bucket[i], 1u);
    crowded |= slot[i] >= kCrowd;
  }
  if (__syncthreads_or(crowded)) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t id = threadIdx.x + i * kThreads;
      if (id < count) shared.elements[id] = static_cast<uint64_t>(key[i]) << 32 | id;
    }
    __syncthreads();
    sort_shared(shared.elements, static_cast<int>(count));
    for (uint32_t i = threadIdx.x; i < k; i += kThreads) ids[i] = static_cast<int64_t>(shared.elements[i] & 0xffffffffu);
    return;
  }

  uint32_t here[kItems], sum = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) sum += here[i] = shared.begin[threadIdx.x * kItems + i];
  uint32_t before = block_exclusive_sum<kThreads>(sum, shared.scan, &total);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    shared.begin[threadIdx.x * kItems + i] = before;
    before += here[i];
  }
  if (threadIdx.x == kThreads - 1) shared.begin[kItems * kThreads] = total;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t id = threadIdx.x + i * kThreads;
    if (id < count) shared.elements[shared.begin[bucket[i]] + slot[i]] = static_cast<uint64_t>(key[i]) << 32 | id;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t id = threadIdx.x + i * kThreads;
    if (id >= count) continue;
    const uint64_t own = static_cast<uint64_t>(key[i]) << 32 | id;
    const uint32_t begin = shared.begin[bucket[i]], end = shared.begin[bucket[i] + 1];
    uint32_t position = begin;
    for (uint32_t j = begin; j < end; ++j) position += shared.elements[j] < own;
    if (position < k) ids[position] = id;
  }
}

template <bool kScore, int kItems>
void launch_small(const ScoreParams& p, int64_t k, int64_t* ids, cudaStream_t stream) {
  auto* kernel = select_small<kScore, kItems>;
  const int shared = sizeof(SmallShared<kItems>);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  kernel<<<1, kThreads, shared, stream>>>(p, kScore && rows_aligned(p), static_cast<uint32_t>(k), ids);
  check_launch("select_small");
}

}  // namespace pagedkv::eviction
