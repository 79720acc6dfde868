// The tile kernel for int8 caches in AVX-512 VNNI: K and V stay integers, and q and the softmax weights are split
// into int8 digits, so that both products are exact integer dot products of 64 multiplications an instruction.
//
// Digits. x = unit * (d[0] * 256^(D-1) + ... + d[D-1]) with signed bytes d and a power of two as unit. Four digits
// (2^-31 of the largest element) for float32 q; two (2^-15) for half q whose elements are alike in size, see sixteen_bits_serve.
//
// Layout. Both products are one loop, `multiply`: lanes are tokens for q.k and dimensions for w.v, and each
// instruction multiplies a lane's four bytes by four digits that all lanes share. So K is transposed by groups of
// four dimensions, 32 tokens at a time, and V by groups of four tokens, 64 dimensions at a time; a transposed
// piece serves all heads of the GQA group before it leaves the L1 cache. vpdpbusd wants unsigned bytes on one side:
// the cache's are offset by 128, and since (x + 128) . d = x . d + 128 * sum(d), the sum over d is taken off by
// where the accumulators start.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention.h"
#include "tile_fixed_point.h"

namespace pagedkv {

template <int Digits>
class VnniTile {
 public:
  using Cache = int8_t;
  static constexpr bool kQuantised = true;

  explicit VnniTile(const AttentionParams& p) : p_(p), group_(p.num_heads / p.num_kv_heads), query_(p.num_heads), weights_(group_) {}

  void load_query(int64_t seq, int64_t kv_begin, int64_t kv_end) {
    kv_begin_ = kv_begin, kv_end_ = kv_end;
    for (int64_t h = 0; h < (kv_end - kv_begin) * group_; ++h) {
      alignas(64) float row[kMaxHeadDim] = {};
      load_query_row(p_, seq, kv_begin * group_ + h, row);
      query_[h].split(row, (p_.head_dim + 15) / 16 * 16);
    }
  }

  void logits(const Tile& tile, float* out, Prefetcher& ahead) const {
    const int64_t steps = p_.head_dim / 4;
    alignas(64) uint8_t keys[2 * 16 * kMaxHeadDim];  // the second group overwrites what the first wrote past its end
    for (int64_t kv = kv_begin_; kv < kv_end_; ++kv, out += group_ * kTile) {
      const int8_t* k = static_cast<const int8_t*>(p_.k_cache) + kv * p_.k_stride_head;
      for (int t = 0; t < tile.padded(); t += 32) {
        transpose_keys(tile.k_row + t, k, keys);
        transpose_keys(tile.k_row + t + 16, k, keys + steps * 64);
        multiply<2>(keys, steps, &query_[(kv - kv_begin_) * group_], ahead, [&](int64_t head, int lanes, __m512 dot) {
          _mm512_storeu_ps(out + head * kTile + t + lanes * 16, dot);
        });
      }
    }
  }

  void accumulate(const Tile& tile, const float* weights, const float* factors, float* acc, int64_t stride, Prefetcher& ahead) {
    const int64_t steps = (tile.count + 3) / 4;
    alignas(64) uint8_t values[kTile * 64];
    for (int64_t kv = kv_begin_; kv < kv_end_; ++kv, weights += group_ * kTile, factors += group_, acc += group_ * stride) {
      const int8_t* v = static_cast<const int8_t*>(p_.v_cache) + kv * p_.v_stride_head;
      for (int64_t i = 0; i < group_; ++i) weights_[i].split(weights + i * kTile, tile.padded());
      for (int64_t d = 0; d < p_.head_dim; d += 64) {
        transpose_values(tile.v_row, steps, v, d, values);
        for (int pair = 0; pair < 2; ++pair) {
          multiply<2>(values + pair * 2 * steps * 64, steps, weights_.data(), ahead, [&](int64_t head, int lanes, __m512 sum) {
            float* row = acc + head * stride + d + (pair * 2 + lanes) * 16;
            _mm512_storeu_ps(row, _mm512_fmadd_ps(_mm512_loadu_ps(row), _mm512_set1_ps(factors[head]), sum));
          });
        }
      }
    }
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
      unit = unit_for(_mm512_reduce_max_epu32(max_bits), 127.0f * (Digits == 2 ? 0x1p8f : 0x1p24f));
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
      // Modulo 2^32, as vpdpbusd adds: the sums behind a NaN unit may be anything.
      for (int d = 0; d < Digits; ++d) start[d] = static_cast<int32_t>(-128u * static_cast<uint32_t>(_mm512_reduce_add_epi32(sums[d])));
    }
  };

  // For each head of the group and each of `Groups` x 16 lanes: emit(head, lanes, sum over steps of a . digits, as float).
  // `a` is [Groups][steps][64 bytes], four bytes for each lane.
  template <int Groups, int N, class Emit>
  void multiply(const uint8_t* a, int64_t steps, const DigitRow<N>* rows, Prefetcher& ahead, const Emit& emit) const {
    constexpr int kHeads = 8 / Digits;  // 8 digits x 2 groups of lanes: 16 of the 32 registers accumulate
    for (int64_t first = 0; first < group_; first += kHeads) {
      const auto some = [&](int64_t head, int lanes, __m512 sum) { emit(first + head, lanes, sum); };
      switch (std::min<int64_t>(kHeads, group_ - first)) {
        case 1: multiply_heads<1, Groups>(a, steps, rows + first, ahead, some); break;
        case 2: multiply_heads<2, Groups>(a, steps, rows + first, ahead, some); break;
        case 3: multiply_heads<3, Groups>(a, steps, rows + first, ahead, some); break;
        default: multiply_heads<4, Groups>(a, steps, rows + first, ahead, some); break;
      }
    }
  }

  template <int Heads, int Groups, int N, class Emit>
  static void multiply_heads(const uint8_t* a, int64_t steps, const DigitRow<N>* rows, Prefetcher& ahead, const Emit& emit) {
    __m512i sum[Heads][Digits][Groups];
    for (int h = 0; h < Heads; ++h) {
      for (int d = 0; d < Digits; ++d) {
        for (int g = 0; g < Groups; ++g) sum[h][d][g] = _mm512_set1_epi32(rows[h].start[d]);
      }
    }
    for (int64_t s = 0; s < steps; ++s) {
      ahead.fetch(Groups);  // over a product, the lines of one head
      __m512i lanes[Groups];
      for (int g = 0; g < Groups; ++g) lanes[g] = _mm512_load_si512(a + (g * steps + s) * 64);
      for (int h = 0; h < Heads; ++h) {
        for (int d = 0; d < Digits; ++d) {
          int32_t four;
          std::memcpy(&four, rows[h].digit[d] + s * 4, sizeof four);
          for (int g = 0; g < Groups; ++g) sum[h][d][g] = _mm512_dpbusd_epi32(sum[h][d][g], lanes[g], _mm512_set1_epi32(four));
        }
      }
    }
    for (int h = 0; h < Heads; ++h) {
      for (int g = 0; g < Groups; ++g) {
        // Pairs of digits fit an int32: 256 * 128 * 127 * 256 < 2^31.
        const auto pair = [&](int d) { return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sum[h][d][g], 8), sum[h][d + 1][g])); };
        __m512 total = pair(0);
        if constexpr (Digits == 4) total = _mm512_fmadd_ps(total, _mm512_set1_ps(65536.0f), pair(2));
        emit(h, g, _mm512_mul_ps(total, _mm512_set1_ps(rows[h].unit)));
      }
    }
  }

  // Up to 64 dimensions from d, offset by 128; nothing past the row's end is read.
  __mmask64 dims_present(int64_t d) const { return p_.head_dim - d >= 64 ? ~0ull : (1ull << (p_.head_dim - d)) - 1; }
  static __m512i load_row(__mmask64 present, const int8_t* row) {
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8(present, row), _mm512_set1_epi8(-128));
  }

  // 16 tokens to keys [dim / 4][token][4 dims]: a 16 x 16 transpose of dwords for every 64 dimensions, first within
  // 4 x 4 blocks (unpack), then of the blocks (shuffle). Writes up to the next multiple of 64 dimensions.
  void transpose_keys(const int64_t* rows, const int8_t* k, uint8_t* keys) const {
    for (int64_t d = 0; d < p_.head_dim; d += 64) {
      const __mmask64 present = dims_present(d);
      __m512i block[4][4];  // [tokens / 4][dims / 4 % 4], lane: dims / 16
      for (int i = 0; i < 4; ++i) {
        __m512i row[4];
        for (int j = 0; j < 4; ++j) row[j] = load_row(present, k + rows[i * 4 + j] + d);
        const __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpackhi_epi32(row[0], row[1]);
        const __m512i c = _mm512_unpacklo_epi32(row[2], row[3]), e = _mm512_unpackhi_epi32(row[2], row[3]);
        block[i][0] = _mm512_unpacklo_epi64(a, c), block[i][1] = _mm512_unpackhi_epi64(a, c);
        block[i][2] = _mm512_unpacklo_epi64(b, e), block[i][3] = _mm512_unpackhi_epi64(b, e);
      }
      uint8_t* out = keys + d / 4 * 64;
      for (int j = 0; j < 4; ++j) {
        const __m512i a = _mm512_shuffle_i32x4(block[0][j], block[1][j], 0x88), b = _mm512_shuffle_i32x4(block[0][j], block[1][j], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(block[2][j], block[3][j], 0x88), e = _mm512_shuffle_i32x4(block[2][j], block[3][j], 0xdd);
        _mm512_store_si512(out + j * 64, _mm512_shuffle_i32x4(a, c, 0x88));
        _mm512_store_si512(out + (4 + j) * 64, _mm512_shuffle_i32x4(b, e, 0x88));
        _mm512_store_si512(out + (8 + j) * 64, _mm512_shuffle_i32x4(a, c, 0xdd));
        _mm512_store_si512(out + (12 + j) * 64, _mm512_shuffle_i32x4(b, e, 0xdd));
      }
    }
  }

  // All tokens' dimensions d .. d + 63, to values [4 groups of lanes][token / 4][16 dims][4 tokens].
  void transpose_values(const int64_t* rows, int64_t steps, const int8_t* v, int64_t d, uint8_t* values) const {
    const __mmask64 present = dims_present(d);
    for (int64_t s = 0; s < steps; ++s) {
      __m512i row[4];
      for (int j = 0; j < 4; ++j) row[j] = load_row(present, v + rows[s * 4 + j] + d);
      const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]), b = _mm512_unpackhi_epi8(row[0], row[1]);
      const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]), e = _mm512_unpackhi_epi8(row[2], row[3]);
      uint8_t* out = values + s * 64;
      _mm512_store_si512(out, _mm512_unpacklo_epi16(a, c));
      _mm512_store_si512(out + steps * 64, _mm512_unpackhi_epi16(a, c));
      _mm512_store_si512(out + 2 * steps * 64, _mm512_unpacklo_epi16(b, e));
      _mm512_store_si512(out + 3 * steps * 64, _mm512_unpackhi_epi16(b, e));
    }
  }

  const AttentionParams& p_;
  int64_t group_;  // query heads of a KV head
  int64_t kv_begin_ = 0, kv_end_ = 0;
  std::vector<DigitRow<kMaxHeadDim>> query_;  // [heads]
  std::vector<DigitRow<kTile>> weights_;      // [group]
};

}  // namespace pagedkv
