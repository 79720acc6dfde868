// merge_attention_states: attention over two disjoint sets of tokens, from the attention over each.
#include <cmath>

#include "parallel.h"
#include "simd.h"

namespace pagedkv {
namespace {

// In natural logarithms throughout: merging with the empty state returns the other one unchanged.
template <class T>
void merge_heads(const MergeParams& p) {
  parallel_ranges(p.num_seqs * p.num_heads, 1 + 16384 / p.head_dim, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t seq = i / p.num_heads, head = i % p.num_heads;
      const float lse_a = p.lse_a[seq * p.lse_a_stride + head], lse_b = p.lse_b[seq * p.lse_b_stride + head];
      const float top = std::fmax(lse_a, lse_b);
      // The empty state weighs nothing, whatever its output holds. No difference of two infinities is taken.
      const auto weight_of = [top](float lse) { return lse == -INFINITY ? 0.0f : lse == top ? 1.0f : std::exp(lse - top); };
      const float weight_a = weight_of(lse_a), weight_b = weight_of(lse_b);
      const float total = weight_a + weight_b;
      p.lse[i] = total == 0.0f ? -INFINITY : top + std::log(total);

      const auto share = [&](const void* out, int64_t stride_seq, int64_t stride_head, float weight, int64_t d) {
        if (weight == 0.0f) return simd::broadcast(0.0f);
        return simd::load(static_cast<const T*>(out) + seq * stride_seq + head * stride_head + d) * simd::broadcast(weight / total);
      };
      for (int64_t d = 0; d < p.head_dim; d += simd::kLanes) {
        simd::store(static_cast<T*>(p.out) + i * p.head_dim + d,
                    share(p.out_a, p.out_a_stride_seq, p.out_a_stride_head, weight_a, d) +
                        share(p.out_b, p.out_b_stride_seq, p.out_b_stride_head, weight_b, d));
      }
    }
  });
}

}  // namespace

void merge_attention_states(const MergeParams& p, void*) {
  dispatch_float(p.dtype, [&](auto type) { merge_heads<decltype(type)>(p); });
}

}  // namespace pagedkv
