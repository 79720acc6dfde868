// channel_statistics: of each channel, over a group of places, the lowest and highest value and the sum of unit vectors.
//
// A CTA takes one head of one group. Its rows go round over the tokens, each lane keeps eight channels, and the rows'
// partial results are joined in their order: the same bits whatever ran first.
#include "paged_tokens.cuh"

namespace pagedkv {
namespace {

template <class T, bool kAligned>
__global__ void __launch_bounds__(kTokenThreads) channels(ChannelStatisticsParams p, int lanes) {
  __shared__ float partial[kTokenThreads * kUnit];
  const PagedTokens& t = p.tokens;
  const int part = threadIdx.x % lanes, row = threadIdx.x / lanes, rows = kTokenThreads / lanes;
  const bool active = part * kUnit < t.head_dim;
  const int64_t items = t.num_seqs * t.num_groups * t.num_kv_heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Quotient head = divide(item, static_cast<int>(t.num_kv_heads));
    const Quotient group = divide(head.quotient, static_cast<int>(t.num_groups));
    const int64_t seq = group.quotient;
    bool bad = !valid_length(t, seq);
    const int64_t group_tokens = t.blocks_per_group * t.block_size;
    const int64_t begin = group.remainder * group_tokens;
    const int64_t end = bad ? begin : min(static_cast<int64_t>(t.seq_lens[seq]), begin + group_tokens);

    float low[kUnit], high[kUnit], direction[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) low[i] = INFINITY, high[i] = -INFINITY, direction[i] = 0.f;
    for (int64_t first = begin; first < end; first += rows) {  // every lane takes each step: the sums need them all
      const int64_t token = first + row;
      float x[kUnit] = {}, squares = 0.f;
      bool read = false;
      if (token < end) {
        const Quotient place = divide(token, static_cast<int>(t.block_size));
        const int64_t block = block_at(t, seq, place.quotient);
        bad = bad || block < 0;
        read = block >= 0 && active;
        if (read) load_row_part<T, kAligned>(t, block, place.remainder, head.remainder, part, x);
      }
#pragma unroll
      for (int i = 0; i < kUnit; ++i) squares = fmaf(x[i], x[i], squares);
      const float norm = sqrtf(row_sum(squares, lanes));
      const float inverse = norm == 0.f ? 0.f : 1.f / norm;
      if (!read) continue;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        low[i] = fminf(low[i], x[i]), high[i] = fmaxf(high[i], x[i]);  // which leave NaN out
        direction[i] = fmaf(x[i], inverse, direction[i]);
      }
    }
    bad = __syncthreads_or(bad);

    auto join = [&](const float (&own)[kUnit], float* out, auto combine) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) partial[threadIdx.x * kUnit + i] = own[i];
      __syncthreads();
      for (int d = threadIdx.x; d < t.head_dim; d += kTokenThreads) {
        float result = partial[d];
        for (int r = 1; r < rows; ++r) result = combine(result, partial[r * lanes * kUnit + d]);
        out[item * t.head_dim + d] = bad ? NAN : result;
      }
      __syncthreads();
    };
    join(low, p.low, [](float a, float b) { return fminf(a, b); });
    join(high, p.high, [](float a, float b) { return fmaxf(a, b); });
    join(direction, p.direction, [](float a, float b) { return a + b; });
  }
}

}  // namespace

void channel_statistics(const ChannelStatisticsParams& p, void* stream) {
  const PagedTokens& t = p.tokens;
  const int lanes = lanes_of_row(t);
  const int64_t items = t.num_seqs * t.num_groups * t.num_kv_heads;
  dispatch_cache(t, [&](auto element, auto aligned) {
    channels<decltype(element), decltype(aligned)::value>
        <<<grid_for(items, 1, 1 << 20), kTokenThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, lanes);
  });
  check_launch("channel_statistics");
}

}  // namespace pagedkv
