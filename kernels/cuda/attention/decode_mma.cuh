// Decode attention at the memory roof (sm_80 up): KV goes from global memory straight to registers in the layout
// the tensor cores want, K a step ahead, V two.
//
// A CTA owns one work item (a range of one sequence's tokens) and one KV head; its warps take 16-token steps
// in turn. A lane is (g, t) = (lane / 4, lane % 4), as in the mma fragments.
//
//   K    A warp reads whole 128-byte lines, a lane 16 bytes of one: half a line of token g / 2 lies in the four lanes of
//        g. That is the B fragment of mma.m16n8k32 (int8) or m16n8k16 (half) with the head dimension permuted,
//        which q repeats and the dot product does not see. Even columns hold first halves, odd ones second
//        halves; each half of q multiplies all the columns, and a lane adds the two products that are meant.
//        Twice the products, but half-line reads are bound by L2's request rate at two thirds of the memory's.
//   q    Rows are the heads of a GQA group, at most 8 of the 16. With an int8 cache the other 8 rows carry what
//        rounding q to int8 left over (q = s (hi + lo / 254)): 15 bits of q at no extra instruction. Where a head's
//        largest element dwarfs most others, as outlier channels of real models do, those bits are too coarse for the rest:
//        such a tile takes four heads at a time, and the rows of the other four hold a third and a fourth digit.
//   S    comes out as (head g; tokens t, 4 + t, 8 + t, 12 + t): exactly the B fragment of the second product if V's
//        tokens are taken in the same order, so the softmax stays in registers without a shuffle.
//   V    O^T = V^T P^T: a lane reads 16-byte pieces of its four tokens; a byte permute makes pairs of halves of them.
//
// The softmax reference m moves only when a logit exceeds it by more than 2^8: then 2^(x - m) <= 256 is safe in half
// precision, and most steps need no cross-lane work at all. V's scales enter through a second reference, n,
// over logit + log2(scale), so that any spread of scales keeps the weights within half precision's range.
//
// What limits it is bytes in flight, 16 warps an SM x 3 half-steps x 2 KB, and the fetching of instructions: the loop is not
// unrolled, and what a branch of it costs is its registers and its length, taken or not. On an H200, 64 sequences of 8192
// tokens: 265 us unrolled three times over, so that buffers change roles without being copied; 259 twice; 257 rolled, at a copy
// that is also V's change of bias. A second product for q's finer digits within the loop: 263. Rings of cp.async in shared
// memory: 367. Eight warps with twice the depth, and prefetching into L2, were slower too.
#pragma once

#include <type_traits>

#include "attention/state.cuh"
#include "hadamard.cuh"

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
  static constexpr int warps = 4;
  static constexpr int threads = warps * 32;
  // Twice the bytes a row, half the CTAs: the same bytes in flight, and registers to hold them. Small CTAs because
  // those of equal work start and end together, and the memory idles meanwhile: the fewer the waves, the better.
  static constexpr int ctas_per_sm = row_bytes > 128 ? 2 : 4;
  static constexpr int tokens_per_unit = warps * kStepTokens;
  static constexpr int k_pieces = row_bytes / 64;                           // half lines of a row: what four lanes read at once
  static constexpr bool whole_lines = row_bytes >= 128;                     // else a row is half a line, and columns are tokens
  static constexpr int v_piece_bytes = row_bytes >= 128 ? 16 : 8;
  static constexpr int v_pieces = row_bytes / (8 * v_piece_bytes);          // of one token, in a lane
  static constexpr int half_step_words = row_bytes * kStepTokens / 32 / 4;  // in a lane: K or V of 16 tokens
  static constexpr int out_tiles = kHeadDim / 16;                           // of 16 dims x 8 heads
  static constexpr int merge_tiles = out_tiles < 8 ? out_tiles : 8;         // merged across warps at a time, in shared memory
  static constexpr bool whole_rows = merge_tiles == out_tiles;              // which then holds all of a head's output
  static constexpr int stage_steps = 512;                                   // whose table entries sit in shared memory

  // The four tokens of a step that lane t weighs: the k of the second product, in order.
  static constexpr __device__ int token(int i, int t) { return whole_lines ? 4 * i + t : i / 2 * 8 + 2 * t + i % 2; }
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

__device__ inline float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// A digit's worth is this many of the next's: a remainder of half a unit, in int8.
constexpr int kDigitBase = 254;

// Two digits resolve 2^-15 of a row's largest element: for elements this many binades below it on average, 2^-10.5 of
// themselves, half precision's own step. A row whose elements lie further below takes four. Gaussian elements lie 2.4 below,
// give or take 0.3: a second turn, which reads the cache again, is not for them. (At 3.5 one such tile in a hundred took it, and
// the whole launch, a single wave, waited for that one.)
constexpr float kFineBinades = 4.5f;

constexpr int kFineHeads = kTileHeads / 2;                      // in a turn
constexpr float kFineWorth = 1.f / (kDigitBase * kDigitBase);  // of the second pair of digits

// The A fragments of q, the same for all the warps: [piece][k-step][lane] of four registers. They stay in shared
// memory, where a step reads them back without conflicts: 16 registers a lane that the KV buffers need more.
template <class C>
struct QueryFragments {
  using Pieces = uint4[C::k_pieces][2][32];
  Pieces a;
  float scale[kTileHeads];  // makes a dot product a base-2 logit (but for K's scale)
  bool fine;                // a head of the tile needs four digits: its heads take two turns

  // Of an int8 cache: the third and fourth digits of all the heads; once `fine` is dealt with, the second turn.
  Pieces later;
  float later_scale[kTileHeads];

  // Heads 0 to 3 for the first turn, their finer digits in the rows of heads 4 to 7; these for the second. By all the threads.
  __device__ void deal() {
    for (int i = threadIdx.x; i < C::k_pieces * 2 * 16; i += C::threads) {
      uint4 &coarse = a[0][i / 16][16 + i % 16], &fine_digits = later[0][i / 16][i % 16];
      const uint4 swapped = coarse;
      coarse = fine_digits, fine_digits = swapped;
    }
    if (threadIdx.x < kFineHeads) {
      const int h = threadIdx.x;
      later_scale[h] = scale[kFineHeads + h];
      scale[kFineHeads + h] = scale[h] * kFineWorth, later_scale[kFineHeads + h] = later_scale[h] * kFineWorth;
    }
  }

  __device__ void take_second_turn() {
    for (int i = threadIdx.x; i < C::k_pieces * 2 * 32; i += C::threads) a[0][i / 32][i % 32] = later[0][i / 32][i % 32];
    if (threadIdx.x < kTileHeads) scale[threadIdx.x] = later_scale[threadIdx.x];
  }
};

template <typename T>
__device__ inline float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) return __half22float2(reinterpret_cast<const __half2&>(pair));
  else return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

// q on its way to the fragments: a thread takes 8 dims of a head.
template <class C>
struct QueryLoad {
  static constexpr int threads_per_head = C::head_dim / 8;
  static constexpr int all = kTileHeads * threads_per_head;
  static constexpr int rounds = (all + C::threads - 1) / C::threads;
  uint32_t raw[rounds][4] = {};

  __device__ void issue(const AttentionParams& p, int seq, int head0, int heads) {
    const auto* q = static_cast<const typename C::Query*>(p.q) + seq * p.q_stride_seq + head0 * p.q_stride_head;
#pragma unroll
    for (int n = 0; n < rounds; ++n) {
      const int i = threadIdx.x + n * C::threads, g = i / threads_per_head;
      if (g < heads) load_16(raw[n], reinterpret_cast<const char*>(q + g * p.q_stride_head + i % threads_per_head * 8));
    }
  }

  // Piece c of lane (g, t) is head g's dims under the 16 bytes of K at 64 c + 16 t of a row.
  __device__ void store(QueryFragments<C>& query, float sm_scale, bool rotated) const {
    using Q = typename C::Query;
    const float scale = sm_scale * kLog2e;
#pragma unroll
    for (int n = 0; n < rounds; ++n) {
      const int i = threadIdx.x + n * C::threads;
      if (i >= all) break;
      const int g = i / threads_per_head, byte = i % threads_per_head * 8 * C::element_bytes, c = byte / 64, lane = 4 * g + byte % 64 / 16;
      if constexpr (C::quantised) {
        float x[8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack<Q>(raw[n][j]);
          x[2 * j] = pair.x, x[2 * j + 1] = pair.y;
        }
        if (rotated) hadamard_transform<threads_per_head>(x, C::head_dim, i);
        // Bits of |x| order as numbers do, NaN and inf last. `exponents`: their sum over what is not zero, and how many.
        uint32_t peak_bits = 0, exponents = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t bits = __float_as_uint(fabsf(x[j]));
          peak_bits = max(peak_bits, bits);
          exponents += bits ? 1u << 16 | bits >> 23 : 0;
        }
#pragma unroll
        for (int d = 1; d < threads_per_head; d *= 2) {
          peak_bits = max(peak_bits, __shfl_xor_sync(~0u, peak_bits, d));
          exponents += __shfl_xor_sync(~0u, exponents, d);
        }
        const int below_peak = int((exponents >> 16) * (peak_bits >> 23)) - int(exponents & 0xffff);  // binades, over all elements
        if (below_peak > int(kFineBinades * C::head_dim)) query.fine = true;

        // 127 / peak without leaving float32's range at either end.
        const float peak = __uint_as_float(peak_bits), lift = peak < 1.f ? 0x1p64f : 0x1p-64f;
        const float inverse = peak > 0.f ? __fdividef(127.f, peak * lift) : 0.f;
        uint32_t digits[4][2] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float rest = x[j] * lift * inverse;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int digit = __float2int_rn(rest);
            digits[k][j / 4] |= uint32_t(digit & 0xff) << (j % 4 * 8);
            rest = (rest - float(digit)) * float(kDigitBase);
          }
        }
        query.a[c][byte % 16 / 8][lane] = {digits[0][0], digits[1][0], digits[0][1], digits[1][1]};
        query.later[c][byte % 16 / 8][lane] = {digits[2][0], digits[3][0], digits[2][1], digits[3][1]};
        if (i % threads_per_head == 0) query.scale[g] = peak / (127.f * kDigitBase) * scale + (peak_bits < 0x7f800000 ? 0.f : NAN);
      } else {
        query.a[c][0][lane] = {raw[n][0], 0, raw[n][1], 0};
        query.a[c][1][lane] = {raw[n][2], 0, raw[n][3], 0};
        if (i % threads_per_head == 0) query.scale[g] = scale;
      }
    }
  }
};

// --------------------------------------------------------------------------------- tables and loads

// What a step needs to know of its block, staged in shared memory.
struct alignas(16) StepEntry {
  uint32_t block, token;  // block id; the step's first token within the block
  float k_scale, v_scale_log2;
};

// K or V of 16 tokens.
template <class C>
struct HalfStep {
  uint32_t r[C::half_step_words];

  // V as it was loaded; int8 is biased by 128 on the way, as `accumulate` wants it.
  __device__ void take(const HalfStep& loaded) {
#pragma unroll
    for (int w = 0; w < C::half_step_words; ++w) r[w] = C::quantised ? loaded.r[w] ^ 0x80808080u : loaded.r[w];
  }
};

template <class C>
struct Pages {
  const char *k, *v;                             // the head's rows, at this lane's piece
  uint32_t k_block, v_block, k_token, v_token;   // strides, in bytes
  uint32_t k_lane, v_lane;                       // this lane's offset within a step

  __device__ Pages(const AttentionParams& p, int kv_head, int g, int t) {
    constexpr int e = C::element_bytes;
    k = static_cast<const char*>(p.k_cache) + kv_head * p.k_stride_head * e;
    v = static_cast<const char*>(p.v_cache) + kv_head * p.v_stride_head * e;
    k_block = uint32_t(p.k_stride_block) * e, v_block = uint32_t(p.v_stride_block) * e;
    k_token = uint32_t(p.k_stride_token) * e, v_token = uint32_t(p.v_stride_token) * e;
    k_lane = C::whole_lines ? g / 2 * k_token + g % 2 * 64 + 16 * t : g * k_token + 16 * t;
    v_lane = C::token(0, t) * v_token + C::v_piece_bytes * g;
  }

  // Calls use(register, address) for a lane's pieces of K: whole lines of tokens 4 j + g / 2; or token 8 j + g.
  template <class Use>
  __device__ void for_k(const StepEntry& at, Use use) const {
    constexpr int loads = C::half_step_words / 4, per_row = C::whole_lines ? C::k_pieces / 2 : 1, rows = 16 / (loads / per_row);
    const char* row = k + uint64_t(at.block) * k_block + (at.token * k_token + k_lane);
#pragma unroll
    for (int j = 0; j < loads / per_row; ++j, row += rows * k_token) {
#pragma unroll
      for (int line = 0; line < per_row; ++line) use((j * per_row + line) * 4, row + 128 * line);
    }
  }

  __device__ void load_k(HalfStep<C>& to, const StepEntry& at) const {
    for_k(at, [&](int r, const char* piece) { load_16(&to.r[r], piece); });
  }

  // Asks for what `load_k` will load; one lane for each line.
  __device__ void prefetch_k(const StepEntry& at) const {
    if (threadIdx.x % (C::whole_lines ? 8 : 4) != 0) return;
    for_k(at, [](int, const char* piece) { asm volatile("prefetch.global.L2 [%0];" ::"l"(piece)); });
  }

  __device__ void load_v(HalfStep<C>& to, const StepEntry& at) const {
    constexpr int words = C::v_piece_bytes / 4;
    const char* row = v + uint64_t(at.block) * v_block + (at.token * v_token + v_lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < C::v_pieces; ++c) {
        uint32_t* r = &to.r[(j * C::v_pieces + c) * words];
        if constexpr (words == 4) load_16(r, row + 128 * c); else load_8(r, row + 64 * c);
      }
      if (j < 3) row += (C::token(j + 1, 0) - C::token(j, 0)) * v_token;
    }
  }
};

// -------------------------------------------------------------------------------------- the two products

template <class C>
using Product = std::conditional_t<C::quantised, int, float>;

template <class C>
__device__ inline void multiply(Product<C> (&d)[4], uint4 q, uint32_t k0, uint32_t k1) {
  const uint32_t a[4] = {q.x, q.y, q.z, q.w};
  if constexpr (C::quantised) mma_int8(d, a, k0, k1); else mma_half<typename C::Query>(d, a, k0, k1);
}

// Column `e` (0 or 1) of a lane's part of a product: the high part's row and the low part's put together.
template <class C>
__device__ inline Product<C> column(const Product<C> (&d)[4], int e) {
  if constexpr (C::quantised) return d[e] * kDigitBase + d[2 + e]; else return d[e];  // at most 256 * 127^2 * 255 < 2^31
}

// q K^T but for the scales: s[i] is (head g, token C::token(i, t)).
template <class C>
__device__ inline void multiply_keys(Product<C> (&s)[4], const QueryFragments<C>& query, const HalfStep<C>& k, int lane) {
  if constexpr (C::whole_lines) {
    constexpr int lines = C::k_pieces / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Product<C> first[4] = {}, second[4] = {};  // with the first and the second halves of q's lines
#pragma unroll
      for (int line = 0; line < lines; ++line) {
        const uint32_t* r = &k.r[(i * lines + line) * 4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply<C>(first, query.a[2 * line][half][lane], r[2 * half], r[2 * half + 1]);
          multiply<C>(second, query.a[2 * line + 1][half][lane], r[2 * half], r[2 * half + 1]);
        }
      }
      s[i] = column<C>(first, 0) + column<C>(second, 1);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Product<C> d[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply<C>(d, query.a[0][half][lane], k.r[4 * j + 2 * half], k.r[4 * j + 2 * half + 1]);
#pragma unroll
      for (int e = 0; e < 2; ++e) s[2 * j + e] = column<C>(d, e);
    }
  }
}

// Those products as base-2 logits, before masking.
template <class C>
__device__ inline void to_logits(float (&x)[4], const Product<C> (&s)[4], const QueryFragments<C>& query, float scale, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = float(s[i]) * scale;
  if constexpr (C::quantised) {
    if (!query.fine) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] += __shfl_down_sync(~0u, x[i], 4 * kFineHeads);
      if (lane >= 4 * kFineHeads) x[i] = 0.f;
    }
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
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // dims 4 w + 2 half, + 1
        const uint32_t early = __byte_perm(r[0], r[1], half ? 0x7362 : 0x5140);
        const uint32_t late = __byte_perm(r[2], r[3], half ? 0x7362 : 0x5140);
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

// Where dim d of head h lies among floats laid out as [tile][lane] of float4.
template <class C>
__device__ inline int tile_element(int h, int d) {
  constexpr int per_piece = C::v_piece_bytes / C::element_bytes;
  const int tile = (d / (8 * per_piece) * per_piece + d % per_piece) / 2, g = d / per_piece % 8;
  return (32 * tile + 4 * g + h / 2) * 4 + h % 2 + 2 * (d % 2);
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

// ------------------------------------------------------------------------------- after the last token

// Write one tile of 16 dims x 8 heads: the output, or this split's acc.
template <class C>
__device__ inline void write_tile(const AttentionParams& p, const Partials& partials, const WorkItem& work, bool final, int head0, int heads,
                                  int tile, int g, int t, float4 o) {
  const int dim = tile_dim<C>(tile, g);
  auto write = [&](int h, float low, float high) {
    if (h >= heads) return;
    if (final) {
      auto* out = static_cast<typename C::Query*>(p.out) + (int64_t(work.seq) * p.num_heads + head0 + h) * C::head_dim + dim;
      reinterpret_cast<uint32_t&>(*out) = pack<typename C::Query>(low, high);
    } else {
      float* acc = partials.acc + (int64_t(work.index) * p.num_heads + head0 + h) * C::head_dim + dim;
      reinterpret_cast<float2&>(*acc) = {low, high};
    }
  };
  write(2 * t, o.x, o.z);
  write(2 * t + 1, o.y, o.w);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ inline uint32_t cluster_address(const void* shared, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(uint32_t(__cvta_generic_to_shared(shared))), "r"(rank));
  return address;
}
__device__ inline float cluster_load(const float* shared, int rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(cluster_address(shared, rank)));
  return v;
}
__device__ inline float4 cluster_load(const float4* shared, int rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(cluster_address(shared, rank)));
  return v;
}
#else  // no clusters: plans without them
__device__ inline void cluster_sync() { __trap(); }
__device__ inline float cluster_load(const float*, int) { return 0.f; }
__device__ inline float4 cluster_load(const float4*, int) { return {}; }
#endif

// --------------------------------------------------------------------------------------- the kernel

template <class C>
__global__ void __launch_bounds__(C::threads, C::ctas_per_sm) decode_mma(AttentionParams p, SplitPlan plan, Partials partials) {
  union Shared {
    StepEntry entries[C::stage_steps];
    float4 tiles[C::warps][C::merge_tiles][32];
  };
  __shared__ __align__(16) Shared shared;
  __shared__ QueryFragments<C> query;
  __shared__ float warp_m[C::warps][kTileHeads], warp_n[C::warps][kTileHeads], warp_l[C::warps][kTileHeads];

  // Neighbouring CTAs read neighbouring heads of the same pages.
  const int head_tile = blockIdx.x, item = blockIdx.z * gridDim.y + blockIdx.y;
  const int group = int(p.num_heads) / int(p.num_kv_heads);
  const int tiles_per_group = ceil_div(group, kTileHeads);
  const int kv_head = head_tile / tiles_per_group, first_head = head_tile % tiles_per_group * kTileHeads;
  const int tile_head0 = kv_head * group + first_head, tile_heads = min(kTileHeads, group - first_head);
  prefetch_table(plan, p, item);
  let_next_kernel_start();
  __shared__ WorkItem work;
  if (!find_work<C::threads>(plan, p.seq_lens, item, work) && !plan.in_cluster) {  // whose cluster waits for it
    if (plan.fixed_splits && item < plan.max_items()) partials.leave_empty(item, p.num_heads, tile_head0, tile_heads, C::head_dim);
    return;
  }
  QueryLoad<C> query_load;
  query_load.issue(p, work.seq, tile_head0, tile_heads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  if (head_tile == 0) partials.note_splits(plan, work);

  const Pages<C> pages(p, kv_head, g, t);
  const int32_t* table = p.block_tables + work.seq * p.block_tables_stride;
  const int begin = work.begin, end = work.end;
  const int first_step = begin / kStepTokens, end_step = ceil_div(end, kStepTokens);
  const int block_size = int(p.block_size);

  // One token-head scale a lane: K's of token `lane` below 16, V's (as log2) of token `lane - 16` above.
  const bool holds_v = lane >= 16;
  const uint32_t scale_stride_block = uint32_t(holds_v ? p.v_scale_stride_block : p.k_scale_stride_block);
  const uint32_t scale_stride_token = uint32_t(holds_v ? p.v_scale_stride_token : p.k_scale_stride_token);
  const float* token_scales = (holds_v ? p.v_scale + kv_head * p.v_scale_stride_head : p.k_scale + kv_head * p.k_scale_stride_head) + lane % 16 * scale_stride_token;
  auto load_token_scale = [&](const StepEntry& at) { return __ldg(token_scales + (uint64_t(at.block) * scale_stride_block + at.token * scale_stride_token)); };

  if (threadIdx.x == 0) query.fine = false;
  for (int turn = 0;; ++turn) {  // a second one where q is fine and the tile has more than four heads
    WarpState<C> state;
    bool bad = work.bad;
    int head0 = tile_head0, heads = tile_heads;  // of this turn
    int stage = first_step;
    do {  // once even without a token: what `fine` is decides about the turns, which a cluster takes together
      const int stage_end = min(end_step, stage + C::stage_steps);
      __syncthreads();  // the entries of the stage before have been read
#pragma unroll 1
      for (int s = stage + threadIdx.x; s < stage_end; s += C::threads) {
        const int token = s * kStepTokens;
        int block = __ldg(table + token / block_size);
        if (block < 0 || block >= p.num_blocks) bad = true, block = 0;
        StepEntry& entry = shared.entries[s - stage];
        entry.block = block;
        entry.token = token % block_size;
      }
      if (turn == 0 && stage == first_step) query_load.store(query, p.sm_scale, p.rotated);
      __syncthreads();
      if (turn == 0 && stage == first_step && query.fine) {
        query.deal();
        __syncthreads();
      }
      if (query.fine) head0 = tile_head0 + turn * kFineHeads, heads = min(kFineHeads, tile_heads - turn * kFineHeads);

      int step = stage + warp;
      HalfStep<C> k, v;
      float token_scale = 0.f, next_token_scale = 0.f;
      if (step < stage_end) {
        const StepEntry& entry = shared.entries[step - stage];
        pages.load_k(k, entry);
        pages.load_v(v, entry);
        if constexpr (C::kind == CacheKind::kInt8TokenHead) {
          token_scale = load_token_scale(entry);
        } else if (step + 2 * C::warps < stage_end) {
          // The registers for the next K are taken until this one has come. Worth 3 % of a short run of a few dozen steps; with scales to
          // load for each token, nothing.
          pages.prefetch_k(shared.entries[step + C::warps - stage]);
        }
      }
      if constexpr (C::kind == CacheKind::kInt8BlockHead) {  // while the first pages are on their way
#pragma unroll 1
        for (int s = stage + threadIdx.x; s < stage_end; s += C::threads) {
          StepEntry& entry = shared.entries[s - stage];
          entry.k_scale = __ldg(p.k_scale + entry.block * p.k_scale_stride_block + kv_head * p.k_scale_stride_head);
          entry.v_scale_log2 = __log2f(__ldg(p.v_scale + entry.block * p.v_scale_stride_block + kv_head * p.v_scale_stride_head));
        }
        __syncthreads();
      }
      const float query_scale = query.scale[g];
      v.take(v);

#pragma unroll 1
      while (step < stage_end) {
        const int next = step + C::warps;
        const bool more = next < stage_end;
        const StepEntry entry = shared.entries[step - stage];
        const StepEntry next_entry = shared.entries[(more ? next : step) - stage];
        HalfStep<C> next_v;  // sets out first; the next K as soon as this one is done with
        if (more) {
          pages.load_v(next_v, next_entry);
          if constexpr (C::kind == CacheKind::kInt8TokenHead) next_token_scale = load_token_scale(next_entry);
        }

        float x[4];       // base-2 logits
        float v_log2[4];  // log2 of V's token-head scales; a block-head scale is the step's
        Product<C> products[4];
        multiply_keys(products, query, k, lane);
        // From here on K's registers are free. Where there is more to do before the weights, the next K sets out first; with one scale
        // for all, that was 0.5 % slower, for no reason that shows in the instructions.
        constexpr bool next_k_first = C::kind == CacheKind::kInt8TokenHead;
        if (next_k_first && more) pages.load_k(k, next_entry);
        to_logits<C>(x, products, query, C::kind == CacheKind::kInt8BlockHead ? query_scale * entry.k_scale : query_scale, lane);
        if (!next_k_first && more) pages.load_k(k, next_entry);
        if constexpr (C::kind == CacheKind::kInt8TokenHead) {
          if (holds_v) token_scale = __log2f(token_scale);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] *= __shfl_sync(~0u, token_scale, C::token(i, t));
            v_log2[i] = __shfl_sync(~0u, token_scale, 16 + C::token(i, t));
          }
        }
        if (__builtin_expect(p.logits_soft_cap > 0.f, 0)) {
          const float cap = p.logits_soft_cap * kLog2e, inverse = __fdividef(1.f, cap);
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = cap * fast_tanh(x[i] * inverse);
        }
        const int token0 = step * kStepTokens;
        if (__builtin_expect(token0 < begin || token0 + kStepTokens > end, 0)) {  // the first or the last step of the item
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = token0 + C::token(i, t);
            if (token >= begin && token < end) continue;
            x[i] = -INFINITY;
            v_log2[i] = 0.f;  // it may be NaN there
            if constexpr (!C::quantised) {  // what lies there may be NaN, and 0 * NaN is NaN
              constexpr int words = C::half_step_words / 4;
#pragma unroll
              for (int w = 0; w < words; ++w) v.r[i * words + w] = 0;
            }
          }
        }

        const float x_max = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
        float y_max = x_max;  // of the logits plus log2 of V's scales
        if constexpr (C::kind == CacheKind::kInt8BlockHead) y_max += entry.v_scale_log2;
        if constexpr (C::kind == CacheKind::kInt8TokenHead) y_max = fmaxf(fmaxf(x[0] + v_log2[0], x[1] + v_log2[1]), fmaxf(x[2] + v_log2[2], x[3] + v_log2[3]));
        if (__builtin_expect(__any_sync(~0u, x_max > state.m + kReferenceSlack || y_max > state.n + kReferenceSlack), 0)) state.raise(x_max, y_max, t);
        // Before any token of a head has counted its reference is -inf, and so are all the logits: 0, not NaN.
        const float m = state.m == -INFINITY ? 0.f : state.m, n = state.n == -INFINITY ? 0.f : state.n;
        float weight[4], step_sum = 0.f;
        float from_m_to_n;
        if constexpr (C::kind == CacheKind::kInt8BlockHead) from_m_to_n = fast_exp2(fminf(entry.v_scale_log2 + (m - n), 126.f));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weight[i] = fast_exp2(x[i] - m);
          step_sum += weight[i];
          if constexpr (C::kind == CacheKind::kInt8BlockHead) weight[i] *= from_m_to_n;
          if constexpr (C::kind == CacheKind::kInt8TokenHead) weight[i] = fast_exp2(x[i] + (v_log2[i] - n));
        }
        state.l += step_sum;
        if constexpr (C::mass) {
          step_sum += __shfl_xor_sync(~0u, step_sum, 1);
          step_sum += __shfl_xor_sync(~0u, step_sum, 2);
          if (t == 0 && g < heads) {
            partials.step_mass[(int64_t(work.seq) * partials.max_steps + step) * p.num_heads + head0 + g] = m + fast_log2(step_sum);
          }
        }
        using Weight = std::conditional_t<C::quantised, __half, typename C::Query>;
        accumulate(state.out, v, pack<Weight>(weight[0], weight[1]), pack<Weight>(weight[2], weight[3]));
        v.take(next_v);
        token_scale = next_token_scale;
        step = next;
      }
    } while ((stage += C::stage_steps) < end_step);

    // Merge the warps. Each of them merges the references of all: lane (g, t) starts with warp t of head g.
    state.l += __shfl_xor_sync(~0u, state.l, 1);
    state.l += __shfl_xor_sync(~0u, state.l, 2);
    if (t == 0) warp_m[warp][g] = state.m, warp_n[warp][g] = state.n, warp_l[warp][g] = state.l;
    bad = __syncthreads_or(bad);
    static_assert(C::warps == 4);
    SoftmaxState tokens{warp_m[t][g], warp_l[t][g]};
    float n = warp_n[t][g];
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      // In the order of the warps for every lane, so that all four lanes hold the same bits.
      const SoftmaxState other{__shfl_xor_sync(~0u, tokens.m, d), __shfl_xor_sync(~0u, tokens.l, d)};
      tokens = t & d ? merge(other, tokens) : merge(tokens, other);
      n = fmaxf(n, __shfl_xor_sync(~0u, n, d));
    }
    if (bad) tokens = kBadState;

    // From this warp's reference to the common one; from that to m; and, once all the tokens are in, to the output.
    const float shrink = rescale(state.n, n);
    const float shrink_even = __shfl_sync(~0u, shrink, 8 * t), shrink_odd = __shfl_sync(~0u, shrink, 8 * t + 4);
    const bool whole = work.num_splits == 1 && !plan.always_merge;
    float finish = n == -INFINITY ? 1.f : exp2f(n - tokens.m);
    Normaliser norm{};
    if (whole) {
      norm = normaliser(tokens, g < heads ? p.sinks : nullptr, head0 + g);
      finish *= norm.factor;
    }
    const float finish_even = __shfl_sync(~0u, finish, 8 * t), finish_odd = __shfl_sync(~0u, finish, 8 * t + 4);

    // A rotated output is rotated back a whole row at a time, from shared memory.
    const bool rotate_back = C::quantised && C::whole_rows && p.rotated && (whole || plan.in_cluster);
    auto rotated_row = [&](int h) { return static_cast<typename C::Query*>(p.out) + (int64_t(work.seq) * p.num_heads + head0 + h) * C::head_dim; };

#pragma unroll
    for (int tile0 = 0; tile0 < C::out_tiles; tile0 += C::merge_tiles) {
      if (tile0 > 0) __syncthreads();
#pragma unroll
      for (int i = 0; i < C::merge_tiles; ++i) {
        const float(&o)[4] = state.out[tile0 + i];
        shared.tiles[warp][i][lane] = {o[0] * shrink_even, o[1] * shrink_odd, o[2] * shrink_even, o[3] * shrink_odd};
      }
      __syncthreads();
#pragma unroll
      for (int i = warp; i < C::merge_tiles; i += C::warps) {
        float4 sum = shared.tiles[0][i][lane];
#pragma unroll
        for (int w = 1; w < C::warps; ++w) {
          const float4 o = shared.tiles[w][i][lane];
          sum.x += o.x, sum.y += o.y, sum.z += o.z, sum.w += o.w;
        }
        sum = {sum.x * finish_even, sum.y * finish_odd, sum.z * finish_even, sum.w * finish_odd};
        if (plan.in_cluster || rotate_back) shared.tiles[0][i][lane] = sum;
        else write_tile<C>(p, partials, work, whole, head0, heads, tile0 + i, g, t, sum);
      }
      const float* merged = reinterpret_cast<const float*>(shared.tiles[0]);
      if (rotate_back && !plan.in_cluster) {
        __syncthreads();
        for (int h = warp; h < heads; h += C::warps) {
          store_rotated(rotated_row(h), C::head_dim, [&](int d) { return merged[tile_element<C>(h, d)]; });
        }
      }
      if (plan.in_cluster) {
        if (tile0 == 0 && warp == 0 && t == 0) warp_m[0][g] = tokens.m, warp_l[0][g] = tokens.l;
        cluster_sync();
        // The state of head g over the cluster: lane t takes rank t.
        static_assert(kMaxCluster <= 4);
        SoftmaxState mine;
        if (t < plan.fixed_splits) mine = {cluster_load(&warp_m[0][g], t), cluster_load(&warp_l[0][g], t)};
        SoftmaxState all = mine;
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
          const SoftmaxState other{__shfl_xor_sync(~0u, all.m, d), __shfl_xor_sync(~0u, all.l, d)};
          all = t & d ? merge(other, all) : merge(all, other);
        }
        norm = normaliser(all, g < heads ? p.sinks : nullptr, head0 + g);
        tokens = all;
        const float factor = rescale(mine.m, all.m) * norm.factor;
        // Each CTA adds up and writes its share: of the heads where rows are rotated back, else of the tiles.
        for (int h = rotate_back ? work.split * C::warps + warp : heads; h < heads; h += plan.fixed_splits * C::warps) {
          float factors[kMaxCluster];
#pragma unroll
          for (int r = 0; r < kMaxCluster; ++r) factors[r] = __shfl_sync(~0u, factor, 4 * h + r);
          store_rotated(rotated_row(h), C::head_dim, [&](int d) {
            float sum = 0.f;
            for (int r = 0; r < plan.fixed_splits; ++r) sum += factors[r] * cluster_load(merged + tile_element<C>(h, d), r);
            return sum;
          });
        }
        for (int i = rotate_back ? C::merge_tiles : work.split * C::warps + warp; i < C::merge_tiles; i += plan.fixed_splits * C::warps) {
          float4 part[kMaxCluster];
#pragma unroll
          for (int r = 0; r < kMaxCluster; ++r) part[r] = r < plan.fixed_splits ? cluster_load(&shared.tiles[0][i][lane], r) : float4{};
          float4 sum{};
#pragma unroll
          for (int r = 0; r < kMaxCluster; ++r) {
            const float even = __shfl_sync(~0u, factor, 8 * t + r), odd = __shfl_sync(~0u, factor, 8 * t + 4 + r);
            sum.x += part[r].x * even, sum.y += part[r].y * odd, sum.z += part[r].z * even, sum.w += part[r].w * odd;
          }
          write_tile<C>(p, partials, work, true, head0, heads, tile0 + i, g, t, sum);
        }
        cluster_sync();  // nobody leaves or overwrites while another still reads
      }
    }
    if (warp == 0 && t == 0 && g < heads) {
      const int64_t row = int64_t(work.seq) * p.num_heads + head0 + g, at = int64_t(work.index) * p.num_heads + head0 + g;
      if (whole || plan.in_cluster) {
        if (p.lse && work.split == 0) p.lse[row] = norm.lse();
        if constexpr (C::mass) partials.totals[row] = tokens;
      } else {
        partials.m[at] = tokens.m, partials.l[at] = tokens.l;
      }
    }
    if (!query.fine || (turn + 1) * kFineHeads >= tile_heads) break;
    query.take_second_turn();
  }
}

}  // namespace pagedkv::attention
