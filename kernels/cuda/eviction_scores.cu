// eviction_scores: w_recency recency + w_frequency frequency + w_attention mean(attention_mass over valid tokens).
//
// Bound by memory: 5 bytes a token and 12 a block.
#include "eviction/score.cuh"

namespace pagedkv {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) score(ScoreParams p, bool aligned) {
  eviction::score_blocks(p, aligned, [](int64_t, bool, float) {});
}

}  // namespace

void eviction_scores(const ScoreParams& p, void* stream) {
  if (p.num_blocks == 0) return;
  const unsigned grid = grid_for(p.num_blocks, eviction::kTileRows * kThreads / 32, 1 << 20);
  score<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, eviction::rows_aligned(p));
  check_launch("eviction_scores");
}

}  // namespace pagedkv
