// evict_blocks: eviction_scores and select_eviction_candidates in one launch. See eviction/launch.cuh.
#include "eviction/launch.cuh"

namespace pagedkv {

size_t evict_blocks_workspace(int64_t num_blocks, int64_t k) { return eviction::Workspace::bytes(num_blocks, k); }

void evict_blocks(const ScoreParams& p, int64_t k, int64_t* ids, void* workspace, void* stream) {
  if (k == 0) return eviction_scores(p, stream);
  eviction::select<true>(p, k, ids, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace pagedkv
