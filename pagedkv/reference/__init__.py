"""Each op again in NumPy float64, as plain loops: the ground truth that tests and notebooks measure against.

Slow on purpose. Every function takes the arguments of its namesake in `pagedkv`, as torch tensors (on any device) or
arrays, and returns arrays. Floating-point results are float64, except scales and scores' inputs, which are
float32 by definition: a scale is part of the encoding.
"""

from pagedkv.reference.attention import merge_attention_states, paged_attention, quant_paged_attention
from pagedkv.reference.cache import reshape_and_cache
from pagedkv.reference.eviction import evict_blocks, eviction_scores, select_eviction_candidates
from pagedkv.reference.quantization import dequantize_kv, quantize_kv
from pagedkv.reference.sequence_eviction import accumulate_block_mass, select_per_sequence
from pagedkv.reference.statistics import channel_statistics, token_moments
from pagedkv.reference.tolerance import allowed_error, attention_like_pytorch, outside_tolerance

__all__ = [
    "accumulate_block_mass",
    "allowed_error",
    "attention_like_pytorch",
    "channel_statistics",
    "dequantize_kv",
    "evict_blocks",
    "eviction_scores",
    "merge_attention_states",
    "outside_tolerance",
    "paged_attention",
    "quant_paged_attention",
    "quantize_kv",
    "reshape_and_cache",
    "select_eviction_candidates",
    "select_per_sequence",
    "token_moments",
]
