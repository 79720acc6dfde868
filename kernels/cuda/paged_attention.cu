// paged_attention: decode attention over an unquantised paged cache; the kernels of quant_paged_attention.cu, without
// scales. decode_mma.cuh serves a cache of q's own half-precision type, decode_simt.cuh any half-precision one.
#include "attention/launch.cuh"

namespace pagedkv {
namespace {

using namespace attention;

template <class Use>
auto with_float_config(const AttentionParams& p, Use use) {
  return p.q_dtype == DType::kFloat16 ? with_head_dim<__half, CacheKind::kHalf>(p, use) : with_head_dim<__nv_bfloat16, CacheKind::kHalf>(p, use);
}

// Calls `use` with an element of the cache's type.
template <class Use>
auto with_cache_type(const AttentionParams& p, Use use) {
  switch (p.cache_dtype) {
    case DType::kFloat16: return use(__half{});
    case DType::kBFloat16: return use(__nv_bfloat16{});
    default: return use(float{});
  }
}

template <typename Q>
void run_general_over(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  with_cache_type(p, [&](auto kv) { run_general<Q, decltype(kv)>(p, workspace, stream); });
}

}  // namespace

size_t paged_attention_workspace(const AttentionParams& p) {
  if (!fits_mma(p)) {
    return with_cache_type(p, [&](auto kv) { return general_workspace<__half, decltype(kv)>(p); });  // q's dtype does not matter
  }
  return with_float_config(p, [&](auto config) { return workspace_bytes(p, mma_path<decltype(config)>(p)); });
}

void paged_attention(const AttentionParams& p, void* workspace, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (fits_mma(p)) return with_float_config(p, [&](auto config) { run_mma<decltype(config)>(p, workspace, stream); });
  switch (p.q_dtype) {
    case DType::kFloat16: return run_general_over<__half>(p, workspace, stream);
    case DType::kBFloat16: return run_general_over<__nv_bfloat16>(p, workspace, stream);
    default: return run_general_over<float>(p, workspace, stream);
  }
}

}  // namespace pagedkv
