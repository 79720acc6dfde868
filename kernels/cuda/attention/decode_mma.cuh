// Decode attention at the memory roof (sm_80 up): KV goes from global memory straight to registers in the layout
// the tensor cores want, three half-steps deep.
//
// A CTA owns one work item (a range of one sequence's tokens) and one KV head; its warps take 16-token steps
// in turn. A lane is (g, t) = (lane / 4, lane % 4), as in the mma fragments.
//
//   K    A lane reads 16-byte pieces of token g. That is the B fragment of mma.m16n8k32 (int8) or m16n8k16
//        (half) once the head dimension is permuted, which q repeats and the dot product does not see.
//   q    Rows are the heads of a GQA group, at most 8 of the 16. With an int8 cache the other 8 rows carry what
//        rounding q to int8 left over (q = s (hi + lo / 254)): 15 bits of q at no extra instruction.
//   S    comes out as (head g; tokens 2t, 2t+1): exactly the B fragment of the second product, so the softmax
//        stays in registers without a shuffle.
//   V    O^T = V^T P^T: a lane reads 16-byte pieces of tokens 2t, 2t+1, 2t+8, 2t+9; a byte permute makes
//        pairs of halves of them.
//
// The softmax reference m moves only when a logit exceeds it by more than 2^8: then 2^(x - m) <= 256 is safe in half
// precision, and most steps need no cross-lane work at all. V's scales enter through a second reference, n,
// over logit + log2(scale), so that any spread of scales keeps the weights within half precision's range.
//
// What limits it is bytes in flight (README of the ladder notebook): 16 warps an SM x 3 half-steps x 2 KB.
#pragma once

#include <type_traits>

#include "attention/state.cuh"

namespace pagedkv::attention {

enum class CacheKind { kInt8BlockHead, kInt8TokenHead, kHalf };

constexpr int kTileHeads = 8;         // query heads a CTA serves: the n of m16n8
constexpr float kReferenceSlack = 8;  // in powers of two

template <typename Q, CacheKind kKind, int kHeadDim, bool kMass>
struct DecodeConfig {
  using Query = Q;
  static constexpr CacheKind kind = kKind;
  static constexpr bool quantised = kKind != CacheKind::kHalf;
  static constexpr int element_bytes = quantised ? 1 : 2;
  static constexpr int head_dim = kHeadDim;
  static constexpr bool mass = kMass;
  static constexpr int row_bytes = kHeadDim * element_bytes;
  // Twice the bytes a row, half the warps: the same bytes in flight, and registers to hold them.
  static constexpr int warps = row_bytes > 128 ? 4 : 8;
  static constexpr int threads = warps * 32;
  static constexpr int tokens_per_unit = warps * kStepTokens;
  static constexpr int k_pieces = row_bytes / 64;                          // of 16 bytes, of one token, in a lane
  static constexpr int v_piece_bytes = row_bytes >= 128 ? 16 : 8;
  static constexpr int v_pieces = row_bytes / (8 * v_piece_bytes);
  static constexpr int half_step_words = row_bytes * kStepTokens / 32 / 4;  // in a lane: K or V of 16 tokens
  static constexpr int out_tiles = kHeadDim / 16;                           // of 16 dims x 8 heads
  static constexpr int stage_steps = 64 * warps;                            // steps whose table entries sit in shared memory
};

// ------------------------------------------------------------------------------------- instructions

__device__ inline void load_16(uint32_t* r, const char* p) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));
}
__device__ inline void load_8(uint32_t* r, const char* p) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
__device__ inline void mma_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <typename T>
__device__ inline void mma_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
#else  // never launched there (see launch.cuh); the general kernels serve sm_75
__device__ inline void mma_int8(int (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) { __trap(); }
template <typename T>
__device__ inline void mma_half(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) { __trap(); }
#endif

__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Absolute error of a few 1e-7, in a fraction of tanhf's instructions.
__device__ inline float fast_tanh(float x) { return 1.f - __fdividef(2.f, fast_exp2(2.f * kLog2e * x) + 1.f); }

template <typename T>
__device__ inline uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 h = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(h);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(h);
  }
}

// Bytes 0, 1 of a word whose bytes are int8 + 128, as a pair of halves: 0x64xx is 1024 + xx.
__device__ inline uint32_t biased_bytes_to_half2(uint32_t word, uint32_t selector) {
  const uint32_t magic = __byte_perm(word, 0x64646464u, selector);
  const __half2 v = __hsub2(reinterpret_cast<const __half2&>(magic), __half2(__half2_raw{0x6480, 0x6480}));  // 1152
  return reinterpret_cast<const uint32_t&>(v);
}

// ---------------------------------------------------------------------------------------- the query

// The A fragments of q, the same for all the warps: [piece][k-step][lane] of four registers. They stay in shared
// memory, where a step reads them back without conflicts: 16 registers a lane that the KV buffers need more.
template <class C>
struct QueryFragments {
  uint4 a[C::k_pieces][2][32];
  float scale[kTileHeads];  // makes a dot product a base-2 logit (but for K's scale)
};

template <typename T>
__device__ inline float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) return __half22float2(reinterpret_cast<const __half2&>(pair));
  else return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

// Run by one warp. Piece c of lane (g, t) is head g's dims under the 16 bytes of K at 64 c + 16 t of a row.
template <class C>
__device__ inline void load_query(QueryFragments<C>& query, const AttentionParams& p, int seq, int head0, int heads, int g, int t) {
  using Q = typename C::Query;
  constexpr int kWords = 8 / C::element_bytes;  // of a piece: pairs of dims
  const auto* row = reinterpret_cast<const uint4*>(static_cast<const Q*>(p.q) + seq * p.q_stride_seq + (head0 + g) * p.q_stride_head);
  uint32_t x[C::k_pieces][kWords];
#pragma unroll
  for (int c = 0; c < C::k_pieces; ++c) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 four = g < heads ? __ldg(row + (4 * c + t) * kWords / 4 + i) : uint4{};
      x[c][4 * i] = four.x, x[c][4 * i + 1] = four.y, x[c][4 * i + 2] = four.z, x[c][4 * i + 3] = four.w;
    }
  }
  float scale = p.sm_scale * kLog2e;
  if constexpr (C::quantised) {
    float peak = 0.f;
    bool finite = true;
#pragma unroll
    for (int c = 0; c < C::k_pieces; ++c) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const float2 pair = unpack<Q>(x[c][i]);
        const float larger = fmaxf(fabsf(pair.x), fabsf(pair.y));
        peak = fmaxf(peak, larger);
        finite = finite && pair.x - pair.x == 0.f && pair.y - pair.y == 0.f;
      }
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
      finite = __shfl_xor_sync(~0u, int(finite), d) && finite;
    }
    scale = finite ? peak / (127.f * 254.f) * scale : NAN;
    const float inverse = peak > 0.f ? 127.f / peak : 0.f;
#pragma unroll
    for (int c = 0; c < C::k_pieces; ++c) {
      uint32_t hi[4] = {}, lo[4] = {};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 pair = unpack<Q>(x[c][i / 2]);
        const float scaled = (i % 2 ? pair.y : pair.x) * inverse;
        const int whole = __float2int_rn(scaled), rest = __float2int_rn((scaled - float(whole)) * 254.f);
        hi[i / 4] |= uint32_t(whole & 0xff) << (i % 4 * 8);
        lo[i / 4] |= uint32_t(rest & 0xff) << (i % 4 * 8);
      }
      query.a[c][0][4 * g + t] = {hi[0], lo[0], hi[1], lo[1]};
      query.a[c][1][4 * g + t] = {hi[2], lo[2], hi[3], lo[3]};
    }
  } else {
#pragma unroll
    for (int c = 0; c < C::k_pieces; ++c) {
      query.a[c][0][4 * g + t] = {x[c][0], 0, x[c][1], 0};
      query.a[c][1][4 * g + t] = {x[c][2], 0, x[c][3], 0};
    }
  }
  if (t == 0) query.scale[g] = scale;
}

// --------------------------------------------------------------------------------- tables and loads

// What a step needs to know of its block, staged in shared memory.
struct alignas(16) StepEntry {
  int block, token;  // block id; the step's first token within the block
  float k_scale, v_scale_log2;
};

template <class C>
struct HalfStep {
  uint32_t r[C::half_step_words];
};

template <class C>
struct Pages {
  const char *k, *v;  // the head's rows, at this lane's piece
  int64_t k_block, v_block;
  int k_token, v_token;  // strides, in bytes
  int k_lane, v_lane;    // this lane's offset within a step

  __device__ Pages(const AttentionParams& p, int kv_head, int g, int t) {
    constexpr int e = C::element_bytes;
    k = static_cast<const char*>(p.k_cache) + kv_head * p.k_stride_head * e;
    v = static_cast<const char*>(p.v_cache) + kv_head * p.v_stride_head * e;
    k_block = p.k_stride_block * e, v_block = p.v_stride_block * e;
    k_token = int(p.k_stride_token) * e, v_token = int(p.v_stride_token) * e;
    k_lane = g * k_token + 16 * t;
    v_lane = 2 * t * v_token + C::v_piece_bytes * g;
  }

  // Tokens g and g + 8.
  __device__ void load_k(HalfStep<C>& to, const StepEntry& at) const {
    const char* row = k + at.block * k_block + at.token * k_token + k_lane;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int c = 0; c < C::k_pieces; ++c) load_16(&to.r[(j * C::k_pieces + c) * 4], row + j * 8 * k_token + 64 * c);
    }
  }

  // Tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  __device__ void load_v(HalfStep<C>& to, const StepEntry& at) const {
    constexpr int words = C::v_piece_bytes / 4;
    const char* row = v + at.block * v_block + at.token * v_token + v_lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < C::v_pieces; ++c) {
        const char* from = row + (j / 2 * 8 + j % 2) * v_token + 8 * C::v_piece_bytes * c;
        uint32_t* r = &to.r[(j * C::v_pieces + c) * words];
        if constexpr (words == 4) load_16(r, from); else load_8(r, from);
      }
    }
  }
};

// -------------------------------------------------------------------------------------- the two products

// S = q K^T in base-2 logits, before masking: s[2 j + e] is (head g, token 8 j + 2 t + e).
template <class C>
__device__ inline void scores(float (&s)[4], const QueryFragments<C>& query, float query_scale, const HalfStep<C>& k, int lane) {
  std::conditional_t<C::quantised, int, float> d[2][4] = {};
#pragma unroll
  for (int c = 0; c < C::k_pieces; ++c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 q = query.a[c][half][lane];
      const uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t* r = &k.r[(j * C::k_pieces + c) * 4 + 2 * half];
        if constexpr (C::quantised) mma_int8(d[j], a, r[0], r[1]); else mma_half<typename C::Query>(d[j], a, r[0], r[1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto(&dj)[4] = d[i / 2];
    if constexpr (C::quantised) s[i] = float(dj[i % 2] * 254 + dj[i % 2 + 2]) * query_scale;  // at most 256 * 127^2 * 255 < 2^31
    else s[i] = dj[i % 2] * query_scale;
  }
}

// out += V^T P^T. Tile i of a lane: its dims 2 i, 2 i + 1 (rows g, g + 8) x heads 2 t, 2 t + 1.
template <class C>
__device__ inline void accumulate(float (&out)[C::out_tiles][4], const HalfStep<C>& v, uint32_t p0, uint32_t p1) {
  constexpr int words = C::v_pieces * C::v_piece_bytes / 4;  // of one token
  using Weight = std::conditional_t<C::quantised, __half, typename C::Query>;
#pragma unroll
  for (int w = 0; w < words; ++w) {
    const uint32_t r[4] = {v.r[w], v.r[words + w], v.r[2 * words + w], v.r[3 * words + w]};
    if constexpr (C::quantised) {
      uint32_t biased[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) biased[j] = r[j] ^ 0x80808080u;
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // dims 4 w + 2 half, + 1
        const uint32_t early = __byte_perm(biased[0], biased[1], half ? 0x7362 : 0x5140);
        const uint32_t late = __byte_perm(biased[2], biased[3], half ? 0x7362 : 0x5140);
        const uint32_t a[4] = {biased_bytes_to_half2(early, 0x4140), biased_bytes_to_half2(early, 0x4342),
                               biased_bytes_to_half2(late, 0x4140), biased_bytes_to_half2(late, 0x4342)};
        mma_half<Weight>(out[2 * w + half], a, p0, p1);
      }
    } else {
      const uint32_t a[4] = {__byte_perm(r[0], r[1], 0x5410), __byte_perm(r[0], r[1], 0x7632),
                             __byte_perm(r[2], r[3], 0x5410), __byte_perm(r[2], r[3], 0x7632)};
      mma_half<Weight>(out[w], a, p0, p1);
    }
  }
}

// The dims behind tile i of lane group g: rows g and g + 8 are consecutive.
template <class C>
__device__ inline int tile_dim(int i, int g) {
  constexpr int per_piece = C::v_piece_bytes / C::element_bytes;  // dims
  const int dim = 2 * i;
  return dim / per_piece * 8 * per_piece + g * per_piece + dim % per_piece;
}

// ---------------------------------------------------------------------------------------- one warp's state

template <class C>
struct WarpState {
  float m = -INFINITY, l = 0.f;  // of head g; l is this lane's share
  float n = -INFINITY;           // reference of the weights in `out`
  float out[C::out_tiles][4] = {};

  // Raise the references of all the heads to cover this step.
  __device__ void raise(float x_max, float y_max, int t) {
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      x_max = fmaxf(x_max, __shfl_xor_sync(~0u, x_max, d));
      y_max = fmaxf(y_max, __shfl_xor_sync(~0u, y_max, d));
    }
    const float m_new = fmaxf(m, x_max), n_new = fmaxf(n, y_max);
    l *= rescale(m, m_new);
    const float shrink = rescale(n, n_new);
    m = m_new, n = n_new;
    const float even = __shfl_sync(~0u, shrink, 8 * t), odd = __shfl_sync(~0u, shrink, 8 * t + 4);
#pragma unroll
    for (int i = 0; i < C::out_tiles; ++i) out[i][0] *= even, out[i][1] *= odd, out[i][2] *= even, out[i][3] *= odd;
  }
};

// --------------------------------------------------------------------------------------- the kernel

template <class C>
__global__ void __launch_bounds__(C::threads, 2) decode_mma(AttentionParams p, SplitPlan plan, Partials partials) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();  // the merge kernel may be scheduled as soon as SMs have room
#endif
  constexpr int kMergeTiles = C::out_tiles < 8 ? C::out_tiles : 8;  // tiles merged across warps at a time
  union Shared {
    StepEntry entries[C::stage_steps];
    float4 tiles[C::warps][kMergeTiles][32];
  };
  __shared__ __align__(16) Shared shared;
  __shared__ QueryFragments<C> query;
  __shared__ float warp_m[C::warps][kTileHeads], warp_n[C::warps][kTileHeads], warp_l[C::warps][kTileHeads];

  const int group = int(p.num_heads / p.num_kv_heads);
  const int tiles_per_group = ceil_div(group, kTileHeads);
  const int head_tiles = int(p.num_kv_heads) * tiles_per_group;
  const int head_tile = blockIdx.x % head_tiles;
  WorkItem work;
  if (!find_work<C::threads>(plan, p.seq_lens, blockIdx.x / head_tiles, &work)) return;

  const int kv_head = head_tile / tiles_per_group;
  const int head0 = kv_head * group + head_tile % tiles_per_group * kTileHeads;
  const int heads = min(kTileHeads, group - head_tile % tiles_per_group * kTileHeads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  if (head_tile == 0 && work.split == 0 && threadIdx.x == 0) partials.splits[work.seq] = {work.index - work.split, work.num_splits};

  const Pages<C> pages(p, kv_head, g, t);
  WarpState<C> state;
  bool bad = work.bad;
  const int32_t* table = p.block_tables + work.seq * p.block_tables_stride;
  const int first_step = work.begin / kStepTokens, end_step = ceil_div(work.end, kStepTokens);
  const int block_size = int(p.block_size);

  // One token-head scale a lane: K's of token `lane` below 16, V's (as log2) of token `lane - 16` above.
  auto load_token_scale = [&](const StepEntry& at) {
    const bool is_v = lane >= 16;
    const float* scale = is_v ? p.v_scale + at.block * p.v_scale_stride_block + (at.token + lane - 16) * p.v_scale_stride_token + kv_head * p.v_scale_stride_head
                              : p.k_scale + at.block * p.k_scale_stride_block + (at.token + lane) * p.k_scale_stride_token + kv_head * p.k_scale_stride_head;
    return __ldg(scale);
  };

  // The last warp, whose threads are the last to be needed for table entries.
  if (warp == C::warps - 1) load_query(query, p, work.seq, head0, heads, g, t);

  for (int stage = first_step; stage < end_step; stage += C::stage_steps) {
    const int stage_end = min(end_step, stage + C::stage_steps);
    __syncthreads();  // the entries of the stage before have been read
    for (int s = stage + threadIdx.x; s < stage_end; s += C::threads) {
      const int token = s * kStepTokens;
      int block = table[token / block_size];
      if (block < 0 || block >= p.num_blocks) bad = true, block = 0;
      StepEntry entry{block, token % block_size, 1.f, 0.f};
      if constexpr (C::kind == CacheKind::kInt8BlockHead) {
        entry.k_scale = __ldg(p.k_scale + block * p.k_scale_stride_block + kv_head * p.k_scale_stride_head);
        entry.v_scale_log2 = log2f(__ldg(p.v_scale + block * p.v_scale_stride_block + kv_head * p.v_scale_stride_head));
      }
      shared.entries[s - stage] = entry;
    }
    __syncthreads();

    const float query_scale = query.scale[g];
    int step = stage + warp;
    HalfStep<C> a, b, c;
    float token_scale = 0.f, next_token_scale = 0.f;
    if (step < stage_end) {
      const StepEntry& entry = shared.entries[step - stage];
      pages.load_k(a, entry);
      pages.load_v(b, entry);
      if constexpr (C::kind == CacheKind::kInt8TokenHead) token_scale = load_token_scale(entry);
    }

    // One step: K in `k`, V in `v`; loads the next K into `spare` and the next V where K was.
    auto advance = [&](HalfStep<C>& k, HalfStep<C>& v, HalfStep<C>& spare) {
      const int next = step + C::warps;
      const bool more = next < stage_end;
      const StepEntry entry = shared.entries[step - stage];
      const StepEntry next_entry = shared.entries[(more ? next : step) - stage];
      if (more) {
        pages.load_k(spare, next_entry);
        if constexpr (C::kind == CacheKind::kInt8TokenHead) next_token_scale = load_token_scale(next_entry);
      }

      float x[4], y[4];  // base-2 logits; the same plus log2 of V's scale
      scores(x, query, query_scale, k, lane);
      if (more) pages.load_v(k, next_entry);
      if constexpr (C::kind == CacheKind::kInt8BlockHead) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= entry.k_scale;
      } else if constexpr (C::kind == CacheKind::kInt8TokenHead) {
        if (lane >= 16) token_scale = log2f(token_scale);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= __shfl_sync(~0u, token_scale, i / 2 * 8 + 2 * t + i % 2);
      }
      if (p.logits_soft_cap > 0.f) {
        const float cap = p.logits_soft_cap * kLog2e;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = cap * fast_tanh(x[i] / cap);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = x[i];
        if constexpr (C::kind == CacheKind::kInt8BlockHead) y[i] += entry.v_scale_log2;
        if constexpr (C::kind == CacheKind::kInt8TokenHead) y[i] += __shfl_sync(~0u, token_scale, 16 + i / 2 * 8 + 2 * t + i % 2);
      }
      const int token0 = step * kStepTokens;
      if (token0 < work.begin || token0 + kStepTokens > work.end) {  // the first or the last step of the item
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = token0 + i / 2 * 8 + 2 * t + i % 2;
          if (token >= work.begin && token < work.end) continue;
          x[i] = y[i] = -INFINITY;
          if constexpr (!C::quantised) {  // what lies there may be NaN, and 0 * NaN is NaN
            constexpr int words = C::half_step_words / 4;
#pragma unroll
            for (int w = 0; w < words; ++w) v.r[i * words + w] = 0;
          }
        }
      }

      const float x_max = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
      const float y_max = C::quantised ? fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3])) : x_max;
      if (__any_sync(~0u, x_max > state.m + kReferenceSlack || y_max > state.n + kReferenceSlack)) state.raise(x_max, y_max, t);
      // Before any token of a head has counted its reference is -inf, and so are all the logits: 0, not NaN.
      const float m = state.m == -INFINITY ? 0.f : state.m, n = state.n == -INFINITY ? 0.f : state.n;
      float weight[4], step_sum = 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float e = fast_exp2(x[i] - m);
        step_sum += e;
        weight[i] = C::quantised ? fast_exp2(y[i] - n) : e;
      }
      state.l += step_sum;
      if constexpr (C::mass) {
        step_sum += __shfl_xor_sync(~0u, step_sum, 1);
        step_sum += __shfl_xor_sync(~0u, step_sum, 2);
        if (t == 0 && g < heads) {
          partials.step_mass[(int64_t(work.seq) * p.num_heads + head0 + g) * partials.max_steps + step] = m + log2f(step_sum);
        }
      }
      using Weight = std::conditional_t<C::quantised, __half, typename C::Query>;
      accumulate(state.out, v, pack<Weight>(weight[0], weight[1]), pack<Weight>(weight[2], weight[3]));
      token_scale = next_token_scale;
      step = next;
    };

    while (true) {  // the three buffers change roles; after three steps they are back
      if (step >= stage_end) break;
      advance(a, b, c);
      if (step >= stage_end) break;
      advance(c, a, b);
      if (step >= stage_end) break;
      advance(b, c, a);
    }
  }

  // Merge the warps: references first, then the outputs, eight tiles at a time.
  state.l += __shfl_xor_sync(~0u, state.l, 1);
  state.l += __shfl_xor_sync(~0u, state.l, 2);
  if (t == 0) warp_m[warp][g] = state.m, warp_n[warp][g] = state.n, warp_l[warp][g] = state.l;
  bad = __syncthreads_or(bad);

  auto merged_state = [&](int head) {
    SoftmaxState s;
#pragma unroll
    for (int w = 0; w < C::warps; ++w) s = merge(s, {warp_m[w][head], warp_l[w][head]});
    return bad ? kBadState : s;
  };
  auto merged_reference = [&](int head) {
    float n = -INFINITY;
#pragma unroll
    for (int w = 0; w < C::warps; ++w) n = fmaxf(n, warp_n[w][head]);
    return n;
  };
  {
    const float even = rescale(warp_n[warp][2 * t], merged_reference(2 * t));
    const float odd = rescale(warp_n[warp][2 * t + 1], merged_reference(2 * t + 1));
#pragma unroll
    for (int i = 0; i < C::out_tiles; ++i) state.out[i][0] *= even, state.out[i][1] *= odd, state.out[i][2] *= even, state.out[i][3] *= odd;
  }
  const bool whole = work.num_splits == 1;
#pragma unroll
  for (int tile0 = 0; tile0 < C::out_tiles; tile0 += kMergeTiles) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMergeTiles; ++i) {
      const float(&o)[4] = state.out[tile0 + i];
      shared.tiles[warp][i][lane] = {o[0], o[1], o[2], o[3]};
    }
    __syncthreads();
    for (int i = warp; i < kMergeTiles; i += C::warps) {
      if (2 * t >= heads) break;
      float4 sum = shared.tiles[0][i][lane];
#pragma unroll
      for (int w = 1; w < C::warps; ++w) {
        const float4 o = shared.tiles[w][i][lane];
        sum.x += o.x, sum.y += o.y, sum.z += o.z, sum.w += o.w;
      }
      const int dim = tile_dim<C>(tile0 + i, g);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int h = 2 * t + odd;
        if (h >= heads) break;
        const SoftmaxState s = merged_state(h);
        const float n = merged_reference(h);
        const float to_m = n == -INFINITY ? (s.l == 0.f ? 0.f : 1.f) : exp2f(n - s.m);  // from reference n to m
        const float low = (odd ? sum.y : sum.x), high = (odd ? sum.w : sum.z);
        if (whole) {
          const float factor = s.l == 0.f ? 0.f : to_m * normaliser(s, p.sinks, head0 + h).factor;
          auto* out = static_cast<typename C::Query*>(p.out) + (int64_t(work.seq) * p.num_heads + head0 + h) * C::head_dim + dim;
          reinterpret_cast<uint32_t&>(*out) = pack<typename C::Query>(low * factor, high * factor);
        } else {
          float* acc = partials.acc + (int64_t(work.index) * p.num_heads + head0 + h) * C::head_dim + dim;
          reinterpret_cast<float2&>(*acc) = {low * to_m, high * to_m};
        }
      }
    }
  }
  if (threadIdx.x < heads) {
    const int head = head0 + threadIdx.x;
    const SoftmaxState s = merged_state(threadIdx.x);
    const int64_t row = int64_t(work.seq) * p.num_heads + head;
    if (whole) {
      if (p.lse) p.lse[row] = normaliser(s, p.sinks, head).lse;
      if constexpr (C::mass) partials.total_mass[row] = total_mass(s);
    } else {
      const int64_t at = int64_t(work.index) * p.num_heads + head;
      partials.m[at] = s.m, partials.l[at] = s.l;
    }
  }
}

}  // namespace pagedkv::attention
