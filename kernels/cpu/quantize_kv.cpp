// quantize_kv: int8 blocks and their scales from floating-point ones.
#include <vector>

#include "hadamard.h"
#include "parallel.h"
#include "quantize.h"

namespace pagedkv {
namespace {

// Groups of `rows` tokens of one head share a scale: block_size of them, or one.
template <class T>
void quantize(const QuantizeParams& p) {
  const int64_t rows = p.token_head ? 1 : p.block_size;
  const int64_t groups = p.num_blocks * (p.block_size / rows) * p.num_kv_heads;
  const int64_t out_stride = p.num_kv_heads * p.head_dim;
  parallel_ranges(groups, 1 + 32768 / (rows * p.head_dim), [&](int64_t begin, int64_t end) {
    std::vector<float> rotated(p.rotated ? rows * p.head_dim : 0);
    for (int64_t g = begin; g < end; ++g) {
      const int64_t head = g % p.num_kv_heads;
      const int64_t first = g / p.num_kv_heads * rows;  // token of the pool
      const T* x = static_cast<const T*>(p.kv) + first / p.block_size * p.stride_block + first % p.block_size * p.stride_token +
                   head * p.stride_head;
      int8_t* q = p.q + first * out_stride + head * p.head_dim;

      const auto encode = [&](const auto* x, int64_t stride) {
        MaxAbs max_abs;
        for (int64_t r = 0; r < rows; ++r) max_abs.add(x + r * stride, p.head_dim);
        const float scale = scale_for(max_abs.value());
        p.scale[g] = scale == 0.0f ? 1.0f : scale;
        for (int64_t r = 0; r < rows; ++r) encode_row(x + r * stride, p.scale[g], q + r * out_stride, p.head_dim);
      };
      if (p.rotated) {
        for (int64_t r = 0; r < rows; ++r) hadamard_transform(x + r * p.stride_token, rotated.data() + r * p.head_dim, p.head_dim);
        encode(rotated.data(), p.head_dim);
      } else {
        encode(x, p.stride_token);
      }
    }
  });
}

}  // namespace

void quantize_kv(const QuantizeParams& p, void*) {
  dispatch_float(p.dtype, [&](auto type) { quantize<decltype(type)>(p); });
}

}  // namespace pagedkv
