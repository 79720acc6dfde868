// Split-KV planning: which tokens of which sequence a CTA works on.
//
// The host knows shapes only; lengths are on the device. The unit of work is `tokens_per_unit` tokens of one
// sequence. A sequence of u units is cut in ceil(u / c) splits of nearly equal size, and c is chosen on the
// device so that all the splits together number at most num_seqs + target: the grid has that many rows,
// whatever the lengths turn out to be. Every CTA derives the same plan from seq_lens, so there is no planning launch
// and no read-back. Items 0 to num_seqs - 1 are the first splits of the sequences, which so know early whose table
// they will read; the other splits follow, sequence by sequence.
//
// `target` aims at one wave where that is possible: a second wave of leftovers would leave most of the device idle, while
// CTAs that end early leave their bandwidth to the others.
//
//   equal lengths, many    one split each, no merge
//   one long among short   the long one is cut, the others are not
//   few sequences          as many splits as fill the device
//
// Where shapes alone settle it (one sequence, or a table so short that balance cannot matter), every sequence is
// cut in `fixed_splits` and the lengths of the others are not read; splits that a sequence is too short for
// leave an empty state. With short tables on sm_90 up, the splits of a sequence form a thread block
// cluster and merge in shared memory: no workspace, no second launch.
#pragma once

#include <climits>
#include <cstdint>

#include "common.cuh"

namespace pagedkv::attention {

constexpr int kMaxGridRows = 65535;
constexpr int kMaxCluster = 4;  // CTAs; with eight, waiting for room in one GPC cost more than the splits saved
constexpr int kStepTokens = 16;  // the fast kernels' inner step; unit sizes are multiples of it
constexpr int kTableLine = 32;   // entries of a block table in a line of the cache

struct SplitPlan {
  int num_seqs;
  int capacity;  // tokens that a row of the block table can hold
  int window;    // 0: none
  int tokens_per_unit;
  int target;
  int fixed_splits;  // 0: planned on the device
  bool in_cluster;   // the fixed splits of a sequence merge within a cluster
  bool always_merge = false;  // also a sequence in one piece: its output needs a last touch (see `finish`)
  int table_lines = 0;  // of a block table, that an item is likely to begin with

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
  const int units = num_units(r, plan.tokens_per_unit);
  const int each = units / num_splits, extra = units % num_splits;  // the first `extra` splits have one more
  const int base = r.begin / kStepTokens * kStepTokens;
  const int first = base + (each * split + min(split, extra)) * plan.tokens_per_unit;
  const int64_t last = first + int64_t(each + (split < extra)) * plan.tokens_per_unit;
  return {seq, split, num_splits, index, max(first, r.begin), int(min(last, int64_t(r.end))), r.bad};
}

}  // namespace detail

// Asks for the lines of the block table that item `index` begins with, while the lengths are still under way. By all the threads.
__device__ inline void prefetch_table(const SplitPlan& plan, const AttentionParams& p, int index) {
  if (int(threadIdx.x) >= plan.table_lines) return;
  const int seq = plan.in_cluster ? index / plan.fixed_splits : index;
  if (seq >= plan.num_seqs) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p.block_tables + seq * p.block_tables_stride + threadIdx.x * kTableLine));
}

// The work of item `index`, left in shared memory by all the threads of the CTA; false: nothing to do.
template <int kThreads>
__device__ inline bool find_work(const SplitPlan& plan, const int32_t* seq_lens, int index, WorkItem& work) {
  using namespace detail;
  if (index >= plan.max_items()) return false;
  if (plan.fixed_splits) {
    const int seq = index / plan.fixed_splits, split = index % plan.fixed_splits;
    const TokenRange r = attended_tokens(seq_lens[seq], plan.capacity, plan.window);
    const int units = num_units(r, plan.tokens_per_unit);
    const int num_splits = units < 1 ? 1 : units < plan.fixed_splits ? units : plan.fixed_splits;
    if (threadIdx.x == 0) {
      work = split < num_splits ? make_item(plan, r, seq, split, num_splits, index) : WorkItem{seq, split, 0, index, 0, 0, false};
      work.num_splits = plan.fixed_splits;  // of states to merge
    }
    __syncthreads();
    return split < num_splits;
  }

  __shared__ int scratch[kThreads / 32 + 1];
  // Each thread owns a run of consecutive sequences, so that an ordered sum over threads is one over sequences.
  const int run = ceil_div(plan.num_seqs, kThreads);
  const int seq_begin = min(int(threadIdx.x) * run, plan.num_seqs), seq_end = min(seq_begin + run, plan.num_seqs);
  auto units_of = [&](int s) { return num_units(attended_tokens(seq_lens[s], plan.capacity, plan.window), plan.tokens_per_unit); };
  TokenRange own{};
  if (index < plan.num_seqs && threadIdx.x == 0) own = attended_tokens(seq_lens[index], plan.capacity, plan.window);
  const int first_units = seq_begin < seq_end ? units_of(seq_begin) : 0;  // all there is, up to kThreads sequences
  int units = first_units;
#pragma unroll 1  // code that runs once is paid for in instruction fetches
  for (int s = seq_begin + 1; s < seq_end; ++s) units += units_of(s);
  int total;
  block_exclusive_sum<kThreads>(units, scratch, &total);
  const int units_per_split = max(1, ceil_div(total, plan.target));
  auto splits_of = [&](int units) { return max(1, ceil_div(units, units_per_split)); };
  if (index < plan.num_seqs) {
    if (threadIdx.x == 0) work = make_item(plan, own, index, 0, splits_of(num_units(own, plan.tokens_per_unit)), index);
    __syncthreads();
    return true;
  }

  if (threadIdx.x == 0) work.num_splits = 0;
  __syncthreads();
  int more = seq_begin < seq_end ? splits_of(first_units) - 1 : 0;  // than the first of each
#pragma unroll 1
  for (int s = seq_begin + 1; s < seq_end; ++s) more += splits_of(units_of(s)) - 1;
  int num_more;
  int first = plan.num_seqs + block_exclusive_sum<kThreads>(more, scratch, &num_more);
  if (index >= first && index < first + more) {
#pragma unroll 1
    for (int s = seq_begin; s < seq_end; ++s) {
      const TokenRange r = attended_tokens(seq_lens[s], plan.capacity, plan.window);
      const int num_splits = splits_of(num_units(r, plan.tokens_per_unit));
      if (index < first + num_splits - 1) {
        work = make_item(plan, r, s, 1 + index - first, num_splits, index);
        break;
      }
      first += num_splits - 1;
    }
  }
  __syncthreads();
  return work.num_splits > 0;
}

// From shapes alone. `slots`: CTAs that fill the device; `ctas_per_item`: how many share one item (one for each head
// tile); `clusters`: whether the device has them.
inline SplitPlan make_plan(const AttentionParams& p, int tokens_per_unit, int slots, int ctas_per_item, bool clusters) {
  constexpr int kShortTable = 1024;  // tokens: cannot be unbalanced enough to pay for planning
  const int64_t capacity = p.max_blocks * p.block_size;
  const int n = int(p.num_seqs);
  SplitPlan plan{n, int(capacity < INT_MAX ? capacity : INT_MAX), int(p.sliding_window < INT_MAX ? p.sliding_window : INT_MAX), tokens_per_unit, 0, 0, false};
  const int fill = ceil_div(slots, ctas_per_item);
  // Few sequences: fill the device. About as many as it holds: cut what is longer than the mean. Many: the device's
  // own scheduling balances them, but for one that is a fortieth of all the work.
  plan.target = 2 * n <= fill ? fill - n : n < 2 * fill ? n : ceil_div(2 * fill, 5);

  int64_t longest = plan.capacity;
  if (plan.window > 0 && plan.window + kStepTokens < longest) longest = plan.window + kStepTokens;
  if (n == 1 || longest <= kShortTable) {
    const int64_t max_units = (longest + tokens_per_unit - 1) / tokens_per_unit;
    int64_t splits = fill / n;
    if (splits > max_units) splits = max_units;
    plan.in_cluster = clusters && longest <= kShortTable && splits > 1 && n * splits <= kMaxGridRows;
    if (plan.in_cluster && splits > kMaxCluster) splits = kMaxCluster;
    plan.fixed_splits = int(splits < 1 ? 1 : splits);
  }
  constexpr int64_t kMostLines = 16;
  const int64_t lines = (p.max_blocks + kTableLine - 1) / kTableLine;
  if (plan.in_cluster || !plan.fixed_splits) plan.table_lines = int(lines < kMostLines ? lines : kMostLines);
  return plan;
}

}  // namespace pagedkv::attention
