// Paged decode attention on the CPU, whatever the cache holds.
//
// An item of work is (sequence, split, part of the KV heads). It walks its tokens in tiles of 64: first all K of a
// tile, then the softmax, then all V, while V, and the next tile's K, are fetched. A block of the pool holds its
// heads side by side, so memory is read in order where a tile kernel takes all heads of a token in turn. What touches K
// and V is the tile kernel's (tile_float.h, tile_int16.h, tile_vnni.h); softmax, masks, block mass and merging are here, once.
//
// A tile kernel offers:
//   Cache                       the cache's element type
//   kQuantised                  whether the cache comes with scales
//   Kernel(params)              allocates what an item needs
//   load_query(seq, kv_begin, kv_end)
//                               reads the query heads of these KV heads: heads of the item, counted from 0 below
//   logits(tile, out, ahead)    out[h][t] = q[h] . k[t], K's scale left out
//   accumulate(tile, weights, factors, acc, stride, ahead)
//                               acc[h] = acc[h] * factors[h] + sum over t of weights[h][t] * v[t], V's scale left out
//   finish(acc)                 puts a row of acc into the order of the head dimension
// Both products call ahead.fetch from their inner loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention_plan.h"
#include "attention_tile.h"
#include "hadamard.h"
#include "online_softmax.h"
#include "parallel.h"
#include "simd.h"

namespace pagedkv {

// A row of q as float32, rotated if K is.
inline void load_query_row(const AttentionParams& p, int64_t seq, int64_t head, float* row) {
  dispatch_float(p.q_dtype, [&](auto type) {
    const auto* q = static_cast<const decltype(type)*>(p.q) + seq * p.q_stride_seq + head * p.q_stride_head;
    for (int64_t d = 0; d < p.head_dim; d += simd::kLanes) simd::store(row + d, simd::load(q + d));
  });
  if (p.rotated) hadamard_transform(row, p.head_dim);
}

template <class Kernel>
class AttentionItem {
  using Cache = typename Kernel::Cache;

 public:
  AttentionItem(const AttentionParams& p, const AttentionPlan& plan, const PartialResults& partial)
      : p_(p),
        plan_(plan),
        partial_(partial),
        kernel_(p),
        group_(p.num_heads / p.num_kv_heads),
        weights_(p.num_heads),
        factors_(p.num_heads) {}

  void run(int64_t seq, int64_t split, int64_t head_part) {
    const SequenceRange& range = plan_.sequences[seq];
    const int64_t begin = std::max(range.begin, split * plan_.tokens_per_split);
    const int64_t end = std::min(range.end, (split + 1) * plan_.tokens_per_split);
    const int64_t kv_begin = p_.num_kv_heads * head_part / plan_.head_parts;
    const int64_t kv_end = p_.num_kv_heads * (head_part + 1) / plan_.head_parts;
    const int64_t slot = range.first_slot + split - range.first_split;

    kernel_.load_query(seq, kv_begin, kv_end);
    for (int64_t h = kv_begin * group_; h < kv_end * group_; ++h) {
      std::fill_n(partial_.acc_row(slot, h), partial_.acc_stride, 0.0f);
      partial_.state(slot, h) = SoftmaxState{};
      if (partial_.block_sums) {
        float* sums = partial_.block_row(seq, h);
        std::fill(sums + begin / p_.block_size, sums + (end - 1) / p_.block_size + 1, 0.0f);
      }
    }

    const Plane keys{p_.k_cache, p_.k_stride_head, p_.head_dim, sizeof(Cache), kv_begin, kv_end};
    const Plane values{p_.v_cache, p_.v_stride_head, p_.head_dim, sizeof(Cache), kv_begin, kv_end};
    float* acc = partial_.acc_row(slot, kv_begin * group_);
    Tile tiles[2], *tile = &tiles[0], *next = &tiles[1];
    for (tile->locate(p_, seq, begin, end); tile->count > 0; std::swap(tile, next)) {
      next->locate(p_, seq, tile->first + tile->count, end);
      Prefetcher ahead_v(values, tile->v_row, tile->count), ahead_k(keys, next->k_row, next->count);
      kernel_.logits(*tile, weights_[0].of_token, ahead_v);
      for (int64_t kv = kv_begin; kv < kv_end; ++kv) weigh(*tile, seq, slot, kv, (kv - kv_begin) * group_, begin);
      kernel_.accumulate(*tile, weights_[0].of_token, factors_.data(), acc, partial_.acc_stride, ahead_k);
    }
    for (int64_t h = kv_begin * group_; h < kv_end * group_; ++h) kernel_.finish(partial_.acc_row(slot, h));
  }

 private:
  struct alignas(64) Row {
    float of_token[kTile];
  };

  // Turns the logits of a KV head's query heads, the item's from `first` on, into what to multiply V by.
  void weigh(const Tile& tile, int64_t seq, int64_t slot, int64_t kv, int64_t first, int64_t split_begin) {
    alignas(64) float k_scale[kTile], v_scale[kTile];
    if constexpr (Kernel::kQuantised) {
      tile.load_scales(p_.k_scale + kv * p_.k_scale_stride_head, p_.k_scale_stride_block, p_.k_scale_stride_token, k_scale);
      tile.load_scales(p_.v_scale + kv * p_.v_scale_stride_head, p_.v_scale_stride_block, p_.v_scale_stride_token, v_scale);
    }
    for (int64_t i = 0; i < group_; ++i) {
      const int64_t h = kv * group_ + i;
      float *row = weights_[first + i].of_token, &factor = factors_[first + i];
      factor = online_softmax(p_, tile, Kernel::kQuantised ? k_scale : nullptr, row, partial_.state(slot, h));
      if (partial_.block_sums) add_block_sums(p_, tile, split_begin, row, factor, partial_.block_row(seq, h));
      if constexpr (Kernel::kQuantised) {
        for (int t = 0; t < tile.padded(); ++t) row[t] *= v_scale[t];
      }
    }
  }

  const AttentionParams& p_;
  const AttentionPlan& plan_;
  const PartialResults& partial_;
  Kernel kernel_;
  int64_t group_;               // query heads of a KV head
  std::vector<Row> weights_;    // [heads]: logits, then softmax weights
  std::vector<float> factors_;  // [heads]
};

// Merges a head's splits into its output, and turns each split's m into the factor that makes its block sums a
// share of the softmax (the sink left out).
template <class Query>
void merge_splits(const AttentionParams& p, const AttentionPlan& plan, const PartialResults& partial, int64_t seq, int64_t head) {
  const SequenceRange& range = plan.sequences[seq];
  const int64_t splits = range.valid ? range.end_split - range.first_split : 0;
  Query* out = static_cast<Query*>(p.out) + (seq * p.num_heads + head) * p.head_dim;

  SoftmaxState tokens;
  for (int64_t s = 0; s < splits; ++s) tokens = merge(tokens, partial.state(range.first_slot + s, head));
  SoftmaxState all = tokens;
  if (p.sinks && splits > 0) all = merge(all, single_logit(p.sinks[head]));
  if (p.lse) p.lse[seq * p.num_heads + head] = range.valid ? log_sum_exp(all) : NAN;

  alignas(64) float sum[kMaxHeadDim];
  std::fill_n(sum, p.head_dim, range.valid ? 0.0f : NAN);
  for (int64_t s = 0; s < splits; ++s) {
    float& m = partial.state(range.first_slot + s, head).m;
    const float* acc = partial.acc_row(range.first_slot + s, head);
    const simd::Floats weight = simd::broadcast(rescale(m, all.m) / all.l);
    for (int64_t d = 0; d < p.head_dim; d += simd::kLanes) {
      simd::store(sum + d, simd::multiply_add(simd::load(acc + d), weight, simd::load(sum + d)));
    }
    m = rescale(m, tokens.m) / tokens.l;
  }
  if (p.rotated) hadamard_transform(sum, p.head_dim);
  for (int64_t d = 0; d < p.head_dim; d += simd::kLanes) simd::store(out + d, simd::load(sum + d));
}

inline void average_block_mass(const AttentionParams& p, const AttentionPlan& plan, const PartialResults& partial, int64_t seq) {
  const SequenceRange& range = plan.sequences[seq];
  float* mass = p.block_mass + seq * p.max_blocks;
  std::fill_n(mass, p.max_blocks, range.valid ? 0.0f : NAN);
  if (!range.valid || range.end == 0) return;
  for (int64_t b = range.begin / p.block_size; b <= (range.end - 1) / p.block_size; ++b) {
    const int64_t slot = range.first_slot + b * p.block_size / plan.tokens_per_split - range.first_split;
    double sum = 0.0;  // in float32 the rounding of as many additions as there are heads
    for (int64_t h = 0; h < p.num_heads; ++h) sum += partial.block_row(seq, h)[b] * partial.state(slot, h).m;
    mass[b] = static_cast<float>(sum / static_cast<double>(p.num_heads));
  }
}

template <class Kernel>
void attention(const AttentionParams& p) {
  AttentionPlan plan(p);
  plan.check_block_tables(p);
  const PartialResults partial(p, plan);

  struct Work {
    int64_t seq, split;
  };
  std::vector<Work> work;
  for (int64_t s = 0; s < p.num_seqs; ++s) {
    const SequenceRange& r = plan.sequences[s];
    for (int64_t split = r.first_split; r.valid && split < r.end_split; ++split) work.push_back({s, split});
  }
  parallel_items(static_cast<int64_t>(work.size()) * plan.head_parts, [&](int64_t i) {
    const Work& w = work[i / plan.head_parts];
    AttentionItem<Kernel>(p, plan, partial).run(w.seq, w.split, i % plan.head_parts);
  });

  dispatch_float(p.q_dtype, [&](auto query) {
    parallel_ranges(p.num_seqs * p.num_heads, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) merge_splits<decltype(query)>(p, plan, partial, i / p.num_heads, i % p.num_heads);
    });
  });
  if (p.block_mass) {
    parallel_ranges(p.num_seqs, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) average_block_mass(p, plan, partial, s);
    });
  }
}

}  // namespace pagedkv
