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
  static constexpr int kHeads = 4;
  static constexpr bool kQuantised = std::is_same_v<Cache, int8_t>;

  explicit FloatTile(const AttentionParams& p) : p_(p), query_(p.num_heads * p.head_dim) {}

  void load_query(int64_t seq, int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) load_query_row(p_, seq, h, query_.data() + h * p_.head_dim);
  }

  void load_tile(const Tile& tile, int64_t kv_head) {
    tile_ = &tile;
    k_ = static_cast<const Cache*>(p_.k_cache) + kv_head * p_.k_stride_head;
    v_ = static_cast<const Cache*>(p_.v_cache) + kv_head * p_.v_stride_head;
  }

  void logits(int64_t head, int n, float (*out)[kTile]) const {
    switch (n) {
      case 1: return logits_of<1>(head, out);
      case 2: return logits_of<2>(head, out);
      case 3: return logits_of<3>(head, out);
      default: return logits_of<4>(head, out);
    }
  }

  void accumulate(int n, const float (*weights)[kTile], const float* factors, float* acc, int64_t stride) const {
    switch (n) {
      case 1: return accumulate_of<1>(weights, factors, acc, stride);
      case 2: return accumulate_of<2>(weights, factors, acc, stride);
      case 3: return accumulate_of<3>(weights, factors, acc, stride);
      default: return accumulate_of<4>(weights, factors, acc, stride);
    }
  }

  void finish(float*) const {}

 private:
  const float* query(int64_t head) const { return query_.data() + head * p_.head_dim; }

  // Two chains a dot product, of even and odd vectors: shorter chains round less.
  template <int N>
  void logits_of(int64_t head, float (*out)[kTile]) const {
    using namespace simd;
    for (int t = 0; t < tile_->padded(); t += kLanes) {
      Floats dots[N][kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const Cache* k = k_ + tile_->k_row[t + i];
        Floats even[N], odd[N];
        for (int h = 0; h < N; ++h) even[h] = odd[h] = broadcast(0.0f);
        int64_t d = 0;
        for (; d + 2 * kLanes <= p_.head_dim; d += 2 * kLanes) {
          const Floats k0 = load(k + d), k1 = load(k + d + kLanes);
          for (int h = 0; h < N; ++h) {
            even[h] = multiply_add(load(query(head + h) + d), k0, even[h]);
            odd[h] = multiply_add(load(query(head + h) + d + kLanes), k1, odd[h]);
          }
        }
        if (d < p_.head_dim) {
          const Floats k0 = load(k + d);
          for (int h = 0; h < N; ++h) even[h] = multiply_add(load(query(head + h) + d), k0, even[h]);
        }
        for (int h = 0; h < N; ++h) dots[h][i] = even[h] + odd[h];
      }
      for (int h = 0; h < N; ++h) store(out[h] + t, row_sums(dots[h]));
    }
  }

  template <int N>
  void accumulate_of(const float (*weights)[kTile], const float* factors, float* acc, int64_t stride) const {
    int64_t d = 0;
    for (; d + 2 * simd::kLanes <= p_.head_dim; d += 2 * simd::kLanes) accumulate_at<N, 2>(d, weights, factors, acc, stride);
    if (d < p_.head_dim) accumulate_at<N, 1>(d, weights, factors, acc, stride);
  }

  // Only tokens that exist: a weight of 0 would not silence a NaN.
  template <int N, int Vectors>
  void accumulate_at(int64_t d, const float (*weights)[kTile], const float* factors, float* acc, int64_t stride) const {
    using namespace simd;
    Floats sum[N][Vectors];
    for (int h = 0; h < N; ++h) {
      for (int j = 0; j < Vectors; ++j) sum[h][j] = load(acc + h * stride + d + j * kLanes) * broadcast(factors[h]);
    }
    for (int t = 0; t < tile_->count; ++t) {
      const Cache* v = v_ + tile_->v_row[t] + d;
      Floats value[Vectors];
      for (int j = 0; j < Vectors; ++j) value[j] = load(v + j * kLanes);
      for (int h = 0; h < N; ++h) {
        const Floats weight = broadcast(weights[h][t]);
        for (int j = 0; j < Vectors; ++j) sum[h][j] = multiply_add(weight, value[j], sum[h][j]);
      }
    }
    for (int h = 0; h < N; ++h) {
      for (int j = 0; j < Vectors; ++j) store(acc + h * stride + d + j * kLanes, sum[h][j]);
    }
  }

  const AttentionParams& p_;
  std::vector<float> query_;
  const Tile* tile_ = nullptr;
  const Cache *k_ = nullptr, *v_ = nullptr;
};

}  // namespace pagedkv
