// paged_attention: decode attention over a float16, bfloat16 or float32 paged cache.
#include "attention.h"
#include "tile_float.h"

namespace pagedkv {

size_t paged_attention_workspace(const AttentionParams&) { return 0; }  // see PartialResults

void paged_attention(const AttentionParams& p, void*, void*) {
  dispatch_float(p.cache_dtype, [&](auto cache) { attention<FloatTile<decltype(cache)>>(p); });
}

}  // namespace pagedkv
