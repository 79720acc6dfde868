// What the decode kernels share after the last token: partial states in the workspace, and the last step from
// a merged state to the output.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "attention/plan.cuh"
#include "hadamard.cuh"
#include "softmax_state.h"

namespace pagedkv::attention {

// What a decode kernel keeps of each step for block mass; nothing: a second pass over K finds it.
enum class StepMass { kNone, kLog2, kState };

// Workspace. Partial state `item` of head h: m, l at [item * num_heads + h], the unnormalised output
// sum of 2^(logit - m) * v behind it in `acc`.
struct Partials {
  int2* splits;  // [num_seqs] {number of splits, item of the second, if there is one}: the items of a sequence; not in a fixed plan
  float *m, *l;  // [max_items, num_heads]
  float* acc;    // [max_items, num_heads, head_dim]
  // Only with block mass. Of each 16-token step, log2 of its sum of exponentials, which is as exact as half-precision q asks
  // for, or its state; and of each head, the state over all the tokens attended to, sink left out.
  float* step_mass;           // [num_seqs, max_steps, num_heads]
  SoftmaxState* step_states;  // the same
  SoftmaxState* totals;  // [num_seqs, num_heads]; of a split sequence, written when its splits merge
  int max_steps;

  // By the CTAs of one head tile.
  __device__ void note_splits(const SplitPlan& plan, const WorkItem& work) const {
    if (plan.fixed_splits || threadIdx.x != 0) return;
    if (work.split == 0) splits[work.seq].x = work.num_splits;
    if (work.split == 1 || work.num_splits == 1) splits[work.seq].y = work.index;  // who reads one reads both
  }

  // The state of a split without tokens, for `heads` heads; by all the threads of a CTA.
  __device__ void leave_empty(int64_t item, int64_t num_heads, int head0, int heads, int64_t head_dim) const {
    const int64_t row = item * num_heads + head0;
    for (int h = threadIdx.x; h < heads; h += blockDim.x) m[row + h] = -INFINITY, l[row + h] = 0.f;
    for (int i = threadIdx.x; i < heads * head_dim; i += blockDim.x) acc[row * head_dim + i] = 0.f;
  }

  static constexpr size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }

  // Carve up `base`; with a null base only the size counts. Returns the bytes used.
  __host__ size_t lay_out(char* base, const AttentionParams& p, int64_t max_items, StepMass kept) {
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
      totals = reinterpret_cast<SoftmaxState*>(take(p.num_seqs * p.num_heads * sizeof(SoftmaxState)));
      const int64_t steps = p.num_seqs * p.num_heads * max_steps;
      if (kept == StepMass::kLog2) step_mass = reinterpret_cast<float*>(take(steps * sizeof(float)));
      if (kept == StepMass::kState) step_states = reinterpret_cast<SoftmaxState*>(take(steps * sizeof(SoftmaxState)));
    }
    return used;
  }
};

// A sequence that cannot be answered (a bad length, a block id outside the pool): merging keeps it, and all
// that is computed from it is NaN.
constexpr SoftmaxState kBadState{std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};

__device__ inline bool is_bad(SoftmaxState s) { return s.m == INFINITY && isnan(s.l); }  // with l = 1 it is a sink of +inf

// The factor that turns an unnormalised output into the output, and the state of the denominator. A sink is
// one more logit in the denominator, but not for a sequence without tokens: its output is 0, its lse -inf.
struct Normaliser {
  float factor;
  SoftmaxState denominator;

  __device__ float lse() const { return log_sum_exp(denominator); }  // in double: only where it is asked for
};

__device__ inline Normaliser normaliser(SoftmaxState tokens, const float* sinks, int head) {
  if (tokens.l == 0.f) return {0.f, {}};
  SoftmaxState all = tokens;
  if (sinks) all = merge(tokens, single_logit(sinks[head]));
  return {rescale(tokens.m, all.m) / all.l, all};
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

// By a warp: an output row whose element d over rotated V is value(d), rotated back and rounded once.
template <typename T, class Value>
__device__ inline void store_rotated(T* row, int head_dim, Value value) {
  const int lane = threadIdx.x % 32;
  float x[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[r][i] = 128 * r + 4 * lane + i < head_dim ? value(128 * r + 4 * lane + i) : 0.f;
  }
  hadamard_transform<2, 4, 32>(x, hadamard_size(head_dim), lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (128 * r + 4 * lane + i < head_dim) row[128 * r + 4 * lane + i] = from_float<T>(x[r][i]);
    }
  }
}

// ------------------------------------------------------------------------------------------ kernels

constexpr int kMergeThreads = 128;  // few registers, too: most CTAs have little to merge or nothing, and are many
constexpr int kMergeWarps = kMergeThreads / 32;

// The partial states of one sequence.
struct SplitRange {
  int count, first, second;  // items
  __device__ int64_t item(int split) const { return split == 0 ? first : second + split - 1; }
};

__device__ inline SplitRange splits_of(const SplitPlan& plan, const Partials& partials, int seq) {
  if (plan.fixed_splits) return {plan.in_cluster ? 1 : plan.fixed_splits, seq * plan.fixed_splits, seq * plan.fixed_splits + 1};
  const int2 splits = partials.splits[seq];
  return {splits.x, seq, splits.y};
}

// Merge the splits of one (sequence, head); the order is that of the splits, so the result does not depend on which CTA finished first.
template <typename T>
__device__ inline void merge_splits(const AttentionParams& p, const Partials& partials, SplitRange splits, int seq, int head) {
  __shared__ SoftmaxState warp_states[kMergeWarps];
  __shared__ float weights[kMergeThreads];
  auto row_of = [&](int split) { return splits.item(split) * p.num_heads + head; };

  SoftmaxState tokens;
  for (int s = threadIdx.x; s < splits.count; s += kMergeThreads) {
    tokens = merge(tokens, {partials.m[row_of(s)], partials.l[row_of(s)]});
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const SoftmaxState other{__shfl_xor_sync(~0u, tokens.m, d), __shfl_xor_sync(~0u, tokens.l, d)};
    tokens = threadIdx.x & d ? merge(other, tokens) : merge(tokens, other);
  }
  __syncthreads();  // the head before is done with shared memory
  if (threadIdx.x % 32 == 0) warp_states[threadIdx.x / 32] = tokens;
  __syncthreads();
  tokens = warp_states[0];
#pragma unroll
  for (int w = 1; w < kMergeWarps; ++w) tokens = merge(tokens, warp_states[w]);
  const Normaliser norm = normaliser(tokens, p.sinks, head);

  // A warp takes every fourth split, a lane four dims (and four more where head_dim exceeds 128).
  __shared__ float4 warp_sums[kMergeWarps][2][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float4 sums[2] = {};
  for (int base = 0; base < splits.count; base += kMergeThreads) {
    const int count = min(kMergeThreads, splits.count - base);
    __syncthreads();
    if (threadIdx.x < count) weights[threadIdx.x] = rescale(partials.m[row_of(base + threadIdx.x)], tokens.m);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int d = 4 * (lane + 32 * r);
      if (d >= p.head_dim) break;
#pragma unroll 8
      for (int s = warp; s < count; s += kMergeWarps) {
        const float4 a = *reinterpret_cast<const float4*>(partials.acc + row_of(base + s) * p.head_dim + d);
        sums[r].x += weights[s] * a.x, sums[r].y += weights[s] * a.y, sums[r].z += weights[s] * a.z, sums[r].w += weights[s] * a.w;
      }
    }
  }
  warp_sums[warp][0][lane] = sums[0], warp_sums[warp][1][lane] = sums[1];
  __syncthreads();
  const int64_t out_row = int64_t(seq) * p.num_heads + head;
  T* out = static_cast<T*>(p.out) + out_row * p.head_dim;
  auto output = [&](int d) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) sum += reinterpret_cast<const float*>(warp_sums[w])[d];
    return sum * norm.factor;
  };
  if (!p.rotated) {
    for (int d = threadIdx.x; d < p.head_dim; d += kMergeThreads) out[d] = from_float<T>(output(d));
  } else if (warp == 0) {
    store_rotated(out, int(p.head_dim), output);
  }
  if (threadIdx.x == 0) {
    if (p.lse) p.lse[out_row] = norm.lse();
    if (p.block_mass) partials.totals[out_row] = tokens;
  }
}

// The state of a head over all of a sequence's tokens, in every warp; a lane has a head of its own. By all the threads of a CTA.
__device__ inline SoftmaxState total_of_head(const AttentionParams& p, const SplitPlan& plan, const Partials& partials, SplitRange splits, int seq, int head) {
  if (splits.count == 1 && !plan.always_merge) return partials.totals[int64_t(seq) * p.num_heads + head];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  SoftmaxState total;
  for (int s = warp; s < splits.count; s += kMergeWarps) {
    const int64_t at = splits.item(s) * p.num_heads + head;
    total = merge(total, {partials.m[at], partials.l[at]});
  }
  __shared__ SoftmaxState of_warp[kMergeWarps][32];
  __syncthreads();  // the heads before have been read
  of_warp[warp][lane] = total;
  __syncthreads();
  total = of_warp[0][lane];
#pragma unroll
  for (int w = 1; w < kMergeWarps; ++w) total = merge(total, of_warp[w][lane]);
  return total;
}

constexpr int kMassBlocksPerWarp = 8;  // logical blocks, at most

// block_mass from what the fast kernels left for each 16-token step. A warp takes every fourth of the CTA's logical blocks, a lane a
// head.
__device__ inline void mass_of_blocks(const AttentionParams& p, const SplitPlan& plan, const Partials& partials, int seq, int first_block, int blocks_per_warp) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const TokenRange r = attended_tokens(p.seq_lens[seq], plan.capacity, plan.window);
  const SplitRange splits = splits_of(plan, partials, seq);
  const int steps_per_block = int(p.block_size) / kStepTokens, first_step = r.begin / kStepTokens, end_step = ceil_div(r.end, kStepTokens);
  float mass[kMassBlocksPerWarp] = {};
  bool bad = r.bad;
  for (int head0 = 0; head0 < p.num_heads; head0 += 32) {
    const int head = min(head0 + lane, int(p.num_heads) - 1);
    const SoftmaxState total = total_of_head(p, plan, partials, splits, seq, head);
    bad = bad || is_bad(total);
    const float share = head0 + lane < p.num_heads && total.l != 0.f ? 1.f / (total.l * float(p.num_heads)) : 0.f;
    float of_head[kMassBlocksPerWarp] = {};  // by itself: thousands of heads, each added step by step, would lose a digit
    for (int j = 0; j < steps_per_block; ++j) {
#pragma unroll
      for (int i = 0; i < kMassBlocksPerWarp; ++i) {  // all the blocks' loads at once: each takes its time
        const int step = (first_block + warp + i * kMergeWarps) * steps_per_block + j;
        if (i >= blocks_per_warp || step < first_step || step >= end_step) continue;
        const int64_t at = (int64_t(seq) * partials.max_steps + step) * p.num_heads + head;
        const SoftmaxState of_step = partials.step_mass ? SoftmaxState{partials.step_mass[at], 1.f} : partials.step_states[at];
        of_head[i] += of_step.l * rescale(of_step.m, total.m);
      }
    }
#pragma unroll
    for (int i = 0; i < kMassBlocksPerWarp; ++i) mass[i] += of_head[i] * share;
  }
  bad = __any_sync(~0u, bad);
#pragma unroll
  for (int i = 0; i < kMassBlocksPerWarp; ++i) {
    const int block = first_block + warp + i * kMergeWarps;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) mass[i] += __shfl_xor_sync(~0u, mass[i], d);
    if (lane == 0 && i < blocks_per_warp && block < p.max_blocks) p.block_mass[int64_t(seq) * p.max_blocks + block] = bad ? NAN : mass[i];
  }
}

// What is left after the decode kernel, in one launch: the first `merges` CTAs merge splits, the rest add up block mass.
template <typename T>
__global__ void __launch_bounds__(kMergeThreads) finish(AttentionParams p, SplitPlan plan, Partials partials, int merges, int heads_per_merge, int blocks_per_warp) {
  let_next_kernel_start();
  wait_for_kernel_before();
  const int cta = blockIdx.x;
  if (cta < merges) {
    const int ctas_per_seq = ceil_div(int(p.num_heads), heads_per_merge), seq = cta / ctas_per_seq;
    const SplitRange splits = splits_of(plan, partials, seq);
    if (splits.count == 1 && !plan.always_merge) return;
    const int head0 = cta % ctas_per_seq * heads_per_merge;
    for (int h = head0; h < min(head0 + heads_per_merge, int(p.num_heads)); ++h) merge_splits<T>(p, partials, splits, seq, h);
    return;
  }
  const int blocks_per_cta = blocks_per_warp * kMergeWarps, ctas_per_seq = ceil_div(int(p.max_blocks), blocks_per_cta);
  mass_of_blocks(p, plan, partials, (cta - merges) / ctas_per_seq, (cta - merges) % ctas_per_seq * blocks_per_cta, blocks_per_warp);
}

}  // namespace pagedkv::attention
