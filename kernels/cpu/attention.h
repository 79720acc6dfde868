// Paged decode attention on the CPU, whatever the cache holds.
//
// An item of work is (sequence, split, part of the KV heads). It walks its tokens in tiles of 64, and for each
// tile takes the KV heads in turn: a block of the pool holds its heads side by side, so memory is read in
// order. What touches K and V is the tile kernel's (tile_float.h, tile_vnni.h); softmax, masks, block mass
// and merging are here, once.
//
// A tile kernel offers:
//   Cache                       the cache's element type
//   kQuantised                  whether the cache comes with scales
//   Kernel(params)              allocates what an item needs
//   load_query(seq, begin, end) reads the query heads [begin, end)
//   logits(tile, kv, out, ahead)
//                               out[i][t] = q[i] . k[t] for the query heads i of a KV head, K's scale left out
//   accumulate(tile, kv, weights, factors, acc, stride, ahead)
//                               acc[i] = acc[i] * factors[i] + sum over t of weights[i][t] * v[t], V's scale left out
//   finish(acc)                 puts a row of acc into the order of the head dimension
// Both products call ahead.fetch from their inner loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention_plan.h"
#include "parallel.h"
#include "simd.h"

namespace pagedkv {

constexpr float kLog2eRest = 1.92596303e-8f;  // log2(e) - kLog2e

// Up to 64 consecutive tokens of a sequence: where their rows and scales lie, as offsets for head 0. Entries past
// `count` repeat the last token's, so that kernels may load whole vectors of tokens; their weights are 0.
struct Tile {
  int64_t first = 0;  // position in the sequence
  int count = 0;
  int64_t k_row[kTile], v_row[kTile];
  int64_t k_scale[kTile], v_scale[kTile];

  int padded() const { return (count + 15) / 16 * 16; }

  Tile() = default;
  Tile(const AttentionParams& p, int64_t seq, int64_t first, int64_t end) : first(first), count(static_cast<int>(std::min<int64_t>(kTile, end - first))) {
    const int32_t* table = p.block_tables + seq * p.block_tables_stride;
    int64_t logical = first / p.block_size, offset = first % p.block_size;
    for (int t = 0; t < count; ++t) {
      const int64_t block = table[logical];
      k_row[t] = block * p.k_stride_block + offset * p.k_stride_token;
      v_row[t] = block * p.v_stride_block + offset * p.v_stride_token;
      k_scale[t] = block * p.k_scale_stride_block + offset * p.k_scale_stride_token;
      v_scale[t] = block * p.v_scale_stride_block + offset * p.v_scale_stride_token;
      if (++offset == p.block_size) offset = 0, ++logical;
    }
    for (int t = count; t < padded(); ++t) {
      k_row[t] = k_row[count - 1], v_row[t] = v_row[count - 1];
      k_scale[t] = k_scale[count - 1], v_scale[t] = v_scale[count - 1];
    }
  }
};

// Asks for the K and V of a tile ahead of time, cache line by cache line in memory order, while the tile before it
// is worked on. Kernels call `fetch` from their inner loops: a burst would fill the core's miss buffers and stall it.
template <class Cache>
class Prefetcher {
 public:
  Prefetcher(const AttentionParams& p, const Tile& tile, int64_t kv_begin, int64_t kv_end) : p_(p), tile_(tile), kv_begin_(kv_begin) {
    // Heads that lie side by side make one segment.
    const int64_t heads = kv_end - kv_begin;
    const bool dense = p.k_stride_head == p.head_dim && p.v_stride_head == p.head_dim;
    heads_per_segment_ = dense ? heads : 1;
    segments_per_token_ = 2 * (heads / heads_per_segment_);
    segments_left_ = tile.count * segments_per_token_ + 1;
    advance();
  }

  void fetch(int64_t lines) {
    for (; lines > 0 && segments_left_ > 0; --lines) {
      __builtin_prefetch(next_, 0, 2);  // into L2: L1 has no room for a tile of all heads
      next_ += kLine;
      if (next_ >= stop_) advance();
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  void advance() {
    if (--segments_left_ == 0) return;
    const int64_t index = segment_++;
    const int64_t t = index / segments_per_token_, head = kv_begin_ + index % segments_per_token_ / 2;
    const Cache* row = index % 2 == 0 ? static_cast<const Cache*>(p_.k_cache) + tile_.k_row[t] + head * p_.k_stride_head
                                      : static_cast<const Cache*>(p_.v_cache) + tile_.v_row[t] + head * p_.v_stride_head;
    next_ = reinterpret_cast<const char*>(row);
    stop_ = next_ + heads_per_segment_ * p_.head_dim * static_cast<int64_t>(sizeof(Cache));
  }

  const AttentionParams& p_;
  const Tile& tile_;
  int64_t kv_begin_, heads_per_segment_, segments_per_token_, segments_left_, segment_ = 0;
  const char *next_ = nullptr, *stop_ = nullptr;
};

// A row of q as float32.
inline void load_query_row(const AttentionParams& p, int64_t seq, int64_t head, float* row) {
  dispatch_float(p.q_dtype, [&](auto type) {
    const auto* q = static_cast<const decltype(type)*>(p.q) + seq * p.q_stride_seq + head * p.q_stride_head;
    for (int64_t d = 0; d < p.head_dim; d += simd::kLanes) simd::store(row + d, simd::load(q + d));
  });
}

// Turns a head's raw logits into weights, and its state into that of the tokens so far. Returns the factor by
// which what was accumulated before has to be scaled.
//
// Logits are natural until the maximum is off: a logit of 40 rounded to base 2 would cost float32 results two
// digits. m is a reference and need not be the maximum to the last bit, so only the difference has to be exact.
inline float online_softmax(const AttentionParams& p, const Tile& tile, const float* k_scale, float* row, SoftmaxState& state) {
  using namespace simd;
  const Floats sm_scale = broadcast(p.sm_scale), cap = broadcast(p.logits_soft_cap);
  Floats lane_max = broadcast(-INFINITY);
  for (int t = 0; t < tile.padded(); t += kLanes) {
    Floats x = load(row + t) * sm_scale;
    if (k_scale) x = x * load(k_scale + t);
    if (p.logits_soft_cap != 0.0f) x = tanh(x / cap) * cap;
    store(row + t, x);
    for (int i = std::max(tile.count, t); i < t + kLanes; ++i) row[i] = -INFINITY;
    lane_max = max(load(row + t), lane_max);
  }
  const float m = std::fmax(state.m, max_lane(lane_max) * kLog2e);
  const float factor = m == state.m ? 1.0f : rescale(state.m, m);
  const Floats log2e = broadcast(kLog2e), log2e_rest = broadcast(kLog2eRest), reference = broadcast(-m);
  Floats lane_sum = broadcast(0.0f);
  for (int t = 0; t < tile.padded(); t += kLanes) {
    const Floats x = load(row + t);
    const Floats weight = exp2(multiply_add(x, log2e_rest, fma(x, log2e, reference)));
    store(row + t, weight);
    lane_sum = lane_sum + weight;
  }
  state = {m, state.l * factor + sum(lane_sum)};
  return factor;
}

// A logit that joins the denominator only, as a state: l makes up for what rounding m took away.
inline SoftmaxState sink_state(float logit) {
  if (std::isinf(logit)) return {logit, 1.0f};
  const double exact = logit * 1.4426950408889634;
  const float m = static_cast<float>(exact);
  return {m, static_cast<float>(std::exp2(exact - m))};
}

inline float natural_lse(SoftmaxState s) {
  return s.l == 0.0f ? -INFINITY : static_cast<float>((s.m + std::log2(static_cast<double>(s.l))) * 0.6931471805599453);
}

// Adds a tile's weights to the sums of their blocks, and keeps the split's earlier blocks relative to the same maximum.
inline void add_block_sums(const AttentionParams& p, const Tile& tile, int64_t split_begin, const float* weights, float factor, float* sums) {
  const int64_t first_of_split = split_begin / p.block_size;
  int64_t block = tile.first / p.block_size;
  if (factor != 1.0f) {
    for (int64_t b = first_of_split; b <= block; ++b) sums[b] *= factor;
  }
  for (int t = 0; t < tile.count;) {
    const int end = static_cast<int>(std::min<int64_t>(tile.count, (block + 1) * p.block_size - tile.first));
    for (; t < end; ++t) sums[block] += weights[t];
    ++block;
  }
}

template <class Kernel>
class AttentionItem {
  using Cache = typename Kernel::Cache;

 public:
  AttentionItem(const AttentionParams& p, const AttentionPlan& plan, const PartialResults& partial)
      : p_(p), plan_(plan), partial_(partial), kernel_(p), group_(p.num_heads / p.num_kv_heads), weights_(group_ * kTile), factors_(group_) {}

  void run(int64_t seq, int64_t split, int64_t head_part) {
    const SequenceRange& range = plan_.sequences[seq];
    const int64_t begin = std::max(range.begin, split * plan_.tokens_per_split);
    const int64_t end = std::min(range.end, (split + 1) * plan_.tokens_per_split);
    const int64_t kv_begin = p_.num_kv_heads * head_part / plan_.head_parts;
    const int64_t kv_end = p_.num_kv_heads * (head_part + 1) / plan_.head_parts;
    const int64_t slot = range.first_slot + split - range.first_split;

    kernel_.load_query(seq, kv_begin * group_, kv_end * group_);
    for (int64_t h = kv_begin * group_; h < kv_end * group_; ++h) {
      std::fill_n(partial_.acc_row(slot, h), partial_.acc_stride, 0.0f);
      partial_.state(slot, h) = SoftmaxState{};
      if (partial_.block_sums) {
        float* sums = partial_.block_row(seq, h);
        std::fill(sums + begin / p_.block_size, sums + (end - 1) / p_.block_size + 1, 0.0f);
      }
    }

    Tile tile(p_, seq, begin, end), next;
    while (tile.count > 0) {
      const int64_t next_first = tile.first + tile.count;
      next = next_first < end ? Tile(p_, seq, next_first, end) : Tile();
      Prefetcher<Cache> ahead(p_, next, kv_begin, kv_end);
      for (int64_t kv = kv_begin; kv < kv_end; ++kv) attend(tile, seq, slot, kv, begin, ahead);
      tile = next;
    }
    for (int64_t h = kv_begin * group_; h < kv_end * group_; ++h) kernel_.finish(partial_.acc_row(slot, h));
  }

 private:
  void attend(const Tile& tile, int64_t seq, int64_t slot, int64_t kv, int64_t split_begin, Prefetcher<Cache>& ahead) {
    alignas(64) float k_scale[kTile], v_scale[kTile];
    if constexpr (Kernel::kQuantised) {
      for (int t = 0; t < tile.padded(); ++t) {
        k_scale[t] = p_.k_scale[tile.k_scale[t] + kv * p_.k_scale_stride_head];
        v_scale[t] = p_.v_scale[tile.v_scale[t] + kv * p_.v_scale_stride_head];
      }
    }
    const int64_t first = kv * group_;
    kernel_.logits(tile, kv, weights_.data(), ahead);
    for (int64_t i = 0; i < group_; ++i) {
      float* row = weights_.data() + i * kTile;
      factors_[i] = online_softmax(p_, tile, Kernel::kQuantised ? k_scale : nullptr, row, partial_.state(slot, first + i));
      if (partial_.block_sums) add_block_sums(p_, tile, split_begin, row, factors_[i], partial_.block_row(seq, first + i));
      if constexpr (Kernel::kQuantised) {
        for (int t = 0; t < tile.padded(); ++t) row[t] *= v_scale[t];
      }
    }
    kernel_.accumulate(tile, kv, weights_.data(), factors_.data(), partial_.acc_row(slot, first), partial_.acc_stride, ahead);
  }

  const AttentionParams& p_;
  const AttentionPlan& plan_;
  const PartialResults& partial_;
  Kernel kernel_;
  int64_t group_;               // query heads of a KV head
  std::vector<float> weights_;  // [group, kTile]: logits, then softmax weights
  std::vector<float> factors_;  // [group]
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
  if (p.sinks && splits > 0) all = merge(all, sink_state(p.sinks[head]));
  if (p.lse) p.lse[seq * p.num_heads + head] = range.valid ? natural_lse(all) : NAN;

  for (int64_t d = 0; d < p.head_dim; d += simd::kLanes) {
    simd::Floats sum = simd::broadcast(range.valid ? 0.0f : NAN);
    for (int64_t s = 0; s < splits; ++s) {
      const float weight = rescale(partial.state(range.first_slot + s, head).m, all.m) / all.l;
      sum = simd::fma(simd::load(partial.acc_row(range.first_slot + s, head) + d), simd::broadcast(weight), sum);
    }
    simd::store(out + d, sum);
  }
  if (p.block_mass) {
    for (int64_t s = 0; s < splits; ++s) {
      float& m = partial.state(range.first_slot + s, head).m;
      m = rescale(m, tokens.m) / tokens.l;
    }
  }
}

inline void average_block_mass(const AttentionParams& p, const AttentionPlan& plan, const PartialResults& partial, int64_t seq) {
  const SequenceRange& range = plan.sequences[seq];
  float* mass = p.block_mass + seq * p.max_blocks;
  std::fill_n(mass, p.max_blocks, range.valid ? 0.0f : NAN);
  if (!range.valid || range.end == 0) return;
  for (int64_t b = range.begin / p.block_size; b <= (range.end - 1) / p.block_size; ++b) {
    const int64_t slot = range.first_slot + b * p.block_size / plan.tokens_per_split - range.first_split;
    float sum = 0.0f;
    for (int64_t h = 0; h < p.num_heads; ++h) sum += partial.block_row(seq, h)[b] * partial.state(slot, h).m;
    mass[b] = sum / static_cast<float>(p.num_heads);
  }
}

inline size_t attention_workspace(const AttentionParams& p) { return PartialResults(p, AttentionPlan(p), nullptr).bytes; }

template <class Kernel>
void attention(const AttentionParams& p, void* workspace) {
  AttentionPlan plan(p);
  plan.check_block_tables(p);
  const PartialResults partial(p, plan, workspace);

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
