// eviction_scores: a weighted sum of recency, frequency and the mean attention mass of a block's valid tokens.
#include "parallel.h"
#include "simd.h"

namespace pagedkv {
namespace {

// Floats of attention mass, and flags of the mask, to fetch ahead: hardware prefetchers stop at the end of a page, and without
// this a core drew two thirds of the bandwidth that it has.
constexpr int64_t kAhead = 1024;

float mean_valid_mass(const float* mass, const bool* valid, int64_t block_size) {
  simd::Floats total = simd::broadcast(0.0f);
  int64_t count = 0, t = 0;
  for (; t + simd::kLanes <= block_size; t += simd::kLanes) {
    total = total + simd::load_where(mass + t, valid + t);
    uint64_t flags;  // eight bools of 0 or 1: their sum is the product's top byte
    std::memcpy(&flags, valid + t, sizeof flags);
    count += static_cast<int64_t>(flags * 0x0101010101010101ull >> 56);
  }
  float sum = simd::sum(total);
  for (; t < block_size; ++t) {
    if (valid[t]) sum += mass[t], ++count;
  }
  return count == 0 ? 0.0f : sum / static_cast<float>(count);
}

}  // namespace

void eviction_scores(const ScoreParams& p, void*) {
  parallel_ranges(p.num_blocks, 1 + 32768 / (p.block_size + 8), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const float* mass = p.attention_mass + b * p.attention_mass_stride;
      __builtin_prefetch(mass + kAhead);
      __builtin_prefetch(p.valid_mask + b * p.valid_mask_stride + kAhead);
      const float mean = mean_valid_mass(mass, p.valid_mask + b * p.valid_mask_stride, p.block_size);
      p.scores[b] = p.w_recency * p.recency[b] + p.w_frequency * p.frequency[b] + p.w_attention * mean;
    }
  });
}

}  // namespace pagedkv
