// quant_paged_attention: decode attention over an int8 paged cache.
#include "attention.h"
#if defined(PAGEDKV_VNNI)
#include "tile_vnni.h"
#else
#include "tile_float.h"
#endif

namespace pagedkv {

size_t quant_paged_attention_workspace(const AttentionParams&) { return 0; }  // see PartialResults

void quant_paged_attention(const AttentionParams& p, void*, void*) {
#if defined(PAGEDKV_VNNI)
  two_digits_serve(p) ? attention<VnniTile<2>>(p) : attention<VnniTile<4>>(p);
#else
  attention<FloatTile<int8_t>>(p);
#endif
}

}  // namespace pagedkv
