// quant_paged_attention: decode attention straight from an INT8 paged cache.
//
//   out[s, h] = sum_t softmax_t(sm_scale * q[s, h] . K[s, t]) V[s, t],   K, V = int8 * scale of (block[, token], head)
//
// attention/decode_mma.cuh serves head_dim 64, 128, 256 with blocks of a multiple of 16 tokens and half-precision q on sm_80
// up; attention/decode_simt.cuh the rest, sm_75 included, but for what only attention/decode_plain.cuh takes.
// attention/plan.cuh cuts sequences in splits.
#include "attention/launch.cuh"

namespace pagedkv {
namespace {

using namespace attention;

template <class Use>
auto with_quant_config(const AttentionParams& p, Use use) {
  auto with_query = [&](auto q) {
    using Q = decltype(q);
    return p.token_head_scales ? with_head_dim<Q, CacheKind::kInt8TokenHead>(p, use) : with_head_dim<Q, CacheKind::kInt8BlockHead>(p, use);
  };
  return p.q_dtype == DType::kFloat16 ? with_query(__half{}) : with_query(__nv_bfloat16{});
}

}  // namespace

size_t quant_paged_attention_workspace(const AttentionParams& p) {
  if (!fits_mma(p)) return general_workspace<__half, int8_t>(p);  // q's dtype does not matter
  return with_quant_config(p, [&](auto config) { return workspace_bytes(p, mma_path<decltype(config)>(p)); });
}

void quant_paged_attention(const AttentionParams& p, void* workspace, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (fits_mma(p)) return with_quant_config(p, [&](auto config) { run_mma<decltype(config)>(p, workspace, stream); });
  switch (p.q_dtype) {
    case DType::kFloat16: return run_general<__half, int8_t>(p, workspace, stream);
    case DType::kBFloat16: return run_general<__nv_bfloat16, int8_t>(p, workspace, stream);
    default: return run_general<float, int8_t>(p, workspace, stream);
  }
}

}  // namespace pagedkv
