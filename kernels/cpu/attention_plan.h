// How decode attention is cut into items of work, and where partial results lie.
//
// Each sequence's tokens are cut into splits at fixed positions, and its KV heads into parts, both from
// shapes alone: neither the number of threads nor the other sequences' lengths change a result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "../ops.h"
#include "../softmax_state.h"
#include "attention_tile.h"

namespace pagedkv {

// Tokens [begin, end) of a sequence are attended to. A sequence that asks for what is not there is not valid.
struct SequenceRange {
  int64_t begin, end;
  bool valid;
  int64_t first_split, end_split;  // splits that hold tokens
  int64_t first_slot;              // where the first of them keeps its partial result
};

struct AttentionPlan {
  int64_t tokens_per_split;  // a multiple of block_size
  int64_t head_parts;
  int64_t num_slots;
  std::vector<SequenceRange> sequences;

  explicit AttentionPlan(const AttentionParams& p) {
    // About 128 items keep many cores busy; a split of fewer tokens than 256 would spend its time on partial results.
    constexpr int64_t kItems = 128, kFewest = 256, kMost = 4096;
    const int64_t capacity = p.max_blocks * p.block_size;
    const int64_t tokens = std::clamp(p.num_seqs * capacity / kItems, kFewest, kMost);
    const int64_t unit = p.block_size >= kTile ? p.block_size : kTile / p.block_size * p.block_size;
    tokens_per_split = (tokens + unit - 1) / unit * unit;
    const int64_t items = p.num_seqs * std::max<int64_t>(1, capacity / tokens_per_split);
    head_parts = std::clamp<int64_t>(kItems / std::max<int64_t>(1, items), 1, p.num_kv_heads);

    num_slots = 0;
    sequences.reserve(p.num_seqs);
    for (int64_t s = 0; s < p.num_seqs; ++s) {
      SequenceRange r{0, p.seq_lens[s], true, 0, 0, num_slots};
      r.valid = r.end >= 0 && r.end <= capacity;
      if (r.valid && r.end > 0) {
        if (p.sliding_window > 0) r.begin = std::max<int64_t>(0, r.end - p.sliding_window);
        r.first_split = r.begin / tokens_per_split;
        r.end_split = (r.end + tokens_per_split - 1) / tokens_per_split;
        num_slots += r.end_split - r.first_split;
      }
      sequences.push_back(r);
    }
  }

  // Sequences whose tokens lie in a block outside the pool are not valid either; nothing of theirs is read.
  void check_block_tables(const AttentionParams& p) {
    for (int64_t s = 0; s < p.num_seqs; ++s) {
      SequenceRange& r = sequences[s];
      const int32_t* table = p.block_tables + s * p.block_tables_stride;
      if (!r.valid || r.end == 0) continue;
      for (int64_t b = r.begin / p.block_size; b <= (r.end - 1) / p.block_size; ++b) r.valid &= table[b] >= 0 && table[b] < p.num_blocks;
    }
  }
};

// What splits leave behind for the merge, in memory of its own: how much that is depends on the lengths, which the plan has
// looked at by then. Rows of `acc` hold the sum of 2^(logit - m) * value of a head.
struct PartialResults {
  float* acc = nullptr;            // [num_slots, num_heads, acc_stride]
  SoftmaxState* states = nullptr;  // [num_slots, num_heads]
  float* block_sums = nullptr;     // [num_seqs, num_heads, max_blocks]: l of each block, relative to its split's m; or null
  int64_t acc_stride;    // head_dim rounded up to 64
  int64_t num_heads, max_blocks;

  PartialResults(const AttentionParams& p, const AttentionPlan& plan)
      : acc_stride((p.head_dim + 63) / 64 * 64), num_heads(p.num_heads), max_blocks(p.max_blocks) {
    const int64_t rows = plan.num_slots * num_heads;
    const int64_t sums = p.block_mass ? p.num_seqs * num_heads * max_blocks : 0;
    const size_t bytes = rows * (acc_stride * sizeof(float) + sizeof(SoftmaxState)) + sums * sizeof(float);
    memory_.reset(static_cast<float*>(::operator new(bytes, kAlignment)));
    acc = memory_.get();
    states = reinterpret_cast<SoftmaxState*>(acc + rows * acc_stride);
    if (sums > 0) block_sums = reinterpret_cast<float*>(states + rows);
  }

  float* acc_row(int64_t slot, int64_t head) const { return acc + (slot * num_heads + head) * acc_stride; }
  SoftmaxState& state(int64_t slot, int64_t head) const { return states[slot * num_heads + head]; }
  float* block_row(int64_t seq, int64_t head) const { return block_sums + (seq * num_heads + head) * max_blocks; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<float, Delete> memory_;
};

}  // namespace pagedkv
