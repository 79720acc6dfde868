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

struct Workspace {
  uint64_t* candidates;  // [num_seqs, max_blocks]
  int32_t* dropped;      // [num_seqs, max_blocks]: what each sequence let go of, in the order of their places
  int64_t* num_dropped;  // [num_seqs]
};

// (key, place) as one integer: every candidate is different, and the lower place is the lower of two with equal scores.
uint64_t candidate_at(const SequenceSelectParams& p, int64_t s, const int32_t* table, int64_t place) {
  uint32_t key = 0xffffffffu;
  if (p.by_place) {
    key = key_of(p.scores[s * p.scores_stride + place]);
  } else if (in_pool(p, table[place])) {
    key = key_of(p.scores[table[place]]);
  }
  return uint64_t{key} << 32 | static_cast<uint64_t>(place);
}

// Writes a sequence's new table and length, and the blocks that it let go of to the workspace.
void select(const SequenceSelectParams& p, int64_t s, const Workspace& w) {
  const int32_t* table = p.block_tables + s * p.block_tables_stride;
  int32_t* kept = p.new_tables + s * p.max_blocks;
  const Places places = places_of(p, s);
  w.num_dropped[s] = places.dropped;
  p.new_lens[s] = static_cast<int32_t>(p.seq_lens[s] - places.dropped * p.block_size);
  if (places.blocks == 0 && p.seq_lens[s] != 0) {  // a length that cannot be: left as it is
    std::copy_n(table, p.max_blocks, kept);
    return;
  }
  kept = std::copy_n(table, places.first, kept);
  if (places.dropped > 0) {
    uint64_t* candidates = w.candidates + s * p.max_blocks;
    for (int64_t j = places.first; j < places.end; ++j) candidates[j - places.first] = candidate_at(p, s, table, j);
    uint64_t* last = candidates + places.dropped - 1;
    std::nth_element(candidates, last, candidates + (places.end - places.first));
    int32_t* dropped = w.dropped + s * p.max_blocks;
    for (int64_t j = places.first; j < places.end; ++j) {
      int32_t*& into = candidate_at(p, s, table, j) <= *last ? dropped : kept;
      *into++ = table[j];
    }
  } else {
    kept = std::copy(table + places.first, table + places.end, kept);
  }
  kept = std::copy(table + places.end, table + places.blocks, kept);
  std::fill(kept, p.new_tables + (s + 1) * p.max_blocks, -1);
}

}  // namespace

size_t select_per_sequence_workspace(const SequenceSelectParams& p) {
  return p.num_seqs * (p.max_blocks * (sizeof(uint64_t) + sizeof(int32_t)) + sizeof(int64_t));
}

void select_per_sequence(const SequenceSelectParams& p, void* workspace, void*) {
  Workspace w;
  w.candidates = static_cast<uint64_t*>(workspace);
  w.num_dropped = reinterpret_cast<int64_t*>(w.candidates + p.num_seqs * p.max_blocks);
  w.dropped = reinterpret_cast<int32_t*>(w.num_dropped + p.num_seqs);
  parallel_items(p.num_seqs, [&](int64_t s) { select(p, s, w); });

  const auto for_dropped = [&](const auto& f) {
    for (int64_t s = 0; s < p.num_seqs; ++s) {
      const int32_t* dropped = w.dropped + s * p.max_blocks;
      for (int64_t i = 0; i < w.num_dropped[s]; ++i) {
        if (in_pool(p, dropped[i])) f(dropped[i]);
      }
    }
  };
  if (p.references) for_dropped([&](int32_t block) { --p.references[block]; });
  int32_t* freed = p.freed;
  std::vector<bool> taken(p.references ? p.num_blocks : 0);  // shared blocks come once, where they were first let go
  for_dropped([&](int32_t block) {
    if (p.references) {
      if (p.references[block] != 0 || taken[block]) return;
      taken[block] = true;
    }
    *freed++ = block;
  });
  *p.num_freed = static_cast<int32_t>(freed - p.freed);
  std::fill(freed, p.freed + p.num_seqs * p.max_blocks, -1);
}

}  // namespace pagedkv
