// A tile of a sequence's tokens: where it lies in the paged cache, and how to have it at hand in time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../ops.h"

namespace pagedkv {

constexpr int kMaxHeadDim = 256;
constexpr int kTile = 64;  // tokens handled at a time: K and V of all heads (128 KB at 8 heads of 128) fit L2 twice
constexpr int kPad = 32;   // tiles are padded to whole vectors of tokens, two of 16 in tile_vnni.h

// Up to 64 consecutive tokens of a sequence: where their rows lie, as offsets for head 0, and the runs of tokens that
// share a block. Rows past `count` repeat the last token's, so that kernels may work on whole vectors of tokens.
struct Tile {
  struct Run {
    int64_t block, offset;  // block of the pool, first token in it
    int begin, end;         // tokens of the tile
  };

  int64_t first = 0;  // position in the sequence
  int count = 0;
  int num_runs = 0;
  int64_t k_row[kTile], v_row[kTile];
  Run runs[kTile];

  int padded() const { return (count + kPad - 1) / kPad * kPad; }

  void locate(const AttentionParams& p, int64_t seq, int64_t position, int64_t end) {
    first = position;
    count = static_cast<int>(std::clamp<int64_t>(end - first, 0, kTile));
    num_runs = 0;
    const int32_t* table = p.block_tables + seq * p.block_tables_stride;
    for (int t = 0; t < count;) {
      const int64_t block = table[(first + t) / p.block_size], offset = (first + t) % p.block_size;
      const int run_end = static_cast<int>(std::min<int64_t>(count, t + p.block_size - offset));
      runs[num_runs++] = {block, offset, t, run_end};
      for (int64_t o = offset; t < run_end; ++t, ++o) {
        k_row[t] = block * p.k_stride_block + o * p.k_stride_token;
        v_row[t] = block * p.v_stride_block + o * p.v_stride_token;
      }
    }
    for (int t = count; t < padded(); ++t) k_row[t] = k_row[count - 1], v_row[t] = v_row[count - 1];
  }

  // The tokens' scales of a head, past `count` the last one's.
  void load_scales(const float* scale, int64_t stride_block, int64_t stride_token, float* out) const {
    for (int r = 0; r < num_runs; ++r) {
      const float* s = scale + runs[r].block * stride_block + runs[r].offset * stride_token;
      for (int t = runs[r].begin; t < runs[r].end; ++t, s += stride_token) out[t] = *s;
    }
    std::fill(out + count, out + padded(), out[count - 1]);
  }
};

// Asks for the K and V of a tile ahead of time, cache line by cache line in memory order, while the tile before it
// is worked on. Kernels call `fetch` from their inner loops: a burst would fill the core's miss buffers and stall it.
template <class Cache>
class Prefetcher {
 public:
  Prefetcher(const AttentionParams& p, const Tile& tile, int64_t kv_begin, int64_t kv_end) : p_(p), tile_(tile), kv_begin_(kv_begin) {
    // Heads that lie side by side make one segment.
    const bool dense = p.k_stride_head == p.head_dim && p.v_stride_head == p.head_dim;
    segments_ = dense ? 1 : kv_end - kv_begin;
    segment_bytes_ = (kv_end - kv_begin) / segments_ * p.head_dim * static_cast<int64_t>(sizeof(Cache));
    start_segment();
  }

  void fetch(int lines) {
    for (; lines > 0 && next_ < stop_; --lines) {
      __builtin_prefetch(next_, 0, 2);  // into L2: L1 has no room for a tile of all heads
      next_ += 64;
      if (next_ >= stop_) advance();
    }
  }

 private:
  // In the order of memory where K and V are planes of their own: all heads of a token's K, then of its V.
  void advance() {
    if (++segment_ == segments_) segment_ = 0, is_value_ = !is_value_, token_ += !is_value_;
    start_segment();
  }

  void start_segment() {
    if (token_ == tile_.count) return;
    const Cache* row = is_value_ ? static_cast<const Cache*>(p_.v_cache) + tile_.v_row[token_] + (kv_begin_ + segment_) * p_.v_stride_head
                                 : static_cast<const Cache*>(p_.k_cache) + tile_.k_row[token_] + (kv_begin_ + segment_) * p_.k_stride_head;
    next_ = reinterpret_cast<const char*>(row);
    stop_ = next_ + segment_bytes_;
  }

  const AttentionParams& p_;
  const Tile& tile_;
  int64_t kv_begin_, segments_, segment_bytes_, segment_ = 0;
  bool is_value_ = false;
  int token_ = 0;
  const char *next_ = nullptr, *stop_ = nullptr;
};

}  // namespace pagedkv
