// Decode attention without tensor cores: for sm_75, and elsewhere for what decode_mma.cuh does not take (float32 q, blocks
// that are not a multiple of 16 tokens, other head dimensions, head_dim 256 in half precision).
//
// A CTA owns one work item and up to four query heads of one KV head, so that K and V are read once for them all. Its
// warps take 16-token steps in turn. K and V go from global memory straight to registers, 16 bytes a lane; kRowLanes
// lanes hold one head's row. While K is multiplied V is on the way, and while V is multiplied the next K is.
//
//   rows  Lane i looks up one row of the next step: K's of token i, or V's of token i - 16, with its scale. So blocks may have
//         any size, and one scale a block or one a token is the same code: the stride is zero or not.
//   q.k   As integers where they hold q as well as its half precision does: q = unit * (254 high + low), both int8, so that
//         two dp4a serve four dimensions and the sums are exact. Else each byte of K becomes a float32.
//   sums  Each exchange between the lanes of a row halves how many (head, token) sums a lane keeps, until each has two
//         tokens of one head: the softmax of a step is two exponentials a lane.
//   w.v   An element of V becomes a float32 once, for four heads. The lanes that hold the same dimensions of other tokens
//         add up once, at the end.
//
// The reference of the softmax moves only when a logit exceeds it by 2^4, so that the outputs are seldom rescaled.
//
// Arithmetic, not bytes in flight, is what could limit it. A T1000 reads 4 KB (16 tokens of head_dim 128) into an SM in
// some 500 cycles. As integers that takes 840 warp instructions, of 2000 that could issue; the busiest pipe (fma, which
// also has dp4a and integer products) takes one in two cycles and is busy for 235 of the 500. As float32: 1080 and 300. On
// an H200, whose memory is faster than that, it reads int8 at 2.3 TB/s and half precision at 4.1. Converting bytes by
// permutes and subtractions instead of I2F gained it 1 % there, and would load the fma pipe of sm_75 further.
#pragma once

#include <type_traits>

#include "attention/state.cuh"

namespace pagedkv::attention {

constexpr int kSimtHeads = 4;  // that a CTA serves
constexpr int kSimtWarps = 4;
constexpr int kSimtThreads = 32 * kSimtWarps;
constexpr float kSimtSlack = 4;  // in powers of two

// kRowLanes lanes hold a row of head_dim * sizeof(KV) <= 16 * kRowLanes bytes.
template <typename KV_, int kRowLanes>
struct SimtConfig {
  using KV = KV_;
  static constexpr bool quantised = std::is_same_v<KV, int8_t>;
  static constexpr int row_lanes = kRowLanes;
  static constexpr int groups = 32 / kRowLanes;        // rows that a warp reads at once
  static constexpr int tokens = kStepTokens / groups;  // of a step, in a lane
  static constexpr int dims = 16 / sizeof(KV);         // of a row, in a lane
  static constexpr int quads = dims / 4;
  static constexpr int row_dims = kRowLanes * dims;
  static constexpr int ctas_per_sm = row_dims == 256 ? 2 : 3;  // what registers allow
};

// q of the CTA's heads, zero where there is no head or no dimension.
template <class C>
struct SimtQuery {
  float4 value[kSimtHeads][C::quads][C::row_lanes];  // [h][i][lane]: dimensions 4 i .. 4 i + 3 of the lane's
  uint4 digits[C::quantised ? kSimtHeads : 1][2][C::row_lanes];  // [h][0]: high, [h][1]: low
  float digit_unit[kSimtHeads];
};

// The heads that a CTA serves.
struct SimtHeads {
  int kv, first, count;

  SimtHeads() = default;
  __device__ SimtHeads(const AttentionParams& p, int tile) {
    const int group = int(p.num_heads / p.num_kv_heads), tiles_per_group = ceil_div(group, kSimtHeads);
    kv = tile / tiles_per_group;
    const int within = tile % tiles_per_group * kSimtHeads;
    first = kv * group + within, count = min(kSimtHeads, group - within);
  }
};

// Where the rows and scales of a KV head lie, in K or in V. In shared memory: one look-up a step does not pay for twelve registers.
struct alignas(16) SimtCache {
  const char* rows;
  const float* scales;
  int64_t stride_block, stride_token;  // bytes
  int64_t scale_stride_block, scale_stride_token;
};

// What a warp's lanes tell each other within a step.
struct SimtStep {
  const char* rows[2][kStepTokens];  // of K, of V; null where nothing is to be attended to
  float4 weights[kStepTokens];       // of four heads
};

__device__ inline float load_as_float(const void* from, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat16: return to_float(static_cast<const __half*>(from)[i]);
    case DType::kBFloat16: return to_float(static_cast<const __nv_bfloat16*>(from)[i]);
    default: return static_cast<const float*>(from)[i];
  }
}

__device__ inline void store_float(void* to, DType dtype, int64_t i, float x) {
  switch (dtype) {
    case DType::kFloat16: static_cast<__half*>(to)[i] = from_float<__half>(x); break;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(to)[i] = from_float<__nv_bfloat16>(x); break;
    default: static_cast<float*>(to)[i] = x;
  }
}

// Fill `query`, a warp for each head; whether two digits serve all of them. They resolve 2^-15 of a row's largest element,
// which is too coarse where a few channels dwarf the others. (kernels/cpu/tile_vnni.h decides by the same rule.)
template <class C>
__device__ inline bool load_query(SimtQuery<C>& query, const AttentionParams& p, int seq, const SimtHeads& heads) {
  constexpr int per_lane = C::row_dims / 32;
  const int lane = threadIdx.x % 32, h = threadIdx.x / 32;
  float x[per_lane], peak = 0.f;
  bool serve = p.q_dtype != DType::kFloat32;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const int d = lane + 32 * i;
    x[i] = h < heads.count && d < p.head_dim ? load_as_float(p.q, p.q_dtype, seq * p.q_stride_seq + (heads.first + h) * p.q_stride_head + d) : 0.f;
    peak = fmaxf(peak, fabsf(x[i]));
    serve = serve && isfinite(x[i]);
    reinterpret_cast<float*>(&query.value[h][d % C::dims / 4][d / C::dims])[d % 4] = x[i];
  }
  if constexpr (C::quantised) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
    int small = 0;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) small += __popc(__ballot_sync(~0u, x[i] != 0.f && fabsf(x[i]) * 32.f < peak));
    serve = serve && small * 4 <= p.head_dim && (peak == 0.f || peak > 1e-30f);  // whose inverse is finite

    const float inverse = peak > 0.f ? 127.f / peak : 0.f;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      const int high = __float2int_rn(x[i] * inverse), low = __float2int_rn((x[i] * inverse - float(high)) * 254.f);
      reinterpret_cast<int8_t*>(query.digits[h][0])[lane + 32 * i] = int8_t(high);
      reinterpret_cast<int8_t*>(query.digits[h][1])[lane + 32 * i] = int8_t(low);
    }
    if (lane == 0) query.digit_unit[h] = peak / (127.f * 254.f);
  }
  return __syncthreads_and(C::quantised && serve);
}

// Elements 4 i .. 4 i + 3 of 16 bytes, as float32.
template <typename KV>
__device__ inline void unpack_four(float (&x)[4], const uint4* bytes, int i) {
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = to_float(reinterpret_cast<const KV*>(bytes)[4 * i + e]);
}

// This lane's part of the dot products of kTokens of its tokens with each head: [head][token].
template <class C, int kTokens>
__device__ inline void partial_dots(int (&dot)[kSimtHeads * kTokens], const SimtQuery<C>& query, const uint4* k, int piece) {
  auto add = [](int sum, uint4 a, uint4 b) {
    return __dp4a(int(a.w), int(b.w), __dp4a(int(a.z), int(b.z), __dp4a(int(a.y), int(b.y), __dp4a(int(a.x), int(b.x), sum))));
  };
#pragma unroll
  for (int h = 0; h < kSimtHeads; ++h) {
    const uint4 high = query.digits[h][0][piece], low = query.digits[h][1][piece];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) dot[h * kTokens + j] = add(add(0, high, k[j]) * 254, low, k[j]);  // at most 256 * 127^2 * 255 < 2^31
  }
}

template <class C, int kTokens>
__device__ inline void partial_dots(float (&dot)[kSimtHeads * kTokens], const SimtQuery<C>& query, const uint4* k, int piece) {
#pragma unroll
  for (float& x : dot) x = 0.f;
#pragma unroll
  for (int i = 0; i < C::quads; ++i) {
    float4 q[kSimtHeads];
#pragma unroll
    for (int h = 0; h < kSimtHeads; ++h) q[h] = query.value[h][i][piece];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      float x[4];
      unpack_four<typename C::KV>(x, &k[j], i);
#pragma unroll
      for (int h = 0; h < kSimtHeads; ++h) {
        float& sum = dot[h * kTokens + j];
        sum = fmaf(q[h].w, x[3], fmaf(q[h].z, x[2], fmaf(q[h].y, x[1], fmaf(q[h].x, x[0], sum))));
      }
    }
  }
}

// Add up over lanes that differ in `bit`, each keeping one half of the sums: the upper lane the upper half.
template <int kCount, typename T, int kSize>
__device__ inline void add_by_halves(T (&x)[kSize], int lane, int bit) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const T send = lane & bit ? x[i] : x[i + kCount / 2], keep = lane & bit ? x[i + kCount / 2] : x[i];
    x[i] = keep + __shfl_xor_sync(~0u, send, bit);
  }
}

// q.k, but for scales, of the two tokens and the head that are this lane's: x[0], x[1].
template <class C, typename T>
__device__ inline void dots(T (&x)[C::tokens], const SimtQuery<C>& query, const uint4 (&k)[C::tokens], int piece, int lane) {
  constexpr int n = C::tokens < 4 ? C::tokens : 4;  // tokens at a time, for the sake of registers
#pragma unroll
  for (int first = 0; first < C::tokens; first += n) {
    T sums[kSimtHeads * n];
    partial_dots<C, n>(sums, query, k + first, piece);
    add_by_halves<4 * n>(sums, lane, 1);
    add_by_halves<2 * n>(sums, lane, 2);
#pragma unroll
    for (int j = 0; j < n; ++j) x[first + j] = sums[j];
  }
  if constexpr (C::row_lanes >= 8) add_by_halves<C::tokens>(x, lane, 4);
  if constexpr (C::row_lanes >= 16) add_by_halves<C::tokens / 2>(x, lane, 8);
  if constexpr (C::row_lanes >= 32) add_by_halves<C::tokens / 4>(x, lane, 16);
}
__device__ inline int simt_head(int lane) { return lane % 2 * 2 + lane / 2 % 2; }
__device__ inline int simt_head_lane(int head) { return head % 2 * 2 + head / 2; }
template <class C>
__device__ inline int simt_first_token(int lane) {  // of a lane's own C::tokens
  int first = 0;
#pragma unroll
  for (int bit = 4, half = C::tokens / 2; bit < C::row_lanes; bit *= 2, half /= 2) first += lane & bit ? half : 0;
  return first;
}

// Over the lanes that hold other tokens of the same head.
template <class Combine>
__device__ inline float over_tokens(float x, Combine combine) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2) x = combine(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

template <class C>
__global__ void __launch_bounds__(kSimtThreads, C::ctas_per_sm) decode_simt(AttentionParams p, SplitPlan plan, Partials partials) {
  let_next_kernel_start();
  using KV = typename C::KV;
  static_assert(kSimtHeads == 4 && kSimtWarps == kSimtHeads);  // weights are float4; a warp takes a head before and after the loop
  union Shared {
    struct {
      SimtQuery<C> query;
      SimtStep steps[kSimtWarps];
    };
    float out[kSimtWarps][kSimtHeads][C::row_dims];
  };
  __shared__ Shared shared;
  __shared__ SoftmaxState states[kSimtWarps][kSimtHeads];

  const int head_tile = blockIdx.x, item = blockIdx.z * gridDim.y + blockIdx.y;
  __shared__ WorkItem work;
  __shared__ SimtHeads heads;
  if (threadIdx.x == 0) heads = SimtHeads(p, head_tile);
  if (!find_work<kSimtThreads>(plan, p.seq_lens, item, work)) {
    if (plan.fixed_splits && item < plan.max_items()) partials.leave_empty(item, p.num_heads, heads.first, heads.count, p.head_dim);
    return;
  }
  if (head_tile == 0) partials.note_splits(plan, work);
  __shared__ SimtCache caches[2];
  if (threadIdx.x == 0) {
    constexpr int bytes = sizeof(KV);
    caches[0] = {static_cast<const char*>(p.k_cache) + heads.kv * p.k_stride_head * bytes, p.k_scale + heads.kv * p.k_scale_stride_head,
                 p.k_stride_block * bytes, p.k_stride_token * bytes, p.k_scale_stride_block, p.k_scale_stride_token};
    caches[1] = {static_cast<const char*>(p.v_cache) + heads.kv * p.v_stride_head * bytes, p.v_scale + heads.kv * p.v_scale_stride_head,
                 p.v_stride_block * bytes, p.v_stride_token * bytes, p.v_scale_stride_block, p.v_scale_stride_token};
  }
  const bool digits_serve = load_query(shared.query, p, work.seq, heads);  // a barrier

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int piece = lane % C::row_lanes, row_group = lane / C::row_lanes;
  const bool holds_dims = piece * C::dims < p.head_dim;
  const int begin = work.begin, end = work.end, block_size = int(p.block_size);
  SimtStep& shares = shared.steps[warp];
  bool bad = work.bad;

  // The row that this lane has looked up last: `token` is a step ahead of what is being multiplied.
  const bool finds_v = lane >= kStepTokens;
  const int32_t* table = p.block_tables + work.seq * p.block_tables_stride;
  constexpr int kRound = kSimtWarps * kStepTokens;  // tokens from one step of a warp to its next
  int step = begin / kStepTokens + warp;
  int token = step * kStepTokens + lane % kStepTokens, logical = token / block_size, offset = token % block_size;
  int block = 0;
  bool attended = false;
  auto look_up = [&] {
    attended = token >= begin && token < end;
    if (attended) block = __ldg(table + logical);
  };
  // Tells the warp the row that was looked up, and looks up the next; returns the row's scale.
  auto share_row = [&] {
    const char* row = nullptr;
    float scale = 0.f;
    if (attended) {
      if (block >= 0 && block < p.num_blocks) {
        const SimtCache& cache = caches[finds_v];
        row = cache.rows + block * cache.stride_block + offset * cache.stride_token;
        if constexpr (C::quantised) scale = __ldg(cache.scales + block * cache.scale_stride_block + offset * cache.scale_stride_token);
      } else {
        bad = true;
      }
    }
    shares.rows[finds_v][lane % kStepTokens] = row;
    token += kRound, logical += kRound / block_size, offset += kRound % block_size;
    if (offset >= block_size) offset -= block_size, ++logical;
    look_up();
    __syncwarp();
    return scale;
  };
  auto load_rows = [&](uint4 (&to)[C::tokens], const char* const (&rows)[kStepTokens]) {
#pragma unroll
    for (int j = 0; j < C::tokens; ++j) {
      const char* row = rows[j * C::groups + row_group];
      to[j] = row && holds_dims ? __ldg(reinterpret_cast<const uint4*>(row) + piece) : uint4{};
    }
  };

  const int my_head = simt_head(lane), my_token = simt_first_token<C>(lane) * C::groups + row_group;  // and C::groups later
  const float query_scale = digits_serve ? shared.query.digit_unit[my_head] * p.sm_scale : p.sm_scale;
  SoftmaxState state;  // of my_head; l is this lane's share
  float out[kSimtHeads][C::dims] = {};

  auto walk = [&](auto zero) {  // the type in which q.k adds up
    uint4 k[C::tokens], v[C::tokens];
    look_up();
    float scale = share_row();
    load_rows(k, shares.rows[0]);
    load_rows(v, shares.rows[1]);
    __syncwarp();
#pragma unroll 1
    for (; step * kStepTokens < end; step += kSimtWarps) {
      const float next_scale = share_row();

      decltype(zero) dot[C::tokens];
      dots(dot, shared.query, k, piece, lane);
      load_rows(k, shares.rows[0]);

      float x[2], weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = my_token + i * C::groups, at = step * kStepTokens + t;
        x[i] = float(dot[i]) * query_scale;
        if constexpr (C::quantised) x[i] *= __shfl_sync(~0u, scale, t);
        if (p.logits_soft_cap > 0.f) x[i] = p.logits_soft_cap * tanhf(__fdividef(x[i], p.logits_soft_cap));
        if (at < begin || at >= end) x[i] = -INFINITY;
      }
      const float peak = fmaxf(x[0], x[1]) * kLog2e;
      if (__any_sync(~0u, peak > state.m + kSimtSlack)) {
        const float m = fmaxf(state.m, over_tokens(peak, fmaxf)), shrink = rescale(state.m, m);
        state = {m, state.l * shrink};
#pragma unroll
        for (int h = 0; h < kSimtHeads; ++h) {
          const float of_head = __shfl_sync(~0u, shrink, simt_head_lane(h));
#pragma unroll
          for (float& o : out[h]) o *= of_head;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) weight[i] = natural_weight(x[i], state.m);
      state.l += weight[0] + weight[1];
      if (partials.step_states) {
        const float sum = over_tokens(weight[0] + weight[1], [](float a, float b) { return a + b; });
        if (lane < kSimtHeads && my_head < heads.count) {
          partials.step_states[(int64_t(work.seq) * partials.max_steps + step) * p.num_heads + heads.first + my_head] = {state.m, sum};
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = my_token + i * C::groups;
        if constexpr (C::quantised) weight[i] *= __shfl_sync(~0u, scale, kStepTokens + t);
        reinterpret_cast<float*>(&shares.weights[t])[my_head] = weight[i];
      }
      __syncwarp();

#pragma unroll
      for (int j = 0; j < C::tokens; ++j) {
        const float4 w = shares.weights[j * C::groups + row_group];
#pragma unroll
        for (int i = 0; i < C::quads; ++i) {
          float y[4];
          unpack_four<KV>(y, &v[j], i);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int d = 4 * i + e;
            out[0][d] += w.x * y[e], out[1][d] += w.y * y[e], out[2][d] += w.z * y[e], out[3][d] += w.w * y[e];
          }
        }
      }
      load_rows(v, shares.rows[1]);
      scale = next_scale;
      __syncwarp();  // the rows have been read
    }
  };
  if constexpr (C::quantised) {
    if (digits_serve) walk(int{}); else walk(float{});
  } else {
    walk(float{});
  }

  // Over the lanes, then the warps.
  state.l = over_tokens(state.l, [](float a, float b) { return a + b; });
  bad = __syncthreads_or(bad);  // and nobody needs q or the steps any more
  if (lane < kSimtHeads) states[warp][my_head] = state;
#pragma unroll
  for (int h = 0; h < kSimtHeads; ++h) {
#pragma unroll
    for (int d = 0; d < C::dims; ++d) {
      float sum = out[h][d];
#pragma unroll
      for (int bit = C::row_lanes; bit < 32; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
      if (row_group == 0) shared.out[warp][h][piece * C::dims + d] = sum;
    }
  }
  __syncthreads();
  const int h = warp;
  if (h >= heads.count) return;
  SoftmaxState tokens;
#pragma unroll
  for (int w = 0; w < kSimtWarps; ++w) tokens = merge(tokens, states[w][h]);
  if (bad) tokens = kBadState;
  const bool whole = work.num_splits == 1;
  const Normaliser norm = normaliser(tokens, p.sinks, heads.first + h);
  const int64_t row = int64_t(work.seq) * p.num_heads + heads.first + h, at = int64_t(work.index) * p.num_heads + heads.first + h;
  for (int d = lane; d < p.head_dim; d += 32) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kSimtWarps; ++w) sum += shared.out[w][h][d] * rescale(states[w][h].m, tokens.m);
    if (whole) {
      store_float(p.out, p.q_dtype, row * p.head_dim + d, sum * norm.factor);
    } else {
      partials.acc[at * p.head_dim + d] = sum;
    }
  }
  if (lane == 0) {
    if (whole) {
      if (p.lse) p.lse[row] = norm.lse();
      if (p.block_mass) partials.totals[row] = tokens;
    } else {
      partials.m[at] = tokens.m, partials.l[at] = tokens.l;
    }
  }
}

}  // namespace pagedkv::attention
