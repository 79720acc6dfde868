// quant_paged_attention: decode attention over an int8 paged cache.
#include "attention.h"
#if defined(PAGEDKV_VNNI)
#include "tile_vnni.h"
#else
#include "tile_float.h"
#endif

namespace pagedkv {

size_t quant_paged_attention_workspace(const AttentionParams& p) { return attention_workspace(p); }

void quant_paged_attention(const AttentionParams& p, void* workspace, void*) {
#if defined(PAGEDKV_VNNI)
  two_digits_serve(p) ? attention<VnniTile<2>>(p, workspace) : attention<VnniTile<4>>(p, workspace);
#else
  attention<FloatTile<int8_t>>(p, workspace);
#endif
}

}  // namespace pagedkv
