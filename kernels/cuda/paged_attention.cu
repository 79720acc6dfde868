// paged_attention: decode attention over an unquantised paged cache; the kernels of quant_paged_attention.cu, without
// scales. The fast path serves a cache of q's own half-precision type.
#include "attention/launch.cuh"

namespace pagedkv {
namespace {

using namespace attention;

template <class Use>
auto with_float_config(const AttentionParams& p, Use use) {
  return p.q_dtype == DType::kFloat16 ? with_head_dim<__half, CacheKind::kHalf>(p, use) : with_head_dim<__nv_bfloat16, CacheKind::kHalf>(p, use);
}

template <typename Q>
void run_plain_over(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  switch (p.cache_dtype) {
    case DType::kFloat16: return run_plain<Q, __half>(p, workspace, stream);
    case DType::kBFloat16: return run_plain<Q, __nv_bfloat16>(p, workspace, stream);
    default: return run_plain<Q, float>(p, workspace, stream);
  }
}

}  // namespace

size_t paged_attention_workspace(const AttentionParams& p) {
  if (!fits_mma(p)) return workspace_bytes(p, plain_path(p));
  return with_float_config(p, [&](auto config) { return workspace_bytes(p, mma_path<decltype(config)>(p)); });
}

void paged_attention(const AttentionParams& p, void* workspace, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (fits_mma(p)) return with_float_config(p, [&](auto config) { run_mma<decltype(config)>(p, workspace, stream); });
  switch (p.q_dtype) {
    case DType::kFloat16: return run_plain_over<__half>(p, workspace, stream);
    case DType::kBFloat16: return run_plain_over<__nv_bfloat16>(p, workspace, stream);
    default: return run_plain_over<float>(p, workspace, stream);
  }
}

}  // namespace pagedkv
