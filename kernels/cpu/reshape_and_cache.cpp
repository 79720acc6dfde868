// reshape_and_cache: quantise new tokens straight into their slots of the paged cache.
//
// Tokens are sorted by slot (stably, so the last of two tokens for one slot is written last), which brings
// those of a block together; a thread then owns a block, and no result depends on their number.
#include <algorithm>
#include <vector>

#include "hadamard.h"
#include "parallel.h"
#include "quantize.h"

namespace pagedkv {
namespace {

struct Write {
  int64_t slot, token;
};

// One of K and V, in the terms that writing needs.
struct Plane {
  const void* source;
  int64_t source_stride_token, source_stride_head;
  int8_t* cache;
  int64_t stride_block, stride_token, stride_head;
  float* scale;
  int64_t scale_stride_block, scale_stride_token, scale_stride_head;
};

// The writes [begin, end) that go to one head of one block; `source(w)` is the row to write.
template <class Source>
class BlockHead {
 public:
  BlockHead(const CacheWriteParams& p, const Plane& plane, int64_t head, const Write* begin, const Write* end, const Source& source)
      : p_(p), plane_(plane), begin_(begin), end_(end), source_(source), block_(begin->slot / p.block_size) {
    cache_ = plane.cache + block_ * plane.stride_block + head * plane.stride_head;
    scale_ = plane.scale + block_ * plane.scale_stride_block + head * plane.scale_stride_head;
  }

  void write_with_token_scales() {
    for (const Write* w = begin_; w != end_; ++w) {
      MaxAbs max_abs;
      max_abs.add(source_(w), p_.head_dim);
      const float scale = scale_for(max_abs.value());
      float* stored = scale_ + offset(w) * plane_.scale_stride_token;
      *stored = scale == 0.0f ? 1.0f : scale;
      encode_row(source_(w), *stored, row(offset(w)), p_.head_dim);
    }
  }

  // The scale only grows, until a token at offset 0 starts the block afresh; what the block holds follows it.
  void write_with_block_scale() {
    MaxAbs max_abs;
    for (const Write* w = begin_; w != end_; ++w) max_abs.add(source_(w), p_.head_dim);
    const float needed = scale_for(max_abs.value());
    const float held = held_scale();
    float scale = std::isnan(held) || std::isnan(needed) ? NAN : std::max(held, needed);
    if (scale == 0.0f) scale = 1.0f;

    if (std::isnan(scale) || held == 0.0f) {
      for (int64_t t = 0; t < p_.block_size; ++t) std::memset(row(t), 0, p_.head_dim);
    } else if (scale != held) {
      for (int64_t t = 0; t < p_.block_size; ++t) reencode_row(row(t), held, scale, p_.head_dim);
    }
    *scale_ = scale;
    for (const Write* w = begin_; w != end_; ++w) encode_row(source_(w), scale, row(offset(w)), p_.head_dim);
  }

 private:
  int64_t offset(const Write* w) const { return w->slot - block_ * p_.block_size; }
  int8_t* row(int64_t offset) const { return cache_ + offset * plane_.stride_token; }

  // The scale of what the block holds; 0 where it holds nothing that a scale has to respect, NaN where it is spoilt.
  float held_scale() const {
    const float old = *scale_;
    const bool starts_afresh = offset(begin_) == 0;  // writes are sorted
    // An all-zero block has scale 1 by convention, which says nothing about the values to come.
    if (starts_afresh || old <= 0.0f || (old == 1.0f && holds_only_zeros())) return 0.0f;
    return std::isfinite(old) ? old : NAN;
  }

  bool holds_only_zeros() const {
    for (int64_t t = 0; t < p_.block_size; ++t) {
      if (std::any_of(row(t), row(t) + p_.head_dim, [](int8_t x) { return x != 0; })) return false;
    }
    return true;
  }

  const CacheWriteParams& p_;
  const Plane& plane_;
  const Write *begin_, *end_;
  const Source& source_;
  int64_t block_;
  int8_t* cache_;
  float* scale_;
};

template <class T>
void write_block(const CacheWriteParams& p, const Write* begin, const Write* end) {
  const Plane planes[] = {
      {p.key, p.key_stride_token, p.key_stride_head, p.k_cache, p.k_stride_block, p.k_stride_token, p.k_stride_head, p.k_scale,
       p.k_scale_stride_block, p.k_scale_stride_token, p.k_scale_stride_head},
      {p.value, p.value_stride_token, p.value_stride_head, p.v_cache, p.v_stride_block, p.v_stride_token, p.v_stride_head, p.v_scale,
       p.v_scale_stride_block, p.v_scale_stride_token, p.v_scale_stride_head},
  };
  std::vector<float> rotated(p.rotated ? (end - begin) * p.head_dim : 0);
  for (const Plane& plane : planes) {
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      const auto write = [&](const auto& source) {
        BlockHead target(p, plane, head, begin, end, source);
        p.token_head ? target.write_with_token_scales() : target.write_with_block_scale();
      };
      const T* rows = static_cast<const T*>(plane.source) + head * plane.source_stride_head;
      const auto given = [&](const Write* w) { return rows + w->token * plane.source_stride_token; };
      if (!p.rotated) {
        write(given);
        continue;
      }
      const auto transformed = [&](const Write* w) { return rotated.data() + (w - begin) * p.head_dim; };
      for (const Write* w = begin; w != end; ++w) hadamard_transform(given(w), transformed(w), p.head_dim);
      write(transformed);
    }
  }
}

}  // namespace

// The writes in slot order, then the index at which each block's begin.
size_t reshape_and_cache_workspace(const CacheWriteParams& p) {
  return p.num_tokens * sizeof(Write) + (p.num_tokens + 1) * sizeof(int64_t);
}

void reshape_and_cache(const CacheWriteParams& p, void* workspace, void*) {
  Write* writes = static_cast<Write*>(workspace);
  int64_t* starts = reinterpret_cast<int64_t*>(writes + p.num_tokens);

  int64_t count = 0;
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    const int64_t slot = p.slot_mapping[token];
    if (slot >= 0 && slot < p.num_blocks * p.block_size) writes[count++] = {slot, token};
  }
  const auto order = [](const Write& a, const Write& b) { return a.slot != b.slot ? a.slot < b.slot : a.token < b.token; };
  if (!std::is_sorted(writes, writes + count, order)) std::sort(writes, writes + count, order);

  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i == 0 || writes[i].slot / p.block_size != writes[i - 1].slot / p.block_size) starts[blocks++] = i;
  }
  starts[blocks] = count;

  dispatch_float(p.dtype, [&](auto type) {
    parallel_items(blocks, [&](int64_t b) { write_block<decltype(type)>(p, writes + starts[b], writes + starts[b + 1]); });
  });
}

}  // namespace pagedkv
