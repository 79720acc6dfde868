// Selection by sample sort: exact on nearly any scores, at about the same speed.
//
//   1  Every CTA sorts the same small sample of the scores. Its elements split the range of elements (score, id) into
//      intervals of about as many blocks each; the lowest of them hold the k, with a margin of several sigma.
//   2  Intervals are cut further into equal bins. Each CTA bins those of its blocks that lie in the lowest intervals.
//   3  The team adds up the bins: now it is known where in the output each begins. Elements go there.
//   4  A warp takes a bin and writes its ids by rank.
//
// Elements are unique integers, so a score that half the pool shares is split by id like any other range: all-equal,
// clustered and denormal scores take the same path at the same speed. What can go wrong is a sample that misses the
// shape of the scores, and that is counted before anything is written: too few elements below the cut, a bin larger
// than a CTA can sort, or a CTA with more candidates than its list holds. Then every CTA of the team sees it and
// radix_select.cuh does the work instead.
#pragma once

#include "eviction/cta.cuh"

namespace pagedkv::eviction {

constexpr int kMaxSamples = 2048;
constexpr int kTail = 8;            // intervals added on either side of the sample, by extrapolation
constexpr int kMinBinsPerInterval = 8;
constexpr int kWarpBin = 128;       // elements of a bin that a warp ranks on its own; larger ones are a CTA's work
constexpr int kMaxBins = 8192;      // eight a thread in the scan
constexpr int kMaxListed = 8192;    // candidates of a CTA

struct SampleParams {
  const float* scores;
  int64_t num_blocks, k;
  int64_t* ids;
  int id_bits;
  int samples;            // a multiple of 32; num_blocks >= samples
  int intervals;          // the lowest `intervals` of samples + 2 * kTail + 1 hold the candidates
  int bins_per_interval;  // a power of two, at least kMinBinsPerInterval
  int max_samples, max_bins, max_listed, max_sorted;  // capacities, in shared memory
  uint32_t* totals;       // [max_bins + 1]: elements of each bin; the last counts CTAs whose list overflowed
  uint64_t* binned;       // [k + max_sorted]
};

// Shared memory, in the order of alignment.
struct SampleShared {
  uint64_t* splitters;  // [max_samples + 2 * kTail]
  uint64_t* sorted;     // [max_sorted]: bins at work
  uint64_t* listed;     // [max_listed]: this CTA's candidates
  uint32_t* places;     // [max_listed]: bin << 16 | rank among this CTA's elements of the bin
  uint32_t* offsets;    // [max_bins]: elements of a bin that this CTA has, then where they go within the bin
  uint32_t* starts;     // [max_bins + 4]: elements before the bin
  uint32_t* scan;       // [kWarps + 1]
  uint32_t *num_listed, *num_large, *largest;

  static size_t bytes(const SampleParams& p) {
    const size_t elements = p.max_samples + 2 * kTail + p.max_sorted + p.max_listed;
    const size_t words = 2 * p.max_bins + 4 + p.max_listed + kWarps + 1 + 3;
    return 8 * elements + 4 * words;
  }
  __device__ SampleShared(char* memory, const SampleParams& p) {
    splitters = reinterpret_cast<uint64_t*>(memory);
    sorted = splitters + p.max_samples + 2 * kTail;
    listed = sorted + p.max_sorted;
    offsets = reinterpret_cast<uint32_t*>(listed + p.max_listed);
    starts = offsets + p.max_bins;
    places = starts + p.max_bins + 4;
    scan = places + p.max_listed;
    num_listed = scan + kWarps + 1, num_large = num_listed + 1, largest = num_listed + 2;
  }
};

__device__ __forceinline__ uint32_t mix(uint32_t x) {  // a hash (Wellons' lowbias32)
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// One block from each of `samples` equal ranges of ids, at a place that no pattern in the ids lines up with.
__device__ inline void sort_sample(const SampleParams& p, const SampleShared& shared) {
  const uint64_t most = p.id_bits == 32 ? ~uint64_t{0} : (uint64_t{1} << (32 + p.id_bits)) - 1;
  uint64_t* sample = shared.splitters + kTail;
  for (int i = threadIdx.x; i < p.samples; i += kThreads) {
    const int64_t begin = i * p.num_blocks / p.samples, end = (i + 1) * p.num_blocks / p.samples;
    const int64_t id = begin + mix(i) % static_cast<uint32_t>(end - begin);
    sample[i] = element_of(__ldcg(p.scores + id), id, p.id_bits);
  }
  __syncthreads();
  sort_shared(sample, p.samples);
  // Beyond the sample the density is a guess: intervals of half the width of the outermost eight.
  if (threadIdx.x < kTail) {
    const uint64_t step = threadIdx.x + 1;
    const uint64_t low = sample[0], low_width = (sample[kTail] - low) / 2;
    shared.splitters[kTail - step] = low / step > low_width ? low - step * low_width : 0;
    const uint64_t high = sample[p.samples - 1], high_width = (high - sample[p.samples - 1 - kTail]) / 2;
    sample[p.samples - 1 + step] = (most - high) / step > high_width ? high + step * high_width : most;
  }
  __syncthreads();
}

// x in [low, high) to 0 .. bins - 1, monotonically: every step below is monotonic in x.
__device__ __forceinline__ int interpolate(uint64_t x, uint64_t low, uint64_t high, int bins) {
  const float position = __fdividef(static_cast<float>(x - low), static_cast<float>(high - low));
  return min(bins - 1, static_cast<int>(position * bins));
}

__device__ __forceinline__ int bin_of(const SampleParams& p, const uint64_t* splitters, uint64_t x) {
  const int count = p.samples + 2 * kTail;
  int interval = 0;  // the number of splitters <= x
  for (int rest = count; rest > 0;) {
    const int half = rest / 2;
    if (splitters[interval + half] <= x) {
      interval += half + 1, rest -= half + 1;
    } else {
      rest = half;
    }
  }
  const uint64_t most = p.id_bits == 32 ? ~uint64_t{0} : uint64_t{1} << (32 + p.id_bits);
  const uint64_t low = interval > 0 ? splitters[interval - 1] : 0, high = interval < count ? splitters[interval] : most;
  const int bins = p.bins_per_interval, edge = bins / 8;
  const int first = interval * bins;
  // Where the ends have different keys, ties of either may fill the interval: they get bins of their own, split by id.
  const uint64_t low_end = ((low >> p.id_bits) + 1) << p.id_bits, high_begin = high >> p.id_bits << p.id_bits;
  if (low_end > high_begin) return first + interpolate(x, low, high, bins);
  if (x < low_end) return first + interpolate(x, low, low_end, edge);
  if (x >= high_begin) return first + bins - edge + interpolate(x, high_begin, high, edge);
  return first + edge + interpolate(x, low_end, high_begin, bins - 2 * edge);
}

// Appends this CTA's candidates to its list: tiles of kThreads blocks go round the team.
__device__ inline void list_candidates(const SampleParams& p, const Team& team, const SampleShared& shared) {
  const uint64_t cut = p.intervals <= p.samples + 2 * kTail ? shared.splitters[p.intervals - 1] : ~uint64_t{0};
  const int lane = threadIdx.x % 32;
  constexpr int kInFlight = 4;
  const int64_t stride = int64_t{team.size} * kThreads;
  for (int64_t first = int64_t{team.rank} * kThreads; first < p.num_blocks; first += kInFlight * stride) {
    float score[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t id = first + i * stride + threadIdx.x;
      if (id < p.num_blocks) score[i] = __ldcg(p.scores + id);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t id = first + i * stride + threadIdx.x;
      const uint64_t element = id < p.num_blocks ? element_of(score[i], id, p.id_bits) : ~uint64_t{0};
      const bool candidate = id < p.num_blocks && element < cut;
      const unsigned candidates = __ballot_sync(~0u, candidate);
      if (candidates == 0) continue;
      uint32_t base = 0;
      if (lane == 0) base = atomicAdd(shared.num_listed, static_cast<uint32_t>(__popc(candidates)));
      const uint32_t at = __shfl_sync(~0u, base, 0) + __popc(candidates & ((1u << lane) - 1));
      if (candidate && at < static_cast<uint32_t>(p.max_listed)) shared.listed[at] = element;
    }
  }
}

// Turns totals of bins into starts[0 .. bins], finds the largest bin that reaches into the k, and returns the sum.
__device__ inline uint32_t scan_totals(const SampleParams& p, const uint32_t* totals, const SampleShared& shared, int bins) {
  uint32_t count[kMaxBins / kThreads], sum = 0;
  const int each = p.max_bins / kThreads;  // 2, 4 or 8
#pragma unroll
  for (int i = 0; i < kMaxBins / kThreads; i += 2) {
    const int bin = threadIdx.x * each + i;
    const uint2 pair = i < each && bin < bins ? *reinterpret_cast<const uint2*>(totals + bin) : make_uint2(0, 0);
    count[i] = pair.x, count[i + 1] = pair.y;
    sum += pair.x + pair.y;
  }
  uint32_t total;
  uint32_t start = block_exclusive_sum<kThreads>(sum, shared.scan, &total);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kMaxBins / kThreads; ++i) {
    if (i >= each) continue;
    shared.starts[threadIdx.x * each + i] = start;
    if (start < p.k) largest = max(largest, count[i]);
    start += count[i];
  }
  if (threadIdx.x == kThreads - 1) shared.starts[p.max_bins] = total;
#pragma unroll
  for (int delta = 16; delta > 0; delta /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, delta));
  if (threadIdx.x % 32 == 0) atomicMax(shared.largest, largest);
  __syncthreads();
  return total;
}

__device__ __forceinline__ void write_id(const SampleParams& p, uint32_t position, uint64_t element) {
  if (position < p.k) p.ids[position] = static_cast<int64_t>(element & ((uint64_t{1} << p.id_bits) - 1));
}

// Ranks the elements of one bin by counting, in a warp.
template <int kHeld>
__device__ __forceinline__ void rank_bin(const SampleParams& p, const uint64_t* bin, uint32_t start, int count) {
  const int lane = threadIdx.x % 32;
  uint64_t own[kHeld];
  uint32_t rank[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) own[i] = lane + 32 * i < count ? bin[lane + 32 * i] : 0;
#pragma unroll 4
  for (int j = 0; j < count; ++j) {
    const uint64_t other = bin[j];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) rank[i] += other < own[i];
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (lane + 32 * i < count) write_id(p, start + rank[i], own[i]);
  }
}

// Bins go round the warps of the team.
__device__ inline void order_bins(const SampleParams& p, const Team& team, const SampleShared& shared, int bins) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t* large = shared.places;  // no longer needed
  uint64_t* staged = shared.sorted + warp * (p.max_sorted / kWarps);
  const int warp_bin = min(kWarpBin, p.max_sorted / kWarps);
  for (int bin = warp * team.size + team.rank; bin < bins; bin += kWarps * team.size) {
    const uint32_t start = shared.starts[bin];
    const int count = static_cast<int>(shared.starts[bin + 1] - start);
    if (start >= p.k) break;
    if (count == 0) continue;
    if (count > warp_bin) {
      if (lane == 0) large[atomicAdd(shared.num_large, 1u)] = bin;
      continue;
    }
    __syncwarp();
    for (int i = lane; i < count; i += 32) staged[i] = __ldcg(p.binned + start + i);
    __syncwarp();
    if (count <= 32) {
      rank_bin<1>(p, staged, start, count);
    } else if (count <= 64) {
      rank_bin<2>(p, staged, start, count);
    } else {
      rank_bin<4>(p, staged, start, count);
    }
  }
  if (*shared.largest <= static_cast<uint32_t>(warp_bin)) return;
  __syncthreads();
  const uint32_t num_large = *shared.num_large;
  for (uint32_t i = 0; i < num_large; ++i) {
    const uint32_t start = shared.starts[large[i]];
    const int count = static_cast<int>(shared.starts[large[i] + 1] - start);
    for (int j = threadIdx.x; j < count; j += kThreads) shared.sorted[j] = __ldcg(p.binned + start + j);
    __syncthreads();
    sort_shared(shared.sorted, count);
    for (int j = threadIdx.x; j < count; j += kThreads) write_id(p, start + j, shared.sorted[j]);
    __syncthreads();
  }
}

// False, with nothing written to p.ids, where the sample does not serve; every CTA of the team returns the same.
// p.totals must be zero; the team is in step on entry.
__device__ inline bool sample_select(const SampleParams& p, const Team& team, const SampleShared& shared) {
  const int bins = p.intervals * p.bins_per_interval;
  if (threadIdx.x < 3) shared.num_listed[threadIdx.x] = 0;  // and num_large, largest
  for (int bin = threadIdx.x; bin < p.max_bins; bin += kThreads) shared.offsets[bin] = 0;
  sort_sample(p, shared);
  list_candidates(p, team, shared);
  __syncthreads();

  const bool overflows = *shared.num_listed > static_cast<uint32_t>(p.max_listed);
  const int listed = overflows ? 0 : static_cast<int>(*shared.num_listed);
  for (int i = threadIdx.x; i < listed; i += kThreads) {
    const int bin = bin_of(p, shared.splitters, shared.listed[i]);
    shared.places[i] = static_cast<uint32_t>(bin) << 16 | atomicAdd(shared.offsets + bin, 1u);
  }
  __syncthreads();

  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    if (const uint32_t count = shared.offsets[bin]) shared.offsets[bin] = atomicAdd(p.totals + bin, count);
  }
  if (overflows && threadIdx.x == 0) atomicAdd(p.totals + p.max_bins, 1u);
  team.sync();
  const uint32_t total = scan_totals(p, p.totals, shared, bins);
  if (__ldcg(p.totals + p.max_bins) > 0) return false;
  if (total < p.k || *shared.largest > static_cast<uint32_t>(p.max_sorted)) return false;

  for (int i = threadIdx.x; i < listed; i += kThreads) {
    const uint32_t bin = shared.places[i] >> 16, start = shared.starts[bin];
    if (start < p.k) p.binned[start + shared.offsets[bin] + (shared.places[i] & 0xffff)] = shared.listed[i];
  }
  team.sync();
  order_bins(p, team, shared, bins);
  return true;
}

}  // namespace pagedkv::eviction
