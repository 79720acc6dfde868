"""GPU and CPU kernels for a compressed paged KV cache in LLM decoding."""

import importlib

from pagedkv import policies
from pagedkv.ops.attention import merge_attention_states, paged_attention, quant_paged_attention
from pagedkv.ops.cache import reshape_and_cache
from pagedkv.ops.eviction import evict_blocks, eviction_scores, select_eviction_candidates
from pagedkv.ops.quantization import dequantize_kv, quantize_kv
from pagedkv.ops.registry import backend
from pagedkv.ops.sequence_eviction import MASS_UNIT, accumulate_block_mass, select_per_sequence
from pagedkv.ops.statistics import channel_statistics, token_moments
from pagedkv.paged_cache import KVCacheFull, PagedKVCache
from pagedkv.quant_spec import KVQuantSpec

__version__ = "0.2.0"

__all__ = [
    "MASS_UNIT",
    "KVCacheFull",
    "KVQuantSpec",
    "PagedKVCache",
    "accumulate_block_mass",
    "backend",
    "channel_statistics",
    "dequantize_kv",
    "evict_blocks",
    "eviction_scores",
    "merge_attention_states",
    "paged_attention",
    "policies",
    "quant_paged_attention",
    "quantize_kv",
    "reference",
    "reshape_and_cache",
    "select_eviction_candidates",
    "select_per_sequence",
    "token_moments",
]


def __getattr__(name: str):
    """`pagedkv.reference` is imported when it is first asked for."""
    if name == "reference":
        return importlib.import_module("pagedkv.reference")
    raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
