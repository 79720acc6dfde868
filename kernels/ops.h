// The ops as plain C++: raw pointers, sizes, strides. No torch header, no Python.
//
// kernels/cpu and kernels/cuda each define every function declared here, one file an op; bindings.cpp
// adapts torch tensors to them and is compiled once for each backend. Arguments arrive validated
// (pagedkv/ops/checks.py is the one place that validates), so nothing here checks a shape again.
//
// Conventions: strides are in elements; a last dimension is contiguous unless a stride is given for it;
// `stream` is a cudaStream_t on CUDA and null on the CPU; `workspace` is uninitialised memory of the size that the
// op's *_workspace function returned for the same arguments, aligned as torch allocates: to 64 bytes on the CPU, to
// 256 or more on CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagedkv {

enum class DType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kInt8 = 3 };

// ---------------------------------------------------------------------------------------- attention

// One decode step: each sequence has one query token, which sees the keys at positions 0 .. seq_len-1.
// kv head of query head h: h / (num_heads / num_kv_heads).
struct AttentionParams {
  const void* q;  // [num_seqs, num_heads, head_dim], q_dtype
  DType q_dtype;
  int64_t q_stride_seq, q_stride_head;

  const void* k_cache;  // [num_blocks, block_size, num_kv_heads, head_dim], cache_dtype
  const void* v_cache;
  DType cache_dtype;  // kInt8 in quant_paged_attention, a floating type in paged_attention
  int64_t k_stride_block, k_stride_token, k_stride_head;
  int64_t v_stride_block, v_stride_token, v_stride_head;

  const float* k_scale;  // [num_blocks, (block_size,) num_kv_heads]; null in paged_attention
  const float* v_scale;
  int64_t k_scale_stride_block, k_scale_stride_token, k_scale_stride_head;
  int64_t v_scale_stride_block, v_scale_stride_token, v_scale_stride_head;
  bool token_head_scales;  // false: one scale per (block, head), and *_scale_stride_token is 0

  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t block_tables_stride;
  const int32_t* seq_lens;  // [num_seqs]

  int64_t num_seqs, num_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, max_blocks;

  float sm_scale;
  int64_t sliding_window;  // attend to the last `sliding_window` tokens; 0: to all
  float logits_soft_cap;   // cap * tanh(logit / cap); 0: none
  const float* sinks;      // [num_heads], a logit that joins the softmax denominator only; or null
  bool rotated;            // K and V are stored rotated (hadamard.h): so is q before the logits, and the output in the end

  void* out;          // [num_seqs, num_heads, head_dim], q_dtype, contiguous
  float* lse;         // [num_seqs, num_heads], natural log of the whole denominator, sink included; or null
  float* block_mass;  // [num_seqs, max_blocks]; or null
};

size_t paged_attention_workspace(const AttentionParams& p);
void paged_attention(const AttentionParams& p, void* workspace, void* stream);

size_t quant_paged_attention_workspace(const AttentionParams& p);
void quant_paged_attention(const AttentionParams& p, void* workspace, void* stream);

// XORs every 4-byte word of K and V that attention would read into *checksum (0 before): the memory roof of the
// benchmarks, not part of the library's interface. CUDA only.
void paged_gather(const AttentionParams& p, uint32_t* checksum, void* stream);

struct MergeParams {
  const void *out_a, *out_b;  // [num_seqs, num_heads, head_dim], dtype
  int64_t out_a_stride_seq, out_a_stride_head, out_b_stride_seq, out_b_stride_head;
  const float *lse_a, *lse_b;  // [num_seqs, num_heads]
  int64_t lse_a_stride, lse_b_stride;
  DType dtype;
  int64_t num_seqs, num_heads, head_dim;
  void* out;   // contiguous
  float* lse;  // contiguous
};
void merge_attention_states(const MergeParams& p, void* stream);

// ----------------------------------------------------------------------------------------- eviction

struct ScoreParams {
  const float *recency, *frequency;  // [num_blocks]
  const float* attention_mass;       // [num_blocks, block_size]
  const bool* valid_mask;            // [num_blocks, block_size]
  int64_t attention_mass_stride, valid_mask_stride;
  int64_t num_blocks, block_size;
  float w_recency, w_frequency, w_attention;
  float* scores;  // [num_blocks]
};
void eviction_scores(const ScoreParams& p, void* stream);

size_t select_eviction_candidates_workspace(int64_t num_blocks, int64_t k);
void select_eviction_candidates(const float* scores, int64_t num_blocks, int64_t k, int64_t* ids,
                                void* workspace, void* stream);

size_t evict_blocks_workspace(int64_t num_blocks, int64_t k);
void evict_blocks(const ScoreParams& p, int64_t k, int64_t* ids, void* workspace, void* stream);

// -------------------------------------------------------------------- eviction, sequence by sequence

// Softmax mass is accumulated as an integer, so that sums are exact and the order of addition never shows: a mass of 1
// is 2^36, and 2^27 of those fit.
constexpr int kMassFractionBits = 36;

struct MassParams {
  const float* block_mass;      // [num_seqs, max_blocks]
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t block_mass_stride, block_tables_stride;
  int64_t num_seqs, max_blocks, num_blocks;
  double decay;
  int64_t* total;  // [num_blocks], updated
};
void accumulate_block_mass(const MassParams& p, void* stream);

struct SequenceSelectParams {
  const float* scores;  // [num_blocks], or [num_seqs, max_blocks] if by_place
  int64_t scores_stride;
  bool by_place;
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t block_tables_stride;
  const int32_t* seq_lens;  // [num_seqs]
  const int32_t* budgets;   // [num_seqs]; null: `budget` for all
  int64_t budget, protect_first, protect_last;
  int64_t num_seqs, max_blocks, num_blocks, block_size;  // num_blocks: ids at or past it are outside the pool
  int32_t* references;                                   // [num_blocks], updated; null: each block has one holder
  int32_t* new_tables;                                   // contiguous, like block_tables
  int32_t* new_lens;                                     // [num_seqs]
  int32_t* freed;                                        // [num_seqs * max_blocks]
  int32_t* num_freed;                                    // [1]
};
size_t select_per_sequence_workspace(const SequenceSelectParams& p);
void select_per_sequence(const SequenceSelectParams& p, void* workspace, void* stream);

// ------------------------------------------------------------------------------ statistics of K or V

// The tokens of each sequence, in a pool of K or of V. Places of a table, `blocks_per_group` at a time, form groups.
struct PagedTokens {
  const void* cache;  // [num_blocks, block_size, num_kv_heads, head_dim]
  DType dtype;        // kInt8 with a scale, a floating type without
  int64_t stride_block, stride_token, stride_head;
  const float* scale;  // or null
  int64_t scale_stride_block, scale_stride_token, scale_stride_head;
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t block_tables_stride;
  const int32_t* seq_lens;  // [num_seqs]
  int64_t num_seqs, max_blocks, num_blocks, block_size, num_kv_heads, head_dim;
  int64_t blocks_per_group, num_groups;
};

struct TokenMomentsParams {
  PagedTokens tokens;
  const float *shift, *gain;  // [num_seqs, num_groups, num_kv_heads, head_dim]; or both null: 0 and 1
  int64_t shift_stride_seq, shift_stride_group, shift_stride_head;
  int64_t gain_stride_seq, gain_stride_group, gain_stride_head;
  float *sum, *sum_of_squares;  // [num_seqs, max_blocks, block_size, num_kv_heads]
};
void token_moments(const TokenMomentsParams& p, void* stream);

struct ChannelStatisticsParams {
  PagedTokens tokens;
  float *low, *high, *direction;  // [num_seqs, num_groups, num_kv_heads, head_dim]
};
void channel_statistics(const ChannelStatisticsParams& p, void* stream);

// ------------------------------------------------------------------------------------- quantisation

struct QuantizeParams {
  const void* kv;  // [num_blocks, block_size, num_kv_heads, head_dim], dtype
  DType dtype;
  int64_t stride_block, stride_token, stride_head;
  int64_t num_blocks, block_size, num_kv_heads, head_dim;
  bool token_head;
  bool rotated;  // rotate over head_dim first (hadamard.h)
  int8_t* q;     // contiguous, shaped like kv
  float* scale;  // contiguous, [num_blocks, num_kv_heads] or [num_blocks, block_size, num_kv_heads]
};
void quantize_kv(const QuantizeParams& p, void* stream);

struct DequantizeParams {
  const int8_t* q;  // [num_blocks, block_size, num_kv_heads, head_dim]
  int64_t stride_block, stride_token, stride_head;
  const float* scale;
  int64_t scale_stride_block, scale_stride_token, scale_stride_head;  // token stride 0: block-head
  int64_t num_blocks, block_size, num_kv_heads, head_dim;
  float* kv;  // contiguous
};
void dequantize_kv(const DequantizeParams& p, void* stream);

// Both K and V of one call; `stride_token` of key and value walks num_tokens.
struct CacheWriteParams {
  const void *key, *value;  // [num_tokens, num_kv_heads, head_dim], dtype
  DType dtype;
  int64_t key_stride_token, key_stride_head, value_stride_token, value_stride_head;
  int8_t *k_cache, *v_cache;  // [num_blocks, block_size, num_kv_heads, head_dim]
  int64_t k_stride_block, k_stride_token, k_stride_head;
  int64_t v_stride_block, v_stride_token, v_stride_head;
  float *k_scale, *v_scale;
  int64_t k_scale_stride_block, k_scale_stride_token, k_scale_stride_head;
  int64_t v_scale_stride_block, v_scale_stride_token, v_scale_stride_head;
  bool token_head;
  bool rotated;  // rotate key and value over head_dim first (hadamard.h)
  const int64_t* slot_mapping;  // [num_tokens]; negative: skip; past the pool: skip
  int64_t num_tokens, num_kv_heads, head_dim, num_blocks, block_size;
};
size_t reshape_and_cache_workspace(const CacheWriteParams& p);
void reshape_and_cache(const CacheWriteParams& p, void* workspace, void* stream);

// What the backend was built for: "avx512_vnni", "avx2", "portable", "sm_90", ...
const char* instruction_set();

}  // namespace pagedkv
