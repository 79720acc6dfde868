// dequantize_kv: float32 = int8 * scale. Bound by memory; eight elements a thread and step, several steps in flight.
#include "common.cuh"

namespace pagedkv {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) dequantize(DequantizeParams p) {
  const int units_per_row = static_cast<int>(p.head_dim) / kUnit;
  const int64_t units = p.num_blocks * p.block_size * p.num_kv_heads * units_per_row;
  for (int64_t first = int64_t{blockIdx.x} * kThreads * kInFlight; first < units; first += int64_t{gridDim.x} * kThreads * kInFlight) {
    Unit<int8_t> q[kInFlight];
    float scale[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t unit = first + i * kThreads + threadIdx.x;
      if (unit >= units) continue;
      const Quotient row = divide(unit, units_per_row);
      const Quotient head = divide(row.quotient, static_cast<int>(p.num_kv_heads));
      const Quotient token = divide(head.quotient, static_cast<int>(p.block_size));
      q[i] = load_unit<kAligned>(p.q + token.quotient * p.stride_block + token.remainder * p.stride_token +
                                 head.remainder * p.stride_head + row.remainder * kUnit);
      scale[i] = p.scale[token.quotient * p.scale_stride_block + token.remainder * p.scale_stride_token + head.remainder * p.scale_stride_head];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t unit = first + i * kThreads + threadIdx.x;
      if (unit >= units) continue;
      float x[kUnit];
      to_floats(q[i], x);
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[j] = __fmul_rn(x[j], scale[i]);
      Unit<float> result;
      from_floats(x, result);
      store_unit<true>(p.kv + unit * kUnit, result);
    }
  }
}

}  // namespace

void dequantize_kv(const DequantizeParams& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  const int64_t units = p.num_blocks * p.block_size * p.num_kv_heads * (p.head_dim / kUnit);
  if (units == 0) return;
  const unsigned grid = grid_for(units, kThreads * kInFlight, 1 << 20);
  if (units_aligned<int8_t>(p.q, {p.stride_block, p.stride_token, p.stride_head})) {
    dequantize<true><<<grid, kThreads, 0, stream>>>(p);
  } else {
    dequantize<false><<<grid, kThreads, 0, stream>>>(p);
  }
  check_launch("dequantize_kv");
}

}  // namespace pagedkv
