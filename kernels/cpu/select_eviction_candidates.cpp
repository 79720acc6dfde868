// select_eviction_candidates: the k lowest scores, ascending, ties to the lower block id.
//
// Exact, and linear whatever the scores are: a radix descent finds the k-th lowest key and how many of its
// ties belong to the k, one pass in block order collects them, a stable radix sort orders what it collected.
#include <algorithm>
#include <cstring>
#include <utility>

#include "parallel.h"

namespace pagedkv {
namespace {

constexpr int kDigitBits = 11;
constexpr int kDigits = 3;  // of 10, 11 and 11 bits, the most significant first
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

int shift_of(int digit) { return (kDigits - 1 - digit) * kDigitBits; }
uint32_t digit_of(uint32_t key, int digit) { return key >> shift_of(digit) & (kBuckets - 1); }

int64_t num_parts(int64_t num_blocks) { return std::clamp<int64_t>(num_blocks / kPartSize, 1, kMaxParts); }

// The blocks of part i: [begin, end).
std::pair<int64_t, int64_t> part_range(int64_t num_blocks, int64_t i) {
  const int64_t parts = num_parts(num_blocks);
  return {num_blocks * i / parts, num_blocks * (i + 1) / parts};
}

// Of the keys that are below `key`, all are selected; of those equal to it, the first `ties`.
struct Threshold {
  uint32_t key;
  int64_t ties;
};

Threshold find_threshold(const float* scores, int64_t num_blocks, int64_t k, uint32_t* histograms) {
  const int64_t parts = num_parts(num_blocks);
  uint32_t prefix = 0;
  int64_t wanted = k;  // how many of the keys that share the prefix are selected
  for (int d = 0; d < kDigits; ++d) {
    parallel_items(parts, [&](int64_t part) {
      uint32_t* histogram = histograms + part * kBuckets;
      std::fill_n(histogram, kBuckets, 0);
      const auto [begin, end] = part_range(num_blocks, part);
      for (int64_t b = begin; b < end; ++b) {
        const uint32_t key = key_of(scores[b]);
        // The digits before this one agree with the prefix (a shift by 32 would be undefined: there are none).
        if (d == 0 || (key ^ prefix) >> shift_of(d - 1) == 0) ++histogram[digit_of(key, d)];
      }
    });
    uint32_t bucket = 0;
    for (;; ++bucket) {
      int64_t count = 0;
      for (int64_t part = 0; part < parts; ++part) count += histograms[part * kBuckets + bucket];
      if (wanted <= count) break;
      wanted -= count;
    }
    prefix |= bucket << shift_of(d);
  }
  return {prefix, wanted};
}

// Writes (key << 32 | block) of the selected blocks in block order.
void collect(const float* scores, int64_t num_blocks, Threshold threshold, uint64_t* selected) {
  const int64_t parts = num_parts(num_blocks);
  int64_t below[kMaxParts] = {}, equal[kMaxParts] = {};
  if (parts > 1) {
    parallel_items(parts, [&](int64_t part) {
      const auto [begin, end] = part_range(num_blocks, part);
      for (int64_t b = begin; b < end; ++b) {
        const uint32_t key = key_of(scores[b]);
        below[part] += key < threshold.key;
        equal[part] += key == threshold.key;
      }
    });
  }
  parallel_items(parts, [&](int64_t part) {
    int64_t position = 0, equal_before = 0;
    for (int64_t i = 0; i < part; ++i) position += below[i], equal_before += equal[i];
    position += std::min(equal_before, threshold.ties);
    int64_t ties = threshold.ties - std::min(equal_before, threshold.ties);

    const auto [begin, end] = part_range(num_blocks, part);
    for (int64_t b = begin; b < end; ++b) {
      const uint32_t key = key_of(scores[b]);
      if (key < threshold.key || (key == threshold.key && ties-- > 0)) selected[position++] = static_cast<uint64_t>(key) << 32 | b;
    }
  });
}

// Stable by key, so blocks of one key stay in ascending order. Returns the sorted array, `a` or `b`.
uint64_t* sort_by_key(uint64_t* a, uint64_t* b, int64_t n) {
  constexpr int64_t kSmall = 512;  // below it, clearing the histograms costs more than a comparison sort
  if (n <= kSmall) {
    std::sort(a, a + n);
    return a;
  }
  uint32_t histograms[kDigits][kBuckets] = {};
  for (int64_t i = 0; i < n; ++i) {
    for (int d = 0; d < kDigits; ++d) ++histograms[d][digit_of(a[i] >> 32, d)];
  }
  for (int d = kDigits - 1; d >= 0; --d) {
    uint32_t* next = histograms[d];
    if (next[digit_of(a[0] >> 32, d)] == n) continue;  // all agree on this digit
    uint32_t sum = 0;
    for (int i = 0; i < kBuckets; ++i) sum += std::exchange(next[i], sum);
    for (int64_t i = 0; i < n; ++i) b[next[digit_of(a[i] >> 32, d)]++] = a[i];
    std::swap(a, b);
  }
  return a;
}

}  // namespace

// Two arrays of k candidates and a histogram for each part.
size_t select_eviction_candidates_workspace(int64_t num_blocks, int64_t k) {
  return 2 * k * sizeof(uint64_t) + num_parts(num_blocks) * kBuckets * sizeof(uint32_t);
}

void select_eviction_candidates(const float* scores, int64_t num_blocks, int64_t k, int64_t* ids, void* workspace, void*) {
  uint64_t* selected = static_cast<uint64_t*>(workspace);
  uint64_t* spare = selected + k;
  uint32_t* histograms = reinterpret_cast<uint32_t*>(spare + k);

  collect(scores, num_blocks, find_threshold(scores, num_blocks, k, histograms), selected);
  const uint64_t* sorted = sort_by_key(selected, spare, k);
  for (int64_t i = 0; i < k; ++i) ids[i] = static_cast<int64_t>(sorted[i] & 0xffffffffu);
}

}  // namespace pagedkv
