// Selection by buckets: the fast path.
//
//   1  A histogram of the leading bits of the keys, counted while the scores are made.
//   2  Its prefix sums say how many elements lie below each of its bins, and a line between two of them where in the
//      output an element of the bin is expected. That expected rank is monotonic in the key, so elements whose rank
//      falls into one stretch of kBucketMean make a bucket, and buckets are in order. Elements go there, in any order.
//   3  A warp takes a bucket and writes its ids by rank: nothing is left of the order in which they came.
//
// Exact whenever no bucket overflows. What the histogram misses (ties in great number, clusters within one of its bins)
// shows in the counts of the buckets before an id is written, and sample_select.cuh does the work instead.
#pragma once

#include "eviction/cta.cuh"

namespace pagedkv::eviction {

constexpr int kCoarseBits = 12;  // of a key: sign, exponent and three bits of the mantissa
constexpr int kCoarseBins = 1 << kCoarseBits;
constexpr int kBucketMean = 16;
constexpr int kBucketRoom = 64;         // two elements a lane
constexpr int kCounterWords = 1 << 14;  // over which the counters of buckets are spread
constexpr int kWatched = 1 << 13;       // groups of buckets that a CTA counts for itself

struct BucketParams {
  const float* scores;
  int64_t num_blocks, k;
  int64_t* ids;
  int num_buckets;
  uint32_t* coarse;    // [kCoarseBins]: keys of the pool by their leading bits
  uint32_t* filled;    // [num_buckets, filled_stride]: elements of each bucket; atomics on one line of L2 queue, hence the stride
  int filled_stride;
  uint32_t* failed;    // [1]: some CTA gave up
  uint64_t* elements;  // [num_buckets, kBucketRoom]: key << 32 | id

  // Buckets for the k lowest and for those that the expected rank may put before the k-th by mistake.
  static int64_t buckets(int64_t num_blocks, int64_t k) {
    const int64_t ranks = k + k / 4 + 1024;
    return ((ranks < num_blocks ? ranks : num_blocks) + kBucketMean - 1) / kBucketMean;
  }
  static int64_t stride(int64_t buckets) {
    int64_t stride = 1;
    while (stride < 32 && buckets * stride * 2 <= kCounterWords) stride *= 2;
    return stride;
  }
};

struct BucketShared {
  uint32_t histogram[kCoarseBins];  // of this CTA, then starts: elements of the pool below each bin
  uint32_t past_end;                // starts[kCoarseBins]
  uint32_t scan[kWarps + 1];
  uint64_t wide_scan[kWarps + 1];
  uint32_t start[kThreads], count[kThreads];
  union {
    ulonglong2 staged[kWarps][kBucketRoom / 2];
    uint32_t watched[kWatched];  // elements of this CTA for each group of buckets
  };
  uint32_t margin;
  uint32_t candidates;  // among the first elements that this CTA looks at
};

// Readies the counters of the pool and of this CTA. To be followed by a barrier of the team.
__device__ __forceinline__ void clear(const BucketParams& p, const Team& team, BucketShared& shared) {
  for (int i = threadIdx.x; i < kCoarseBins; i += kThreads) shared.histogram[i] = 0;
  const int first = team.rank * kThreads + threadIdx.x, step = team.size * kThreads;
  for (int i = first; i < kCoarseBins; i += step) p.coarse[i] = 0;
  for (int i = first; i < p.num_buckets; i += step) p.filled[int64_t{i} * p.filled_stride] = 0;
  if (first == 0) *p.failed = 0;
}

__device__ __forceinline__ void count_coarse(uint32_t* histogram, float score) { atomicAdd(histogram + (key_of(score) >> (32 - kCoarseBits)), 1u); }

__device__ __forceinline__ void merge_histogram(const BucketParams& p, BucketShared& shared) {
  __syncthreads();
  for (int i = threadIdx.x; i < kCoarseBins; i += kThreads) {
    if (const uint32_t count = shared.histogram[i]) atomicAdd(p.coarse + i, count);
  }
}

// 32 blocks a warp at a time: the i-th such tile of this warp.
__device__ __forceinline__ int64_t tile_of(const Team& team, int64_t i) {
  return (i * kWarps + threadIdx.x / 32) * team.size + team.rank;
}

__device__ inline void count_scores(const BucketParams& p, const Team& team, BucketShared& shared) {
  for (int64_t i = 0; tile_of(team, i) * 32 < p.num_blocks; ++i) {
    const int64_t id = tile_of(team, i) * 32 + threadIdx.x % 32;
    if (id < p.num_blocks) count_coarse(shared.histogram, __ldg(p.scores + id));
  }
}

// Whether far more of the first elements that a CTA looks at are candidates than the lines say: a pool that lies in a small part of one
// bin. Buckets would overflow, but only after the counters had heard of all of it. Neighbours in the pool may have neighbouring scores, so
// chance is counted in tiles.
__device__ __forceinline__ bool is_dense(const BucketParams& p, const Team& team, uint32_t candidates, uint32_t limit, int most_seen) {
  const float blocks = static_cast<float>(p.num_blocks), seen = fminf(static_cast<float>(most_seen), blocks / static_cast<float>(team.size));
  return static_cast<float>(candidates) > 2.5f * seen * (static_cast<float>(limit) / blocks) + 8 * 32;
}

// Where in the output an element of its bin is expected, as if keys lay evenly in it.
__device__ __forceinline__ uint32_t expected_rank(const uint32_t* starts, uint32_t key) {
  const uint32_t bin = key >> (32 - kCoarseBits), start = starts[bin];
  return start + __umulhi(key << kCoarseBits, starts[bin + 1] - start);
}

// Turns the histogram of the pool into starts, and returns the expected rank from which on nothing is a candidate.
__device__ inline uint32_t find_starts(const BucketParams& p, BucketShared& shared) {
  static_assert(kCoarseBins == 4 * kThreads);
  const uint4 count = __ldcg(reinterpret_cast<const uint4*>(p.coarse) + threadIdx.x);
  uint32_t total;
  const uint32_t start = block_exclusive_sum<kThreads>(count.x + count.y + count.z + count.w, shared.scan, &total);
  const uint32_t s1 = start + count.x, s2 = s1 + count.y, s3 = s2 + count.z, s4 = s3 + count.w;
  reinterpret_cast<uint4*>(shared.histogram)[threadIdx.x] = make_uint4(start, s1, s2, s3);
  if (threadIdx.x == kThreads - 1) shared.past_end = total;
  const uint32_t k = static_cast<uint32_t>(p.k);
  // The k-th lowest is in one bin. There the line may be off by an eighth of the bin where its density trebles from end to end.
  if (start < k && k <= s4) shared.margin = (k <= s1 ? count.x : k <= s2 ? count.y : k <= s3 ? count.z : count.w) / 8 + 4 * kBucketRoom;
  __syncthreads();
  return min(k + shared.margin, static_cast<uint32_t>(p.num_buckets) * kBucketMean);
}

__device__ inline void fill_buckets(const BucketParams& p, const Team& team, BucketShared& shared) {
  constexpr int kInFlight = 4;
  const int lane = threadIdx.x % 32;
  float score[kInFlight];
  const auto id_of = [&](int64_t batch, int i) { return tile_of(team, batch * kInFlight + i) * 32 + lane; };
  const auto load = [&](int64_t batch) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (id_of(batch, i) < p.num_blocks) score[i] = __ldcg(p.scores + id_of(batch, i));
    }
  };
  load(0);
  int watch_shift = 0;  // of a bucket, to its group
  while (p.num_buckets >> watch_shift >= kWatched) ++watch_shift;
  for (int i = threadIdx.x; i <= p.num_buckets >> watch_shift; i += kThreads) shared.watched[i] = 0;
  if (threadIdx.x == 0) shared.candidates = 0;
  const uint32_t limit = find_starts(p, shared);

  const uint32_t* starts = shared.histogram;
  const int64_t tiles = (p.num_blocks + 31) / 32, batch_tiles = int64_t{kInFlight} * kWarps * team.size;
  for (int64_t batch = 0; batch * batch_tiles < tiles; ++batch) {
    uint32_t key[kInFlight], bucket[kInFlight], slot[kInFlight];
    bool overflows = false;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      bucket[i] = ~0u;
      if (id_of(batch, i) >= p.num_blocks) continue;
      key[i] = key_of(score[i]);
      const uint32_t rank = expected_rank(starts, key[i]);
      if (rank >= limit) continue;
      bucket[i] = rank / kBucketMean;
      overflows |= atomicAdd(shared.watched + (bucket[i] >> watch_shift), 1u) >= static_cast<uint32_t>(kBucketRoom) << watch_shift;
    }
    if (batch == 0) {
      uint32_t candidates = 0;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) candidates += __popc(__ballot_sync(~0u, bucket[i] != ~0u));
      if (lane == 0) atomicAdd(&shared.candidates, candidates);
    }
    // A CTA that alone overfills a bucket says so, rather than queue at its counter with all the others.
    if (__syncthreads_or(overflows) || (batch == 0 && is_dense(p, team, shared.candidates, limit, kInFlight * kThreads))) {
      if (threadIdx.x == 0) *p.failed = 1;
      return;
    }
    load(batch + 1);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (bucket[i] != ~0u) slot[i] = atomicAdd(p.filled + int64_t{bucket[i]} * p.filled_stride, 1u);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (bucket[i] != ~0u && slot[i] < kBucketRoom) {
        p.elements[int64_t{bucket[i]} * kBucketRoom + slot[i]] = static_cast<uint64_t>(key[i]) << 32 | static_cast<uint32_t>(id_of(batch, i));
      }
    }
  }
}

// Two elements a lane: element `lane` of a bucket and element lane + 32, as far as there are any.
struct Held {
  uint64_t low, high;
  __device__ __forceinline__ void load(const BucketParams& p, int bucket, uint32_t count) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t* from = p.elements + int64_t{bucket} * kBucketRoom + lane;
    if (lane < count) low = __ldcg(from);
    if (lane + 32 < count) high = __ldcg(from + 32);
  }
};

// Ranks the elements of one bucket by counting, in a warp, and writes their ids.
template <bool kBoth>
__device__ __forceinline__ void order_bucket(const BucketParams& p, const Held& own, ulonglong2* staged, uint32_t start, int count) {
  const int lane = threadIdx.x % 32;
  uint64_t* elements = reinterpret_cast<uint64_t*>(staged);
  elements[lane] = lane < count ? own.low : ~uint64_t{0};
  if (kBoth) elements[lane + 32] = lane + 32 < count ? own.high : ~uint64_t{0};
  __syncwarp();
  uint32_t low_rank = 0, high_rank = 0;
#pragma unroll 4
  for (int j = 0; j < (count + 1) / 2; ++j) {
    const ulonglong2 other = staged[j];
    low_rank += (other.x < own.low) + (other.y < own.low);
    if (kBoth) high_rank += (other.x < own.high) + (other.y < own.high);
  }
  __syncwarp();
  if (lane < count && start + low_rank < p.k) p.ids[start + low_rank] = static_cast<int64_t>(own.low & 0xffffffffu);
  if (kBoth && lane + 32 < count && start + high_rank < p.k) p.ids[start + high_rank] = static_cast<int64_t>(own.high & 0xffffffffu);
}

// False, with nothing written to p.ids, where a bucket overflowed; every CTA of the team returns the same.
__device__ inline bool order_buckets(const BucketParams& p, const Team& team, BucketShared& shared) {
  const int warp = threadIdx.x / 32;
  const int each = (p.num_buckets + team.size - 1) / team.size;
  const int begin = min(team.rank * each, p.num_buckets), end = min(begin + each, p.num_buckets);
  const int foremost = begin + warp;  // bucket of this warp
  const uint32_t foremost_count = foremost < end ? __ldcg(p.filled + int64_t{foremost} * p.filled_stride) : 0;
  uint64_t sums = 0;  // elements before this CTA's buckets << 32 | all elements
  bool overflows = threadIdx.x == 0 && __ldcg(p.failed) != 0;
#pragma unroll 8
  for (int b = threadIdx.x; b < p.num_buckets; b += kThreads) {
    const uint32_t count = __ldcg(p.filled + int64_t{b} * p.filled_stride);
    sums += static_cast<uint64_t>(b < begin ? count : 0) << 32 | count;
    overflows |= count > kBucketRoom;
  }
  Held held;
  held.load(p, foremost, foremost_count);  // on its way while the CTA adds up
  uint64_t totals;
  block_exclusive_sum<kThreads>(sums, shared.wide_scan, &totals);
  if (__syncthreads_or(overflows) || static_cast<uint32_t>(totals) < p.k) return false;

  uint32_t carry = totals >> 32;
  for (int first = begin; first < end && carry < p.k; first += kThreads) {
    const int here = min(end - first, kThreads);
    const uint32_t own = threadIdx.x < here ? __ldcg(p.filled + int64_t{first + threadIdx.x} * p.filled_stride) : 0;
    uint32_t total;
    shared.start[threadIdx.x] = carry + block_exclusive_sum<kThreads>(own, shared.scan, &total);
    shared.count[threadIdx.x] = own;
    carry += total;
    __syncthreads();
    if (first > begin && warp < here) held.load(p, first + warp, shared.count[warp]);
    for (int b = warp; b < here; b += kWarps) {
      const uint32_t start = shared.start[b];
      const int count = shared.count[b];
      if (start >= p.k) break;
      const Held own = held;
      if (b + kWarps < here) held.load(p, first + b + kWarps, shared.count[b + kWarps]);
      if (count > 32) {
        order_bucket<true>(p, own, shared.staged[warp], start, count);
      } else {
        order_bucket<false>(p, own, shared.staged[warp], start, count);
      }
    }
    __syncthreads();
  }
  return true;
}

}  // namespace pagedkv::eviction
