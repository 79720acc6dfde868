// quant_paged_attention: decode attention over an int8 paged cache.
#include "attention.h"
#if defined(PAGEDKV_VNNI)
#include "tile_vnni.h"
#else
#include "tile_float.h"
#if defined(PAGEDKV_AVX2)
#include "tile_int16.h"
#endif
#endif

namespace pagedkv {

size_t quant_paged_attention_workspace(const AttentionParams&) { return 0; }  // see PartialResults

void quant_paged_attention(const AttentionParams& p, void*, void*) {
#if defined(PAGEDKV_VNNI)
  sixteen_bits_serve(p) ? attention<VnniTile<2>>(p) : attention<VnniTile<4>>(p);
#elif defined(PAGEDKV_AVX2)
  sixteen_bits_serve(p) ? attention<Int16Tile>(p) : attention<FloatTile<int8_t>>(p);
#else
  attention<FloatTile<int8_t>>(p);
#endif
}

}  // namespace pagedkv
