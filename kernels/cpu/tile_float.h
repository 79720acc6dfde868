// The tile kernel in float32 FMA, for any cache type and instruction set: K and V are converted as they are loaded,
// and every loaded vector serves up to four heads of the GQA group.
#pragma once

#include <type_traits>
#include <vector>

#include "attention.h"

namespace pagedkv {

template <class CacheType>
class FloatTile {
 public:
  using Cache = CacheType;
  static constexpr bool kQuantised = std::is_same_v<Cache, int8_t>;

  explicit FloatTile(const AttentionParams& p) : p_(p), group_(p.num_heads / p.num_kv_heads), query_(p.num_heads * p.head_dim) {}

  void load_query(int64_t seq, int64_t kv_begin, int64_t kv_end) {
    kv_begin_ = kv_begin, kv_end_ = kv_end;
    float* row = query_.data();
    for (int64_t h = kv_begin * group_; h < kv_end * group_; ++h, row += p_.head_dim) load_query_row(p_, seq, h, row);
  }

  void logits(const Tile& tile, float* out, Prefetcher& ahead) const {
    const float* q = query_.data();
    for (int64_t kv = kv_begin_; kv < kv_end_; ++kv, q += group_ * p_.head_dim, out += group_ * kTile) {
      const Cache* k = static_cast<const Cache*>(p_.k_cache) + kv * p_.k_stride_head;
      for_heads(group_, [&](int64_t first, auto n) { logits_of<n.value>(tile, k, q + first * p_.head_dim, out + first * kTile, ahead); });
    }
  }

  void accumulate(const Tile& tile, const float* weights, const float* factors, float* acc, int64_t stride, Prefetcher& ahead) const {
    for (int64_t kv = kv_begin_; kv < kv_end_; ++kv, weights += group_ * kTile, factors += group_, acc += group_ * stride) {
      const Cache* v = static_cast<const Cache*>(p_.v_cache) + kv * p_.v_stride_head;
      for_heads(group_, [&](int64_t first, auto n) {
        const float *w = weights + first * kTile, *f = factors + first;
        float* row = acc + first * stride;
        int64_t d = 0;
        for (; d + 2 * simd::kLanes <= p_.head_dim; d += 2 * simd::kLanes) {
          accumulate_at<n.value, 2>(tile, v + d, w, f, row + d, stride, ahead);
        }
        if (d < p_.head_dim) accumulate_at<n.value, 1>(tile, v + d, w, f, row + d, stride, ahead);
      });
    }
  }

  void finish(float*) const {}

 private:
  // Two chains a dot product, of even and odd vectors: shorter chains round less.
  template <int N>
  void logits_of(const Tile& tile, const Cache* k, const float* q, float* out, Prefetcher& ahead) const {
    using namespace simd;
    const int64_t lines = (p_.head_dim * sizeof(Cache) + 63) / 64;  // of a token
    for (int t = 0; t < tile.padded(); t += kLanes) {
      Floats dots[N][kLanes];
      for (int i = 0; i < kLanes; ++i) {
        ahead.fetch(lines);
        const Cache* row = k + tile.k_row[t + i];
        Floats even[N], odd[N];
        for (int h = 0; h < N; ++h) even[h] = odd[h] = broadcast(0.0f);
        int64_t d = 0;
        for (; d + 2 * kLanes <= p_.head_dim; d += 2 * kLanes) {
          const Floats k0 = load(row + d), k1 = load(row + d + kLanes);
          for (int h = 0; h < N; ++h) {
            even[h] = multiply_add(load(q + h * p_.head_dim + d), k0, even[h]);
            odd[h] = multiply_add(load(q + h * p_.head_dim + d + kLanes), k1, odd[h]);
          }
        }
        if (d < p_.head_dim) {
          const Floats k0 = load(row + d);
          for (int h = 0; h < N; ++h) even[h] = multiply_add(load(q + h * p_.head_dim + d), k0, even[h]);
        }
        for (int h = 0; h < N; ++h) dots[h][i] = even[h] + odd[h];
      }
      for (int h = 0; h < N; ++h) store(out + h * kTile + t, row_sums(dots[h]));
    }
  }

  // A column of 8 * Vectors dimensions. Only tokens that exist: a weight of 0 would not silence a NaN.
  template <int N, int Vectors>
  static void accumulate_at(const Tile& tile, const Cache* v, const float* weights, const float* factors, float* acc, int64_t stride,
                            Prefetcher& ahead) {
    using namespace simd;
    constexpr int kTokensPerLine = 64 / (Vectors * kLanes * sizeof(Cache));
    Floats sum[N][Vectors];
    for (int h = 0; h < N; ++h) {
      for (int j = 0; j < Vectors; ++j) sum[h][j] = load(acc + h * stride + j * kLanes) * broadcast(factors[h]);
    }
    for (int t = 0; t < tile.count; ++t) {
      if (t % kTokensPerLine == 0) ahead.fetch(1);
      Floats value[Vectors];
      for (int j = 0; j < Vectors; ++j) value[j] = load(v + tile.v_row[t] + j * kLanes);
      for (int h = 0; h < N; ++h) {
        const Floats weight = broadcast(weights[h * kTile + t]);
        for (int j = 0; j < Vectors; ++j) sum[h][j] = multiply_add(weight, value[j], sum[h][j]);
      }
    }
    for (int h = 0; h < N; ++h) {
      for (int j = 0; j < Vectors; ++j) store(acc + h * stride + j * kLanes, sum[h][j]);
    }
  }

  const AttentionParams& p_;
  int64_t group_;  // query heads of a KV head
  int64_t kv_begin_ = 0, kv_end_ = 0;
  std::vector<float> query_;  // [heads, head_dim]
};

}  // namespace pagedkv
