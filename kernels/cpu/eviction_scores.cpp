// eviction_scores: a weighted sum of recency, frequency and the mean attention mass of a block's valid tokens.
//
// Eight blocks at a time: one transposition adds up all their masses, and a block's score has the same bits wherever it
// stands among the eight.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "parallel.h"
#include "simd.h"

namespace pagedkv {
namespace {

using simd::Floats;
using simd::kLanes;

// Floats of attention mass, and flags of the mask, to fetch ahead: hardware prefetchers stop at the end of a page, and without
// this a core drew two thirds of the bandwidth that it has.
constexpr int64_t kAhead = 1024;

// Of `blocks` (1 to 8) blocks from `first` on; lanes past them repeat the last.
template <class BlockSize, class Blocks>
inline __attribute__((always_inline)) Floats mean_valid_mass(const ScoreParams& p, int64_t first, BlockSize block_size, Blocks blocks) {
  const int64_t whole = block_size / kLanes * kLanes;
  const float* mass[kLanes];
  const bool* valid[kLanes];
  Floats totals[kLanes];
  float counts[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) {
    const int64_t block = first + std::min<int64_t>(i, blocks - 1);
    mass[i] = p.attention_mass + block * p.attention_mass_stride;
    valid[i] = p.valid_mask + block * p.valid_mask_stride;
    __builtin_prefetch(mass[i] + kAhead);
    __builtin_prefetch(valid[i] + kAhead);
    totals[i] = simd::broadcast(0.0f);
    int count = 0;
    for (int64_t t = 0; t < whole; t += kLanes) {
      totals[i] = totals[i] + simd::load_where(mass[i] + t, valid[i] + t);
      uint64_t flags;  // eight bools of 0 or 1: their sum is the product's top byte
      std::memcpy(&flags, valid[i] + t, sizeof flags);
      count += static_cast<int>(flags * 0x0101010101010101ull >> 56);
    }
    counts[i] = static_cast<float>(count);
  }
  Floats total = simd::row_sums(totals);
  if (whole < block_size) {
    float sums[kLanes];
    simd::store(sums, total);
    for (int i = 0; i < kLanes; ++i) {
      for (int64_t t = whole; t < block_size; ++t) {
        if (valid[i][t]) sums[i] += mass[i][t], ++counts[i];
      }
    }
    total = simd::load(sums);
  }
  const Floats count = simd::load(counts);
  return simd::select_less(count, simd::broadcast(1.0f), simd::broadcast(0.0f), total / count);
}

template <class BlockSize>
void score_range(const ScoreParams& p, int64_t begin, int64_t end, BlockSize block_size) {
  const auto weigh = [&](const float* recency, const float* frequency, Floats mean, float* scores) {
    simd::store(scores, simd::broadcast(p.w_recency) * simd::load(recency) + simd::broadcast(p.w_frequency) * simd::load(frequency) +
                            simd::broadcast(p.w_attention) * mean);
  };
  int64_t b = begin;
  for (; b + kLanes <= end; b += kLanes) {
    weigh(p.recency + b, p.frequency + b, mean_valid_mass(p, b, block_size, std::integral_constant<int64_t, kLanes>{}), p.scores + b);
  }
  if (b == end) return;
  float recency[kLanes] = {}, frequency[kLanes] = {}, scores[kLanes];
  std::copy(p.recency + b, p.recency + end, recency);
  std::copy(p.frequency + b, p.frequency + end, frequency);
  weigh(recency, frequency, mean_valid_mass(p, b, block_size, end - b), scores);
  std::copy_n(scores, end - b, p.scores + b);
}

}  // namespace

void eviction_scores(const ScoreParams& p, void*) {
  parallel_ranges(p.num_blocks, 1 + 32768 / (p.block_size + 8), [&](int64_t begin, int64_t end) {
    if (p.block_size == 16) {  // the usual size: loops that the compiler knows the length of
      score_range(p, begin, end, std::integral_constant<int64_t, 16>{});
    } else {
      score_range(p, begin, end, p.block_size);
    }
  });
}

}  // namespace pagedkv
