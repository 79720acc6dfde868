// torch tensors in, kernels/ops.h out. Compiled once for each backend: PAGEDKV_LIBRARY names the private
// namespace (pagedkv_cpu or pagedkv_cuda) whose functions pagedkv/ops/registry.py calls after validation.
//
// No CUDA header is needed: the device guard and the current stream come from c10's device-neutral
// interface, so this file compiles against a CPU build of torch as well.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>

#include "ops.h"

namespace {

using at::Tensor;
using std::optional;

// The tensor's device is current for as long as the call lasts, and work goes to its current stream.
struct Launch {
  explicit Launch(const Tensor& t) : guard(t.device()) {
    if (!t.is_cpu()) {
      c10::impl::VirtualGuardImpl impl(t.device().type());
      stream = impl.getStreamNativeHandle(impl.getStream(t.device()));
    }
  }
  c10::DeviceGuard guard;
  void* stream = nullptr;
};

pagedkv::DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kHalf: return pagedkv::DType::kFloat16;
    case at::kBFloat16: return pagedkv::DType::kBFloat16;
    case at::kFloat: return pagedkv::DType::kFloat32;
    case at::kChar: return pagedkv::DType::kInt8;
    default: TORCH_CHECK_TYPE(false, "unsupported dtype ", t.scalar_type());
  }
}

Tensor workspace(size_t bytes, const Tensor& like) {
  return at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte));
}

struct ScaleStrides { int64_t block, token, head; };
ScaleStrides scale_strides(const Tensor& s) {
  return s.dim() == 3 ? ScaleStrides{s.stride(0), s.stride(1), s.stride(2)} : ScaleStrides{s.stride(0), 0, s.stride(1)};
}

// ---------------------------------------------------------------------------------------- attention

// What every kernel that walks a paged cache is told of it.
pagedkv::AttentionParams paged_params(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                                      const Tensor& seq_lens) {
  pagedkv::AttentionParams p{};
  p.q = q.const_data_ptr();
  p.q_dtype = dtype_of(q);
  p.q_stride_seq = q.stride(0), p.q_stride_head = q.stride(1);
  p.k_cache = k_cache.const_data_ptr(), p.v_cache = v_cache.const_data_ptr();
  p.cache_dtype = dtype_of(k_cache);
  p.k_stride_block = k_cache.stride(0), p.k_stride_token = k_cache.stride(1), p.k_stride_head = k_cache.stride(2);
  p.v_stride_block = v_cache.stride(0), p.v_stride_token = v_cache.stride(1), p.v_stride_head = v_cache.stride(2);
  p.block_tables = block_tables.const_data_ptr<int32_t>();
  p.block_tables_stride = block_tables.stride(0);
  p.seq_lens = seq_lens.const_data_ptr<int32_t>();
  p.num_seqs = q.size(0), p.num_heads = q.size(1), p.num_kv_heads = k_cache.size(2), p.head_dim = q.size(2);
  p.num_blocks = k_cache.size(0), p.block_size = k_cache.size(1), p.max_blocks = block_tables.size(1);
  return p;
}

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& q, const Tensor& k_cache, const Tensor* k_scale, const Tensor& v_cache,
                                             const Tensor* v_scale, const Tensor& block_tables, const Tensor& seq_lens,
                                             double sm_scale, optional<int64_t> sliding_window, optional<double> logits_soft_cap,
                                             const optional<Tensor>& sinks, bool return_lse, bool return_block_mass,
                                             bool rotated) {
  Launch launch(q);
  const auto floats = q.options().dtype(at::kFloat);
  Tensor out = at::empty(q.sizes(), q.options());
  Tensor lse = at::empty(return_lse ? at::IntArrayRef{q.size(0), q.size(1)} : at::IntArrayRef{0}, floats);
  Tensor mass = at::empty(return_block_mass ? block_tables.sizes() : at::IntArrayRef{0}, floats);

  pagedkv::AttentionParams p = paged_params(q, k_cache, v_cache, block_tables, seq_lens);
  if (k_scale) {
    p.k_scale = k_scale->const_data_ptr<float>(), p.v_scale = v_scale->const_data_ptr<float>();
    const auto ks = scale_strides(*k_scale), vs = scale_strides(*v_scale);
    p.k_scale_stride_block = ks.block, p.k_scale_stride_token = ks.token, p.k_scale_stride_head = ks.head;
    p.v_scale_stride_block = vs.block, p.v_scale_stride_token = vs.token, p.v_scale_stride_head = vs.head;
    p.token_head_scales = k_scale->dim() == 3;
  }
  p.sm_scale = static_cast<float>(sm_scale);
  p.sliding_window = sliding_window.value_or(0);
  p.logits_soft_cap = static_cast<float>(logits_soft_cap.value_or(0.0));
  p.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  p.rotated = rotated;
  p.out = out.mutable_data_ptr();
  p.lse = return_lse ? lse.mutable_data_ptr<float>() : nullptr;
  p.block_mass = return_block_mass ? mass.mutable_data_ptr<float>() : nullptr;

  if (out.numel() > 0) {
    if (k_scale) {
      Tensor scratch = workspace(pagedkv::quant_paged_attention_workspace(p), q);
      pagedkv::quant_paged_attention(p, scratch.mutable_data_ptr(), launch.stream);
    } else {
      Tensor scratch = workspace(pagedkv::paged_attention_workspace(p), q);
      pagedkv::paged_attention(p, scratch.mutable_data_ptr(), launch.stream);
    }
  }
  return {out, lse, mass};
}

std::tuple<Tensor, Tensor, Tensor> quant_paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& k_scale,
                                                         const Tensor& v_cache, const Tensor& v_scale, const Tensor& block_tables,
                                                         const Tensor& seq_lens, double sm_scale, optional<int64_t> sliding_window,
                                                         optional<double> logits_soft_cap, const optional<Tensor>& sinks,
                                                         bool return_lse, bool return_block_mass, bool rotated) {
  return attention(q, k_cache, &k_scale, v_cache, &v_scale, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap,
                   sinks, return_lse, return_block_mass, rotated);
}

std::tuple<Tensor, Tensor, Tensor> paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                                   const Tensor& block_tables, const Tensor& seq_lens, double sm_scale,
                                                   optional<int64_t> sliding_window, optional<double> logits_soft_cap,
                                                   const optional<Tensor>& sinks, bool return_lse, bool return_block_mass,
                                                   bool rotated) {
  return attention(q, k_cache, nullptr, v_cache, nullptr, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap,
                   sinks, return_lse, return_block_mass, rotated);
}

#ifdef PAGEDKV_CUDA
// The benchmarks' roof, private: K and V are read and nothing is computed. `checksum` is int32 [1].
void paged_gather(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables, const Tensor& seq_lens,
                  Tensor checksum) {
  Launch launch(q);
  pagedkv::paged_gather(paged_params(q, k_cache, v_cache, block_tables, seq_lens),
                        reinterpret_cast<uint32_t*>(checksum.mutable_data_ptr<int32_t>()), launch.stream);
}
#endif

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                                  const Tensor& lse_b) {
  Launch launch(out_a);
  Tensor out = at::empty(out_a.sizes(), out_a.options());
  Tensor lse = at::empty(lse_a.sizes(), lse_a.options());
  if (out.numel() > 0 || lse.numel() > 0) {
    pagedkv::merge_attention_states(
        {out_a.const_data_ptr(), out_b.const_data_ptr(), out_a.stride(0), out_a.stride(1), out_b.stride(0), out_b.stride(1),
         lse_a.const_data_ptr<float>(), lse_b.const_data_ptr<float>(), lse_a.stride(0), lse_b.stride(0), dtype_of(out_a),
         out_a.size(0), out_a.size(1), out_a.size(2), out.mutable_data_ptr(), lse.mutable_data_ptr<float>()},
        launch.stream);
  }
  return {out, lse};
}

// ----------------------------------------------------------------------------------------- eviction

pagedkv::ScoreParams score_params(const Tensor& recency, const Tensor& frequency, const Tensor& attention_mass,
                                  const Tensor& valid_mask, double w_recency, double w_frequency, double w_attention,
                                  Tensor& scores) {
  return {recency.const_data_ptr<float>(), frequency.const_data_ptr<float>(), attention_mass.const_data_ptr<float>(),
          valid_mask.const_data_ptr<bool>(), attention_mass.stride(0), valid_mask.stride(0), attention_mass.size(0),
          attention_mass.size(1), static_cast<float>(w_recency), static_cast<float>(w_frequency),
          static_cast<float>(w_attention), scores.mutable_data_ptr<float>()};
}

Tensor eviction_scores(const Tensor& recency, const Tensor& frequency, const Tensor& attention_mass, const Tensor& valid_mask,
                       double w_recency, double w_frequency, double w_attention) {
  Launch launch(recency);
  Tensor scores = at::empty(recency.sizes(), recency.options());
  if (scores.numel() > 0) {
    pagedkv::eviction_scores(score_params(recency, frequency, attention_mass, valid_mask, w_recency, w_frequency, w_attention, scores),
                             launch.stream);
  }
  return scores;
}

Tensor select_eviction_candidates(const Tensor& scores, int64_t k) {
  Launch launch(scores);
  Tensor ids = at::empty({k}, scores.options().dtype(at::kLong));
  if (k > 0) {
    Tensor scratch = workspace(pagedkv::select_eviction_candidates_workspace(scores.numel(), k), scores);
    pagedkv::select_eviction_candidates(scores.const_data_ptr<float>(), scores.numel(), k, ids.mutable_data_ptr<int64_t>(),
                                        scratch.mutable_data_ptr(), launch.stream);
  }
  return ids;
}

std::tuple<Tensor, Tensor> evict_blocks(const Tensor& recency, const Tensor& frequency, const Tensor& attention_mass,
                                        const Tensor& valid_mask, int64_t k, double w_recency, double w_frequency,
                                        double w_attention) {
  Launch launch(recency);
  Tensor scores = at::empty(recency.sizes(), recency.options());
  Tensor ids = at::empty({k}, recency.options().dtype(at::kLong));
  if (scores.numel() > 0) {
    Tensor scratch = workspace(pagedkv::evict_blocks_workspace(scores.numel(), k), recency);
    pagedkv::evict_blocks(score_params(recency, frequency, attention_mass, valid_mask, w_recency, w_frequency, w_attention, scores), k,
                          ids.mutable_data_ptr<int64_t>(), scratch.mutable_data_ptr(), launch.stream);
  }
  return {ids, scores};
}

// -------------------------------------------------------------------- eviction, sequence by sequence

void accumulate_block_mass(const Tensor& block_mass, const Tensor& block_tables, Tensor total, double decay) {
  Launch launch(block_mass);
  if (total.numel() == 0) return;
  pagedkv::accumulate_block_mass({block_mass.const_data_ptr<float>(), block_tables.const_data_ptr<int32_t>(), block_mass.stride(0),
                                  block_tables.stride(0), block_mass.size(0), block_mass.size(1), total.size(0), decay,
                                  total.mutable_data_ptr<int64_t>()},
                                 launch.stream);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> select_per_sequence(const Tensor& scores, const Tensor& block_tables, const Tensor& seq_lens,
                                                               int64_t budget, int64_t protect_first, int64_t protect_last,
                                                               int64_t block_size, optional<Tensor> references,
                                                               const optional<Tensor>& budgets) {
  Launch launch(scores);
  Tensor tables = at::empty(block_tables.sizes(), block_tables.options());
  Tensor lens = at::empty(seq_lens.sizes(), seq_lens.options());
  Tensor freed = at::empty({block_tables.numel()}, block_tables.options());
  Tensor num_freed = at::empty({1}, block_tables.options());

  pagedkv::SequenceSelectParams p{};
  p.scores = scores.const_data_ptr<float>();
  p.by_place = scores.dim() == 2;
  p.scores_stride = p.by_place ? scores.stride(0) : 0;
  p.block_tables = block_tables.const_data_ptr<int32_t>(), p.block_tables_stride = block_tables.stride(0);
  p.seq_lens = seq_lens.const_data_ptr<int32_t>();
  p.budgets = budgets ? budgets->const_data_ptr<int32_t>() : nullptr;
  p.budget = budget, p.protect_first = protect_first, p.protect_last = protect_last;
  p.num_seqs = block_tables.size(0), p.max_blocks = block_tables.size(1), p.block_size = block_size;
  p.num_blocks = !p.by_place ? scores.size(0) : references ? references->size(0) : INT32_MAX;
  p.references = references ? references->mutable_data_ptr<int32_t>() : nullptr;
  p.new_tables = tables.mutable_data_ptr<int32_t>(), p.new_lens = lens.mutable_data_ptr<int32_t>();
  p.freed = freed.mutable_data_ptr<int32_t>(), p.num_freed = num_freed.mutable_data_ptr<int32_t>();
  Tensor scratch = workspace(pagedkv::select_per_sequence_workspace(p), scores);
  pagedkv::select_per_sequence(p, scratch.mutable_data_ptr(), launch.stream);
  return {tables, lens, freed, num_freed};
}

// ------------------------------------------------------------------------------ statistics of K or V

pagedkv::PagedTokens paged_tokens(const Tensor& cache, const optional<Tensor>& scale, const Tensor& block_tables,
                                  const Tensor& seq_lens, int64_t blocks_per_group) {
  pagedkv::PagedTokens t{};
  t.cache = cache.const_data_ptr(), t.dtype = dtype_of(cache);
  t.stride_block = cache.stride(0), t.stride_token = cache.stride(1), t.stride_head = cache.stride(2);
  if (scale) {
    t.scale = scale->const_data_ptr<float>();
    const auto s = scale_strides(*scale);
    t.scale_stride_block = s.block, t.scale_stride_token = s.token, t.scale_stride_head = s.head;
  }
  t.block_tables = block_tables.const_data_ptr<int32_t>(), t.block_tables_stride = block_tables.stride(0);
  t.seq_lens = seq_lens.const_data_ptr<int32_t>();
  t.num_seqs = block_tables.size(0), t.max_blocks = block_tables.size(1);
  t.num_blocks = cache.size(0), t.block_size = cache.size(1), t.num_kv_heads = cache.size(2), t.head_dim = cache.size(3);
  t.blocks_per_group = blocks_per_group, t.num_groups = t.max_blocks / blocks_per_group + (t.max_blocks % blocks_per_group != 0);
  return t;
}

std::tuple<Tensor, Tensor> token_moments(const Tensor& cache, const optional<Tensor>& scale, const Tensor& block_tables,
                                         const Tensor& seq_lens, int64_t blocks_per_group, const optional<Tensor>& shift,
                                         const optional<Tensor>& gain) {
  Launch launch(cache);
  const auto floats = cache.options().dtype(at::kFloat);
  const std::array<int64_t, 4> sizes{block_tables.size(0), block_tables.size(1), cache.size(1), cache.size(2)};
  Tensor sum = at::empty(sizes, floats), sum_of_squares = at::empty(sizes, floats);
  if (sum.numel() > 0) {
    pagedkv::TokenMomentsParams p{};
    p.tokens = paged_tokens(cache, scale, block_tables, seq_lens, blocks_per_group);
    if (shift) {
      p.shift = shift->const_data_ptr<float>(), p.gain = gain->const_data_ptr<float>();
      p.shift_stride_seq = shift->stride(0), p.shift_stride_group = shift->stride(1), p.shift_stride_head = shift->stride(2);
      p.gain_stride_seq = gain->stride(0), p.gain_stride_group = gain->stride(1), p.gain_stride_head = gain->stride(2);
    }
    p.sum = sum.mutable_data_ptr<float>(), p.sum_of_squares = sum_of_squares.mutable_data_ptr<float>();
    pagedkv::token_moments(p, launch.stream);
  }
  return {sum, sum_of_squares};
}

std::tuple<Tensor, Tensor, Tensor> channel_statistics(const Tensor& cache, const optional<Tensor>& scale, const Tensor& block_tables,
                                                      const Tensor& seq_lens, int64_t blocks_per_group) {
  Launch launch(cache);
  const auto tokens = paged_tokens(cache, scale, block_tables, seq_lens, blocks_per_group);
  const std::array<int64_t, 4> sizes{tokens.num_seqs, tokens.num_groups, tokens.num_kv_heads, tokens.head_dim};
  const auto floats = cache.options().dtype(at::kFloat);
  Tensor low = at::empty(sizes, floats), high = at::empty(sizes, floats), direction = at::empty(sizes, floats);
  if (low.numel() > 0) {
    pagedkv::channel_statistics({tokens, low.mutable_data_ptr<float>(), high.mutable_data_ptr<float>(),
                                 direction.mutable_data_ptr<float>()},
                                launch.stream);
  }
  return {low, high, direction};
}

// ------------------------------------------------------------------------------------- quantisation

std::tuple<Tensor, Tensor> quantize_kv(const Tensor& kv, c10::string_view granularity, bool rotated) {
  Launch launch(kv);
  const bool token_head = granularity == "token_head";
  Tensor q = at::empty(kv.sizes(), kv.options().dtype(at::kChar));
  Tensor scale = at::empty(token_head ? at::IntArrayRef{kv.size(0), kv.size(1), kv.size(2)} : at::IntArrayRef{kv.size(0), kv.size(2)},
                           kv.options().dtype(at::kFloat));
  if (q.numel() > 0) {
    pagedkv::quantize_kv({kv.const_data_ptr(), dtype_of(kv), kv.stride(0), kv.stride(1), kv.stride(2), kv.size(0), kv.size(1),
                          kv.size(2), kv.size(3), token_head, rotated, q.mutable_data_ptr<int8_t>(), scale.mutable_data_ptr<float>()},
                         launch.stream);
  }
  return {q, scale};
}

Tensor dequantize_kv(const Tensor& q, const Tensor& scale) {
  Launch launch(q);
  Tensor kv = at::empty(q.sizes(), q.options().dtype(at::kFloat));
  if (kv.numel() > 0) {
    const auto s = scale_strides(scale);
    pagedkv::dequantize_kv({q.const_data_ptr<int8_t>(), q.stride(0), q.stride(1), q.stride(2), scale.const_data_ptr<float>(), s.block,
                            s.token, s.head, q.size(0), q.size(1), q.size(2), q.size(3), kv.mutable_data_ptr<float>()},
                           launch.stream);
  }
  return kv;
}

void reshape_and_cache(const Tensor& key, const Tensor& value, Tensor k_cache, Tensor k_scale, Tensor v_cache, Tensor v_scale,
                       const Tensor& slot_mapping, bool rotated) {
  Launch launch(key);
  if (key.numel() == 0) return;
  pagedkv::CacheWriteParams p{};
  p.key = key.const_data_ptr(), p.value = value.const_data_ptr();
  p.dtype = dtype_of(key);
  p.key_stride_token = key.stride(0), p.key_stride_head = key.stride(1);
  p.value_stride_token = value.stride(0), p.value_stride_head = value.stride(1);
  p.k_cache = k_cache.mutable_data_ptr<int8_t>(), p.v_cache = v_cache.mutable_data_ptr<int8_t>();
  p.k_stride_block = k_cache.stride(0), p.k_stride_token = k_cache.stride(1), p.k_stride_head = k_cache.stride(2);
  p.v_stride_block = v_cache.stride(0), p.v_stride_token = v_cache.stride(1), p.v_stride_head = v_cache.stride(2);
  p.k_scale = k_scale.mutable_data_ptr<float>(), p.v_scale = v_scale.mutable_data_ptr<float>();
  const auto ks = scale_strides(k_scale), vs = scale_strides(v_scale);
  p.k_scale_stride_block = ks.block, p.k_scale_stride_token = ks.token, p.k_scale_stride_head = ks.head;
  p.v_scale_stride_block = vs.block, p.v_scale_stride_token = vs.token, p.v_scale_stride_head = vs.head;
  p.token_head = k_scale.dim() == 3;
  p.rotated = rotated;
  p.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  p.num_tokens = key.size(0), p.num_kv_heads = key.size(1), p.head_dim = key.size(2);
  p.num_blocks = k_cache.size(0), p.block_size = k_cache.size(1);
  Tensor scratch = workspace(pagedkv::reshape_and_cache_workspace(p), key);
  pagedkv::reshape_and_cache(p, scratch.mutable_data_ptr(), launch.stream);
}

std::string instruction_set() { return pagedkv::instruction_set(); }

}  // namespace

#define PAGEDKV_DEFINE(library, m) TORCH_LIBRARY(library, m)  // one more expansion, so that the macro's value is the name
PAGEDKV_DEFINE(PAGEDKV_LIBRARY, m) {
  m.def("quant_paged_attention", &quant_paged_attention);
  m.def("paged_attention", &paged_attention);
  m.def("merge_attention_states", &merge_attention_states);
  m.def("eviction_scores", &eviction_scores);
  m.def("select_eviction_candidates", &select_eviction_candidates);
  m.def("evict_blocks", &evict_blocks);
  m.def("accumulate_block_mass(Tensor block_mass, Tensor block_tables, Tensor(a!) total, float decay) -> ()", &accumulate_block_mass);
  m.def("select_per_sequence(Tensor scores, Tensor block_tables, Tensor seq_lens, int budget, int protect_first, int protect_last, int block_size, Tensor(a!)? references, Tensor? budgets) -> (Tensor, Tensor, Tensor, Tensor)", &select_per_sequence);
  m.def("token_moments", &token_moments);
  m.def("channel_statistics", &channel_statistics);
  m.def("quantize_kv", &quantize_kv);
  m.def("dequantize_kv", &dequantize_kv);
  m.def("reshape_and_cache(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) k_scale, Tensor(c!) v_cache, Tensor(d!) v_scale, Tensor slot_mapping, bool rotated) -> ()", &reshape_and_cache);
  m.def("instruction_set", &instruction_set);
#ifdef PAGEDKV_CUDA
  m.def("paged_gather(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, Tensor(a!) checksum) -> ()", &paged_gather);
#endif
}
