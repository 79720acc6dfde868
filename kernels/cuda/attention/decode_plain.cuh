// Decode attention, plain: every shape, dtype, stride and device. It serves what the two fast kernels do not take (float32
// caches, rows that do not start at multiples of 16 bytes, head dimensions of 8 n with odd n in int8), and is what to
// read first.
//
// A CTA owns one work item and one query head. Eight lanes share a token: each holds up to four 8-element pieces of
// the head dimension, so a CTA of 128 threads has 16 tokens in hand, each group of lanes with an online
// softmax of its own. The groups merge in shared memory at the end. All arithmetic is float32.
#pragma once

#include <type_traits>

#include "attention/state.cuh"
#include "hadamard.cuh"

namespace pagedkv::attention {

constexpr int kPlainThreads = 128;
constexpr int kTokenLanes = 8;
constexpr int kTokenGroups = kPlainThreads / kTokenLanes;
constexpr int kPieces = 4;  // of 8 elements, in a lane: head_dim <= 256
constexpr int kPlainTokensPerUnit = 64;

// Eight elements as float32; 8 * sizeof(T) bytes at a time where the caller knows them aligned.
template <typename T>
__device__ inline void load_piece(float (&x)[8], const T* from, bool aligned) {
  if (aligned) {
    constexpr int words = 8 * sizeof(T) / 8;
    uint2 raw[words];
#pragma unroll
    for (int w = 0; w < words; ++w) raw[w] = reinterpret_cast<const uint2*>(from)[w];
    const T* e = reinterpret_cast<const T*>(raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(e[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(from[i]);
  }
}

// Whether every row of a [.., head_dim] tensor with these strides (in elements) starts at a multiple of 8 bytes.
template <typename T>
__device__ inline bool pieces_aligned(const void* base, int64_t s0, int64_t s1, int64_t s2) {
  return reinterpret_cast<uintptr_t>(base) % 8 == 0 && (s0 | s1 | s2) * int64_t(sizeof(T)) % 8 == 0;
}

// One query head's view of one sequence.
template <typename Q, typename KV>
struct HeadView {
  const AttentionParams& p;
  int seq, head, kv_head, lane;  // lane within the token's group
  unsigned group_mask;
  bool k_aligned, v_aligned;
  float q[kPieces][8];

  __device__ HeadView(const AttentionParams& params, int seq_, int head_) : p(params), seq(seq_), head(head_) {
    kv_head = head / int(p.num_heads / p.num_kv_heads);
    lane = threadIdx.x % kTokenLanes;
    group_mask = 0xffu << (threadIdx.x % 32 / kTokenLanes * kTokenLanes);
    k_aligned = pieces_aligned<KV>(p.k_cache, p.k_stride_block, p.k_stride_token, p.k_stride_head);
    v_aligned = pieces_aligned<KV>(p.v_cache, p.v_stride_block, p.v_stride_token, p.v_stride_head);
    const Q* row = static_cast<const Q*>(p.q) + seq * p.q_stride_seq + head * p.q_stride_head;
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) q[c][i] = has(c) ? to_float(row[dim(c) + i]) : 0.f;
    }
    if (p.rotated) hadamard_transform<kPieces, 8, kTokenLanes>(q, hadamard_size(p.head_dim), lane, group_mask);
  }

  __device__ int dim(int c) const { return 8 * (lane + kTokenLanes * c); }
  __device__ bool has(int c) const { return dim(c) < p.head_dim; }

  // The block that holds a token, or -1 where the table names none of the pool.
  __device__ int64_t block_of(int token) const {
    const int block = p.block_tables[seq * p.block_tables_stride + token / p.block_size];
    return block >= 0 && block < p.num_blocks ? block : -1;
  }

  // q . k of one token as a natural logit, the same in all the lanes of the group.
  __device__ float logit(int64_t block, int offset) const {
    const KV* row = static_cast<const KV*>(p.k_cache) + block * p.k_stride_block + offset * p.k_stride_token + kv_head * p.k_stride_head;
    float dot = 0.f;
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      if (!has(c)) break;
      float k[8];
      load_piece(k, row + dim(c), k_aligned);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot += q[c][i] * k[i];
    }
#pragma unroll
    for (int d = 1; d < kTokenLanes; d *= 2) dot += __shfl_xor_sync(group_mask, dot, d);
    float x = dot * p.sm_scale;
    if constexpr (std::is_same_v<KV, int8_t>) {
      x *= p.k_scale[block * p.k_scale_stride_block + offset * p.k_scale_stride_token + kv_head * p.k_scale_stride_head];
    }
    if (p.logits_soft_cap > 0.f) x = p.logits_soft_cap * tanhf(x / p.logits_soft_cap);
    return x;
  }

  // acc += weight * v of one token.
  __device__ void accumulate(float (&acc)[kPieces][8], float weight, int64_t block, int offset) const {
    if constexpr (std::is_same_v<KV, int8_t>) {
      weight *= p.v_scale[block * p.v_scale_stride_block + offset * p.v_scale_stride_token + kv_head * p.v_scale_stride_head];
    }
    const KV* row = static_cast<const KV*>(p.v_cache) + block * p.v_stride_block + offset * p.v_stride_token + kv_head * p.v_stride_head;
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      if (!has(c)) break;
      float v[8];
      load_piece(v, row + dim(c), v_aligned);
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[c][i] += weight * v[i];
    }
  }
};

template <typename Q, typename KV>
__global__ void __launch_bounds__(kPlainThreads) decode_plain(AttentionParams p, SplitPlan plan, Partials partials) {
  let_next_kernel_start();
  __shared__ SoftmaxState states[kTokenGroups];
  __shared__ float outs[kTokenGroups][256];

  const int head = blockIdx.x, item = blockIdx.z * gridDim.y + blockIdx.y;
  __shared__ WorkItem work;
  if (!find_work<kPlainThreads>(plan, p.seq_lens, item, work)) {
    if (plan.fixed_splits && item < plan.max_items()) partials.leave_empty(item, p.num_heads, head, 1, p.head_dim);
    return;
  }
  if (head == 0) partials.note_splits(plan, work);

  const HeadView<Q, KV> view(p, work.seq, head);
  const int group = threadIdx.x / kTokenLanes;
  SoftmaxState state;
  float acc[kPieces][8] = {};
  bool bad = work.bad;
  for (int token = work.begin + group; token < work.end; token += kTokenGroups) {
    const int64_t block = view.block_of(token);
    if (block < 0) {
      bad = true;
      break;
    }
    const int offset = token % int(p.block_size);
    const float x = view.logit(block, offset);
    const float m = fmaxf(state.m, x * kLog2e), keep = rescale(state.m, m), weight = natural_weight(x, m);
    state = {m, state.l * keep + weight};
    if (keep != 1.f) {
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[c][i] *= keep;
      }
    }
    view.accumulate(acc, weight, block, offset);
  }

  if (view.lane == 0) states[group] = state;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (view.has(c)) outs[group][view.dim(c) + i] = acc[c][i];
    }
  }
  bad = __syncthreads_or(bad);

  SoftmaxState tokens;
  for (int i = 0; i < kTokenGroups; ++i) tokens = merge(tokens, states[i]);
  if (bad) tokens = kBadState;
  const bool whole = work.num_splits == 1;
  const Normaliser norm = normaliser(tokens, p.sinks, head);
  const int64_t row = int64_t(work.seq) * p.num_heads + head, at = int64_t(work.index) * p.num_heads + head;
  for (int d = threadIdx.x; d < p.head_dim; d += kPlainThreads) {
    float sum = 0.f;
    for (int i = 0; i < kTokenGroups; ++i) sum += outs[i][d] * rescale(states[i].m, tokens.m);
    if (!whole) {
      partials.acc[at * p.head_dim + d] = sum;
    } else if (p.rotated) {
      outs[0][d] = sum * norm.factor;
    } else {
      static_cast<Q*>(p.out)[row * p.head_dim + d] = from_float<Q>(sum * norm.factor);
    }
  }
  if (whole && p.rotated) {
    __syncthreads();
    if (threadIdx.x < 32) store_rotated(static_cast<Q*>(p.out) + row * p.head_dim, int(p.head_dim), [&](int d) { return outs[0][d]; });
  }
  if (threadIdx.x == 0) {
    if (whole) {
      if (p.lse) p.lse[row] = norm.lse();
      if (p.block_mass) partials.totals[row] = tokens;
    } else {
      partials.m[at] = tokens.m, partials.l[at] = tokens.l;
    }
  }
}

// block_mass by a second pass over K: a CTA for each (sequence, logical block), eight lanes a (head, token).
template <typename Q, typename KV>
__global__ void __launch_bounds__(kPlainThreads) block_mass_plain(AttentionParams p, SplitPlan plan, Partials partials) {
  __shared__ double sums[kTokenGroups];
  const int seq = int(blockIdx.x / p.max_blocks), logical = int(blockIdx.x % p.max_blocks);
  const int group = threadIdx.x / kTokenLanes;
  const TokenRange r = attended_tokens(p.seq_lens[seq], plan.capacity, plan.window);
  const SoftmaxState* totals = partials.totals + int64_t(seq) * p.num_heads;
  const bool bad = r.bad || is_bad(totals[0]);
  const int begin = max(logical * int(p.block_size), r.begin), end = min((logical + 1) * int(p.block_size), r.end);
  double sum = 0.0;  // in float32 the rounding of as many additions as there are heads
  if (!bad && begin < end) {
    for (int head = 0; head < p.num_heads; ++head) {
      const HeadView<Q, KV> view(p, seq, head);
      float of_head = 0.f;
      for (int token = begin + group; token < end; token += kTokenGroups) {
        of_head += natural_weight(view.logit(view.block_of(token), token % int(p.block_size)), totals[head].m) / totals[head].l;
      }
      sum += of_head;
    }
  }
  if (threadIdx.x % kTokenLanes == 0) sums[group] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    double mass = 0.0;
    for (int i = 0; i < kTokenGroups; ++i) mass += sums[i];
    p.block_mass[blockIdx.x] = bad ? NAN : float(mass / double(p.num_heads));
  }
}

}  // namespace pagedkv::attention
