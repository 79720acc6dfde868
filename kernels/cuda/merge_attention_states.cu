// merge_attention_states: attention over two disjoint sets of tokens, from the attention over each.
//
// In natural logarithms throughout, so that merging with the empty state returns the other one unchanged.
#include "common.cuh"

namespace pagedkv {
namespace {

constexpr int kThreads = 256;

// exp(from - to) for an lse `from` and the larger one `to`: 0 for the empty state; no difference of two infinities is taken.
__device__ __forceinline__ float weight_of(float from, float to) { return from == -INFINITY ? 0.f : from == to ? 1.f : expf(from - to); }

// A thread takes up to eight elements of a row: a unit, or what is left of the row where it is no multiple of eight.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads) merge_states(MergeParams p) {
  const int parts = static_cast<int>((p.head_dim + kUnit - 1) / kUnit);
  const int parts_or_one = parts > 0 ? parts : 1;
  const int64_t items = p.num_seqs * p.num_heads * parts_or_one;
  for (int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x; item < items; item += int64_t{gridDim.x} * kThreads) {
    const Quotient part = divide(item, parts_or_one);
    const int64_t row = part.quotient;
    const Quotient seq = divide(row, static_cast<int>(p.num_heads));
    const float lse_a = p.lse_a[seq.quotient * p.lse_a_stride + seq.remainder];
    const float lse_b = p.lse_b[seq.quotient * p.lse_b_stride + seq.remainder];
    const float top = fmaxf(lse_a, lse_b);
    float weight_a = weight_of(lse_a, top), weight_b = weight_of(lse_b, top);
    const float total = weight_a + weight_b;
    if (part.remainder == 0) p.lse[row] = total == 0.f ? -INFINITY : top + logf(total);
    weight_a = total == 0.f ? 0.f : __fdiv_rn(weight_a, total);
    weight_b = total == 0.f ? 0.f : __fdiv_rn(weight_b, total);

    const int begin = part.remainder * kUnit;
    const int count = static_cast<int>(p.head_dim) - begin < kUnit ? static_cast<int>(p.head_dim) - begin : kUnit;
    if (count <= 0) continue;
    const T* a = static_cast<const T*>(p.out_a) + seq.quotient * p.out_a_stride_seq + seq.remainder * p.out_a_stride_head + begin;
    const T* b = static_cast<const T*>(p.out_b) + seq.quotient * p.out_b_stride_seq + seq.remainder * p.out_b_stride_head + begin;
    T* out = static_cast<T*>(p.out) + row * p.head_dim + begin;

    // What weighs nothing is not read: the output of an empty state may hold anything.
    float x[kUnit] = {};
    auto add = [&](const T* from, float weight) {
      if (weight == 0.f) return;
      Unit<T> unit = {};
      if (count == kUnit) {
        unit = load_unit<kAligned>(from);
      } else {
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          if (j < count) reinterpret_cast<T*>(unit.words)[j] = from[j];
        }
      }
      float y[kUnit];
      to_floats(unit, y);
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[j] = __fmaf_rn(weight, y[j], x[j]);
    };
    add(a, weight_a);
    add(b, weight_b);
    Unit<T> merged;
    from_floats(x, merged);
    if (count == kUnit) {
      store_unit<kAligned>(out, merged);
    } else {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        if (j < count) out[j] = reinterpret_cast<T*>(merged.words)[j];
      }
    }
  }
}

}  // namespace

void merge_attention_states(const MergeParams& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  const int64_t parts = (p.head_dim + kUnit - 1) / kUnit;
  const int64_t items = p.num_seqs * p.num_heads * (parts > 0 ? parts : 1);
  if (items == 0) return;
  dispatch_float(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned = units_aligned<T>(p.out_a, {p.out_a_stride_seq, p.out_a_stride_head}) &&
                         units_aligned<T>(p.out_b, {p.out_b_stride_seq, p.out_b_stride_head}) && units_aligned<T>(p.out, {p.head_dim});
    const unsigned grid = grid_for(items, kThreads, 1 << 20);
    if (aligned) {
      merge_states<T, true><<<grid, kThreads, 0, stream>>>(p);
    } else {
      merge_states<T, false><<<grid, kThreads, 0, stream>>>(p);
    }
  });
  check_launch("merge_attention_states");
}

}  // namespace pagedkv
