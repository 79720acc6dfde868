// A tile of a sequence's tokens: where it lies in the paged cache, and how to have it at hand in time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../ops.h"

namespace pagedkv {

constexpr int kMaxHeadDim = 256;
constexpr int kTile = 64;  // tokens handled at a time: K and V of all heads, 128 KB at 8 heads of 128, fit L2
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

// Calls f(first, how many) over the query heads of a GQA group, up to four at a time, the number as a type.
template <class F>
void for_heads(int64_t group, const F& f) {
  for (int64_t first = 0; first < group; first += 4) {
    switch (group - first) {
      case 1: f(first, std::integral_constant<int, 1>{}); break;
      case 2: f(first, std::integral_constant<int, 2>{}); break;
      case 3: f(first, std::integral_constant<int, 3>{}); break;
      default: f(first, std::integral_constant<int, 4>{}); break;
    }
  }
}

// A cache's K or V, of some KV heads.
struct Plane {
  const void* cache;
  int64_t stride_head, head_dim, element_size;
  int64_t kv_begin, kv_end;
};

// Asks for rows of a plane ahead of time, cache line by cache line in memory order, while other rows are worked on.
// Kernels call `fetch` from their inner loops: a burst would fill the core's miss buffers and stall it.
class Prefetcher {
 public:
  Prefetcher(const Plane& plane, const int64_t* rows, int count)
      : first_(static_cast<const char*>(plane.cache) + plane.kv_begin * plane.stride_head * plane.element_size),
        row_(rows),
        end_(rows + count),
        element_size_(plane.element_size),
        segment_stride_(plane.stride_head * plane.element_size),
        // Heads that lie side by side make one segment.
        segments_(plane.stride_head == plane.head_dim ? 1 : plane.kv_end - plane.kv_begin),
        segment_bytes_((plane.kv_end - plane.kv_begin) / segments_ * plane.head_dim * plane.element_size) {
    start_segment();
  }

  void fetch(int64_t lines) {
    while (lines > 0 && next_ < stop_) {
      const char* stop = std::min(stop_, next_ + lines * 64);
      for (; next_ < stop; next_ += 64, --lines) __builtin_prefetch(next_, 0, 2);  // into L2: L1 has no room for a tile of all heads
      if (next_ >= stop_) {
        if (++segment_ == segments_) segment_ = 0, ++row_;
        start_segment();
      }
    }
  }

 private:
  void start_segment() {
    if (row_ == end_) return;
    next_ = first_ + *row_ * element_size_ + segment_ * segment_stride_;
    stop_ = next_ + segment_bytes_;
  }

  const char* first_;
  const int64_t *row_, *end_;
  int64_t element_size_, segment_stride_, segments_, segment_bytes_, segment_ = 0;
  const char *next_ = nullptr, *stop_ = nullptr;
};

}  // namespace pagedkv
