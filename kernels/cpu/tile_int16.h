// The tile kernel for int8 caches in AVX2: K and V stay integers, and q and the softmax weights become 16-bit integers times a
// power of two, so that both products are exact integer dot products of 16 multiplications an instruction, twice as many as
// in float32, and only sums are converted. For q that 16 bits hold (sixteen_bits_serve); tile_float.h has the others.
//
// vpmaddwd adds up two neighbouring products. For q.k those are neighbouring dimensions: K is only widened. For w.v they
// are two tokens, whose bytes are interleaved before they are widened. Both products take a few tokens of all heads at a
// time, not a head's 64 tokens: that is the order of memory, and a head's rows, a power of two of bytes apart, would
// share a few sets of the L1 cache.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "tile_fixed_point.h"

namespace pagedkv {

class Int16Tile {
 public:
  using Cache = int8_t;
  static constexpr bool kQuantised = true;

  explicit Int16Tile(const AttentionParams& p)
      : p_(p), group_(p.num_heads / p.num_kv_heads), query_(p.num_heads), weights_(p.num_heads), dots_(p.num_heads) {}

  void load_query(int64_t seq, int64_t kv_begin, int64_t kv_end) {
    kv_begin_ = kv_begin, kv_end_ = kv_end;
    for (int64_t h = 0; h < num_heads(); ++h) {
      alignas(32) float row[kMaxHeadDim] = {};
      load_query_row(p_, seq, kv_begin * group_ + h, row);
      query_[h].round(row, (p_.head_dim + 15) / 16 * 16);
    }
  }

  void logits(const Tile& tile, float* out, Prefetcher& ahead) {
    const int64_t lines = (p_.head_dim + 63) / 64;  // of a token
    for (int t = 0; t < tile.padded(); t += 8) {
      for (int i = 0; i < 8; ++i) {
        const int8_t* k = static_cast<const int8_t*>(p_.k_cache) + tile.k_row[t + i];
        for (int64_t kv = kv_begin_; kv < kv_end_; ++kv) {
          ahead.fetch(lines);
          for_heads(group_, [&](int64_t first, auto n) {
            const int64_t h = (kv - kv_begin_) * group_ + first;
            _mm_store_si128(&dots_[h].of_token[i % 4][i / 4], multiply_key<n.value>(k + kv * p_.k_stride_head, &query_[h]));
          });
        }
      }
      for (int64_t kv = 0; kv < kv_end_ - kv_begin_; ++kv) {
        for_heads(group_, [&](int64_t first, auto n) {
          const int64_t h = kv * group_ + first;
          store_dots<n.value>(dots_[h], &query_[h], out + h * kTile + t);
        });
      }
    }
  }

  void accumulate(const Tile& tile, const float* weights, const float* factors, float* acc, int64_t stride, Prefetcher& ahead) {
    for (int64_t h = 0; h < num_heads(); ++h) weights_[h].round(weights + h * kTile, tile.padded());
    for (int begin = 0; begin < tile.count; begin += kTokens) {
      const int end = std::min(begin + kTokens, tile.count);
      for (int64_t kv = kv_begin_; kv < kv_end_; ++kv) {
        const int8_t* v = static_cast<const int8_t*>(p_.v_cache) + kv * p_.v_stride_head;
        for_heads(group_, [&](int64_t first, auto n) {
          const int64_t h = (kv - kv_begin_) * group_ + first;
          multiply_values<n.value>(tile, begin, end, v, &weights_[h], factors + h, acc + h * stride, stride, ahead);
        });
      }
    }
  }

  void finish(float*) const {}

 private:
  static constexpr int kTokens = 16;  // of V at a time

  // A vector of up to N floats as unit * x.
  template <int N>
  struct FixedRow {
    alignas(32) int16_t x[N];
    float unit;

    void round(const float* from, int64_t n) {
      __m256i max_bits = _mm256_setzero_si256();
      for (int64_t i = 0; i < n; i += 8) {
        const __m256i bits = _mm256_castps_si256(_mm256_load_ps(from + i));
        max_bits = _mm256_max_epu32(max_bits, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
      }
      alignas(32) uint32_t lanes[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), max_bits);
      unit = unit_for(*std::max_element(lanes, lanes + 8), 32767.0f);
      const __m256 inverse = _mm256_set1_ps(1.0f / unit);
      const auto integers = [&](const float* f) { return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(f), inverse)); };
      for (int64_t i = 0; i < n; i += 16) {
        const __m256i words = _mm256_packs_epi32(integers(from + i), integers(from + i + 8));  // by halves of a register
        _mm256_store_si256(reinterpret_cast<__m256i*>(x + i), _mm256_permute4x64_epi64(words, 0xd8));
      }
    }
  };

  // Of up to four heads with eight tokens: tokens i and i + 4 side by side.
  struct alignas(32) Dots {
    __m128i of_token[4][2];
  };

  int64_t num_heads() const { return (kv_end_ - kv_begin_) * group_; }

  static __m128i load16(const int8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }
  static __m128i load8(const int8_t* bytes) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)); }

  // Lane h of the result is q[h] . k.
  template <int N>
  __m128i multiply_key(const int8_t* k, const FixedRow<kMaxHeadDim>* q) const {
    __m256i sum[4];
    for (__m256i& lanes : sum) lanes = _mm256_setzero_si256();
    const auto add = [&](int64_t d, __m128i bytes) {
      const __m256i key = _mm256_cvtepi8_epi16(bytes);
      for (int h = 0; h < N; ++h) {
        const __m256i query = _mm256_load_si256(reinterpret_cast<const __m256i*>(q[h].x + d));
        sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(key, query));  // at most 256 * 128 * 32767 < 2^31
      }
    };
    int64_t d = 0;
    for (; d + 16 <= p_.head_dim; d += 16) add(d, load16(k + d));
    if (d < p_.head_dim) add(d, load8(k + d));
    const auto add32 = [](__m256i a, __m256i b) { return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); };
    const __m256i a = add32(sum[0], sum[1]), b = add32(sum[2], sum[3]);
    const __m256i halves = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    return _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  }

  // out[h] = unit * dots of eight tokens: a 4 x 4 transpose in each half of the registers.
  template <int N>
  static void store_dots(const Dots& dots, const FixedRow<kMaxHeadDim>* q, float* out) {
    __m256i rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(dots.of_token[i]));
    const __m256i a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpackhi_epi32(rows[0], rows[1]);
    const __m256i c = _mm256_unpacklo_epi32(rows[2], rows[3]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
    const __m256i of_head[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
    for (int h = 0; h < N; ++h) {
      _mm256_store_ps(out + h * kTile, _mm256_mul_ps(_mm256_cvtepi32_ps(of_head[h]), _mm256_set1_ps(q[h].unit)));
    }
  }

  // acc[h] += w[h] . v over tokens [begin, end); before the tile's first, acc is scaled by its factor. An odd last token is paired
  // with what pads the tile, whose weight is 0.
  template <int N>
  void multiply_values(const Tile& tile, int begin, int end, const int8_t* v, const FixedRow<kTile>* w, const float* factors, float* acc,
                       int64_t stride, Prefetcher& ahead) const {
    const int pairs = (end - begin + 1) / 2;
    __m256i weights[N][kTokens / 2];  // of two tokens, in all lanes: broadcast in the inner loop, they would not leave enough registers
    for (int h = 0; h < N; ++h) {
      for (int i = 0; i < pairs; ++i) {
        int32_t two;
        std::memcpy(&two, w[h].x + begin + 2 * i, sizeof two);
        weights[h][i] = _mm256_set1_epi32(two);
      }
    }
    const auto column = [&](int64_t d, auto dims) {
      constexpr int kVectors = dims.value / 8;
      __m256i sum[N][kVectors];
      for (int h = 0; h < N; ++h) {
        for (int j = 0; j < kVectors; ++j) sum[h][j] = _mm256_setzero_si256();
      }
      for (int i = 0; i < pairs; ++i) {
        const int8_t *one = v + tile.v_row[begin + 2 * i] + d, *other = v + tile.v_row[begin + 2 * i + 1] + d;
        __m256i values[kVectors];
        if constexpr (kVectors == 2) {
          const __m128i a = load16(one), b = load16(other);
          values[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), values[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
        } else {
          values[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(load8(one), load8(other)));
        }
        for (int h = 0; h < N; ++h) {
          for (int j = 0; j < kVectors; ++j) sum[h][j] = _mm256_add_epi32(sum[h][j], _mm256_madd_epi16(values[j], weights[h][i]));
        }
      }
      for (int h = 0; h < N; ++h) {
        const __m256 unit = _mm256_set1_ps(w[h].unit), factor = _mm256_set1_ps(begin == 0 ? factors[h] : 1.0f);
        for (int j = 0; j < kVectors; ++j) {
          float* row = acc + h * stride + d + j * 8;
          const __m256 added = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[h][j]), unit);
          _mm256_store_ps(row, _mm256_fmadd_ps(_mm256_load_ps(row), factor, added));
        }
      }
    };
    int64_t d = 0;
    for (; d + 16 <= p_.head_dim; d += 16) {
      ahead.fetch(kTokens * 16 / 64);
      column(d, std::integral_constant<int, 16>{});
    }
    if (d < p_.head_dim) column(d, std::integral_constant<int, 8>{});
  }

  const AttentionParams& p_;
  int64_t group_;  // query heads of a KV head
  int64_t kv_begin_ = 0, kv_end_ = 0;
  std::vector<FixedRow<kMaxHeadDim>> query_;  // [heads]
  std::vector<FixedRow<kTile>> weights_;      // [heads]
  std::vector<Dots> dots_;                    // [heads], of which every fourth of a group is used
};

}  // namespace pagedkv
