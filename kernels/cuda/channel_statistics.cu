// channel_statistics: of each channel, over a group of places, the lowest and highest value and the sum of unit vectors.
//
// A CTA takes some heads of a group, its warps a block each at a time; a thread keeps a piece of a head's channels, and has a
// few tokens under way while it adds up those before. Where groups are few, a cluster of CTAs shares
// one, and its partial results meet in shared memory. All are joined in a fixed order: the same bits whatever ran first.
#include <cooperative_groups.h>

#include "paged_tokens.cuh"

namespace pagedkv {
namespace {

constexpr int kMaxCluster = 8;
constexpr int kWarps = kTokenThreads / 32;
constexpr int kBad = -1, kNone = -2;  // for a block's id: outside the pool; no more blocks

// Tokens of a thread that are under way at a time.
template <class Layout>
constexpr int kAhead = sizeof(Piece<Layout>::units) > 16 ? 2 : 4;

// How the work is cut.
struct Shares {
  int lanes;  // of a row
  int heads;  // of a CTA, a power of two
  int head_tiles;
  int ctas;  // that share an item: a head tile of a group
};

struct Statistics {
  enum { kLow, kHigh, kDirection, kCount };
  static __device__ __forceinline__ float join(int which, float a, float b) {
    return which == kLow ? fminf(a, b) : which == kHigh ? fmaxf(a, b) : a + b;  // the first two leave NaN out
  }
};

// The CTAs that share an item, in the order of their tokens.
struct Team {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ static int rank() { return static_cast<int>(cooperative_groups::this_cluster().block_rank()); }
  __device__ static void sync() { cooperative_groups::this_cluster().sync(); }
  template <class T>
  __device__ static const T* of(T* shared, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
  }
#else  // no clusters: every CTA has an item of its own
  __device__ static int rank() { return 0; }
  __device__ static void sync() { __syncthreads(); }
  template <class T>
  __device__ static const T* of(T* shared, int) {
    return shared;
  }
#endif
};

template <class Layout>
__global__ void __launch_bounds__(kTokenThreads, 2) channels(ChannelStatisticsParams p, Shares shares) {
  constexpr int kChannels = Layout::kChannels, kTokens = kAhead<Layout>;
  __shared__ alignas(16) float partial[kTokenThreads * kChannels];
  __shared__ float joined[Statistics::kCount][32 * kChannels];  // a CTA's heads fit a warp
  __shared__ int any_bad;
  const PagedTokens& t = p.tokens;
  const int lane = threadIdx.x % 32, part = lane % shares.lanes;
  const int phase = lane / (shares.lanes * shares.heads), phases = 32 / (shares.lanes * shares.heads);  // of a warp's tokens
  const int rank = Team::rank();
  const Quotient tile = divide(blockIdx.x / shares.ctas, shares.head_tiles);
  const Quotient group = divide(tile.quotient, static_cast<int>(t.num_groups));
  const int64_t seq = group.quotient;
  const int first_head = tile.remainder * shares.heads;
  const int head = first_head + lane / shares.lanes % shares.heads;
  const bool active = part * kChannels < t.head_dim && head < t.num_kv_heads;

  const int32_t len = t.seq_lens[seq];
  bool bad = !valid_length(t, len);
  const int64_t group_places = min(t.blocks_per_group, t.max_blocks), begin = group.remainder * group_places;
  const int64_t places = bad ? 0 : max(int64_t{0}, min((len + t.block_size - 1) / t.block_size - begin, group_places));
  const int64_t end = begin + places * (rank + 1) / shares.ctas;

  // Two loads follow each other, of the block's id and of the pieces: the id of the warp's next block is fetched along with
  // the pieces of this.
  const auto id_at = [&](int64_t place) { return place < end ? block_at(t, seq, place) : kNone; };
  int64_t place = begin + places * rank / shares.ctas + threadIdx.x / 32;
  int id = id_at(place), next_id = id_at(place + kWarps), token = phase;
  Piece<Layout> next[kTokens];
  unsigned next_read = 0;  // a bit for each
  const auto fetch = [&] {
    const int64_t held = len - place * t.block_size;
    const int tokens = id < 0 || !active ? 0 : static_cast<int>(min(held, t.block_size));
    bad = bad || id == kBad;
    next_read = 0;
#pragma unroll
    for (int u = 0; u < kTokens; ++u, token += phases) {
      next[u] = {};
      if (token >= tokens) continue;
      next_read |= 1u << u;
      next[u].load(t, id, token, head, part);
    }
    if (token - phase < t.block_size) return;
    token = phase, place += kWarps;
    id = next_id, next_id = id_at(place + kWarps);
  };

  float low[kChannels], high[kChannels], direction[kChannels];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) low[i] = INFINITY, high[i] = -INFINITY, direction[i] = 0.f;
  bool more = place < end;
  fetch();
  while (more) {  // the same for all lanes of a warp: sums over a row need them
    Piece<Layout> pieces[kTokens];
#pragma unroll
    for (int u = 0; u < kTokens; ++u) pieces[u] = next[u];
    const unsigned read = next_read;
    more = place < end;
    fetch();
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      typename Layout::Sum sum, squares;
      pieces[u].moments(sum, squares);
      const float norm_squared = static_cast<float>(row_sum(squares, shares.lanes));  // as stored: a unit vector has no scale, only its sign
      if (!(read >> u & 1)) continue;
      const float scale = pieces[u].scale;
      const float finite = scale - scale;  // 0, or NaN
      const float inverse = (norm_squared == 0.f || scale == 0.f ? 0.f : copysignf(rsqrtf(norm_squared), scale)) + finite;
      float x[kChannels];
      pieces[u].values(x);
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        direction[i] = fmaf(x[i], inverse, direction[i]);
        low[i] = Statistics::join(Statistics::kLow, low[i], x[i] * scale);
        high[i] = Statistics::join(Statistics::kHigh, high[i], x[i] * scale);
      }
    }
  }
  bad = __syncthreads_or(bad);
  if (threadIdx.x == 0) any_bad = bad;

  const int width = shares.heads * shares.lanes * kChannels;  // of the CTA's heads, as a row of its threads hold them
  const int slots = kTokenThreads * kChannels / width;
  const auto join_slots = [&](int which, const float (&own)[kChannels]) {
#pragma unroll
    for (int i = 0; i < kChannels; i += 4) {
      *reinterpret_cast<float4*>(partial + threadIdx.x * kChannels + i) = make_float4(own[i], own[i + 1], own[i + 2], own[i + 3]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += kTokenThreads) {
      float result = partial[i];
      for (int s = 1; s < slots; ++s) result = Statistics::join(which, result, partial[s * width + i]);
      joined[which][i] = result;
    }
    __syncthreads();
  };
  join_slots(Statistics::kLow, low);
  join_slots(Statistics::kHigh, high);
  join_slots(Statistics::kDirection, direction);

  Team::sync();
  for (int r = 0; r < shares.ctas; ++r) bad = bad || *Team::of(&any_bad, r);
  for (int i = rank * kTokenThreads + threadIdx.x; i < width; i += shares.ctas * kTokenThreads) {
    const int h = first_head + i / (shares.lanes * kChannels), d = i % (shares.lanes * kChannels);
    if (h >= t.num_kv_heads || d >= t.head_dim) continue;
    const int64_t at = ((seq * t.num_groups + group.remainder) * t.num_kv_heads + h) * t.head_dim + d;
#pragma unroll
    for (int which = 0; which < Statistics::kCount; ++which) {
      float result = *Team::of(&joined[which][i], 0);
      for (int r = 1; r < shares.ctas; ++r) result = Statistics::join(which, result, *Team::of(&joined[which][i], r));
      float* out = which == Statistics::kLow ? p.low : which == Statistics::kHigh ? p.high : p.direction;
      out[at] = bad ? NAN : result;
    }
  }
  Team::sync();  // no CTA leaves while another reads its results
}

// As many heads to a CTA as a warp has lanes for, since those lie side by side in memory; fewer where that leaves SMs idle,
// and more CTAs to an item until each SM has its two, twice over.
template <class Layout>
Shares shares_of(const PagedTokens& t, bool clusters) {
  Shares shares{lanes_of_row<Layout>(t), 1, 1, 1};
  const int64_t enough = 4 * device_attribute(cudaDevAttrMultiProcessorCount), most = clusters ? kMaxCluster : 1;
  const auto items = [&](int heads) { return t.num_seqs * t.num_groups * ((t.num_kv_heads + heads - 1) / heads); };
  while (shares.heads < t.num_kv_heads && shares.heads * shares.lanes < 32) shares.heads *= 2;
  while (shares.heads > 1 && items(shares.heads) * most < enough) shares.heads /= 2;
  shares.head_tiles = static_cast<int>((t.num_kv_heads + shares.heads - 1) / shares.heads);
  const int64_t group_places = t.blocks_per_group < t.max_blocks ? t.blocks_per_group : t.max_blocks;
  while (shares.ctas < most && items(shares.heads) * shares.ctas < enough && group_places >= 2 * kWarps * shares.ctas) shares.ctas *= 2;
  return shares;
}

}  // namespace

void channel_statistics(const ChannelStatisticsParams& p, void* stream) {
  const PagedTokens& t = p.tokens;
  dispatch_layout(t, [&](auto layout) {
    using Layout = decltype(layout);
    static const int compiled_for = [] {  // below the device's own version where the driver translated PTX
      cudaFuncAttributes attributes;
      check(cudaFuncGetAttributes(&attributes, channels<Layout>), "channel_statistics");
      return attributes.ptxVersion;
    }();
    const Shares shares = shares_of<Layout>(t, compiled_for >= 90);
    const int64_t ctas = t.num_seqs * t.num_groups * shares.head_tiles * shares.ctas;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(shares.ctas), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ctas)), config.blockDim = dim3(kTokenThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &cluster, config.numAttrs = shares.ctas > 1;
    check(cudaLaunchKernelEx(&config, channels<Layout>, p, shares), "channel_statistics");
  });
}

}  // namespace pagedkv
