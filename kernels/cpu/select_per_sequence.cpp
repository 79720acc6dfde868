// select_per_sequence: each sequence lets go of its lowest-scored blocks until it is within its budget.
//
// Sequences are independent and go to the threads; what they let go of is counted off the references afterwards, in
// order, by one.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../ops.h"
#include "parallel.h"

namespace pagedkv {
namespace {

// Unsigned integers that order like the scores: -0.0 equals 0.0, NaN comes last.
uint32_t key_of(float score) {
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  const uint32_t flip = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  return score != score ? 0xffffffffu : bits ^ flip;
}

struct Places {
  int64_t blocks = 0, first = 0, end = 0;  // those that hold tokens; those of them that may go
  int64_t dropped = 0;                     // how many go
};

Places places_of(const SequenceSelectParams& p, int64_t s) {
  const int64_t len = p.seq_lens[s];
  if (len < 0 || len > p.max_blocks * p.block_size) return {};
  Places places;
  places.blocks = (len + p.block_size - 1) / p.block_size;
  const int64_t last = std::max<int64_t>(p.protect_last, len % p.block_size != 0);
  places.first = std::min(p.protect_first, places.blocks);
  places.end = std::max(places.first, places.blocks - std::min(last, places.blocks));
  const int64_t budget = std::max<int64_t>(0, p.budgets ? p.budgets[s] : p.budget);
  places.dropped = std::clamp<int64_t>(places.blocks - budget, 0, places.end - places.first);
  return places;
}

bool in_pool(const SequenceSelectParams& p, int32_t block) { return block >= 0 && block < p.num_blocks; }

// Writes a sequence's new table and length, and the blocks that it let go of, in the order of their places, to `dropped`.
void select(const SequenceSelectParams& p, int64_t s, std::vector<int32_t>& dropped) {
  const int32_t* table = p.block_tables + s * p.block_tables_stride;
  int32_t* kept = p.new_tables + s * p.max_blocks;
  const Places places = places_of(p, s);
  p.new_lens[s] = static_cast<int32_t>(p.seq_lens[s] - places.dropped * p.block_size);
  if (places.blocks == 0 && p.seq_lens[s] != 0) {  // a length that cannot be: left as it is
    std::copy_n(table, p.max_blocks, kept);
    return;
  }
  std::vector<uint64_t> candidates;  // (key, place)
  if (places.dropped > 0) {
    candidates.reserve(places.end - places.first);
    for (int64_t j = places.first; j < places.end; ++j) {
      uint32_t key = 0xffffffffu;
      if (p.by_place) {
        key = key_of(p.scores[s * p.scores_stride + j]);
      } else if (in_pool(p, table[j])) {
        key = key_of(p.scores[table[j]]);
      }
      candidates.push_back(uint64_t{key} << 32 | static_cast<uint64_t>(j));
    }
    std::nth_element(candidates.begin(), candidates.begin() + (places.dropped - 1), candidates.end());
  }
  const uint64_t highest = candidates.empty() ? 0 : candidates[places.dropped - 1];
  std::vector<bool> goes(places.blocks);
  for (uint64_t candidate : candidates) {
    if (candidate <= highest) goes[candidate & 0xffffffffu] = true;
  }
  for (int64_t j = 0; j < places.blocks; ++j) {
    if (goes[j]) {
      dropped.push_back(table[j]);
    } else {
      *kept++ = table[j];
    }
  }
  std::fill(kept, p.new_tables + (s + 1) * p.max_blocks, -1);
}

}  // namespace

size_t select_per_sequence_workspace(const SequenceSelectParams&) { return 0; }

void select_per_sequence(const SequenceSelectParams& p, void*, void*) {
  std::vector<std::vector<int32_t>> dropped(p.num_seqs);
  parallel_items(p.num_seqs, [&](int64_t s) { select(p, s, dropped[s]); });

  int32_t* freed = p.freed;
  if (p.references) {
    for (const auto& blocks : dropped) {
      for (int32_t block : blocks) {
        if (in_pool(p, block)) --p.references[block];
      }
    }
  }
  std::vector<bool> taken(p.references ? p.num_blocks : 0);  // shared blocks come once, where they were first let go
  for (const auto& blocks : dropped) {
    for (int32_t block : blocks) {
      if (!in_pool(p, block)) continue;
      if (p.references) {
        if (p.references[block] != 0 || taken[block]) continue;
        taken[block] = true;
      }
      *freed++ = block;
    }
  }
  *p.num_freed = static_cast<int32_t>(freed - p.freed);
  std::fill(freed, p.freed + p.num_seqs * p.max_blocks, -1);
}

}  // namespace pagedkv
