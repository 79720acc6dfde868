// What the decode kernels share after the last token: partial states in the workspace, and the last step from
// a merged state to the output.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/plan.cuh"
#include "softmax_state.h"

namespace pagedkv::attention {

// Workspace. Partial state `item` of head h: m, l at [item * num_heads + h], the unnormalised output
// sum of 2^(logit - m) * v behind it in `acc`.
struct Partials {
  int2* splits;  // [num_seqs] {first item, number of splits}, written by each sequence's first CTA
  float *m, *l;  // [max_items, num_heads]
  float* acc;    // [max_items, num_heads, head_dim]
  // Only with block mass. Of each 16-token step, log2 of its sum of exponentials; and of each head, log2 of
  // the sum over all the tokens attended to, sink left out.
  float* step_mass;   // [num_seqs, num_heads, max_steps]
  float* total_mass;  // [num_seqs, num_heads]
  int max_steps;

  static constexpr size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }

  // Carve up `base`; with a null base only the size counts. Returns the bytes used.
  __host__ size_t lay_out(char* base, const AttentionParams& p, int64_t max_items, bool step_masses) {
    size_t used = 0;
    auto take = [&](size_t bytes) {
      char* at = base + used;
      used += align(bytes);
      return at;
    };
    splits = reinterpret_cast<int2*>(take(p.num_seqs * sizeof(int2)));
    m = reinterpret_cast<float*>(take(max_items * p.num_heads * sizeof(float)));
    l = reinterpret_cast<float*>(take(max_items * p.num_heads * sizeof(float)));
    acc = reinterpret_cast<float*>(take(max_items * p.num_heads * p.head_dim * sizeof(float)));
    max_steps = int((p.max_blocks * p.block_size + kStepTokens - 1) / kStepTokens);
    if (p.block_mass) {
      total_mass = reinterpret_cast<float*>(take(p.num_seqs * p.num_heads * sizeof(float)));
      if (step_masses) step_mass = reinterpret_cast<float*>(take(p.num_seqs * p.num_heads * max_steps * sizeof(float)));
    }
    return used;
  }
};

// A sequence that cannot be answered (a bad length, a block id outside the pool): merging keeps it, and all
// that is computed from it is NaN.
#define kBadState (SoftmaxState{INFINITY, NAN})

// log2 of a state's sum of exponentials; +inf marks a bad sequence.
__device__ inline float total_mass(SoftmaxState s) { return s.m == INFINITY ? INFINITY : s.m + log2f(s.l); }

// The factor that turns an unnormalised output into the output, and the natural-log denominator. A sink is
// one more logit in the denominator, but not for a sequence without tokens: its output is 0, its lse -inf.
struct Normaliser {
  float factor, lse;
};

__device__ inline Normaliser normaliser(SoftmaxState tokens, const float* sinks, int head) {
  if (tokens.l == 0.f) return {0.f, -INFINITY};
  SoftmaxState all = tokens;
  if (sinks) all = merge(tokens, {sinks[head] * kLog2e, 1.f});
  return {rescale(tokens.m, all.m) / all.l, log_sum_exp(all)};
}

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(int8_t x) { return float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// ------------------------------------------------------------------------------------------ kernels

// Merge the splits of one (sequence, head); a sequence in one piece was finished by the decode kernel.
// Splits merge in order, so the result does not depend on which CTA finished first.
template <typename T>
__global__ void __launch_bounds__(128) merge_splits(AttentionParams p, Partials partials) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();  // launched while the decode kernel drains
#endif
  const int seq = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
  const int first = partials.splits[seq].x, num_splits = partials.splits[seq].y;
  if (num_splits == 1) return;
  const int64_t row = int64_t(first) * p.num_heads + head;

  SoftmaxState tokens;
  for (int s = 0; s < num_splits; ++s) {
    const int64_t at = row + int64_t(s) * p.num_heads;
    tokens = merge(tokens, {partials.m[at], partials.l[at]});
  }
  const Normaliser norm = normaliser(tokens, p.sinks, head);
  for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    float sum = 0.f;
    for (int s = 0; s < num_splits; ++s) {
      const int64_t at = row + int64_t(s) * p.num_heads;
      sum += partials.acc[at * p.head_dim + d] * rescale(partials.m[at], tokens.m);
    }
    static_cast<T*>(p.out)[(int64_t(seq) * p.num_heads + head) * p.head_dim + d] = from_float<T>(sum * norm.factor);
  }
  if (threadIdx.x == 0) {
    if (p.lse) p.lse[int64_t(seq) * p.num_heads + head] = norm.lse;
    if (p.block_mass) partials.total_mass[int64_t(seq) * p.num_heads + head] = total_mass(tokens);
  }
}

// block_mass from what the fast kernel left for each 16-token step: a thread adds up one logical block over heads.
__global__ void __launch_bounds__(128) block_mass_from_steps(AttentionParams p, SplitPlan plan, Partials partials) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= p.num_seqs * p.max_blocks) return;
  const int seq = int(at / p.max_blocks), block = int(at % p.max_blocks);
  const TokenRange r = attended_tokens(p.seq_lens[seq], plan.capacity, plan.window);
  const float* total = partials.total_mass + int64_t(seq) * p.num_heads;
  const int steps_per_block = int(p.block_size) / kStepTokens;
  const int begin = max(block * steps_per_block, r.begin / kStepTokens);
  const int end = min((block + 1) * steps_per_block, ceil_div(r.end, kStepTokens));
  float mass = 0.f;
  for (int h = 0; h < p.num_heads; ++h) {
    const float* steps = partials.step_mass + (int64_t(seq) * p.num_heads + h) * partials.max_steps;
    for (int s = begin; s < end; ++s) mass += exp2f(steps[s] - total[h]);
  }
  p.block_mass[at] = r.bad || total[0] == INFINITY ? NAN : mass / float(p.num_heads);
}

}  // namespace pagedkv::attention
