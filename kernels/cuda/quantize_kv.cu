// quantize_kv: int8 = round(x / scale), scale = max|x| / 127 over a (block, head) or a (block, token, head).
//
// Bound by memory: 16-byte loads, and a group is read once as long as it fits its warp's registers.
#include "quantization/int8.cuh"

namespace pagedkv {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMaxCtas = 1 << 20;

template <class T>
__device__ __forceinline__ const T* row_of(const QuantizeParams& p, int64_t block, int64_t token, int64_t head) {
  return static_cast<const T*>(p.kv) + block * p.stride_block + token * p.stride_token + head * p.stride_head;
}

// A warp takes a (block, head): its lanes hold kHeld units each of the block_size x head_dim values at a time.
template <class T, bool kAligned, bool kRotated, int kHeld>
__global__ void __launch_bounds__(kThreads) quantize_block_heads(QuantizeParams p) {
  const int lane = threadIdx.x % 32;
  const int units_per_row = static_cast<int>(p.head_dim) / kUnit;
  const int block_size = static_cast<int>(p.block_size);
  const int units = block_size * units_per_row;
  const int64_t groups = p.num_blocks * p.num_kv_heads;
  for (int64_t g = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; g < groups; g += int64_t{gridDim.x} * kWarps) {
    const Quotient at = divide(g, static_cast<int>(p.num_kv_heads));
    Held<kRotated, T> held[kHeld];
    auto load = [&](UnitWalk& walk) {
      Unit<T> raw[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i, walk.advance()) {
        raw[i] = {};
        if (walk.offset < block_size) raw[i] = load_unit<kAligned>(row_of<T>(p, at.quotient, walk.offset, at.remainder) + walk.part * kUnit);
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) held[i] = hold<kRotated>(raw[i], static_cast<int>(p.head_dim));
    };
    float max_abs = 0.f;
    UnitWalk walk(lane, units_per_row);
    for (int unit = 0; unit < units; unit += 32 * kHeld) {
      UnitWalk here = walk;
      load(walk);
#pragma unroll
      for (int i = 0; i < kHeld; ++i, here.advance()) {
        if (here.offset < block_size) max_abs = max_magnitude(max_abs, held[i]);
      }
    }
    float scale = scale_for(group_max_magnitude(max_abs));
    if (scale == 0.f) scale = 1.f;
    if (lane == 0) p.scale[g] = scale;
    const Encoder encode(scale);
    walk = UnitWalk(lane, units_per_row);
    for (int unit = 0; unit < units; unit += 32 * kHeld) {
      UnitWalk here = walk;
      if (units > 32 * kHeld) load(walk);  // else all of it is held
#pragma unroll
      for (int i = 0; i < kHeld; ++i, here.advance()) {
        if (here.offset >= block_size) continue;
        float x[kUnit];
        to_floats(held[i], x);
        const int64_t row = (at.quotient * block_size + here.offset) * p.num_kv_heads + at.remainder;
        store_unit<true>(p.q + row * p.head_dim + here.part * kUnit, encode(x));
      }
    }
  }
}

// kLanes lanes take a (block, token, head), one unit each; a thread has several groups in flight.
template <class T, bool kAligned, bool kRotated, int kLanes>
__global__ void __launch_bounds__(kThreads) quantize_token_heads(QuantizeParams p) {
  constexpr int kInFlight = 4;
  constexpr int kGroups = kThreads / kLanes;  // of a CTA, at a time
  const int unit = threadIdx.x % kLanes;
  const bool has_unit = unit < static_cast<int>(p.head_dim) / kUnit;
  const int64_t groups = p.num_blocks * p.block_size * p.num_kv_heads;
  for (int64_t first = int64_t{blockIdx.x} * kGroups * kInFlight; first < groups; first += int64_t{gridDim.x} * kGroups * kInFlight) {
    Unit<T> held[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t g = first + i * kGroups + threadIdx.x / kLanes;
      held[i] = {};
      if (g >= groups || !has_unit) continue;
      const Quotient head = divide(g, static_cast<int>(p.num_kv_heads));
      const Quotient token = divide(head.quotient, static_cast<int>(p.block_size));
      held[i] = load_unit<kAligned>(row_of<T>(p, token.quotient, token.remainder, head.remainder) + unit * kUnit);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t g = first + i * kGroups + threadIdx.x / kLanes;
      float x[kUnit];
      to_floats(held[i], x);
      if constexpr (kRotated) hadamard_transform<kLanes>(x, hadamard_size(p.head_dim), unit);
      const float max_abs = kRotated ? max_magnitude(0.f, x) : max_magnitude(0.f, held[i]);
      float scale = scale_for(group_max_magnitude<kLanes>(max_abs));
      if (scale == 0.f) scale = 1.f;
      if (g >= groups || !has_unit) continue;
      if (unit == 0) p.scale[g] = scale;
      store_unit<true>(p.q + g * p.head_dim + unit * kUnit, Encoder(scale)(x));
    }
  }
}

template <class T, bool kAligned, bool kRotated>
void launch(const QuantizeParams& p, cudaStream_t stream) {
  const int units_per_row = static_cast<int>(p.head_dim) / kUnit;
  if (!p.token_head) {
    const unsigned grid = grid_for(p.num_blocks * p.num_kv_heads, kWarps, kMaxCtas);
    if (p.block_size * units_per_row <= 64) {
      quantize_block_heads<T, kAligned, kRotated, 2><<<grid, kThreads, 0, stream>>>(p);
    } else {
      quantize_block_heads<T, kAligned, kRotated, 8><<<grid, kThreads, 0, stream>>>(p);
    }
    return;
  }
  const int64_t groups = p.num_blocks * p.block_size * p.num_kv_heads;
  auto grid = [&](int lanes) { return grid_for(groups, 4 * kThreads / lanes, kMaxCtas); };
  if (units_per_row <= 4) {
    quantize_token_heads<T, kAligned, kRotated, 4><<<grid(4), kThreads, 0, stream>>>(p);
  } else if (units_per_row <= 8) {
    quantize_token_heads<T, kAligned, kRotated, 8><<<grid(8), kThreads, 0, stream>>>(p);
  } else if (units_per_row <= 16) {
    quantize_token_heads<T, kAligned, kRotated, 16><<<grid(16), kThreads, 0, stream>>>(p);
  } else {
    quantize_token_heads<T, kAligned, kRotated, 32><<<grid(32), kThreads, 0, stream>>>(p);
  }
}

}  // namespace

void quantize_kv(const QuantizeParams& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.num_blocks * p.block_size * p.num_kv_heads * p.head_dim == 0) return;
  dispatch_float(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned = units_aligned<T>(p.kv, {p.stride_block, p.stride_token, p.stride_head});
    if (p.rotated) return aligned ? launch<T, true, true>(p, stream) : launch<T, false, true>(p, stream);
    aligned ? launch<T, true, false>(p, stream) : launch<T, false, false>(p, stream);
  });
  check_launch("quantize_kv");
}

}  // namespace pagedkv
