"""GPU and CPU kernels for a compressed paged KV cache in LLM decoding."""

from pagedkv.ops.eviction import evict_blocks, eviction_scores, select_eviction_candidates
from pagedkv.ops.registry import backend

__version__ = "0.2.0"

__all__ = [
    "backend",
    "evict_blocks",
    "eviction_scores",
    "select_eviction_candidates",
]
