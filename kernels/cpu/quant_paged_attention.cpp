// quant_paged_attention: decode attention over an int8 paged cache.
#include "attention.h"
#include "tile_float.h"

namespace pagedkv {

size_t quant_paged_attention_workspace(const AttentionParams& p) { return attention_workspace(p); }

void quant_paged_attention(const AttentionParams& p, void* workspace, void*) { attention<FloatTile<int8_t>>(p, workspace); }

}  // namespace pagedkv
