// select_eviction_candidates: the k lowest scores, ascending, ties to the lower block id.
//
// Exact, and linear whatever the scores are. Histograms of 11 bits of the keys, from the highest bit in which they differ
// downwards, close in on the k-th lowest until few blocks share what is known of it: mostly the first is enough. Blocks
// up to there are listed in block order, and a stable radix sort of that list, not of the pool, gives the k lowest.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "parallel.h"
#include "simd.h"

namespace pagedkv {
namespace {

constexpr int kLevelBits = 11;  // of the key, counted at a time: the counts stay in the first-level cache
constexpr int kLevelDigits = 1 << kLevelBits;
constexpr int kSortBits = 9;  // a pass of the sort
constexpr int kSortDigits = 1 << kSortBits;
constexpr int64_t kPartSize = 1 << 15;  // blocks that are worth a thread
constexpr int64_t kMaxParts = 64;

// Unsigned integers that order like the scores: -0.0 equals 0.0, NaN comes last.
uint32_t key_of(float score) {
  const uint32_t nan = score != score ? 0xffffffffu : 0;
  score += 0.0f;  // -0.0 becomes 0.0
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return (bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u)) | nan;
}

int bit_width(uint32_t x) { return x == 0 ? 0 : 32 - __builtin_clz(x); }

int64_t num_parts(int64_t n) { return std::clamp<int64_t>(n / kPartSize, 1, kMaxParts); }

// Calls f(part, begin, end) for n blocks cut into parts.
template <class F>
void for_parts(int64_t n, const F& f) {
  const int64_t parts = num_parts(n);
  parallel_items(parts, [&](int64_t i) { f(i, n * i / parts, n * (i + 1) / parts); });
}

// What a selection sorts at most: a quarter more than k costs less than another look at the pool.
int64_t max_candidates(int64_t n, int64_t k) { return std::min(n, k + k / 4 + 32); }

// The k lowest have keys in [lowest, last]: `below` have one below `first`, the rest are among the `sharing` in [first, last].
struct Cut {
  uint32_t first, last;
  int64_t below, sharing;
};

Cut find_cut(const uint32_t* keys, int64_t n, int64_t k, uint32_t lowest, uint32_t highest, uint32_t* histograms) {
  Cut cut{lowest, highest, 0, n};
  int bits = bit_width(highest - lowest);  // of keys less cut.first
  while (bits > 0 && cut.below + cut.sharing > max_candidates(n, k)) {
    const int shift = std::max(0, bits - kLevelBits);
    const uint32_t first = cut.first, span = cut.last - first;
    const bool all = cut.sharing == n;
    for_parts(n, [=](int64_t part, int64_t begin, int64_t end) {
      uint32_t* histogram = histograms + part * kLevelDigits;
      std::fill_n(histogram, kLevelDigits, 0);
      if (all) {
        for (int64_t b = begin; b < end; ++b) ++histogram[(keys[b] - first) >> shift];
      } else {
        for (int64_t b = begin; b < end; ++b) {
          if (keys[b] - first <= span) ++histogram[(keys[b] - first) >> shift];
        }
      }
    });
    uint32_t digit = 0;
    for (;; ++digit) {
      cut.sharing = 0;
      for (int64_t part = 0; part < num_parts(n); ++part) cut.sharing += histograms[part * kLevelDigits + digit];
      if (cut.below + cut.sharing >= k) break;
      cut.below += cut.sharing;
    }
    cut.first = first + (digit << shift);
    cut.last = cut.first + std::min((1u << shift) - 1, highest - cut.first);
    bits = shift;
  }
  return cut;
}

// Stable by the upper half of `a`, which differs in kPasses * kSortBits bits at most; the lower halves, in order, go to `ids`.
template <int kPasses>
void sort_ids(uint64_t* a, uint64_t* b, int64_t n, int64_t k, int64_t* ids) {
  const auto digit = [](uint64_t x, int pass) { return x >> (32 + pass * kSortBits) & (kSortDigits - 1); };
  std::array<std::array<uint32_t, kSortDigits>, kPasses> next{};
  for (int64_t i = 0; i < n; ++i) {
    for (int pass = 0; pass < kPasses; ++pass) ++next[pass][digit(a[i], pass)];
  }
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t sum = 0;
    for (uint32_t& x : next[pass]) sum += std::exchange(x, sum);
    for (int64_t i = 0; i < n; ++i) b[next[pass][digit(a[i], pass)]++] = a[i];
    std::swap(a, b);
  }
  for (int64_t i = 0; i < k; ++i) ids[i] = static_cast<int64_t>(a[i] & 0xffffffffu);
}

}  // namespace

// Candidates, twice; keys and a list of blocks; a histogram for each part.
size_t select_eviction_candidates_workspace(int64_t num_blocks, int64_t k) {
  return 2 * max_candidates(num_blocks, k) * sizeof(uint64_t) + (2 * num_blocks + num_parts(num_blocks) * kLevelDigits) * sizeof(uint32_t);
}

void select_eviction_candidates(const float* scores, int64_t num_blocks, int64_t k, int64_t* ids, void* workspace, void*) {
  const int64_t n = num_blocks;
  uint64_t* candidates = static_cast<uint64_t*>(workspace);
  uint64_t* spare = candidates + max_candidates(n, k);
  uint32_t* keys = reinterpret_cast<uint32_t*>(spare + max_candidates(n, k));
  uint32_t* blocks = keys + n;
  uint32_t* histograms = blocks + n;
  uint32_t lowest = 0xffffffffu, highest = 0;
  for (int64_t b = 0; b < n; ++b) {
    const uint32_t key = key_of(scores[b]);
    keys[b] = key;
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
  }
  const Cut cut = find_cut(keys, n, k, lowest, highest, histograms);

  int64_t listed[kMaxParts];
  for_parts(n, [&listed, keys, blocks, last = cut.last](int64_t part, int64_t begin, int64_t end) {
    uint32_t* list = blocks + begin;
    int64_t count = 0, b = begin;
    for (; b + simd::kLanes <= end; b += simd::kLanes) count += simd::list_at_most(keys + b, last, static_cast<uint32_t>(b), list + count);
    for (; b < end; ++b) {
      if (keys[b] <= last) list[count++] = static_cast<uint32_t>(b);
    }
    listed[part] = count;
  });
  // Too many sharing the cut can only be ties, of which the first are taken.
  int64_t count = 0, sharing = cut.first == cut.last ? k - cut.below : cut.sharing;
  const int64_t parts = num_parts(n);
  for (int64_t part = 0; part < parts; ++part) {
    const uint32_t* list = blocks + n * part / parts;
    for (int64_t i = 0; i < listed[part]; ++i) {
      const uint32_t key = keys[list[i]];
      if (key >= cut.first && --sharing < 0) continue;
      candidates[count++] = static_cast<uint64_t>(key - lowest) << 32 | list[i];
    }
  }

  switch ((bit_width(cut.last - lowest) + kSortBits - 1) / kSortBits) {
    case 0: return sort_ids<0>(candidates, spare, count, k, ids);
    case 1: return sort_ids<1>(candidates, spare, count, k, ids);
    case 2: return sort_ids<2>(candidates, spare, count, k, ids);
    case 3: return sort_ids<3>(candidates, spare, count, k, ids);
    default: return sort_ids<4>(candidates, spare, count, k, ids);
  }
}

}  // namespace pagedkv
