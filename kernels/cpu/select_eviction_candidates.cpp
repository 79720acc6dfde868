// select_eviction_candidates: the k lowest scores, ascending, ties to the lower block id.
//
// Exact, and linear whatever the scores are. A radix descent looks for the k-th lowest key: each level counts a digit of
// 11 bits, takes the blocks below the digit of the k-th, and goes on with those that share it. It starts at the highest
// bit in which the keys differ, so scores of similar size are told apart by the first level already. What is left in
// the end are ties of the k-th key, in block order. A stable radix sort then orders what was taken.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "parallel.h"

namespace pagedkv {
namespace {

constexpr int kDigitBits = 11;
constexpr int kBuckets = 1 << kDigitBits;
constexpr int64_t kPartSize = 1 << 15;  // blocks that are worth a thread
constexpr int64_t kMaxParts = 64;

// Unsigned integers that order like the scores: -0.0 equals 0.0, NaN comes last.
uint32_t key_of(float score) {
  score += 0.0f;  // -0.0 becomes 0.0
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  const uint32_t flip = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  return score != score ? 0xffffffffu : bits ^ flip;
}

int bit_width(uint32_t x) { return x == 0 ? 0 : 32 - __builtin_clz(x); }

int64_t num_parts(int64_t n) { return std::clamp<int64_t>(n / kPartSize, 1, kMaxParts); }

// Calls f(part, begin, end) for n items cut into parts.
template <class F>
void for_parts(int64_t n, const F& f) {
  const int64_t parts = num_parts(n);
  parallel_items(parts, [&](int64_t i) { f(i, n * i / parts, n * (i + 1) / parts); });
}

// What the levels of the descent share. A candidate is written as (key << 32 | block).
struct Selection {
  const float* scores;
  uint64_t* taken;  // k of them in the end
  int64_t num_taken = 0;
  int64_t wanted;        // still to be taken
  uint32_t* histograms;  // [kMaxParts, kBuckets]
};

// One level, over the blocks block_at(0 .. n-1), whose keys less `base` have no bit above shift + 11. Takes those whose
// digit (the 11 bits from `shift`) is below that of the wanted-th lowest, and writes those that share it, in order, to
// `rest`. Returns that digit and how many share it.
template <class BlockAt>
std::pair<uint32_t, int64_t> descend(Selection& s, int64_t n, const BlockAt& block_at, uint32_t base, int shift, uint32_t* rest) {
  for_parts(n, [&](int64_t part, int64_t begin, int64_t end) {
    uint32_t* histogram = s.histograms + part * kBuckets;
    std::fill_n(histogram, kBuckets, 0);
    for (int64_t i = begin; i < end; ++i) ++histogram[(key_of(s.scores[block_at(i)]) - base) >> shift];
  });

  const int64_t parts = num_parts(n);
  int64_t below[kMaxParts] = {}, sharing[kMaxParts] = {};  // of each part
  int64_t num_below = 0;
  uint32_t digit = 0;
  for (;; ++digit) {
    int64_t count = 0;
    for (int64_t part = 0; part < parts; ++part) count += sharing[part] = s.histograms[part * kBuckets + digit];
    if (num_below + count >= s.wanted) break;
    num_below += count;
    for (int64_t part = 0; part < parts; ++part) below[part] += sharing[part];
  }

  for_parts(n, [&](int64_t part, int64_t begin, int64_t end) {
    int64_t to = s.num_taken, to_rest = 0;
    for (int64_t i = 0; i < part; ++i) to += below[i], to_rest += sharing[i];
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t block = block_at(i), key = key_of(s.scores[block]), mine = (key - base) >> shift;
      if (mine < digit) s.taken[to++] = static_cast<uint64_t>(key) << 32 | block;
      if (mine == digit) rest[to_rest++] = block;
    }
  });
  s.num_taken += num_below;
  s.wanted -= num_below;
  int64_t num_sharing = 0;
  for (int64_t part = 0; part < parts; ++part) num_sharing += sharing[part];
  return {digit, num_sharing};
}

// Fills s.taken. `rest` has room for two lists of n blocks.
void take_lowest(Selection& s, int64_t n, uint32_t* rest) {
  uint32_t lowest = 0xffffffffu, highest = 0;
  for (int64_t b = 0; b < n; ++b) {
    lowest = std::min(lowest, key_of(s.scores[b]));
    highest = std::max(highest, key_of(s.scores[b]));
  }
  uint32_t *from = rest, *to = rest + n;
  int shift = std::max(0, bit_width(highest - lowest) - kDigitBits);
  uint32_t base = lowest;
  auto [digit, count] = descend(s, n, [](int64_t i) { return static_cast<uint32_t>(i); }, base, shift, to);
  while (shift > 0) {
    std::swap(from, to);
    base += digit << shift;
    shift = std::max(0, shift - kDigitBits);
    std::tie(digit, count) = descend(s, count, [from](int64_t i) { return from[i]; }, base, shift, to);
  }
  // All that is left have one key.
  for (int64_t i = 0; i < s.wanted; ++i) s.taken[s.num_taken + i] = static_cast<uint64_t>(base + digit) << 32 | to[i];
}

// Stable by key, so blocks of one key stay in ascending order. Returns the sorted array, `a` or `b`.
uint64_t* sort_by_key(uint64_t* a, uint64_t* b, int64_t n) {
  constexpr int64_t kSmall = 256;  // below it, clearing the histograms costs more than a comparison sort
  if (n <= kSmall) {
    std::sort(a, a + n);
    return a;
  }
  const auto [lowest, highest] = std::minmax_element(a, a + n);
  const uint32_t base = static_cast<uint32_t>(*lowest >> 32);
  const int bits = bit_width(static_cast<uint32_t>(*highest >> 32) - base);
  for (int shift = 0; shift < bits; shift += kDigitBits) {
    const auto digit = [&](uint64_t x) { return (static_cast<uint32_t>(x >> 32) - base) >> shift & (kBuckets - 1); };
    uint32_t next[kBuckets] = {}, sum = 0;
    for (int64_t i = 0; i < n; ++i) ++next[digit(a[i])];
    for (uint32_t& x : next) sum += std::exchange(x, sum);
    for (int64_t i = 0; i < n; ++i) b[next[digit(a[i])]++] = a[i];
    std::swap(a, b);
  }
  return a;
}

}  // namespace

// Two arrays of k candidates, two lists of blocks, and a histogram for each part.
size_t select_eviction_candidates_workspace(int64_t num_blocks, int64_t k) {
  return 2 * k * sizeof(uint64_t) + (2 * num_blocks + num_parts(num_blocks) * kBuckets) * sizeof(uint32_t);
}

void select_eviction_candidates(const float* scores, int64_t num_blocks, int64_t k, int64_t* ids, void* workspace, void*) {
  uint64_t* taken = static_cast<uint64_t*>(workspace);
  uint64_t* spare = taken + k;
  uint32_t* rest = reinterpret_cast<uint32_t*>(spare + k);
  Selection selection{scores, taken, 0, k, rest + 2 * num_blocks};
  take_lowest(selection, num_blocks, rest);
  const uint64_t* sorted = sort_by_key(taken, spare, k);
  for (int64_t i = 0; i < k; ++i) ids[i] = static_cast<int64_t>(sorted[i] & 0xffffffffu);
}

}  // namespace pagedkv
