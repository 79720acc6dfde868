// Plans and launches a selection, with or without the scoring before it.
//
//   num_blocks <= kSmallPool   one CTA, in shared memory
//   more                       one cooperative launch: all SMs score, and select by buckets. Where one overflows: by sample.
//                              Where that fails, too, or k or num_blocks is too large for its tables: by radix
//   no cooperative launches    radix, a launch a stage
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "eviction/bucket_select.cuh"
#include "eviction/radix_select.cuh"
#include "eviction/sample_select.cuh"
#include "eviction/score.cuh"
#include "eviction/small_select.cuh"

namespace pagedkv::eviction {

struct SelectParams {
  ScoreParams score;
  bool aligned;  // rows_aligned(score)
  BucketParams buckets;
  bool sampled;  // the sample may serve where buckets overflow
  SampleParams sample;
  RadixParams radix;
};

// kScore: score.scores is written first; otherwise it is the input.
template <bool kScore>
__global__ void __launch_bounds__(kThreads, 1) select_cooperative(const __grid_constant__ SelectParams p) {
  extern __shared__ __align__(16) char memory[];
  BucketShared& shared = *reinterpret_cast<BucketShared*>(memory);
  const auto grid = cooperative_groups::this_grid();
  const Team team{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};

  clear(p.buckets, team, shared);
  if (p.sampled) {
    for (int i = team.rank * kThreads + threadIdx.x; i <= p.sample.max_bins; i += team.size * kThreads) p.sample.totals[i] = 0;
  }
  auto cleared = grid.barrier_arrive();  // and a barrier of the CTA; nobody needs to wait before there is something to add
  if constexpr (kScore) {
    score_blocks(p.score, p.aligned, [&](int64_t, bool is_one, float score) {
      if (is_one) count_coarse(shared.histogram, score);
    });
  } else {
    count_scores(p.buckets, team, shared);
  }
  grid.barrier_wait(std::move(cleared));
  merge_histogram(p.buckets, shared);
  team.sync();
  fill_buckets(p.buckets, team, shared);
  team.sync();
  if (order_buckets(p.buckets, team, shared)) return;

  team.sync();
  if (p.sampled && sample_select(p.sample, team, SampleShared(memory, p.sample))) return;
  __syncthreads();
  radix_select(p.radix, team, *reinterpret_cast<RadixShared*>(memory));
}

template <bool kScore>
__global__ void __launch_bounds__(kThreads, 1) select_stage(const __grid_constant__ SelectParams p, int stage) {
  extern __shared__ __align__(16) char memory[];
  const Team grid{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  if constexpr (kScore) {
    if (stage == 0) score_blocks(p.score, p.aligned, [](int64_t, bool, float) {});
  }
  radix_stage(p.radix, grid, *reinterpret_cast<RadixShared*>(memory), stage);
}

// ------------------------------------------------------------------------------------------- planning

// Workspace, in pieces that are multiples of 16 bytes. The three ways to select take turns with its elements.
struct Workspace {
  static constexpr size_t kTotals = kMaxBins + 8, kHistograms = 4 * kDigits, kCounts = 2 * kMaxCtas, kDigitCounts = size_t{kDigits} * kMaxCtas;
  static constexpr int kMaxSorted = 4096;
  static size_t counters(int64_t buckets) { return (buckets * BucketParams::stride(buckets) + 1 + 3) / 4 * 4; }
  static size_t bytes(int64_t num_blocks, int64_t k) {
    if (k == 0 || num_blocks <= kSmallPool) return 0;
    const int64_t buckets = BucketParams::buckets(num_blocks, k);
    const size_t elements = std::max<size_t>(buckets * kBucketRoom, 2 * k + kMaxSorted);
    return 4 * (kCoarseBins + counters(buckets) + kTotals + kHistograms + kCounts + kDigitCounts) + 8 * elements;
  }
};

// Intervals that hold the k lowest but for a chance of about 1e-6: the sample's rank of the k-th is binomial.
inline int intervals_for(double fraction, int samples) {
  const double rank = fraction * samples, sigma = std::sqrt(rank * (1 - fraction));
  const int cut = static_cast<int>(std::ceil(rank + 4.5 * sigma)) + 2;
  return kTail + (cut < samples ? cut : samples + kTail + 1);
}

// Fills in p.sample and p.sampled. `shared_limit`: bytes of shared memory that a CTA may have.
inline void plan_sample(SelectParams& p, int64_t n, int64_t k, int team, size_t shared_limit) {
  SampleParams& s = p.sample;
  s.id_bits = 1;
  while ((int64_t{1} << s.id_bits) < n) ++s.id_bits;
  auto fits = [&](int samples, int bins, int listed, int sorted) {
    s.max_samples = samples, s.max_bins = bins, s.max_listed = listed, s.max_sorted = sorted;
    return SampleShared::bytes(s) <= shared_limit;
  };
  const bool any_fits = fits(kMaxSamples, kMaxBins, kMaxListed, Workspace::kMaxSorted)  // 208 KB: sm_90, 100
                        || fits(kMaxSamples, kMaxBins, 4096, Workspace::kMaxSorted)     // 160 KB: sm_80
                        || fits(kMaxSamples, 4096, 2048, 2048)                          // 89 KB: sm_86, 89, 120
                        || fits(512, 2048, 2048, 2048);                                 // 61 KB: sm_75
  if (!any_fits) return;

  const double fraction = static_cast<double>(k) / static_cast<double>(n);
  s.samples = 64;
  while (s.samples < s.max_samples && s.samples * 512 < n) s.samples *= 2;
  while (s.samples > 64 && intervals_for(fraction, s.samples) * kMinBinsPerInterval > s.max_bins) s.samples /= 2;
  s.intervals = intervals_for(fraction, s.samples);
  s.bins_per_interval = kMinBinsPerInterval;
  if (s.intervals * s.bins_per_interval > s.max_bins) return;
  while (s.intervals * s.bins_per_interval * 2 <= s.max_bins && int64_t{s.samples} * s.bins_per_interval * 16 < n) s.bins_per_interval *= 2;

  // What is expected, with room for chance and for pools where low scores come in runs.
  const double share = std::fmin(1.0, static_cast<double>(s.intervals - kTail) / s.samples);
  const double candidates = share * static_cast<double>(n) / team;
  const double mean_bin = static_cast<double>(n) / s.samples / s.bins_per_interval;
  p.sampled = 1.25 * candidates + 1024 <= s.max_listed && 8 * mean_bin <= s.max_sorted;
}

template <bool kScore>
void select(const ScoreParams& score, int64_t k, int64_t* ids, void* workspace, cudaStream_t stream) {
  const int64_t n = score.num_blocks;
  if (n <= kThreads) return launch_small<kScore, 1>(score, k, ids, stream);
  if (n <= kSmallPool) return launch_small<kScore, kSmallItems>(score, k, ids, stream);

  SelectParams p{};
  p.score = score;
  p.aligned = kScore && rows_aligned(score);
  p.buckets.num_buckets = static_cast<int>(BucketParams::buckets(n, k));
  p.buckets.filled_stride = static_cast<int>(BucketParams::stride(p.buckets.num_buckets));
  uint32_t* words = static_cast<uint32_t*>(workspace);
  p.buckets.coarse = words, words += kCoarseBins;
  p.buckets.failed = words;
  p.buckets.filled = words + 1, words += Workspace::counters(p.buckets.num_buckets);
  p.sample.totals = words, words += Workspace::kTotals;
  p.radix.histograms = words, words += Workspace::kHistograms;
  p.radix.counts = words, words += Workspace::kCounts;
  p.radix.digits = words, words += Workspace::kDigitCounts;
  p.radix.ping = p.sample.binned = p.buckets.elements = reinterpret_cast<uint64_t*>(words);
  p.radix.pong = p.radix.ping + k;
  p.radix.scores = p.sample.scores = p.buckets.scores = score.scores;
  p.radix.num_blocks = p.sample.num_blocks = p.buckets.num_blocks = n;
  p.radix.k = p.sample.k = p.buckets.k = k;
  p.radix.ids = p.sample.ids = p.buckets.ids = ids;

  const int sms = device_attribute(cudaDevAttrMultiProcessorCount);
  if (!device_attribute(cudaDevAttrCooperativeLaunch)) {
    const unsigned grid = grid_for(n, kThreads, sms < kMaxCtas ? sms : kMaxCtas);
    for (int stage = 0; stage < kRadixStages; ++stage) select_stage<kScore><<<grid, kThreads, sizeof(RadixShared), stream>>>(p, stage);
    return check_launch("select_stage");
  }

  auto* kernel = select_cooperative<kScore>;
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  const size_t shared_limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - attributes.sharedSizeBytes;
  const int team = sms < kMaxCtas ? sms : kMaxCtas;  // launch bounds and shared memory allow one CTA an SM; more would only cost in barriers
  plan_sample(p, n, k, team, shared_limit);
  size_t shared = std::max(sizeof(BucketShared), sizeof(RadixShared));
  if (p.sampled) shared = std::max(shared, SampleShared::bytes(p.sample));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "cudaFuncSetAttribute");
  int per_sm = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kThreads, shared), "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  if (per_sm < 1) throw std::runtime_error("select_cooperative: a CTA of 1024 threads does not fit an SM");
  void* arguments[] = {&p};
  check(cudaLaunchCooperativeKernel(kernel, dim3(team), dim3(kThreads), arguments, shared, stream), "select_cooperative");
}

}  // namespace pagedkv::eviction
