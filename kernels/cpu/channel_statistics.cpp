// channel_statistics: of each channel, over a group of places, the lowest and highest value and the sum of unit vectors.
#include <algorithm>
#include <cmath>

#include "paged_tokens.h"
#include "parallel.h"

namespace pagedkv {

void channel_statistics(const ChannelStatisticsParams& p, void*) {
  const PagedTokens& t = p.tokens;
  dispatch_cache(t.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_items(t.num_seqs * t.num_groups * t.num_kv_heads, [&](int64_t i) {
      const int64_t head = i % t.num_kv_heads, group = i / t.num_kv_heads % t.num_groups, seq = i / t.num_kv_heads / t.num_groups;
      float *low = p.low + i * t.head_dim, *high = p.high + i * t.head_dim, *direction = p.direction + i * t.head_dim;
      std::fill_n(low, t.head_dim, INFINITY);
      std::fill_n(high, t.head_dim, -INFINITY);
      std::fill_n(direction, t.head_dim, 0.0f);
      bool bad = !valid_length(t, seq);
      const int64_t first = group * t.blocks_per_group, end = std::min(t.max_blocks, first + t.blocks_per_group);
      for (int64_t place = first; place < end && !bad; ++place) {
        const int64_t tokens = tokens_at(t, seq, place);
        if (tokens == 0) break;
        const int64_t block = block_at(t, seq, place);
        bad = block < 0;
        for (int64_t token = 0; token < tokens && !bad; ++token) {
          simd::Floats squares = simd::broadcast(0.0f);
          for_channels<T>(t, block, token, head, [&](int64_t, simd::Floats x) { squares = simd::multiply_add(x, x, squares); });
          const float norm = std::sqrt(simd::sum(squares));
          const simd::Floats inverse = simd::broadcast(norm == 0 ? 0.0f : 1 / norm);
          for_channels<T>(t, block, token, head, [&](int64_t d, simd::Floats x) {
            simd::store(low + d, simd::min(x, simd::load(low + d)));  // the second where either is NaN: it is left out
            simd::store(high + d, simd::max(x, simd::load(high + d)));
            simd::store(direction + d, simd::multiply_add(x, inverse, simd::load(direction + d)));
          });
        }
      }
      if (bad) {
        for (float* into : {low, high, direction}) std::fill_n(into, t.head_dim, NAN);
      }
    });
  });
}

}  // namespace pagedkv
