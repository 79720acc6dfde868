// Plans and launches a selection, with or without the scoring before it.
//
//   num_blocks <= 2,048        one CTA sorts them all
//   some thousand blocks       one cooperative launch: all SMs score, one CTA selects by sample in shared memory
//   more                       one cooperative launch: all SMs score and select by sample
//   k or num_blocks too large for the sample's tables, and samples that failed: radix, in the same launch
//   no cooperative launches    radix, a launch a stage
#pragma once

#include <algorithm>
#include <cmath>

#include "eviction/radix_select.cuh"
#include "eviction/sample_select.cuh"
#include "eviction/score.cuh"

namespace pagedkv::eviction {

constexpr int64_t kTinyPool = 2048;
constexpr int64_t kSoloPool = 4096;  // up to here one CTA may select alone; at 16,384 it took 38 us on an H200, the team 22

struct SelectParams {
  ScoreParams score;
  bool aligned;  // rows_aligned(score)
  bool sampled;  // try the sample first
  bool solo;     // one CTA selects
  SampleParams sample;
  RadixParams radix;
};

// kScore: score.scores is written first; otherwise it is the input.
template <bool kScore>
__global__ void __launch_bounds__(kThreads, 1) select_tiny(ScoreParams score, bool aligned, int64_t k, int64_t* ids, int id_bits) {
  __shared__ uint64_t elements[kTinyPool];
  if constexpr (kScore) {
    score_blocks(score, aligned);
    __syncthreads();
  }
  const int count = static_cast<int>(score.num_blocks);
  for (int i = threadIdx.x; i < count; i += kThreads) elements[i] = element_of(score.scores[i], i, id_bits);
  __syncthreads();
  sort_shared(elements, count);
  for (int i = threadIdx.x; i < k; i += kThreads) ids[i] = static_cast<int64_t>(elements[i] & ((uint64_t{1} << id_bits) - 1));
}

template <bool kScore>
__global__ void __launch_bounds__(kThreads, 1) select_cooperative(const __grid_constant__ SelectParams p) {
  extern __shared__ __align__(16) char memory[];
  const Team grid{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  if constexpr (kScore) score_blocks(p.score, p.aligned);
  if (p.sampled && !p.solo) {
    for (int i = grid.rank * kThreads + threadIdx.x; i <= p.sample.max_bins; i += grid.size * kThreads) p.sample.totals[i] = 0;
  }
  grid.sync();
  if (p.solo && grid.rank > 0) return;
  const Team team = p.solo ? Team{0, 1} : grid;
  if (p.sampled && sample_select(p.sample, team, SampleShared(memory, p.sample))) return;
  __syncthreads();
  radix_select(p.radix, team, *reinterpret_cast<RadixShared*>(memory));
}

template <bool kScore>
__global__ void __launch_bounds__(kThreads, 1) select_stage(const __grid_constant__ SelectParams p, int stage) {
  extern __shared__ __align__(16) char memory[];
  const Team grid{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  if constexpr (kScore) {
    if (stage == 0) score_blocks(p.score, p.aligned);
  }
  radix_stage(p.radix, grid, *reinterpret_cast<RadixShared*>(memory), stage);
}

// ------------------------------------------------------------------------------------------- planning

// Workspace, in 8-byte words so that everything is aligned.
struct Workspace {
  static constexpr size_t kTotals = kMaxBins + 8, kHistograms = 4 * kDigits, kCounts = 2 * kMaxCtas, kDigitCounts = size_t{kDigits} * kMaxCtas;
  static constexpr int kMaxSorted = 4096;
  static size_t bytes(int64_t num_blocks, int64_t k) {
    if (k == 0 || num_blocks <= kTinyPool) return 0;
    return 4 * (kTotals + kHistograms + kCounts + kDigitCounts) + 8 * (2 * static_cast<size_t>(k) + kMaxSorted);
  }
};

// Intervals that hold the k lowest but for a chance of about 1e-6: the sample's rank of the k-th is binomial.
inline int intervals_for(double fraction, int samples) {
  const double rank = fraction * samples, sigma = std::sqrt(rank * (1 - fraction));
  const int cut = static_cast<int>(std::ceil(rank + 4.5 * sigma)) + 2;
  return kTail + (cut < samples ? cut : samples + kTail + 1);
}

// Fills in p.sample, p.sampled and p.solo. `shared_limit`: bytes of shared memory that a CTA may have.
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
  p.solo = n <= kSoloPool && 1.1 * share * static_cast<double>(n) <= s.max_listed;
  const double candidates = share * static_cast<double>(n) / team;
  const double mean_bin = static_cast<double>(n) / s.samples / s.bins_per_interval;
  p.sampled = p.solo || (1.25 * candidates + 1024 <= s.max_listed && 8 * mean_bin <= s.max_sorted);
}

template <bool kScore>
void select(const ScoreParams& score, int64_t k, int64_t* ids, void* workspace, cudaStream_t stream) {
  const int64_t n = score.num_blocks;
  SelectParams p{};
  p.score = score;
  p.aligned = kScore && rows_aligned(score);
  if (n <= kTinyPool) {
    select_tiny<kScore><<<1, kThreads, 0, stream>>>(score, p.aligned, k, ids, 12);
    return check_launch("select_tiny");
  }

  uint32_t* words = static_cast<uint32_t*>(workspace);
  p.sample.totals = words, words += Workspace::kTotals;
  p.radix.histograms = words, words += Workspace::kHistograms;
  p.radix.counts = words, words += Workspace::kCounts;
  p.radix.digits = words, words += Workspace::kDigitCounts;
  p.radix.ping = p.sample.binned = reinterpret_cast<uint64_t*>(words);
  p.radix.pong = p.radix.ping + k;
  p.radix.scores = p.sample.scores = score.scores;
  p.radix.num_blocks = p.sample.num_blocks = n;
  p.radix.k = p.sample.k = k;
  p.radix.ids = p.sample.ids = ids;

  const int sms = device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t score_ctas = (n + kTileRows * kWarps - 1) / (kTileRows * kWarps);
  if (!device_attribute(cudaDevAttrCooperativeLaunch)) {
    const unsigned grid = grid_for(n, kThreads, sms < kMaxCtas ? sms : kMaxCtas);
    for (int stage = 0; stage < kRadixStages; ++stage) select_stage<kScore><<<grid, kThreads, sizeof(RadixShared), stream>>>(p, stage);
    return check_launch("select_stage");
  }

  auto* kernel = select_cooperative<kScore>;
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  const size_t shared_limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - attributes.sharedSizeBytes;
  int team = sms < kMaxCtas ? sms : kMaxCtas;  // launch bounds and shared memory allow one CTA an SM; more would only cost in barriers
  plan_sample(p, n, k, team, shared_limit);
  size_t shared = sizeof(RadixShared);
  if (p.sampled) shared = std::max(shared, SampleShared::bytes(p.sample));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "cudaFuncSetAttribute");
  int per_sm = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kThreads, shared), "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  if (per_sm < 1) throw std::runtime_error("select_cooperative: a CTA of 1024 threads does not fit an SM");
  // Fewer CTAs meet sooner: a solo selection needs no more than what scores fastest.
  if (p.solo) team = static_cast<int>(std::min<int64_t>(team, kScore ? 4 * score_ctas : 1));
  void* arguments[] = {&p};
  check(cudaLaunchCooperativeKernel(kernel, dim3(team), dim3(kThreads), arguments, shared, stream), "select_cooperative");
}

}  // namespace pagedkv::eviction
