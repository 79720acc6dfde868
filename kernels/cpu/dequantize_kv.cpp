// dequantize_kv: q * scale.
#include "parallel.h"
#include "simd.h"

namespace pagedkv {

void dequantize_kv(const DequantizeParams& p, void*) {
  const int64_t rows = p.num_blocks * p.block_size * p.num_kv_heads;
  parallel_ranges(rows, 1 + 32768 / p.head_dim, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row % p.num_kv_heads;
      const int64_t token = row / p.num_kv_heads % p.block_size;
      const int64_t block = row / p.num_kv_heads / p.block_size;
      const int8_t* q = p.q + block * p.stride_block + token * p.stride_token + head * p.stride_head;
      const float scale = p.scale[block * p.scale_stride_block + token * p.scale_stride_token + head * p.scale_stride_head];
      for (int64_t i = 0; i < p.head_dim; i += simd::kLanes) {
        simd::store(p.kv + row * p.head_dim + i, simd::load(q + i) * simd::broadcast(scale));
      }
    }
  });
}

}  // namespace pagedkv
