#include "simd.h"

namespace pagedkv {

const char* instruction_set() {
#if defined(PAGEDKV_VNNI)
  return "avx512_vnni";
#elif defined(PAGEDKV_AVX2)
  return "avx2";
#else
  return "portable";
#endif
}

}  // namespace pagedkv
