"""GPU and CPU kernels for a compressed paged KV cache in LLM decoding."""

import importlib

from pagedkv.ops.attention import merge_attention_states, paged_attention, quant_paged_attention
from pagedkv.ops.cache import reshape_and_cache
from pagedkv.ops.eviction import evict_blocks, eviction_scores, select_eviction_candidates
from pagedkv.ops.quantization import dequantize_kv, quantize_kv
from pagedkv.ops.registry import backend
from pagedkv.paged_cache import KVCacheFull, PagedKVCache
from pagedkv.quant_spec import KVQuantSpec

__version__ = "0.2.0"

__all__ = [
    "KVCacheFull",
    "KVQuantSpec",
    "PagedKVCache",
    "backend",
    "dequantize_kv",
    "evict_blocks",
    "eviction_scores",
    "merge_attention_states",
    "paged_attention",
    "quant_paged_attention",
    "quantize_kv",
    "reference",
    "reshape_and_cache",
    "select_eviction_candidates",
]


def __getattr__(name: str):
    """`pagedkv.reference` is imported when it is first asked for."""
    if name == "reference":
        return importlib.import_module("pagedkv.reference")
    raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
