// select_per_sequence: each sequence lets go of its lowest-scored blocks until it is within its budget.
//
// One cooperative launch. A CTA takes a sequence: four radix passes over the candidates' keys, a byte each, find the
// key of the last block to go and how many of its ties go, too; where one block goes, as in a decode loop, that is the
// least key. One pass of prefix sums then writes the table without them and the list of what was let go. Keys of up to
// kCachedKeys places stay in shared memory; a longer table's are read again. When all sequences have said how many of
// those nobody holds any more, each writes its own behind those of the sequences before it.
#include <climits>

#include "eviction/cta.cuh"

namespace pagedkv {
namespace {

using eviction::key_of;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kCachedKeys = 8192;
constexpr int kDigits = 256;
// While the freed blocks are gathered, the count of a block without holders is lowered to this plus the first place at
// which it was let go: of several sequences that shared it, that one names it.
constexpr int kMark = INT_MIN;
constexpr int kHighestMark = INT_MIN / 2;

struct Workspace {
  int32_t* dropped;      // [num_seqs, max_blocks]: what each sequence let go of, in the order of their places
  int32_t* num_dropped;  // [num_seqs]
  int32_t* num_freed;    // [num_seqs]: how many of them are free now, and named here
};

struct Shared {
  uint32_t keys[kCachedKeys];
  uint32_t histogram[kDigits];
  uint64_t scan[kWarps + 1];
  uint32_t threshold, wanted;
};

__device__ __forceinline__ bool in_pool(const SequenceSelectParams& p, int32_t block) { return block >= 0 && block < p.num_blocks; }

__device__ __forceinline__ uint32_t key_at(const SequenceSelectParams& p, const int32_t* table, int64_t seq, int64_t place) {
  if (p.by_place) return key_of(p.scores[seq * p.scores_stride + place]);
  const int32_t block = table[place];
  return in_pool(p, block) ? key_of(p.scores[block]) : 0xffffffffu;
}

// shared.threshold: the wanted-th lowest of keys [0, count); shared.wanted: how many of its ties are among the lowest.
template <class KeyAt>
__device__ void find_threshold(Shared& shared, int64_t count, uint32_t wanted, const KeyAt& key_at_) {
  if (threadIdx.x == 0) shared.threshold = 0, shared.wanted = wanted;
  uint32_t known = 0;  // bits of the threshold that are found
  for (int shift = 24; shift >= 0; shift -= 8) {
    static_assert(kDigits == kThreads);
    shared.histogram[threadIdx.x] = 0;
    __syncthreads();
    const uint32_t prefix = shared.threshold, rank = shared.wanted;  // before a barrier that those who change them pass, too
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t key = key_at_(i);
      if ((key & known) == prefix) atomicAdd(&shared.histogram[key >> shift & 0xff], 1u);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      uint32_t counts[kDigits / 32], own = 0;
#pragma unroll
      for (int i = 0; i < kDigits / 32; ++i) own += counts[i] = shared.histogram[lane * (kDigits / 32) + i];
      uint32_t below = warp_inclusive_sum(own) - own;
      if (below < rank && rank <= below + own) {
        uint32_t digit = lane * (kDigits / 32);
#pragma unroll
        for (int i = 0; i < kDigits / 32 - 1; ++i) {
          if (digit == lane * (kDigits / 32) + i && below + counts[i] < rank) below += counts[i], ++digit;
        }
        shared.threshold = prefix | digit << shift;
        shared.wanted = rank - below;
      }
    }
    known |= 0xffu << shift;
    __syncthreads();
  }
}

// The same for one.
template <class KeyAt>
__device__ void find_least(Shared& shared, int64_t count, const KeyAt& key_at_) {
  if (threadIdx.x == 0) shared.threshold = ~0u, shared.wanted = 1;
  uint32_t least = ~0u;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) least = min(least, key_at_(i));
#pragma unroll
  for (int delta = 16; delta > 0; delta /= 2) least = min(least, __shfl_xor_sync(~0u, least, delta));
  __syncthreads();
  if (threadIdx.x % 32 == 0 && least != ~0u) atomicMin(&shared.threshold, least);
  __syncthreads();
}

__device__ void select(const SequenceSelectParams& p, const Workspace& w, Shared& shared, int64_t seq) {
  const int32_t* table = p.block_tables + seq * p.block_tables_stride;
  int32_t* kept = p.new_tables + seq * p.max_blocks;
  int32_t* dropped = w.dropped + seq * p.max_blocks;
  const int64_t len = p.seq_lens[seq];
  const bool bad = len < 0 || len > p.max_blocks * p.block_size;
  const int64_t blocks = bad ? p.max_blocks : (len + p.block_size - 1) / p.block_size;
  const int64_t last = max(p.protect_last, int64_t{len % p.block_size != 0});
  const int64_t first = min(p.protect_first, blocks);
  const int64_t candidates = bad ? 0 : max(int64_t{0}, blocks - min(last, blocks) - first);
  const int64_t budget = max(int64_t{0}, p.budgets ? int64_t{p.budgets[seq]} : p.budget);
  const int64_t drop = min(max(int64_t{0}, blocks - budget), candidates);

  const bool cached = candidates <= kCachedKeys;
  const auto find = [&](const auto& key_at_) {
    drop == 1 ? find_least(shared, candidates, key_at_) : find_threshold(shared, candidates, drop, key_at_);
  };
  if (drop > 0) {
    if (cached) {
      constexpr int kInFlight = 4;
      for (int64_t i = threadIdx.x; i < candidates; i += kInFlight * kThreads) {
        uint32_t key[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) key[j] = i + j * kThreads < candidates ? key_at(p, table, seq, first + i + j * kThreads) : 0;
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          if (i + j * kThreads < candidates) shared.keys[i + j * kThreads] = key[j];
        }
      }
      find([&](int64_t i) { return shared.keys[i]; });
    } else {
      find([&](int64_t i) { return key_at(p, table, seq, first + i); });
    }
  }

  // Places before this one whose key is below the threshold, and those that tie with it, in the two halves of a word.
  const uint32_t threshold = shared.threshold, wanted = drop > 0 ? shared.wanted : 0;
  uint64_t base = 0;
  int freed = 0;  // if no block is shared
  for (int64_t tile = 0; tile < p.max_blocks; tile += kThreads) {
    const int64_t place = tile + threadIdx.x;
    const int64_t candidate = place - first;
    uint64_t flags = 0;
    if (drop > 0 && candidate >= 0 && candidate < candidates) {
      const uint32_t key = cached ? shared.keys[candidate] : key_at(p, table, seq, place);
      flags = key < threshold ? uint64_t{1} << 32 : key == threshold ? 1 : 0;
    }
    uint64_t total;
    const uint64_t before = base + block_exclusive_sum<kThreads>(flags, shared.scan, &total);
    base += total;
    const uint32_t ties = static_cast<uint32_t>(before);
    const int64_t gone = (before >> 32) + min(ties, wanted);
    bool is_free = false;
    if (place < blocks) {
      const int32_t block = table[place];
      if (flags > 1 || (flags == 1 && ties < wanted)) {
        dropped[gone] = block;
        is_free = in_pool(p, block);
        if (p.references && is_free) atomicSub(p.references + block, 1);
      } else {
        kept[place - gone] = block;
      }
    }
    if (place < p.max_blocks) p.freed[seq * p.max_blocks + place] = -1;
    if (!bad && place < p.max_blocks && place >= blocks - drop) {
      kept[place] = -1;  // places that a block was moved to lie before these
    }
    freed += __syncthreads_count(is_free);
  }
  if (threadIdx.x == 0) {
    p.new_lens[seq] = static_cast<int32_t>(len - drop * p.block_size);
    w.num_dropped[seq] = static_cast<int32_t>(drop);
    w.num_freed[seq] = freed;
  }
}

// Whether the block that `seq` let go of, `i`-th, is free now, and this is where it is named.
__device__ __forceinline__ bool is_freed(const SequenceSelectParams& p, const Workspace& w, int64_t seq, int i) {
  const int64_t at = seq * p.max_blocks + i;
  const int32_t block = w.dropped[at];
  if (!in_pool(p, block)) return false;
  return !p.references || *static_cast<volatile int32_t*>(p.references + block) == static_cast<int32_t>(kMark + at);
}

// Of several places that let go of a block, the first is to name it.
__device__ void mark_freed(const SequenceSelectParams& p, const Workspace& w, int64_t seq) {
  for (int i = threadIdx.x; i < w.num_dropped[seq]; i += kThreads) {
    const int64_t at = seq * p.max_blocks + i;
    const int32_t block = w.dropped[at];
    if (!in_pool(p, block)) continue;
    const int32_t count = *static_cast<volatile int32_t*>(p.references + block);
    if (count == 0 || count < kHighestMark) atomicMin(p.references + block, static_cast<int32_t>(kMark + at));
  }
}

__device__ void count_freed(const SequenceSelectParams& p, const Workspace& w, int64_t seq) {
  const int dropped = w.num_dropped[seq];
  int freed = 0;
  for (int tile = 0; tile < dropped; tile += kThreads) {
    const int i = tile + threadIdx.x;
    freed += __syncthreads_count(i < dropped && is_freed(p, w, seq, i));
  }
  if (threadIdx.x == 0) w.num_freed[seq] = freed;
}

__device__ void write_freed(const SequenceSelectParams& p, const Workspace& w, Shared& shared, int64_t seq) {
  const int dropped = w.num_dropped[seq];
  uint64_t own = 0, start;
  for (int64_t s = threadIdx.x; s < seq; s += kThreads) own += w.num_freed[s];
  block_exclusive_sum<kThreads>(own, shared.scan, &start);
  __syncthreads();
  for (int tile = 0; tile < dropped; tile += kThreads) {
    const int i = tile + threadIdx.x;
    const bool mine = i < dropped && is_freed(p, w, seq, i);
    uint64_t total;
    const uint64_t at = start + block_exclusive_sum<kThreads>(uint64_t{mine}, shared.scan, &total);
    start += total;
    if (mine) {
      const int32_t block = w.dropped[seq * p.max_blocks + i];
      p.freed[at] = block;
      if (p.references) p.references[block] = 0;  // one place names a block, so nobody else looks for its mark
    }
    __syncthreads();
  }
  if (threadIdx.x == 0 && seq == p.num_seqs - 1) *p.num_freed = static_cast<int32_t>(start);
}

__global__ void __launch_bounds__(kThreads, 4) select_and_gather(SequenceSelectParams p, Workspace w) {
  __shared__ Shared shared;
  const auto for_sequences = [&](const auto& f) {
    for (int64_t seq = blockIdx.x; seq < p.num_seqs; seq += gridDim.x) {
      f(seq);
      __syncthreads();
    }
  };
  const auto sync_grid = [] { cooperative_groups::this_grid().sync(); };
  for_sequences([&](int64_t seq) { select(p, w, shared, seq); });
  if (p.references) {
    sync_grid();  // the references are counted down
    for_sequences([&](int64_t seq) { mark_freed(p, w, seq); });
    sync_grid();
    for_sequences([&](int64_t seq) { count_freed(p, w, seq); });
  }
  sync_grid();
  for_sequences([&](int64_t seq) { write_freed(p, w, shared, seq); });
  if (p.num_seqs == 0 && threadIdx.x == 0) *p.num_freed = 0;
}

constexpr size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

size_t select_per_sequence_workspace(const SequenceSelectParams& p) {
  return aligned(p.num_seqs * p.max_blocks * sizeof(int32_t)) + 2 * aligned(p.num_seqs * sizeof(int32_t));
}

void select_per_sequence(const SequenceSelectParams& p, void* workspace, void* stream) {
  Workspace w{};
  char* at = static_cast<char*>(workspace);
  w.dropped = reinterpret_cast<int32_t*>(at);
  w.num_dropped = reinterpret_cast<int32_t*>(at += aligned(p.num_seqs * p.max_blocks * sizeof(int32_t)));
  w.num_freed = reinterpret_cast<int32_t*>(at += aligned(p.num_seqs * sizeof(int32_t)));

  int per_sm = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, select_and_gather, kThreads, 0), "select_per_sequence");
  const unsigned grid = grid_for(p.num_seqs, 1, int64_t{per_sm} * device_attribute(cudaDevAttrMultiProcessorCount));
  SequenceSelectParams params = p;
  void* arguments[] = {&params, &w};
  check(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(select_and_gather), dim3(grid), dim3(kThreads), arguments, 0,
                                    static_cast<cudaStream_t>(stream)),
        "select_per_sequence");
}

}  // namespace pagedkv
