// Partial softmax as a monoid: what split-KV, warps and merge_attention_states all combine.
//
// Logits are in base 2 (natural logits times log2 e). A state over a set of tokens is the reference m (at
// least the largest logit seen, up to a bounded slack) and l = sum of 2^(logit - m). The empty set is
// {-inf, 0} and merges as the neutral element. A sink of +inf is {+inf, 1}: next to it all finite states weigh nothing. No
// difference of two infinities is ever taken.
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
constexpr float kLog2eRest = 1.92596303e-8f;  // log2(e) - kLog2e

// Past this |m| (logits of 7e8) base 2 rounds by more than float32 can make up for, while different float32 logits are so
// far apart (64) that next to the largest all others weigh nothing.
constexpr float kHugeReference = 0x1p30f;
PAGEDKV_HD bool is_huge(float m) { return fabsf(m) > kHugeReference && fabsf(m) < INFINITY; }

struct SoftmaxState {
  float m = -INFINITY;
  float l = 0.f;
};

// 2^(from - to): what an amount counted relative to `from` is worth relative to `to >= from`.
// 0 for the empty state, whatever `to` is; NaN from inf to inf, which no finite tokens come to.
PAGEDKV_HD float rescale(float from, float to) { return from == -INFINITY ? 0.f : exp2f(from - to); }

PAGEDKV_HD SoftmaxState merge(SoftmaxState a, SoftmaxState b) {
  const float m = fmaxf(a.m, b.m);
  // Both factors are computed, and one is chosen: no branch around either.
  const float of_a = rescale(a.m, m), of_b = rescale(b.m, m);
  return {m, a.l * (a.m == m ? 1.f : of_a) + b.l * (b.m == m ? 1.f : of_b)};
}

// 2^(x log2 e - m): the weight of a natural logit x relative to the reference m. A logit of 40 rounded to base 2 would cost a
// float32 result a digit; here only the difference is rounded.
PAGEDKV_HD float natural_weight(float x, float m) {
  if (x == -INFINITY) return 0.f;
  if (is_huge(m)) return x * kLog2e < m ? 0.f : 1.f + (x - x);  // NaN stays NaN
  return exp2f(fmaf(x, kLog2e, -m) + x * kLog2eRest);
}

// A single natural logit as a state: l makes up for what rounding m took away. One that overflows in base 2 counts as infinite.
PAGEDKV_HD SoftmaxState single_logit(float x) {
  const float m = x * kLog2e;
  if (m == INFINITY || m == -INFINITY) return {m, m < 0.f ? 0.f : 1.f};
  return {m, natural_weight(x, m)};
}

// The natural-log sum of exponentials; -inf for the empty state. In double: at logits of 1e5 a float32 product is off by more than
// the result's own rounding.
PAGEDKV_HD float log_sum_exp(SoftmaxState s) {
  return s.l == 0.f ? -INFINITY : static_cast<float>((double(s.m) + log2(double(s.l))) * 0.6931471805599453);
}

}  // namespace pagedkv
