// Which kernel serves a call, and the launches of one: decode, merge, block mass.
#pragma once

#include <algorithm>

#include "attention/decode_mma.cuh"
#include "attention/decode_plain.cuh"
#include "attention/decode_simt.cuh"

namespace pagedkv::attention {

inline int num_sms() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// ---------------------------------------------------------------------------------------- one path's launches

// Launch attribute: the CTAs of a sequence's splits as a cluster.
inline cudaLaunchAttribute cluster_of(const SplitPlan& plan) {
  cudaLaunchAttribute attribute{};
  if (plan.in_cluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {1, unsigned(plan.fixed_splits), 1};
  }
  return attribute;
}

// x: head tiles; y, and z where there are more than y can count: items.
inline dim3 item_grid(int head_tiles, int64_t items) {
  const int64_t layers = (items + kMaxGridRows - 1) / kMaxGridRows;
  return dim3(unsigned(head_tiles), unsigned((items + layers - 1) / layers), unsigned(layers));
}

struct Path {
  SplitPlan plan;
  int head_tiles, threads;
  StepMass step_mass;
};

inline size_t workspace_bytes(const AttentionParams& p, const Path& path) {
  return Partials{}.lay_out(nullptr, p, path.plan.max_items(), path.step_mass);
}

// Decode with one CTA for each (item, head tile), then whatever is left to merge or to add up.
template <typename Q, typename Kernel>
Partials run(const AttentionParams& p, const Path& path, void* workspace, cudaStream_t stream, Kernel decode) {
  Partials partials{};
  partials.lay_out(static_cast<char*>(workspace), p, path.plan.max_items(), path.step_mass);
  launch_kernel(decode, item_grid(path.head_tiles, path.plan.max_items()), path.threads, stream, {cluster_of(path.plan)}, p, path.plan, partials);

  // A CTA merges several heads where there are many and most sequences have nothing to merge.
  const int64_t several = path.plan.always_merge ? 1 : std::max<int64_t>(1, p.num_seqs * p.num_heads / 512);
  const int heads_per_merge = int(std::min<int64_t>(p.num_heads, several));
  const bool merging = (path.plan.fixed_splits != 1 && !path.plan.in_cluster) || path.plan.always_merge;
  const int64_t merges = merging ? p.num_seqs * ceil_div(int(p.num_heads), heads_per_merge) : 0;
  // So many blocks a warp that four CTAs an SM take them all.
  const bool masses_left = p.block_mass && path.step_mass != StepMass::kNone;
  const int blocks_per_warp = int(std::clamp<int64_t>(p.num_seqs * p.max_blocks / (4 * kMergeWarps * num_sms()), 1, kMassBlocksPerWarp));
  const int64_t masses = masses_left ? p.num_seqs * ceil_div(int(p.max_blocks), blocks_per_warp * kMergeWarps) : 0;
  if (merges + masses > 0) {
    launch_kernel(finish<Q>, dim3(unsigned(merges + masses)), kMergeThreads, stream, {overlap()}, p, path.plan, partials, int(merges), heads_per_merge, blocks_per_warp);
  }
  return partials;
}

// ------------------------------------------------------------------------------------------ tensor cores

template <class C>
Path mma_path(const AttentionParams& p) {
  const int head_tiles = int(p.num_kv_heads) * ceil_div(int(p.num_heads / p.num_kv_heads), kTileHeads);
  const bool rotate_last = p.rotated && !C::whole_rows;  // the decode kernel never holds a whole row, which rotating it back needs
  SplitPlan plan = make_plan(p, C::tokens_per_unit, C::ctas_per_sm * num_sms(), head_tiles, compiled_for() >= 90 && !rotate_last);
  plan.always_merge = rotate_last;
  return {plan, head_tiles, C::threads, StepMass::kLog2};
}

inline bool rows_aligned_16(const void* base, int64_t s0, int64_t s1, int64_t s2, int bytes) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && (s0 | s1 | s2) * bytes % 16 == 0;
}

// Whether the tensor cores serve this call.
inline bool fits_mma(const AttentionParams& p) {
  const bool quantised = p.cache_dtype == DType::kInt8;
  const int bytes = quantised ? 1 : 2;
  return compiled_for() >= 80 && p.num_blocks > 0 && p.block_size % kStepTokens == 0 &&
         (p.head_dim == 64 || p.head_dim == 128 || (p.head_dim == 256 && quantised)) &&  // 256 in half: 190 registers of buffers
         p.q_dtype != DType::kFloat32 && (quantised || (p.cache_dtype == p.q_dtype && !p.rotated)) &&
         rows_aligned_16(p.q, p.q_stride_seq, p.q_stride_head, 0, 2) &&
         rows_aligned_16(p.k_cache, p.k_stride_block, p.k_stride_token, p.k_stride_head, bytes) &&
         rows_aligned_16(p.v_cache, p.v_stride_block, p.v_stride_token, p.v_stride_head, bytes) &&
         p.k_stride_token * bytes < (1 << 24) && p.v_stride_token * bytes < (1 << 24) &&  // 32-bit offsets within a block
         p.k_stride_block * bytes < INT_MAX && p.v_stride_block * bytes < INT_MAX &&      // and factors of a block id
         p.k_scale_stride_block < INT_MAX && p.v_scale_stride_block < INT_MAX && p.k_scale_stride_token < (1 << 24) && p.v_scale_stride_token < (1 << 24);
}

// Calls `use` with the DecodeConfig that serves p.
template <typename Q, CacheKind kKind, class Use>
auto with_head_dim(const AttentionParams& p, Use use) {
  auto with_mass = [&](auto mass) {
    constexpr bool kMass = decltype(mass)::value;
    if (p.head_dim == 64) return use(DecodeConfig<Q, kKind, 64, kMass>{});
    if constexpr (kKind != CacheKind::kHalf) {
      if (p.head_dim == 256) return use(DecodeConfig<Q, kKind, 256, kMass>{});
    }
    return use(DecodeConfig<Q, kKind, 128, kMass>{});
  };
  return p.block_mass ? with_mass(std::true_type{}) : with_mass(std::false_type{});
}

template <class C>
void run_mma(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  run<typename C::Query>(p, mma_path<C>(p), workspace, stream, decode_mma<C>);
}

// ------------------------------------------------------------------------------------ without tensor cores

// Calls `use` with the SimtConfig that serves p.
template <typename KV, class Use>
auto with_simt_config(const AttentionParams& p, Use use) {
  const int64_t row_bytes = p.head_dim * int64_t(sizeof(KV));
  if constexpr (std::is_same_v<KV, int8_t>) {
    if (row_bytes <= 64) return use(SimtConfig<KV, 4>{});
  } else {
    if (row_bytes > 256) return use(SimtConfig<KV, 32>{});
  }
  if (row_bytes > 128) return use(SimtConfig<KV, 16>{});
  return use(SimtConfig<KV, 8>{});
}

template <class C>
Path simt_path(const AttentionParams& p) {
  const int head_tiles = int(p.num_kv_heads) * ceil_div(int(p.num_heads / p.num_kv_heads), kSimtHeads);
  const SplitPlan plan = make_plan(p, kSimtWarps * kStepTokens, C::ctas_per_sm * num_sms(), head_tiles, false);
  return {plan, head_tiles, kSimtThreads, StepMass::kState};
}

// Whether rows are whole 16-byte pieces: any block size, any dtype of q, but no rotation. Block mass asks for steps that lie in one
// block: the plain kernel's second pass over K adds up dot products in another order, and at logits of 1e4 a float32's step shows.
template <typename KV>
bool fits_simt(const AttentionParams& p) {
  constexpr int bytes = sizeof(KV);
  return !p.rotated && (!p.block_mass || p.block_size % kStepTokens == 0) && p.head_dim * bytes % 16 == 0 &&
         rows_aligned_16(p.k_cache, p.k_stride_block, p.k_stride_token, p.k_stride_head, bytes) &&
         rows_aligned_16(p.v_cache, p.v_stride_block, p.v_stride_token, p.v_stride_head, bytes);
}

// ----------------------------------------------------------------------------------------- the general path

inline Path plain_path(const AttentionParams& p) {
  // 16 CTAs of 128 threads fill an SM.
  return {make_plan(p, kPlainTokensPerUnit, 16 * num_sms(), int(p.num_heads), false), int(p.num_heads), kPlainThreads, StepMass::kNone};
}

// Calls `use` with the launch and the decode kernel for what the tensor cores do not serve.
template <typename Q, typename KV, class Use>
auto with_general_path(const AttentionParams& p, Use use) {
  if constexpr (!std::is_same_v<KV, float>) {
    if (fits_simt<KV>(p)) return with_simt_config<KV>(p, [&](auto c) { return use(simt_path<decltype(c)>(p), decode_simt<decltype(c)>); });
  }
  return use(plain_path(p), decode_plain<Q, KV>);
}

template <typename Q, typename KV>
size_t general_workspace(const AttentionParams& p) {
  return with_general_path<Q, KV>(p, [&](const Path& path, auto) { return workspace_bytes(p, path); });
}

template <typename Q, typename KV>
void run_general(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  with_general_path<Q, KV>(p, [&](const Path& path, auto decode) {
    const Partials partials = run<Q>(p, path, workspace, stream, decode);
    if (p.block_mass && path.step_mass == StepMass::kNone && p.num_seqs * p.max_blocks > 0) {
      launch_kernel(block_mass_plain<Q, KV>, dim3(unsigned(p.num_seqs * p.max_blocks)), kPlainThreads, stream, {}, p, path.plan, partials);
    }
  });
}

}  // namespace pagedkv::attention
