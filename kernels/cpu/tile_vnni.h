// The tile kernel for int8 caches in AVX-512 VNNI: K and V stay integers, and q and the softmax weights are split
// into int8 digits, so that both products are exact integer dot products of 64 multiplications an instruction.
//
// Digits. x = unit * (d[0] * 256^(D-1) + ... + d[D-1]) with signed bytes d and a power of two as unit: two digits
// for half q (2^-15 of the largest element, below half's own rounding), four for float32 (2^-31, below float32's).
//
// Layout. Both products are one loop, `multiply`: lanes are tokens for q.k and dimensions for w.v, and each
// instruction multiplies a lane's four bytes by four digits that all lanes share. So K is transposed by groups of
// four dimensions, and V by groups of four tokens, once a tile; the transposed tiles serve all heads of the GQA
// group. vpdpbusd wants unsigned bytes on one side: the cache's are offset by 128, and since
// (x + 128) . d = x . d + 128 * sum(d), the sum over d is taken off by where the accumulators start.
#pragma once

#include <immintrin.h>

#include <vector>

#include "attention.h"

namespace pagedkv {

template <int Digits>
class VnniTile {
 public:
  using Cache = int8_t;
  static constexpr int kHeads = 8 / Digits;  // 8 columns x 2 vectors of lanes: 16 of the 32 registers accumulate
  static constexpr bool kQuantised = true;

  explicit VnniTile(const AttentionParams& p) : p_(p), query_(p.num_heads) {}

  void load_query(int64_t seq, int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      alignas(64) float row[kMaxDim] = {};
      load_query_row(p_, seq, h, row);
      query_[h].split(row, (p_.head_dim + 15) / 16 * 16);
    }
  }

  void load_tile(const Tile& tile, int64_t kv_head) {
    tile_ = &tile;
    transpose_keys(static_cast<const int8_t*>(p_.k_cache) + kv_head * p_.k_stride_head);
    transpose_values(static_cast<const int8_t*>(p_.v_cache) + kv_head * p_.v_stride_head);
  }

  void logits(int64_t head, int n, float (*out)[kTile]) const {
    multiply(n, keys_, tile_->padded() / 16, p_.head_dim / 4, &query_[head], [&](int i, int64_t group, __m512 dot) {
      _mm512_storeu_ps(out[i] + group * 16, dot);
    });
  }

  void accumulate(int n, const float (*weights)[kTile], const float* factors, float* acc, int64_t stride) const {
    DigitRow<kTile> digits[kHeads];
    for (int i = 0; i < n; ++i) digits[i].split(weights[i], tile_->padded());
    multiply(n, values_, (p_.head_dim + 63) / 64 * 4, (tile_->count + 3) / 4, digits, [&](int i, int64_t group, __m512 sum) {
      float* row = acc + i * stride + group * 16;
      _mm512_storeu_ps(row, _mm512_fmadd_ps(_mm512_loadu_ps(row), _mm512_set1_ps(factors[i]), sum));
    });
  }

  // transpose_values leaves 64 dimensions as 4 vectors x 4 lanes x 4 dimensions; they belong in lanes, vectors, dimensions.
  void finish(float* acc) const {
    for (int64_t d = 0; d < p_.head_dim; d += 64) {
      float mixed[64];
      std::copy_n(acc + d, 64, mixed);
      for (int vector = 0; vector < 4; ++vector) {
        for (int lane = 0; lane < 4; ++lane) std::copy_n(mixed + (vector * 4 + lane) * 4, 4, acc + d + (lane * 4 + vector) * 4);
      }
    }
  }

 private:
  static constexpr int kMaxDim = 256;

  // A vector of up to N floats as digits, most significant first.
  template <int N>
  struct DigitRow {
    alignas(64) int8_t digit[Digits][N];
    int32_t start[Digits];  // -128 * sum of the digits: where the accumulators start
    float unit;

    void split(const float* x, int64_t n) {
      __m512i max_bits = _mm512_setzero_si512();
      for (int64_t i = 0; i < n; i += 16) {
        max_bits = _mm512_max_epu32(max_bits, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff)));
      }
      unit = unit_for(_mm512_reduce_max_epu32(max_bits));
      const __m512 inverse = _mm512_set1_ps(1.0f / unit);
      __m512i sums[Digits];
      for (auto& sum : sums) sum = _mm512_setzero_si512();
      for (int64_t i = 0; i < n; i += 16) {
        __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
        for (int d = Digits - 1; d >= 0; --d) {
          const __m512i low = d > 0 ? _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24) : rest;
          _mm_store_si128(reinterpret_cast<__m128i*>(digit[d] + i), _mm512_cvtepi32_epi8(low));
          sums[d] = _mm512_add_epi32(sums[d], low);
          rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, low), 8);
        }
      }
      for (int d = 0; d < Digits; ++d) start[d] = -128 * _mm512_reduce_add_epi32(sums[d]);
    }

    // The smallest power of two by which the largest element fits the digits; NaN if that element is not finite.
    static float unit_for(uint32_t max_bits) {
      if (max_bits >= 0x7f800000u) return NAN;
      constexpr float kLargest = 127.0f * (Digits == 2 ? 0x1p8f : 0x1p24f);
      float max_abs, unit;
      std::memcpy(&max_abs, &max_bits, sizeof max_abs);
      uint32_t bits;
      const float quotient = std::max(max_abs / kLargest, 0x1p-126f);
      std::memcpy(&bits, &quotient, sizeof bits);
      bits = (bits + 0x7fffff) & 0xff800000u;
      std::memcpy(&unit, &bits, sizeof unit);
      return unit;
    }
  };

  // For each of n columns (rows of digits) and each group of 16 lanes: emit(column, group, sum over steps of a . digits, as float).
  // `a` is [groups][steps][64 bytes], four bytes for each lane.
  template <int N, class Emit>
  static void multiply(int n, const uint8_t* a, int64_t groups, int64_t steps, const DigitRow<N>* columns, const Emit& emit) {
    switch (n) {
      case 1: return multiply_columns<1>(a, groups, steps, columns, emit);
      case 2: return multiply_columns<2>(a, groups, steps, columns, emit);
      case 3: return multiply_columns<3>(a, groups, steps, columns, emit);
      default: return multiply_columns<4>(a, groups, steps, columns, emit);
    }
  }

  template <int Columns, int N, class Emit>
  static void multiply_columns(const uint8_t* a, int64_t groups, int64_t steps, const DigitRow<N>* columns, const Emit& emit) {
    if constexpr (Columns <= kHeads) {
      int64_t g = 0;
      for (; g + 2 <= groups; g += 2) multiply_groups<Columns, 2>(a + g * steps * 64, g, steps, columns, emit);
      if (g < groups) multiply_groups<Columns, 1>(a + g * steps * 64, g, steps, columns, emit);
    }
  }

  template <int Columns, int Groups, int N, class Emit>
  static void multiply_groups(const uint8_t* a, int64_t first_group, int64_t steps, const DigitRow<N>* columns, const Emit& emit) {
    __m512i sum[Columns][Digits][Groups];
    for (int c = 0; c < Columns; ++c) {
      for (int d = 0; d < Digits; ++d) {
        for (int g = 0; g < Groups; ++g) sum[c][d][g] = _mm512_set1_epi32(columns[c].start[d]);
      }
    }
    for (int64_t s = 0; s < steps; ++s) {
      __m512i lanes[Groups];
      for (int g = 0; g < Groups; ++g) lanes[g] = _mm512_load_si512(a + (g * steps + s) * 64);
      for (int c = 0; c < Columns; ++c) {
        for (int d = 0; d < Digits; ++d) {
          int32_t four;
          std::memcpy(&four, columns[c].digit[d] + s * 4, sizeof four);
          for (int g = 0; g < Groups; ++g) sum[c][d][g] = _mm512_dpbusd_epi32(sum[c][d][g], lanes[g], _mm512_set1_epi32(four));
        }
      }
    }
    for (int c = 0; c < Columns; ++c) {
      for (int g = 0; g < Groups; ++g) {
        // Pairs of digits fit an int32: 256 * 128 * 127 * 256 < 2^31.
        const auto pair = [&](int d) { return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sum[c][d][g], 8), sum[c][d + 1][g])); };
        __m512 total = pair(0);
        if constexpr (Digits == 4) total = _mm512_fmadd_ps(total, _mm512_set1_ps(65536.0f), pair(2));
        emit(c, first_group + g, _mm512_mul_ps(total, _mm512_set1_ps(columns[c].unit)));
      }
    }
  }

  static __m512i offset_by_128(__m512i x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }

  // Sixteen tokens at a time to keys_ [token group][dim / 4][token][4 dims].
  void transpose_keys(const int8_t* k) {
    for (int t = 0; t < tile_->padded(); t += 16) {
      uint8_t* out = keys_ + t * p_.head_dim;
      for (int64_t d = 0; d < p_.head_dim; d += 16) {
        const bool whole = d + 16 <= p_.head_dim;
        __m512i row[4];  // row[j]: tokens j, 4 + j, 8 + j, 12 + j in the four 128-bit lanes
        for (int j = 0; j < 4; ++j) {
          const auto piece = [&](int lane) {
            const auto* bytes = reinterpret_cast<const __m128i*>(k + tile_->k_row[t + lane * 4 + j] + d);
            return whole ? _mm_loadu_si128(bytes) : _mm_loadl_epi64(bytes);
          };
          const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(piece(0)), piece(1), 1);
          const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(piece(2)), piece(3), 1);
          row[j] = offset_by_128(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
        }
        const __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpackhi_epi32(row[0], row[1]);
        const __m512i c = _mm512_unpacklo_epi32(row[2], row[3]), e = _mm512_unpackhi_epi32(row[2], row[3]);
        uint8_t* group = out + d / 4 * 64;
        _mm512_store_si512(group, _mm512_unpacklo_epi64(a, c));
        _mm512_store_si512(group + 64, _mm512_unpackhi_epi64(a, c));
        if (whole) {
          _mm512_store_si512(group + 128, _mm512_unpacklo_epi64(b, e));
          _mm512_store_si512(group + 192, _mm512_unpackhi_epi64(b, e));
        }
      }
    }
  }

  // Four tokens at a time to values_ [dim group][token / 4][dim][4 tokens].
  void transpose_values(const int8_t* v) {
    const int64_t steps = (tile_->count + 3) / 4;
    for (int64_t s = 0; s < steps; ++s) {
      for (int64_t d = 0; d < p_.head_dim; d += 64) {
        const __mmask64 present = _cvtu64_mask64(p_.head_dim - d >= 64 ? ~0ull : (1ull << (p_.head_dim - d)) - 1);
        __m512i row[4];
        for (int j = 0; j < 4; ++j) row[j] = offset_by_128(_mm512_maskz_loadu_epi8(present, v + tile_->v_row[s * 4 + j] + d));
        const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]), b = _mm512_unpackhi_epi8(row[0], row[1]);
        const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]), e = _mm512_unpackhi_epi8(row[2], row[3]);
        uint8_t* group = values_ + (d / 16 * steps + s) * 64;
        _mm512_store_si512(group, _mm512_unpacklo_epi16(a, c));
        _mm512_store_si512(group + steps * 64, _mm512_unpackhi_epi16(a, c));
        _mm512_store_si512(group + 2 * steps * 64, _mm512_unpacklo_epi16(b, e));
        _mm512_store_si512(group + 3 * steps * 64, _mm512_unpackhi_epi16(b, e));
      }
    }
  }

  const AttentionParams& p_;
  std::vector<DigitRow<kMaxDim>> query_;
  const Tile* tile_ = nullptr;
  alignas(64) uint8_t keys_[kTile * kMaxDim];
  alignas(64) uint8_t values_[kTile * kMaxDim];
};

}  // namespace pagedkv
