// select_eviction_candidates: the k lowest scores, ascending, ties to the lower block id. See eviction/launch.cuh.
#include "eviction/launch.cuh"

namespace pagedkv {

size_t select_eviction_candidates_workspace(int64_t num_blocks, int64_t k) { return eviction::Workspace::bytes(num_blocks, k); }

void select_eviction_candidates(const float* scores, int64_t num_blocks, int64_t k, int64_t* ids, void* workspace, void* stream) {
  if (k == 0) return;
  ScoreParams p{};
  p.num_blocks = num_blocks;
  p.scores = const_cast<float*>(scores);  // read only: nothing is scored
  eviction::select<false>(p, k, ids, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace pagedkv
