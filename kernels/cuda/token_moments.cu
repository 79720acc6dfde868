// token_moments: of each token's vector y = (x - shift) * gain, the sum and the sum of squares over channels.
//
// A warp takes a slice of a place's rows, so that what is looked up or divided serves kRows rows of each thread; the loads of
// those are all under way before the first is looked at.
#include <climits>

#include "paged_tokens.cuh"

namespace pagedkv {
namespace {

constexpr int kRows = 4;  // of a thread

// The shift and gain of a lane's channels; rows of a thread mostly share them.
template <int kChannels>
struct Affine {
  float shift[kChannels], gain[kChannels];
  int holds = -1;

  __device__ __forceinline__ void load(const TokenMomentsParams& p, int64_t seq, int group, int head, int part, bool vectors) {
    if (head == holds) return;
    holds = head;
    copy(p.shift + seq * p.shift_stride_seq + group * p.shift_stride_group + head * p.shift_stride_head + part * kChannels, vectors, shift);
    copy(p.gain + seq * p.gain_stride_seq + group * p.gain_stride_group + head * p.gain_stride_head + part * kChannels, vectors, gain);
  }
  static __device__ __forceinline__ void copy(const float* from, bool vectors, float (&to)[kChannels]) {
    if (vectors) {
#pragma unroll
      for (int i = 0; i < kChannels / 4; ++i) {
        const float4 four = reinterpret_cast<const float4*>(from)[i];
        to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) to[i] = from[i];
    }
  }
};

template <class Layout, bool kShifted>
__global__ void __launch_bounds__(kTokenThreads, kShifted ? 2 : 4) moments(TokenMomentsParams p, int lanes, int slices, bool vectors) {
  const PagedTokens& t = p.tokens;
  const int lane = threadIdx.x % 32, part = lane % lanes, rows_per_warp = 32 / lanes;
  const Quotient slice = divide((int64_t{blockIdx.x} * kTokenThreads + threadIdx.x) / 32, slices);
  if (slice.quotient >= t.num_seqs * t.max_blocks) return;  // all lanes of a warp or none
  const Quotient place = divide(slice.quotient, static_cast<int>(t.max_blocks));
  const int64_t seq = place.quotient;
  const int heads = static_cast<int>(t.num_kv_heads), block_rows = static_cast<int>(t.block_size) * heads;

  const int32_t len = t.seq_lens[seq];
  int64_t tokens = t.block_size, block = -1;  // of the place; a row of a token in no block is NaN
  if (valid_length(t, len)) {
    tokens = min(tokens, len - place.remainder * t.block_size);
    if (tokens > 0) block = block_at(t, seq, place.remainder);
  }
  const bool active = block >= 0 && part * Layout::kChannels < t.head_dim;

  // The thread's rows, `stride` apart, which keeps each at one head where the number of heads allows: f(u, row, token, head).
  const int first = slice.remainder * rows_per_warp + lane / lanes, stride = slices * rows_per_warp;
  const int first_token = first / heads, token_step = stride / heads;
  const auto for_rows = [&](const auto& f) {
    int token = first_token, head = first - first_token * heads;
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      f(u, first + u * stride, token, head);
      token += token_step, head += stride - token_step * heads;
      if (head >= heads) head -= heads, ++token;
    }
  };
  Piece<Layout> pieces[kRows];
  for_rows([&](int u, int, int token, int head) {
    if (token >= tokens) return;
    if (active) pieces[u].load(t, block, token, head, part);
    if (block < 0) pieces[u].scale = NAN;
  });

  Affine<Layout::kChannels> affine;
  for_rows([&](int u, int row, int token, int head) {
    const float scale = pieces[u].scale;
    float sum, sum_of_squares;
    if constexpr (kShifted) {
      sum = sum_of_squares = isnan(scale) ? NAN : 0.f;
      if (active && token < tokens) {
        affine.load(p, seq, place.remainder / static_cast<int>(min(t.blocks_per_group, t.max_blocks)), head, part, vectors);
        float x[Layout::kChannels];
        pieces[u].values(x);
#pragma unroll
        for (int i = 0; i < Layout::kChannels; ++i) {
          const float y = fmaf(x[i], scale, -affine.shift[i]) * affine.gain[i];
          sum += y, sum_of_squares = fmaf(y, y, sum_of_squares);
        }
      }
      sum = row_sum(sum, lanes), sum_of_squares = row_sum(sum_of_squares, lanes);
    } else {
      typename Layout::Sum stored, stored_squares;
      pieces[u].moments(stored, stored_squares);
      sum = scale * row_sum(stored, lanes);
      sum_of_squares = scale * (scale * row_sum(stored_squares, lanes));  // in this order no square of a scale underflows
    }
    const int64_t at = slice.quotient * block_rows + row;
    if (part == 0 && row < block_rows) p.sum[at] = sum, p.sum_of_squares[at] = sum_of_squares;
  });
}

// Whether rows that start at `base` plus multiples of the strides consist of whole 16-byte pieces.
bool whole_vectors(const float* base, int64_t s0, int64_t s1, int64_t s2) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && (s0 | s1 | s2) % 4 == 0;
}

}  // namespace

void token_moments(const TokenMomentsParams& p, void* stream) {
  const PagedTokens& t = p.tokens;
  const bool vectors = whole_vectors(p.shift, p.shift_stride_seq, p.shift_stride_group, p.shift_stride_head) &&
                       whole_vectors(p.gain, p.gain_stride_seq, p.gain_stride_group, p.gain_stride_head);
  dispatch_layout(t, [&](auto layout) {
    using Layout = decltype(layout);
    const int lanes = lanes_of_row<Layout>(t);
    const int64_t rows_per_slice = 32 / lanes * kRows;
    const int slices = static_cast<int>((t.block_size * t.num_kv_heads + rows_per_slice - 1) / rows_per_slice);
    const unsigned grid = grid_for(t.num_seqs * t.max_blocks * slices, kTokenThreads / 32, INT_MAX);  // results of more fill no GPU's memory
    const auto kernel = p.shift ? moments<Layout, true> : moments<Layout, false>;
    kernel<<<grid, kTokenThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, lanes, slices, vectors);
  });
  check_launch("token_moments");
}

}  // namespace pagedkv
