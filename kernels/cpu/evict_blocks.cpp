// evict_blocks: score, then select. Calling the two ops makes the result theirs bit for bit, and costs nothing: scores stay in cache.
#include "../ops.h"

namespace pagedkv {

size_t evict_blocks_workspace(int64_t num_blocks, int64_t k) { return select_eviction_candidates_workspace(num_blocks, k); }

void evict_blocks(const ScoreParams& p, int64_t k, int64_t* ids, void* workspace, void* stream) {
  eviction_scores(p, stream);
  if (k > 0) select_eviction_candidates(p.scores, p.num_blocks, k, ids, workspace, stream);
}

}  // namespace pagedkv
