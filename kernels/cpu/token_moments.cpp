// token_moments: of each token's vector y = (x - shift) * gain, the sum and the sum of squares over channels.
#include <algorithm>
#include <cmath>

#include "paged_tokens.h"
#include "parallel.h"

namespace pagedkv {

void token_moments(const TokenMomentsParams& p, void*) {
  const PagedTokens& t = p.tokens;
  dispatch_cache(t.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t places = t.num_seqs * t.max_blocks, rows = t.block_size * t.num_kv_heads;
    parallel_ranges(places, 1 + 4096 / (rows * t.head_dim / 8), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t seq = i / t.max_blocks, place = i % t.max_blocks, group = place / t.blocks_per_group;
        float *sum = p.sum + i * rows, *squares = p.sum_of_squares + i * rows;
        const float nothing = valid_length(t, seq) ? 0.0f : NAN;
        std::fill_n(sum, rows, nothing);
        std::fill_n(squares, rows, nothing);
        const int64_t tokens = tokens_at(t, seq, place);
        const int64_t block = tokens > 0 ? block_at(t, seq, place) : -1;
        for (int64_t row = 0; row < tokens * t.num_kv_heads; ++row) {
          const int64_t token = row / t.num_kv_heads, head = row % t.num_kv_heads;
          if (block < 0) {
            sum[row] = squares[row] = NAN;
            continue;
          }
          const float *shift = nullptr, *gain = nullptr;
          if (p.shift) {
            shift = p.shift + seq * p.shift_stride_seq + group * p.shift_stride_group + head * p.shift_stride_head;
            gain = p.gain + seq * p.gain_stride_seq + group * p.gain_stride_group + head * p.gain_stride_head;
          }
          simd::Floats first = simd::broadcast(0.0f), second = first;
          for_channels<T>(t, block, token, head, [&](int64_t d, simd::Floats x) {
            if (shift) x = (x - simd::load(shift + d)) * simd::load(gain + d);
            first = first + x;
            second = simd::multiply_add(x, x, second);
          });
          sum[row] = simd::sum(first), squares[row] = simd::sum(second);
        }
      }
    });
  });
}

}  // namespace pagedkv
