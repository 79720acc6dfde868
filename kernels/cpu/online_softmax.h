// The softmax of decode attention, tile by tile (softmax_state.h has the algebra).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../softmax_state.h"
#include "attention_tile.h"
#include "simd.h"

namespace pagedkv {

// Turns a head's raw logits into weights, and its state into that of the tokens so far. Returns the factor by
// which what was accumulated before has to be scaled.
//
// Logits are natural until the maximum is off: a logit of 40 rounded to base 2 would cost float32 results a
// digit. m is a reference and need not be the maximum to the last bit, so only the difference has to be exact.
inline float online_softmax(const AttentionParams& p, const Tile& tile, const float* k_scale, float* row, SoftmaxState& state) {
  using namespace simd;
  const Floats sm_scale = broadcast(p.sm_scale), cap = broadcast(p.logits_soft_cap);
  Floats lane_max = broadcast(-INFINITY);
  for (int t = 0; t < tile.padded(); t += kLanes) {
    Floats x = load(row + t) * sm_scale;
    if (k_scale) x = x * load(k_scale + t);
    if (p.logits_soft_cap != 0.0f) x = tanh(x / cap) * cap;
    store(row + t, x);
    lane_max = max(x, lane_max);  // what pads the tile repeats a token, so it cannot raise the maximum
  }
  std::fill(row + tile.count, row + tile.padded(), -INFINITY);
  const float top = max_lane(lane_max), m = std::fmax(state.m, top * kLog2e);
  const float factor = m == state.m ? 1.0f : rescale(state.m, m);
  const Floats log2e = broadcast(kLog2e), log2e_rest = broadcast(kLog2eRest);
  const Floats reference = broadcast(m == -INFINITY ? 0.0f : -m);  // logits of -inf so far: weights of 0, not NaN
  Floats lane_sum = broadcast(0.0f);
  if (is_huge(m)) {  // see kHugeReference; here the natural logits are at hand to compare
    const Floats largest = broadcast(top * kLog2e < m ? INFINITY : top), zero = broadcast(0.0f), one = broadcast(1.0f);
    for (int t = 0; t < tile.padded(); t += kLanes) {
      const Floats x = load(row + t);
      const Floats weight = select_less(x, largest, zero, one + (x - x));
      store(row + t, weight);
      lane_sum = lane_sum + weight;
    }
    state = {m, state.l * factor + sum(lane_sum)};
    return factor;
  }
  for (int t = 0; t < tile.padded(); t += kLanes) {
    const Floats x = load(row + t);
    const Floats weight = exp2(multiply_add(x, log2e_rest, fma(x, log2e, reference)));
    store(row + t, weight);
    lane_sum = lane_sum + weight;
  }
  state = {m, state.l * factor + sum(lane_sum)};
  return factor;
}

// Adds a tile's weights to the sums of their blocks, and keeps the split's earlier blocks relative to the same maximum.
inline void add_block_sums(const AttentionParams& p, const Tile& tile, int64_t split_begin, const float* weights, float factor,
                           float* sums) {
  int64_t block = tile.first / p.block_size;  // of the sequence
  if (factor != 1.0f) {
    for (int64_t b = split_begin / p.block_size; b <= block; ++b) sums[b] *= factor;
  }
  for (int r = 0; r < tile.num_runs; ++r, ++block) {
    int t = tile.runs[r].begin;
    simd::Floats lanes = simd::broadcast(0.0f);
    for (; t + simd::kLanes <= tile.runs[r].end; t += simd::kLanes) lanes = lanes + simd::load(weights + t);
    float sum = simd::sum(lanes);
    for (; t < tile.runs[r].end; ++t) sum += weights[t];
    sums[block] += sum;
  }
}

}  // namespace pagedkv
