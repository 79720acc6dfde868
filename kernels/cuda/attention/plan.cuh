// Split-KV planning: which tokens of which sequence a CTA works on.
//
// The host knows shapes only; lengths are on the device. The unit of work is `tokens_per_unit` tokens of one
// sequence. A sequence of u units is cut in ceil(u / c) splits of nearly equal size, and c is chosen on the
// device so that all the splits together number at most num_seqs + target: the grid has that many rows,
// whatever the lengths turn out to be. Every CTA derives the same plan from seq_lens (about a microsecond,
// hidden behind its neighbour on the SM), so there is no planning launch and no read-back.
//
//   equal lengths          c = the whole sequence: one split each, no merge
//   one long among short   the long one gets most of the splits
//   a single sequence      as many splits as fill the device
//
// Where shapes alone settle it (one sequence, or a table so short that balance cannot matter),
// `fixed_splits` says so and the lengths of the others are not read.
#pragma once

#include <climits>
#include <cstdint>

#include "ops.h"

namespace pagedkv::attention {

constexpr int kStepTokens = 16;  // the fast kernels' inner step; unit sizes are multiples of it

struct SplitPlan {
  int num_seqs;
  int capacity;  // tokens that a row of the block table can hold
  int window;    // 0: none
  int tokens_per_unit;
  int target;
  int fixed_splits;  // 0: planned on the device

  __host__ __device__ int64_t max_items() const {
    return fixed_splits ? int64_t(num_seqs) * fixed_splits : int64_t(num_seqs) + target;
  }
};

// The tokens one sequence attends to; bad: a length that the table cannot hold.
struct TokenRange {
  int begin, end;
  bool bad;
};

__device__ inline TokenRange attended_tokens(int seq_len, int capacity, int window) {
  if (seq_len < 0 || seq_len > capacity) return {0, 0, true};
  return {window > 0 && seq_len > window ? seq_len - window : 0, seq_len, false};
}

struct WorkItem {
  int seq, split, num_splits;
  int index;       // of the partial state that this CTA writes
  int begin, end;  // tokens
  bool bad;
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

namespace detail {

// Units start at a step boundary, so that a step lies in one block whatever the window.
__device__ inline int num_units(TokenRange r, int tokens_per_unit) {
  return ceil_div(r.end - r.begin / kStepTokens * kStepTokens, tokens_per_unit);
}

__device__ inline WorkItem make_item(const SplitPlan& plan, TokenRange r, int seq, int split, int num_splits, int index) {
  const int64_t units = num_units(r, plan.tokens_per_unit);
  const int base = r.begin / kStepTokens * kStepTokens;
  const int64_t first = base + units * split / num_splits * plan.tokens_per_unit;
  const int64_t last = base + units * (split + 1) / num_splits * plan.tokens_per_unit;
  return {seq, split, num_splits, index, int(first > r.begin ? first : r.begin), int(last < r.end ? last : r.end), r.bad};
}

// Inclusive sum over the CTA's threads; `warp_sums` is shared scratch of kThreads / 32 ints.
template <int kThreads>
__device__ inline int block_inclusive_sum(int value, int* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += other;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  int before = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) before += w < warp ? warp_sums[w] : 0;
  __syncthreads();
  return value + before;
}

}  // namespace detail

// The work of item `index`, the same for all the threads of the CTA; false: nothing (the CTA exits).
template <int kThreads>
__device__ inline bool find_work(const SplitPlan& plan, const int32_t* seq_lens, int index, WorkItem* work) {
  using namespace detail;
  if (plan.fixed_splits) {
    const int seq = index / plan.fixed_splits, split = index % plan.fixed_splits;
    const TokenRange r = attended_tokens(seq_lens[seq], plan.capacity, plan.window);
    const int units = num_units(r, plan.tokens_per_unit);
    const int num_splits = units < 1 ? 1 : units < plan.fixed_splits ? units : plan.fixed_splits;
    if (split >= num_splits) return false;
    *work = make_item(plan, r, seq, split, num_splits, index);
    return true;
  }

  __shared__ int warp_sums[kThreads / 32];
  __shared__ int total;
  __shared__ WorkItem found;
  // Each thread owns a run of consecutive sequences, so that an ordered sum over threads is one over sequences.
  const int run = ceil_div(plan.num_seqs, kThreads);
  const int seq_begin = min(int(threadIdx.x) * run, plan.num_seqs), seq_end = min(seq_begin + run, plan.num_seqs);
  int units = 0;
  for (int s = seq_begin; s < seq_end; ++s) units += num_units(attended_tokens(seq_lens[s], plan.capacity, plan.window), plan.tokens_per_unit);
  const int units_up_to_here = block_inclusive_sum<kThreads>(units, warp_sums);
  if (threadIdx.x == kThreads - 1) total = units_up_to_here;
  if (threadIdx.x == 0) found.num_splits = 0;
  __syncthreads();
  const int units_per_split = max(1, ceil_div(total, plan.target));

  auto splits_of = [&](int units) { return max(1, ceil_div(units, units_per_split)); };
  int splits = 0;
  for (int s = seq_begin; s < seq_end; ++s) {
    splits += splits_of(num_units(attended_tokens(seq_lens[s], plan.capacity, plan.window), plan.tokens_per_unit));
  }
  int first = block_inclusive_sum<kThreads>(splits, warp_sums) - splits;
  if (index >= first && index < first + splits) {
    for (int s = seq_begin; s < seq_end; ++s) {
      const TokenRange r = attended_tokens(seq_lens[s], plan.capacity, plan.window);
      const int num_splits = splits_of(num_units(r, plan.tokens_per_unit));
      if (index < first + num_splits) {
        found = make_item(plan, r, s, index - first, num_splits, index);
        break;
      }
      first += num_splits;
    }
  }
  __syncthreads();
  if (found.num_splits == 0) return false;
  *work = found;
  return true;
}

// From shapes alone. `slots`: CTAs that fill the device; `ctas_per_item`: how many share one item (one for
// each head tile).
inline SplitPlan make_plan(const AttentionParams& p, int tokens_per_unit, int slots, int ctas_per_item) {
  const int64_t capacity = p.max_blocks * p.block_size;
  const int n = int(p.num_seqs);
  SplitPlan plan{n, int(capacity < INT_MAX ? capacity : INT_MAX), int(p.sliding_window < INT_MAX ? p.sliding_window : INT_MAX), tokens_per_unit, 0, 0};
  const int fill = ceil_div(slots, ctas_per_item);
  plan.target = n > fill ? n : fill;
  // A table this short cannot be unbalanced enough to pay for planning: at most 8 units a sequence.
  int64_t longest = plan.capacity;
  if (plan.window > 0 && plan.window + kStepTokens < longest) longest = plan.window + kStepTokens;
  const int64_t max_units = (longest + tokens_per_unit - 1) / tokens_per_unit;
  if (n == 1 || max_units <= 8) {
    const int64_t units_per_split = n * max_units > plan.target ? (n * max_units + plan.target - 1) / plan.target : 1;
    const int64_t splits = (max_units + units_per_split - 1) / units_per_split;
    plan.fixed_splits = int(splits < 1 ? 1 : splits);
  }
  return plan;
}

}  // namespace pagedkv::attention
