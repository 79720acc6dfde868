// INT8 paged decode attention in four rungs, from the obvious kernel to one that the memory limits.
//
//   out[s, h] = sum_t softmax_t(sm_scale * q[s, h] . K[s, t]) V[s, t],   K, V = int8 * scale of (block, KV head)
//
//   1  a CTA for each query head, one pass over the pages  the published algorithm
//   2  a CTA for each KV head, 16 tokens at a time         every byte is read once, 16 bytes a load
//   3  + long sequences cut in splits                      work for the whole device, however few the sequences
//   4  + tensor cores, the next page already on its way    arithmetic out of the way, more bytes in flight
//
// The top of the ladder is the library's own op, cuda/quant_paged_attention.cu. To read easily, these fix what it leaves open:
// head_dim 128, blocks of 16 tokens, 4 query heads to a KV head, float16 q, contiguous tensors, valid tables, no empty sequence.
// notebooks/ladder.ipynb compiles this file, checks every rung against attention in float32, and then times it.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

constexpr int kHeadDim = 128, kBlockSize = 16, kGroup = 4;  // kGroup: query heads that share a KV head
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr float kLog2e = 1.44269504f;  // softmax in base 2: exp2 is one instruction

struct Problem {
  const __half* q;                   // [num_seqs, num_heads, head_dim]
  const int8_t *k, *v;               // [num_blocks, block_size, num_kv_heads, head_dim]
  const float *k_scale, *v_scale;    // [num_blocks, num_kv_heads]
  const int* block_tables;           // [num_seqs, max_blocks]
  const int* seq_lens;               // [num_seqs]
  __half* out;                       // [num_seqs, num_heads, head_dim]
  float* partials;                   // [num_seqs, num_splits, num_heads, head_dim + 2]: acc, m, l; unused with one split
  int num_seqs, num_kv_heads, max_blocks, num_splits;
  float sm_scale;

  __host__ __device__ int num_heads() const { return num_kv_heads * kGroup; }
  __device__ int block(int seq, int page) const { return block_tables[int64_t(seq) * max_blocks + page]; }
  __device__ int64_t row(int block, int offset, int kv_head) const {  // of K and V
    return ((int64_t(block) * kBlockSize + offset) * num_kv_heads + kv_head) * kHeadDim;
  }
};

namespace {

// A partial softmax: tokens weigh 2^(logit - m), l is the sum of the weights. To compare two of them, rescale to the larger m.
__device__ float rescale(float from, float to) { return from == -INFINITY ? 0.f : exp2f(from - to); }

// ------------------------------------------------------------------------------------------- rung 1
// A thread for each dim. The dot products of a page are sums over the CTA, one after another: each costs a trip to memory and two
// barriers. The 4 heads of a group read the same K and V, each for itself.

__device__ float sum_over_cta(float x, float* warp_sums) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.f;
  for (int w = 0; w < kWarps; ++w) x += warp_sums[w];
  __syncthreads();  // before the next token's sums
  return x;
}

__global__ void __launch_bounds__(kThreads) rung1(Problem p) {
  __shared__ float warp_sums[kWarps];
  const int head = blockIdx.x, seq = blockIdx.y, kv_head = head / kGroup, dim = threadIdx.x, seq_len = p.seq_lens[seq];
  const int64_t at = (int64_t(seq) * p.num_heads() + head) * kHeadDim + dim, token_stride = int64_t(p.num_kv_heads) * kHeadDim;
  const float q = __half2float(p.q[at]) * p.sm_scale * kLog2e;
  float m = -INFINITY, l = 0.f, acc = 0.f;
  for (int page = 0; page * kBlockSize < seq_len; ++page) {
    const int block = p.block(seq, page), tokens = min(kBlockSize, seq_len - page * kBlockSize);
    const float k_scale = p.k_scale[block * p.num_kv_heads + kv_head], v_scale = p.v_scale[block * p.num_kv_heads + kv_head];
    const int8_t *k = p.k + p.row(block, 0, kv_head) + dim, *v = p.v + p.row(block, 0, kv_head) + dim;
    float logits[kBlockSize], m_new = m;
#pragma unroll
    for (int t = 0; t < kBlockSize; ++t) {
      logits[t] = t < tokens ? sum_over_cta(q * k[t * token_stride], warp_sums) * k_scale : -INFINITY;
      m_new = fmaxf(m_new, logits[t]);
    }
    const float keep = rescale(m, m_new);
    m = m_new, l *= keep, acc *= keep;
#pragma unroll
    for (int t = 0; t < kBlockSize; ++t) {
      const float weight = exp2f(logits[t] - m);
      l += weight;
      if (t < tokens) acc += weight * v_scale * v[t * token_stride];
    }
  }
  p.out[at] = __float2half_rn(acc / l);
}

// ------------------------------------------------------------------------------------- rungs 2 and 3
// A CTA serves the 4 heads of a KV head. Eight lanes share a token, 16 bytes of its row each, so that a page is one load of K
// and one of V for each thread. Every group of lanes has an online softmax of its own; they merge at the end.

// The pages that a CTA of `split` works on. With one split: all of them.
struct Pages {
  int begin, end;
  __device__ Pages(const Problem& p, int seq, int split) {
    const int pages = (p.seq_lens[seq] + kBlockSize - 1) / kBlockSize, each = (pages + p.num_splits - 1) / p.num_splits;
    begin = min(split * each, pages), end = min(begin + each, pages);
  }
};

// The last step of a CTA: one head's dim, to the output or to the partial states that `merge_splits` reads.
__device__ void store(const Problem& p, int seq, int split, int head, int dim, float m, float l, float acc) {
  if (p.num_splits == 1) {
    p.out[(int64_t(seq) * p.num_heads() + head) * kHeadDim + dim] = __float2half_rn(acc / l);
    return;
  }
  float* partial = p.partials + ((int64_t(seq) * p.num_splits + split) * p.num_heads() + head) * (kHeadDim + 2);
  partial[dim] = acc;
  if (dim == 0) partial[kHeadDim] = m, partial[kHeadDim + 1] = l;
}

__global__ void __launch_bounds__(kThreads, 3) rungs2and3(Problem p) {
  const int kv_head = blockIdx.x, seq = blockIdx.y, split = blockIdx.z, offset = threadIdx.x / 8, piece = threadIdx.x % 8 * 16;
  float q[kGroup][16], m[kGroup], l[kGroup] = {}, acc[kGroup][16] = {};
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    m[h] = -INFINITY;
    const __half* row = p.q + (int64_t(seq) * p.num_heads() + kv_head * kGroup + h) * kHeadDim + piece;
#pragma unroll
    for (int i = 0; i < 16; ++i) q[h][i] = __half2float(row[i]) * p.sm_scale * kLog2e;
  }

  const Pages pages(p, seq, split);
  for (int page = pages.begin; page < pages.end; ++page) {
    const int block = p.block(seq, page);
    const int64_t row = p.row(block, offset, kv_head) + piece;
    const int4 k_raw = *reinterpret_cast<const int4*>(p.k + row), v_raw = *reinterpret_cast<const int4*>(p.v + row);
    const int8_t *k = reinterpret_cast<const int8_t*>(&k_raw), *v = reinterpret_cast<const int8_t*>(&v_raw);
    const float k_scale = p.k_scale[block * p.num_kv_heads + kv_head], v_scale = p.v_scale[block * p.num_kv_heads + kv_head];
    const bool live = page * kBlockSize + offset < p.seq_lens[seq];
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      float logit = 0.f;
#pragma unroll
      for (int i = 0; i < 16; ++i) logit += q[h][i] * k[i];
#pragma unroll
      for (int d = 1; d < 8; d *= 2) logit += __shfl_xor_sync(~0u, logit, d);
      logit = live ? logit * k_scale : -INFINITY;
      const float m_new = fmaxf(m[h], logit), keep = rescale(m[h], m_new), weight = rescale(logit, m_new);
      m[h] = m_new;
      l[h] = l[h] * keep + weight;
#pragma unroll
      for (int i = 0; i < 16; ++i) acc[h][i] = acc[h][i] * keep + weight * v_scale * v[i];
    }
  }

  // Merge the four tokens of a warp by shuffles, then the warps through shared memory.
  __shared__ float warp_m[kWarps][kGroup], warp_l[kWarps][kGroup], warp_acc[kWarps][kGroup][kHeadDim];
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    float m_all = m[h];
    for (int d = 8; d < 32; d *= 2) m_all = fmaxf(m_all, __shfl_xor_sync(~0u, m_all, d));
    const float keep = rescale(m[h], m_all);
    auto sum = [&](float x) {
      x *= keep;
      for (int d = 8; d < 32; d *= 2) x += __shfl_xor_sync(~0u, x, d);
      return x;
    };
    warp_m[warp][h] = m_all;
    warp_l[warp][h] = sum(l[h]);
#pragma unroll
    for (int i = 0; i < 16; ++i) warp_acc[warp][h][piece + i] = sum(acc[h][i]);
  }
  __syncthreads();
  for (int h = 0; h < kGroup; ++h) {
    float m_all = -INFINITY, l_all = 0.f, acc_all = 0.f;
    for (int w = 0; w < kWarps; ++w) m_all = fmaxf(m_all, warp_m[w][h]);
    for (int w = 0; w < kWarps; ++w) {
      const float keep = rescale(warp_m[w][h], m_all);
      l_all += warp_l[w][h] * keep;
      acc_all += warp_acc[w][h][threadIdx.x] * keep;
    }
    store(p, seq, split, kv_head * kGroup + h, threadIdx.x, m_all, l_all, acc_all);
  }
}

// A thread for each dim of one (sequence, head).
__global__ void __launch_bounds__(kThreads) merge_splits(Problem p) {
  const int head = blockIdx.x, seq = blockIdx.y, dim = threadIdx.x;
  const float* first = p.partials + (int64_t(seq) * p.num_splits * p.num_heads() + head) * (kHeadDim + 2);
  const int64_t stride = int64_t(p.num_heads()) * (kHeadDim + 2);
  float m = -INFINITY, l = 0.f, acc = 0.f;
  for (int s = 0; s < p.num_splits; ++s) m = fmaxf(m, first[s * stride + kHeadDim]);
  for (int s = 0; s < p.num_splits; ++s) {
    const float keep = rescale(first[s * stride + kHeadDim], m);
    l += first[s * stride + kHeadDim + 1] * keep;
    acc += first[s * stride + dim] * keep;
  }
  p.out[(int64_t(seq) * p.num_heads() + head) * kHeadDim + dim] = __float2half_rn(acc / l);
}

// ------------------------------------------------------------------------------------------- rung 4
// A warp takes a page at a time and asks for the next one before it computes. Both products run on tensor cores, whose
// operands are laid out so that loads of 16 bytes land where the instruction wants them. Lane (g, t) = (lane / 4, lane % 4).
//
//   S = q K^T    m16n8k32, int8. Rows: 8 heads; and what rounding q to int8 left over in the 8 rows below, so that q keeps 15 bits.
//                Columns: 8 tokens. The lane's 32 bytes of token g are not those that the instruction numbers so, but q is
//                permuted in the same way, and a dot product does not see the order of its terms.
//   O^T = V^T P^T   m16n8k16, half. The weights of S come out just as this product takes them in: no shuffle.

struct Page {
  uint4 k[2][2];  // of tokens g and 8 + g: 16 bytes at 16 t and at 64 + 16 t
  uint4 v[4];     // of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9: 16 bytes at 16 g
};

__device__ uint32_t word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

__device__ void multiply_int8(int (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#endif
}

__device__ void multiply_half(float (&d)[4], const __half2 (&a)[4], __half2 b0, __half2 b1) {
#if __CUDA_ARCH__ >= 800
  auto bits = [](const __half2& h) { return reinterpret_cast<const uint32_t&>(h); };
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(bits(a[0])), "r"(bits(a[1])), "r"(bits(a[2])), "r"(bits(a[3])), "r"(bits(b0)), "r"(bits(b1)));
#endif
}

// Byte `i` of a and of b as halves: 0x6400 | byte is 1024 + byte, so no conversion instruction is needed.
__device__ __half2 to_half2(uint32_t a, uint32_t b, int i) {
  const uint32_t pair = __byte_perm(a ^ 0x80808080u, b ^ 0x80808080u, i | (4 + i) << 4);  // int8 + 128
  const uint32_t biased = __byte_perm(pair, 0x64646464u, 0x4140);
  return __hsub2(reinterpret_cast<const __half2&>(biased), __half2half2(__ushort_as_half(0x6480)));  // 1024 + 128
}

__global__ void __launch_bounds__(kThreads, 3) rung4(Problem p) {
  const int kv_head = blockIdx.x, seq = blockIdx.y, split = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;

  // q as int8: high and low part of 16 dims at 16 t and at 64 + 16 t, in the order of K's bytes.
  uint4 q[2][2] = {};
  float q_scale = 0.f;
  if (g < kGroup) {
    const __half* row = p.q + (int64_t(seq) * p.num_heads() + kv_head * kGroup + g) * kHeadDim;
    float peak = 0.f;
    for (int d = 0; d < kHeadDim; ++d) peak = fmaxf(peak, fabsf(__half2float(row[d])));
    const float inverse = peak > 0.f ? 127.f / peak : 0.f;
    q_scale = peak / (127.f * 254.f) * p.sm_scale * kLog2e;
    auto packed = [&](int dim, bool low) {
      uint32_t bytes = 0;
      for (int i = 0; i < 4; ++i) {
        const float x = __half2float(row[dim + i]) * inverse, high = rintf(x);
        bytes |= uint32_t(int(low ? rintf((x - high) * 254.f) : high) & 0xff) << 8 * i;
      }
      return bytes;
    };
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int dim = 64 * c + 16 * t + 8 * half;
        q[c][half] = {packed(dim, false), packed(dim, true), packed(dim + 4, false), packed(dim + 4, true)};
      }
    }
  }

  auto load = [&](Page& page, int block) {
    auto bytes = [&](const int8_t* cache, int offset, int from) { return *reinterpret_cast<const uint4*>(cache + p.row(block, offset, kv_head) + from); };
#pragma unroll
    for (int j = 0; j < 2; ++j) page.k[j][0] = bytes(p.k, 8 * j + g, 16 * t), page.k[j][1] = bytes(p.k, 8 * j + g, 64 + 16 * t);
#pragma unroll
    for (int j = 0; j < 4; ++j) page.v[j] = bytes(p.v, 2 * t + j % 2 + j / 2 * 8, 16 * g);
  };

  float m = -INFINITY, l = 0.f;  // of head g; l is this lane's share
  float out[8][4] = {};          // tile i: dims 16 g + 2 i and + 1, heads 2 t and 2 t + 1
  const Pages pages(p, seq, split);
  const int seq_len = p.seq_lens[seq];
  Page page, next;
  int block = 0, next_block = 0;
  if (pages.begin + warp < pages.end) load(page, block = p.block(seq, pages.begin + warp));
  for (int i = pages.begin + warp; i < pages.end; i += kWarps) {
    if (i + kWarps < pages.end) load(next, next_block = p.block(seq, i + kWarps));

    const float k_scale = p.k_scale[block * p.num_kv_heads + kv_head], v_scale = p.v_scale[block * p.num_kv_heads + kv_head];
    float x[4];  // base-2 logits of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9, plus log2 of V's scale: that weighs V, too
    float x_max = -INFINITY;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int d[4] = {};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        multiply_int8(d, q[c][0], page.k[j][c].x, page.k[j][c].y);
        multiply_int8(d, q[c][1], page.k[j][c].z, page.k[j][c].w);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool live = i * kBlockSize + 8 * j + 2 * t + e < seq_len;
        x[2 * j + e] = live ? float(d[e] * 254 + d[2 + e]) * (q_scale * k_scale) + __log2f(v_scale) : -INFINITY;
        x_max = fmaxf(x_max, x[2 * j + e]);
      }
    }
    x_max = fmaxf(x_max, __shfl_xor_sync(~0u, x_max, 1));
    x_max = fmaxf(x_max, __shfl_xor_sync(~0u, x_max, 2));
    const float m_new = fmaxf(m, x_max), keep = rescale(m, m_new);
    m = m_new;
    if (__any_sync(~0u, keep != 1.f)) {
      const float even = __shfl_sync(~0u, keep, 8 * t), odd = __shfl_sync(~0u, keep, 8 * t + 4);  // of heads 2 t and 2 t + 1
      l *= keep;
#pragma unroll
      for (int n = 0; n < 8; ++n) out[n][0] *= even, out[n][1] *= odd, out[n][2] *= even, out[n][3] *= odd;
    }
    float weight[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) weight[j] = exp2f(x[j] - m);
    l += __fdividef(weight[0] + weight[1] + weight[2] + weight[3], v_scale);
    const __half2 early = __floats2half2_rn(weight[0], weight[1]), late = __floats2half2_rn(weight[2], weight[3]);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint32_t v[4] = {word(page.v[0], n / 2), word(page.v[1], n / 2), word(page.v[2], n / 2), word(page.v[3], n / 2)};
      const int byte = n % 2 * 2;
      const __half2 a[4] = {to_half2(v[0], v[1], byte), to_half2(v[0], v[1], byte + 1), to_half2(v[2], v[3], byte), to_half2(v[2], v[3], byte + 1)};
      multiply_half(out[n], a, early, late);
    }
    page = next, block = next_block;
  }

  __shared__ float warp_m[kWarps][8], warp_l[kWarps][8], warp_out[kWarps][8][kHeadDim];
  l += __shfl_xor_sync(~0u, l, 1);
  l += __shfl_xor_sync(~0u, l, 2);
  warp_m[warp][g] = m, warp_l[warp][g] = l;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) warp_out[warp][2 * t + e % 2][16 * g + 2 * n + e / 2] = out[n][e];
  }
  __syncthreads();
  for (int h = 0; h < kGroup; ++h) {
    float m_all = -INFINITY, l_all = 0.f, out_all = 0.f;
    for (int w = 0; w < kWarps; ++w) m_all = fmaxf(m_all, warp_m[w][h]);
    for (int w = 0; w < kWarps; ++w) {
      const float keep = rescale(warp_m[w][h], m_all);
      l_all += warp_l[w][h] * keep;
      out_all += warp_out[w][h][threadIdx.x] * keep;
    }
    store(p, seq, split, kv_head * kGroup + h, threadIdx.x, m_all, l_all, out_all);
  }
}

}  // namespace

// Launch rung 1 to 4. Rungs 1 and 2 know no splits. Returns a cudaError_t.
extern "C" int decode_rung(int rung, const Problem* problem, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  Problem p = *problem;
  if (rung <= 2) p.num_splits = 1;
  const dim3 groups(p.num_kv_heads, p.num_seqs, p.num_splits), heads(p.num_heads(), p.num_seqs);
  switch (rung) {
    case 1: rung1<<<heads, kThreads, 0, stream>>>(p); break;
    case 2:
    case 3: rungs2and3<<<groups, kThreads, 0, stream>>>(p); break;
    case 4: rung4<<<groups, kThreads, 0, stream>>>(p); break;
    default: return cudaErrorInvalidValue;
  }
  if (p.num_splits > 1) merge_splits<<<heads, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
