// reshape_and_cache: quantise new tokens straight into their slots of the paged cache, K and V in one launch.
//
// Tokens of one block must act together: they share its scale, and only one CTA may re-quantise what it holds. They
// find each other through `winner`, the last token of the call for each slot. Up to kScanTokens tokens, each CTA
// finds the winners of its token's block by reading all slots: one launch. Beyond, two small kernels put them in the
// workspace, a word a slot of the pool, of which only the blocks that are written get touched.
// The winner of a block's lowest slot leads the block: its CTA writes all of the block's new tokens. A token that is not its
// slot's winner is not written, but the block's scale covers it.
#include <algorithm>
#include <climits>

#include "quantization/int8.cuh"

namespace pagedkv {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kScanTokens = 256;  // of more, reading all slots in each CTA costs more than two launches
constexpr int kMaxSpan = 16;
constexpr int kMaxBlockSize = 256;
constexpr int64_t kMaxCtas = 1 << 30;

// One of K and V.
struct Plane {
  const void* source;
  int64_t source_stride_token, source_stride_head;
  int8_t* cache;
  int64_t stride_block, stride_token, stride_head;
  float* scale;
  int64_t scale_stride_block, scale_stride_token, scale_stride_head;
};

struct Write {
  Plane planes[2];
  const int64_t* slots;
  int64_t num_tokens, num_slots;
  int block_size, num_kv_heads, head_dim;
  int span;     // tokens whose leaders a warp looks for when the winners are in the workspace
  int* winner;  // [num_slots]: the last token of the call for the slot, or -1
  int* first;   // [num_blocks]: the lowest offset that the call writes
  unsigned* covered;  // [num_blocks][2 * num_kv_heads]: bits of the largest magnitude among tokens that are not winners
};

__device__ __forceinline__ bool in_pool(const Write& w, int64_t slot) { return slot >= 0 && slot < w.num_slots; }

// ------------------------------------------------------------------------------- winners in the workspace

// The kernels of a call overlap; until wait_for_kernel_before they do what needs no workspace.

// Clears what belongs to the blocks that are written: a run of tokens of one block leaves it to its first, and that one to its warp.
template <bool kTokenHead>
__global__ void __launch_bounds__(kThreads) clear_winners(const __grid_constant__ Write w) {
  let_next_kernel_start();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t slot = token < w.num_tokens ? w.slots[token] : -1;
  if constexpr (kTokenHead) {
    if (in_pool(w, slot)) w.winner[slot] = -1;
  } else {
    const int lane = threadIdx.x % 32;
    const int64_t block = in_pool(w, slot) ? divide(slot, w.block_size).quotient : -1;
    const int64_t before = __shfl_up_sync(~0u, block, 1);
    for (unsigned rest = __ballot_sync(~0u, block >= 0 && (lane == 0 || before != block)); rest != 0; rest &= rest - 1) {
      const int64_t cleared = __shfl_sync(~0u, block, __ffs(rest) - 1);
      if (lane == 0) w.first[cleared] = INT_MAX;
      for (int item = lane; item < 2 * w.num_kv_heads; item += 32) w.covered[cleared * 2 * w.num_kv_heads + item] = 0;
      for (int offset = lane; offset < w.block_size; offset += 32) w.winner[cleared * w.block_size + offset] = -1;
    }
  }
}

__global__ void __launch_bounds__(kThreads) claim_slots(const __grid_constant__ Write w) {
  let_next_kernel_start();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t slot = token < w.num_tokens ? w.slots[token] : -1;
  wait_for_kernel_before();
  if (in_pool(w, slot)) atomicMax(w.winner + slot, static_cast<int>(token));
}

// The largest magnitude of one token's head, in a warp. All lanes get it.
template <class T, bool kAligned, bool kRotated>
__device__ __forceinline__ float row_max_abs(const Write& w, const Plane& plane, int64_t token, int head) {
  const T* row = static_cast<const T*>(plane.source) + token * plane.source_stride_token + head * plane.source_stride_head;
  const int part = threadIdx.x % 32;
  Unit<T> unit = {};
  if (part < w.head_dim / kUnit) unit = load_unit<kAligned>(row + part * kUnit);
  return group_max_magnitude(max_magnitude(0.f, hold<kRotated>(unit, w.head_dim)));
}

// As claim_slots. Besides, whoever meets another claim on a slot sees which of the two has lost it, and every loser is seen
// once; the warp then adds the losers to w.covered.
template <class T, bool kAligned, bool kRotated>
__global__ void __launch_bounds__(kThreads) claim_slots_of_blocks(const __grid_constant__ Write w) {
  let_next_kernel_start();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t slot = token < w.num_tokens ? w.slots[token] : -1;
  wait_for_kernel_before();
  int loser = -1;
  const Quotient at = in_pool(w, slot) ? divide(slot, w.block_size) : Quotient{-1, 0};
  const int64_t block_before = __shfl_up_sync(~0u, at.quotient, 1);
  const int offset_before = __shfl_up_sync(~0u, at.remainder, 1);
  if (in_pool(w, slot)) {
    const int other = atomicMax(w.winner + slot, static_cast<int>(token));
    loser = min(other, static_cast<int>(token));
    const bool lower_before = threadIdx.x % 32 > 0 && block_before == at.quotient && offset_before < at.remainder;
    if (!lower_before) atomicMin(w.first + at.quotient, at.remainder);
  }
  for (unsigned rest = __ballot_sync(~0u, loser >= 0); rest != 0; rest &= rest - 1) {
    const int source = __ffs(rest) - 1;
    const int lost = __shfl_sync(~0u, loser, source);
    const int64_t block = __shfl_sync(~0u, at.quotient, source);
    for (int item = 0; item < 2 * w.num_kv_heads; ++item) {
      const bool is_value = item >= w.num_kv_heads;
      const float max_abs = row_max_abs<T, kAligned, kRotated>(w, w.planes[is_value], lost, is_value ? item - w.num_kv_heads : item);
      if (threadIdx.x % 32 == 0) atomicMax(w.covered + block * 2 * w.num_kv_heads + item, __float_as_uint(max_abs));
    }
  }
}

// ------------------------------------------------------------------------------------ block-head scales

// The warp, as a number that the compiler knows to be the same in all its lanes, so that it trusts them to stay together.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

// A warp writes the call's tokens of one block and head. kHeld: units that a lane keeps in registers between finding the scale and
// encoding. winner: [block_size]. covered: a magnitude that the scale has to cover besides.
template <class T, bool kAligned, bool kRotated, int kHeld>
__device__ __forceinline__ void write_block_head(const Write& w, const Plane& plane, int64_t block, int head, const int* winner, float covered) {
  const int lane = threadIdx.x % 32;
  const T* source = static_cast<const T*>(plane.source) + head * plane.source_stride_head;
  int8_t* cache = plane.cache + block * plane.stride_block + head * plane.stride_head;
  float* stored = plane.scale + block * plane.scale_stride_block + head * plane.scale_stride_head;
  const int parts = w.head_dim / kUnit;
  const int units = w.block_size * parts;
  const float old = *stored;
  const bool afresh = winner[0] >= 0;

  Held<kRotated, T> held[kHeld];
  uint32_t is_new = 0;  // bit i: held[i] is to be written
  auto load = [&](UnitWalk& at) {
    Unit<T> raw[kHeld];
    is_new = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i, at.advance()) {
      raw[i] = {};
      if (at.offset >= w.block_size) continue;
      const int token = winner[at.offset];
      if (token < 0) continue;
      is_new |= 1u << i;
      raw[i] = load_unit<kAligned>(source + token * plane.source_stride_token + at.part * kUnit);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!kRotated || __any_sync(~0u, is_new >> i & 1)) held[i] = hold<kRotated>(raw[i], w.head_dim);
    }
  };

  float max_abs = covered;
  UnitWalk at(lane, parts);
  for (int unit = 0; unit < units; unit += 32 * kHeld) {
    load(at);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (is_new >> i & 1) max_abs = max_magnitude(max_abs, held[i]);
    }
  }
  const float needed = scale_for(group_max_magnitude(max_abs));

  // The scale of what the block holds: 0 where that asks for none. An all-zero block has scale 1 by convention, which says
  // nothing about the values to come.
  float before = afresh || old <= 0.f ? 0.f : old;
  if (before == 1.f) {
    uint32_t any = 0;
    for (at = UnitWalk(lane, parts); at.offset < w.block_size; at.advance()) {
      const Unit<int8_t> q = load_unit<kAligned>(cache + at.offset * plane.stride_token + at.part * kUnit);
      any |= q.words[0] | q.words[1];
    }
    if (!__any_sync(~0u, any != 0)) before = 0.f;
  }
  float scale = max_magnitude(before, needed);
  if (!(scale <= FLT_MAX)) scale = __uint_as_float(0x7fc00000u);
  if (scale == 0.f) scale = 1.f;
  if (lane == 0) *stored = scale;
  const Encoder encode(scale);

  // What the block holds besides the new tokens: nothing that a fresh or spoilt block keeps, and re-quantised where the scale grew.
  if (before != scale) {
    const bool clears = before == 0.f || isnan(scale);
    UnitWalk at(lane, parts);
    for (int unit = 0; unit < units; unit += 32 * kHeld) {
      UnitWalk here = at;
      Unit<int8_t> q[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i, at.advance()) {
        q[i] = {};
        if (!clears && at.offset < w.block_size) q[i] = load_unit<kAligned>(cache + at.offset * plane.stride_token + at.part * kUnit);
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i, here.advance()) {
        if (here.offset >= w.block_size || winner[here.offset] >= 0) continue;
        if (!clears) {
          float x[kUnit];
          to_floats(q[i], x);
#pragma unroll
          for (int j = 0; j < kUnit; ++j) x[j] = __fmul_rn(x[j], before);
          q[i] = encode(x);
        }
        store_unit<kAligned>(cache + here.offset * plane.stride_token + here.part * kUnit, q[i]);
      }
    }
  }

  at = UnitWalk(lane, parts);
  for (int unit = 0; unit < units; unit += 32 * kHeld) {
    UnitWalk here = at;
    if (units > 32 * kHeld) load(at);  // else all of it is held
#pragma unroll
    for (int i = 0; i < kHeld; ++i, here.advance()) {
      if (!(is_new >> i & 1)) continue;
      float x[kUnit];
      to_floats(held[i], x);
      store_unit<kAligned>(cache + here.offset * plane.stride_token + here.part * kUnit, encode(x));
    }
  }
}

// A CTA a token: the winners of its block come from reading all slots, one a thread.
template <class T, bool kAligned, bool kRotated>
__global__ void __launch_bounds__(kThreads) write_blocks_scanning(const __grid_constant__ Write w) {
  static_assert(kScanTokens <= kThreads);
  __shared__ int winner[kMaxBlockSize];
  __shared__ int losers[kScanTokens];
  __shared__ int num_losers;
  const int64_t mine = w.slots[blockIdx.x];
  const int64_t other_slot = threadIdx.x < w.num_tokens ? w.slots[threadIdx.x] : -1;
  for (int offset = threadIdx.x; offset < w.block_size; offset += kThreads) winner[offset] = -1;
  if (threadIdx.x == 0) num_losers = 0;
  __syncthreads();
  if (!in_pool(w, mine)) return;
  const Quotient at = divide(mine, w.block_size);
  if (const int64_t offset = other_slot - at.quotient * w.block_size; offset >= 0 && offset < w.block_size) {
    const int token = threadIdx.x, other = atomicMax(winner + offset, token);
    if (other >= 0) losers[atomicAdd(&num_losers, 1)] = min(other, token);
  }
  __syncthreads();
  bool others_lead = false;
  for (int offset = threadIdx.x; offset < at.remainder; offset += kThreads) others_lead |= winner[offset] >= 0;
  if (__syncthreads_or(others_lead) || winner[at.remainder] != static_cast<int>(blockIdx.x)) return;
  for (int item = warp_index() + blockIdx.y * kWarps; item < 2 * w.num_kv_heads; item += kWarps * gridDim.y) {
    const bool is_value = item >= w.num_kv_heads;
    const int head = is_value ? item - w.num_kv_heads : item;
    float covered = 0.f;
    for (int i = 0; i < num_losers; ++i) covered = max_magnitude(covered, row_max_abs<T, kAligned, kRotated>(w, w.planes[is_value], losers[i], head));
    write_block_head<T, kAligned, kRotated, 8>(w, w.planes[is_value], at.quotient, head, winner, covered);
  }
}

// What a prompt is made of: blocks that consecutive tokens fill from end to end. A warp holds one for one (K or V, head), whole rows
// at a time.
template <class T, bool kAligned, bool kRotated>
struct WholeBlock {
  static constexpr int kHeld = 8;
  Unit<T> raw[kHeld];
  int parts, rows, times;  // units of a row, rows that the warp takes at once, how often

  __device__ __forceinline__ explicit WholeBlock(const Write& w) : parts(w.head_dim / kUnit), rows(0), times(0) {
    if (parts > 32 || (parts & (parts - 1)) != 0) return;
    const int shift = __ffs(parts) - 1;
    if (const int units = w.block_size << shift; units % 32 == 0 && units <= 32 * kHeld) rows = 32 >> shift, times = units / 32;
  }
  __device__ __forceinline__ bool fits() const { return times > 0; }
  __device__ __forceinline__ int row() const { return threadIdx.x % 32 >> (__ffs(parts) - 1); }
  __device__ __forceinline__ int column() const { return (threadIdx.x & (parts - 1)) * kUnit; }

  // first: the first of its tokens.
  __device__ __forceinline__ void load(const Plane& plane, int64_t first, int head) {
    const T* source = static_cast<const T*>(plane.source) + (first + row()) * plane.source_stride_token + head * plane.source_stride_head + column();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      raw[i] = {};
      if (i < times) raw[i] = load_unit<kAligned>(source + i * rows * plane.source_stride_token);
    }
  }

  // covered: as in write_block_head.
  __device__ __forceinline__ void write(const Write& w, const Plane& plane, int64_t block, int head, float covered) const {
    Held<kRotated, T> held[kHeld];
    float max_abs = covered;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      held[i] = hold<kRotated>(raw[i], w.head_dim);
      max_abs = max_magnitude(max_abs, held[i]);
    }
    float scale = scale_for(group_max_magnitude(max_abs));
    if (scale == 0.f) scale = 1.f;
    if (threadIdx.x % 32 == 0) plane.scale[block * plane.scale_stride_block + head * plane.scale_stride_head] = scale;
    const Encoder encode(scale);
    int8_t* cache = plane.cache + block * plane.stride_block + row() * plane.stride_token + head * plane.stride_head + column();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (i >= times) continue;
      float x[kUnit];
      to_floats(held[i], x);
      store_unit<kAligned>(cache + i * rows * plane.stride_token, encode(x));
    }
  }
};

// A warp for w.span consecutive tokens and one (K or V, head): it writes its part of the blocks that they lead. 32 warps on an SM are
// as many as registers allow where a lane holds eight units of two bytes.
template <class T, bool kAligned, bool kRotated>
__global__ void __launch_bounds__(kThreads, kRotated || sizeof(T) > 2 ? 2 : 4) write_blocks(const __grid_constant__ Write w) {
  const int item = static_cast<int>(blockIdx.y) * kWarps + warp_index(), per_block = 2 * w.num_kv_heads;
  if (item >= per_block) return;
  const bool is_value = item >= w.num_kv_heads;
  const int head = is_value ? item - w.num_kv_heads : item;
  const Plane& plane = w.planes[is_value];
  const int lane = threadIdx.x % 32;
  const int64_t first = int64_t{blockIdx.x} * w.span, token = first + lane;
  const int64_t slot = token < w.num_tokens ? w.slots[token] : -1;
  const bool in_span = lane < w.span && in_pool(w, slot);
  const Quotient at = in_span ? divide(slot, w.block_size) : Quotient{0, 0};

  // A token at the start of a block, with its neighbour next to it: the rest probably follows, so it is loaded before the winners are
  // known.
  const int64_t next = __shfl_down_sync(~0u, slot, 1);
  const bool starts = in_span && at.remainder == 0 && (w.block_size == 1 || next == slot + 1) && token + w.block_size <= w.num_tokens;
  WholeBlock<T, kAligned, kRotated> whole(w);
  const int guess = __ffs(whole.fits() ? __ballot_sync(~0u, starts) : 0) - 1;
  if (guess >= 0) whole.load(plane, first + guess, head);

  wait_for_kernel_before();
  const int lowest = in_span ? w.first[at.quotient] : -1, winner = in_span ? w.winner[slot] : -1;
  const auto covered = [&](int64_t block) { return __uint_as_float(w.covered[block * per_block + item]); };
  const int64_t block = __shfl_sync(~0u, at.quotient, max(guess, 0));
  float max_abs = 0.f;
  bool is_whole = guess >= 0;
  if (guess >= 0) {
    max_abs = covered(block);
#pragma unroll 1
    for (int offset = lane; offset < w.block_size; offset += 32) {
      is_whole &= w.winner[block * w.block_size + offset] == static_cast<int>(first) + guess + offset;
    }
  }
  unsigned leaders = __ballot_sync(~0u, in_span && lowest == at.remainder && winner == static_cast<int>(token));
  if (__all_sync(~0u, is_whole)) {
    whole.write(w, plane, block, head, max_abs);
    leaders &= ~(1u << guess);
  }
  for (; leaders != 0; leaders &= leaders - 1) {
    const int64_t led = __shfl_sync(~0u, at.quotient, __ffs(leaders) - 1);
    write_block_head<T, kAligned, kRotated, 2>(w, plane, led, head, w.winner + led * w.block_size, covered(led));
  }
}

// ------------------------------------------------------------------------------------ token-head scales

struct Target {
  int64_t block;
  int offset;
  bool written;  // false: skipped, or a later token has the slot
};

// Where the CTA's tokens go, by all its threads.
template <int kTokens, int kCta, bool kScan>
__device__ __forceinline__ void find_targets(const Write& w, int64_t first, Target (&targets)[kTokens]) {
  auto target = [&](int64_t slot, bool wins) {
    if (!wins) return Target{0, 0, false};
    const Quotient at = divide(slot, w.block_size);
    return Target{at.quotient, at.remainder, true};
  };
  if constexpr (kScan) {
    static_assert(kTokens == 1);
    const int64_t slot = w.slots[first];
    bool rewritten = false;
    for (int64_t later = first + 1 + threadIdx.x; later < w.num_tokens; later += kCta) rewritten |= w.slots[later] == slot;
    rewritten = __syncthreads_or(rewritten);
    if (threadIdx.x == 0) targets[0] = target(slot, in_pool(w, slot) && !rewritten);
  } else if (threadIdx.x < kTokens) {
    const int64_t token = first + threadIdx.x;
    const int64_t slot = token < w.num_tokens ? w.slots[token] : -1;
    wait_for_kernel_before();
    targets[threadIdx.x] = target(slot, in_pool(w, slot) && w.winner[slot] == static_cast<int>(token));
  }
  __syncthreads();
}

// Reduces the largest magnitudes of kTokens rows at once, by halves: lane l of a group gets that of row l / (kLanes / kTokens).
template <int kLanes, int kTokens>
__device__ __forceinline__ float scatter_max(float (&magnitude)[kTokens], int lane) {
  int delta = kLanes / 2;
#pragma unroll
  for (int rows = kTokens / 2; rows > 0; rows /= 2, delta /= 2) {
    const bool upper = lane & delta;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const float sent = upper ? magnitude[i] : magnitude[i + rows], kept = upper ? magnitude[i + rows] : magnitude[i];
      magnitude[i] = max_magnitude(kept, __shfl_xor_sync(~0u, sent, delta));
    }
  }
#pragma unroll
  for (; delta > 0; delta /= 2) magnitude[0] = max_magnitude(magnitude[0], __shfl_xor_sync(~0u, magnitude[0], delta));
  return magnitude[0];
}

constexpr int kPieces = 2;  // units of a row in one lane: what is done once a row, and the reduction, cost half as much as with one

// kLanes lanes take the rows of kTokens tokens for one (K or V, head); a CTA takes kTokens tokens.
template <class T, bool kAligned, bool kRotated, int kLanes, int kTokens, int kCta, bool kScan>
__global__ void __launch_bounds__(kCta) write_tokens(const __grid_constant__ Write w) {
  constexpr int kGroups = kCta / kLanes, kLanesPerRow = kLanes / kTokens;
  __shared__ Target targets[kTokens];
  const int lane = threadIdx.x % kLanes;
  const int64_t first = int64_t{blockIdx.x} * kTokens;
  for (int base = 0; base < 2 * w.num_kv_heads; base += kGroups) {  // the same for all threads: they reduce together
    const int item = base + static_cast<int>(threadIdx.x) / kLanes;
    const bool has_item = item < 2 * w.num_kv_heads;
    const bool is_value = item >= w.num_kv_heads;
    const int head = is_value ? item - w.num_kv_heads : item;
    const Plane& plane = w.planes[is_value];
    const T* source = static_cast<const T*>(plane.source) + first * plane.source_stride_token + head * plane.source_stride_head + lane * kUnit;
    const int parts = has_item ? w.head_dim / kUnit - lane : 0;  // units of a row from the lane's first on
    Unit<T> held[kTokens][kPieces];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        held[i][c] = {};
        if (c * kLanes < parts && first + i < w.num_tokens) held[i][c] = load_unit<kAligned>(source + i * plane.source_stride_token + c * kLanes * kUnit);
      }
    }
    if (base == 0) find_targets<kTokens, kCta, kScan>(w, first, targets);  // while those loads are under way
    float largest[kTokens];
    float x[kTokens][kPieces][kUnit];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      largest[i] = 0.f;
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        if constexpr (kRotated) {
          to_floats(held[i][c], x[i][c]);
        } else {
          largest[i] = max_magnitude(largest[i], held[i][c]);
        }
      }
      if constexpr (kRotated) {
        hadamard_transform<kPieces, kUnit, kLanes>(x[i], hadamard_size(w.head_dim), lane);
#pragma unroll
        for (int c = 0; c < kPieces; ++c) largest[i] = max_magnitude(largest[i], x[i][c]);
      }
    }
    // Each lane finds the scale of one row, and all get it from there.
    float scale = scale_for(scatter_max<kLanes>(largest, lane));
    if (scale == 0.f) scale = 1.f;
    const Encoder mine(scale);
    if (const Target to = targets[lane / kLanesPerRow]; to.written && has_item && lane % kLanesPerRow == 0) {
      plane.scale[to.block * plane.scale_stride_block + to.offset * plane.scale_stride_token + head * plane.scale_stride_head] = scale;
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      Encoder encode = mine;
      encode.scale = __shfl_sync(~0u, mine.scale, i * kLanesPerRow, kLanes), encode.inverse = __shfl_sync(~0u, mine.inverse, i * kLanesPerRow, kLanes);
      const Target to = targets[i];
      if (!to.written) continue;
      int8_t* row = plane.cache + to.block * plane.stride_block + to.offset * plane.stride_token + head * plane.stride_head + lane * kUnit;
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        if (c * kLanes >= parts) continue;
        if constexpr (!kRotated) to_floats(held[i][c], x[i][c]);
        store_unit<kAligned>(row + c * kLanes * kUnit, encode(x[i][c]));
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ launch

template <class T, bool kAligned, bool kRotated>
void launch_blocks(const Write& w, cudaStream_t stream) {
  const unsigned spread = static_cast<unsigned>((2 * w.num_kv_heads + kWarps - 1) / kWarps);  // CTAs with a warp for each head
  if (w.num_tokens <= kScanTokens) {
    write_blocks_scanning<T, kAligned, kRotated><<<dim3(static_cast<unsigned>(w.num_tokens), spread), kThreads, 0, stream>>>(w);
    return;
  }
  const unsigned grid = grid_for(w.num_tokens, kThreads, kMaxCtas);
  clear_winners<false><<<grid, kThreads, 0, stream>>>(w);
  launch_kernel(claim_slots_of_blocks<T, kAligned, kRotated>, grid, kThreads, stream, {overlap()}, w);
  launch_kernel(write_blocks<T, kAligned, kRotated>, dim3(grid_for(w.num_tokens, w.span, kMaxCtas), spread), kThreads, stream, {overlap()}, w);
}

// kUnits: at least those of a row.
template <class T, bool kAligned, bool kRotated, int kUnits>
void launch_tokens(const Write& w, cudaStream_t stream) {
  constexpr int kLanes = kUnits / kPieces, kTokens = 4, kCta = 16 * kLanes;
  if (w.num_tokens <= kScanTokens) {
    write_tokens<T, kAligned, kRotated, kLanes, 1, kCta, true><<<grid_for(w.num_tokens, 1, kMaxCtas), kCta, 0, stream>>>(w);
    return;
  }
  const unsigned grid = grid_for(w.num_tokens, kThreads, kMaxCtas);
  clear_winners<true><<<grid, kThreads, 0, stream>>>(w);
  launch_kernel(claim_slots, grid, kThreads, stream, {overlap()}, w);
  launch_kernel(write_tokens<T, kAligned, kRotated, kLanes, kTokens, kCta, false>, grid_for(w.num_tokens, kTokens, kMaxCtas), kCta, stream, {overlap()}, w);
}

template <class T, bool kAligned, bool kRotated>
void launch(const Write& w, bool token_head, cudaStream_t stream) {
  if (!token_head) return launch_blocks<T, kAligned, kRotated>(w, stream);
  if (w.head_dim <= 64) return launch_tokens<T, kAligned, kRotated, 8>(w, stream);
  if (w.head_dim <= 128) return launch_tokens<T, kAligned, kRotated, 16>(w, stream);
  launch_tokens<T, kAligned, kRotated, 32>(w, stream);
}

template <class T>
bool rows_aligned(const Plane& plane) {
  return units_aligned<T>(plane.source, {plane.source_stride_token, plane.source_stride_head}) &&
         units_aligned<int8_t>(plane.cache, {plane.stride_block, plane.stride_token, plane.stride_head});
}

}  // namespace

size_t reshape_and_cache_workspace(const CacheWriteParams& p) {
  return p.num_tokens <= kScanTokens ? 0 : sizeof(int) * static_cast<size_t>(p.num_blocks * (p.block_size + 1 + 2 * p.num_kv_heads));
}

void reshape_and_cache(const CacheWriteParams& p, void* workspace, void* stream_) {
  if (p.num_tokens == 0 || p.num_kv_heads == 0 || p.head_dim == 0 || p.num_blocks == 0) return;
  Write w{};
  w.planes[0] = {p.key, p.key_stride_token, p.key_stride_head, p.k_cache, p.k_stride_block, p.k_stride_token, p.k_stride_head,
                 p.k_scale, p.k_scale_stride_block, p.k_scale_stride_token, p.k_scale_stride_head};
  w.planes[1] = {p.value, p.value_stride_token, p.value_stride_head, p.v_cache, p.v_stride_block, p.v_stride_token, p.v_stride_head,
                 p.v_scale, p.v_scale_stride_block, p.v_scale_stride_token, p.v_scale_stride_head};
  w.slots = p.slot_mapping;
  w.span = static_cast<int>(std::clamp<int64_t>(p.num_tokens / 1024, 1, kMaxSpan));  // few tokens may all lead blocks: spread them
  w.num_tokens = p.num_tokens, w.num_slots = p.num_blocks * p.block_size;
  w.block_size = static_cast<int>(p.block_size), w.num_kv_heads = static_cast<int>(p.num_kv_heads), w.head_dim = static_cast<int>(p.head_dim);
  w.winner = static_cast<int*>(workspace), w.first = w.winner + w.num_slots, w.covered = reinterpret_cast<unsigned*>(w.first + p.num_blocks);
  const auto stream = static_cast<cudaStream_t>(stream_);
  dispatch_float(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned = rows_aligned<T>(w.planes[0]) && rows_aligned<T>(w.planes[1]);
    if (p.rotated) return aligned ? launch<T, true, true>(w, p.token_head, stream) : launch<T, false, true>(w, p.token_head, stream);
    aligned ? launch<T, true, false>(w, p.token_head, stream) : launch<T, false, false>(w, p.token_head, stream);
  });
  check_launch("reshape_and_cache");
}

}  // namespace pagedkv
