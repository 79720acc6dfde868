// token_moments: of each token's vector y = (x - shift) * gain, the sum and the sum of squares over channels.
#include "paged_tokens.cuh"

namespace pagedkv {
namespace {

template <class T, bool kAligned>
__global__ void __launch_bounds__(kTokenThreads) moments(TokenMomentsParams p, int lanes) {
  const PagedTokens& t = p.tokens;
  const int heads = static_cast<int>(t.num_kv_heads);
  const int part = threadIdx.x % lanes;
  const int rows_per_cta = kTokenThreads / lanes;
  const int64_t rows = t.num_seqs * t.max_blocks * t.block_size * heads;
  for (int64_t first = int64_t{blockIdx.x} * rows_per_cta; first < rows; first += int64_t{gridDim.x} * rows_per_cta) {
    const int64_t row = first + threadIdx.x / lanes;
    float sum = 0.f, squares = 0.f;
    if (row < rows) {
      const Quotient head = divide(row, heads);
      const Quotient token = divide(head.quotient, static_cast<int>(t.block_size));
      const Quotient place = divide(token.quotient, static_cast<int>(t.max_blocks));
      const int64_t seq = place.quotient;
      const bool good = valid_length(t, seq);
      if (good && place.remainder * t.block_size + token.remainder < t.seq_lens[seq]) {
        const int64_t block = block_at(t, seq, place.remainder);
        if (block < 0) {
          sum = squares = NAN;
        } else if (part * kUnit < t.head_dim) {
          float x[kUnit];
          load_row_part<T, kAligned>(t, block, token.remainder, head.remainder, part, x);
          if (p.shift) {
            const int64_t group = place.remainder / t.blocks_per_group;
            const float* shift = p.shift + seq * p.shift_stride_seq + group * p.shift_stride_group + head.remainder * p.shift_stride_head;
            const float* gain = p.gain + seq * p.gain_stride_seq + group * p.gain_stride_group + head.remainder * p.gain_stride_head;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) x[i] = (x[i] - shift[part * kUnit + i]) * gain[part * kUnit + i];
          }
#pragma unroll
          for (int i = 0; i < kUnit; ++i) sum += x[i], squares = fmaf(x[i], x[i], squares);
        }
      } else if (!good) {
        sum = squares = NAN;
      }
    }
    sum = row_sum(sum, lanes), squares = row_sum(squares, lanes);
    if (row < rows && part == 0) p.sum[row] = sum, p.sum_of_squares[row] = squares;
  }
}

}  // namespace

void token_moments(const TokenMomentsParams& p, void* stream) {
  const PagedTokens& t = p.tokens;
  const int lanes = lanes_of_row(t);
  const int64_t rows = t.num_seqs * t.max_blocks * t.block_size * t.num_kv_heads;
  dispatch_cache(t, [&](auto element, auto aligned) {
    moments<decltype(element), decltype(aligned)::value>
        <<<grid_for(rows, kTokenThreads / lanes, 1 << 20), kTokenThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, lanes);
  });
  check_launch("token_moments");
}

}  // namespace pagedkv
