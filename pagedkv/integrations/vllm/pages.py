"""The pages that vLLM hands out, seen as K, V and their scales: each a plane of its own, none interleaved with another.

A page of an INT8 cache has the bytes that vLLM reckons for `int8_per_token_head`, `2 * block_size * num_kv_heads * (head_dim + 4)`:

    | K int8 [block_size, num_kv_heads, head_dim] | V, the same | K scales float32 | V scales float32 |

so rows of data stay aligned, and whatever copies or frees whole pages needs to know nothing of this. Block-head scales fill a part of
the tail. An unquantised page is K, then V.

INT8 holds K rotated, `k H` with H the matrix of `ops.rotation.hadamard_transform` without its factor: entries 1 and -1, exact in any dtype.
`(q H) . (k H) = size * q . k`, which the scale of the logits takes back. An outlier channel, as K has them, then costs a token little.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

import pagedkv
from pagedkv.ops.rotation import hadamard_transform

SCALE_BYTES = 4


class Pages(NamedTuple):
    """Views into the engine's buffer: `[num_blocks, block_size, num_kv_heads, head_dim]`, scales as in `pagedkv.quantize_kv` or None."""

    k: Tensor
    k_scale: Tensor | None
    v: Tensor
    v_scale: Tensor | None

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @classmethod
    def view(cls, buffer: Tensor, block_size: int, num_kv_heads: int, head_dim: int, granularity: str) -> Pages:
        """See `buffer`, `[num_blocks, ...]` with the elements of a page side by side in whatever order, as pages: INT8 if it is int8."""
        page = buffer.as_strided((buffer.shape[0], math.prod(buffer.shape[1:])), (buffer.stride(0), 1))
        shape = (buffer.shape[0], block_size, num_kv_heads, head_dim)
        plane = block_size * num_kv_heads * head_dim
        k, v = (page[:, i * plane : (i + 1) * plane].view(shape) for i in range(2))
        if buffer.dtype != torch.int8:
            return cls(k, None, v, None)
        scale_shape = shape[:3] if granularity == "token_head" else (shape[0], num_kv_heads)
        scales = math.prod(scale_shape[1:])
        tail = page[:, 2 * plane : 2 * (plane + SCALE_BYTES * scales)].view(torch.float32)
        k_scale, v_scale = (tail[:, i * scales : (i + 1) * scales].view(scale_shape) for i in range(2))
        return cls(k, k_scale, v, v_scale)

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """`pagedkv.reshape_and_cache`. Unquantised, what is to be skipped goes to slot 0, which is of vLLM's null block and never read."""
        if self.k_scale is not None:
            key, _ = rotate(key)
            pagedkv.reshape_and_cache(key, value, self.k, self.k_scale, self.v, self.v_scale, slot_mapping)
            return
        slots = slot_mapping.clamp(min=0)
        block, offset = slots // self.block_size, slots % self.block_size
        self.k[block, offset] = key.to(self.k.dtype)
        self.v[block, offset] = value.to(self.v.dtype)

    def decode(self, q: Tensor, block_tables: Tensor, seq_lens: Tensor, sm_scale: float, **options) -> Tensor:
        """Attention of one token per sequence: `pagedkv.quant_paged_attention`, or `paged_attention`."""
        if self.k_scale is None:
            return pagedkv.paged_attention(q, self.k, self.v, block_tables, seq_lens, sm_scale, **options)
        q, size = rotate(q)
        sm_scale /= size
        return pagedkv.quant_paged_attention(q, self.k, self.k_scale, self.v, self.v_scale, block_tables, seq_lens, sm_scale, **options)

    def tokens(self, block_table: Tensor, begin: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of the positions `begin .. end-1` of one sequence, dense `[end - begin, num_kv_heads, head_dim]`."""
        first = begin // self.block_size
        blocks = block_table[first : -(-end // self.block_size)].long()
        within = slice(begin - first * self.block_size, end - first * self.block_size)
        if self.k_scale is None:
            return tuple(cache[blocks].flatten(0, 1)[within].to(dtype) for cache in (self.k, self.v))
        k, v = (
            pagedkv.dequantize_kv(cache[blocks], scale[blocks]).flatten(0, 1)[within].to(dtype)
            for cache, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        k, size = rotate(k)
        return k.div_(size), v


def rotate(x: Tensor) -> tuple[Tensor, int]:
    """`x H`, and H's size: the rotation of `hadamard_transform` without its factor, once more and over that size its own inverse."""
    matrix, size = _hadamard(x.shape[-1], x.dtype, x.device)
    return x @ matrix, size


@functools.cache
def _hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
    size = dim & -dim  # of its blocks: the largest power of two that divides the dimension
    return (hadamard_transform(torch.eye(dim)) * size**0.5).round().to(device, dtype), size
