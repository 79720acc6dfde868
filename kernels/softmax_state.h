// Partial softmax as a monoid: what split-KV, warps and merge_attention_states all combine.
//
// Logits are in base 2 (natural logits times log2 e). A state over a set of tokens is the reference m (at
// least the largest logit seen, up to a bounded slack) and l = sum of 2^(logit - m). The empty set is
// {-inf, 0} and merges as the neutral element; no difference of two infinities is ever taken.
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define PAGEDKV_HD __host__ __device__ __forceinline__
#else
#define PAGEDKV_HD inline
#endif

namespace pagedkv {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

struct SoftmaxState {
  float m = -INFINITY;
  float l = 0.f;
};

// 2^(from - to): what an amount counted relative to `from` is worth relative to `to >= from`.
// 0 for the empty state, whatever `to` is; NaN stays NaN.
PAGEDKV_HD float rescale(float from, float to) { return from == -INFINITY ? 0.f : exp2f(from - to); }

PAGEDKV_HD SoftmaxState merge(SoftmaxState a, SoftmaxState b) {
  const float m = fmaxf(a.m, b.m);
  return {m, a.l * rescale(a.m, m) + b.l * rescale(b.m, m)};
}

// The natural-log sum of exponentials; -inf for the empty state.
PAGEDKV_HD float log_sum_exp(SoftmaxState s) { return s.l == 0.f ? -INFINITY : (s.m + log2f(s.l)) * kLn2; }

}  // namespace pagedkv
