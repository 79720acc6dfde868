"""The pages that vLLM hands out, seen as K, V and their scales: each a plane of its own, none interleaved with another.

A page of an INT8 cache has the bytes that vLLM reckons for `int8_per_token_head`, `2 * block_size * num_kv_heads * (head_dim + 4)`:

    | K int8 [block_size, num_kv_heads, head_dim] | V, the same | K scales float32 | V scales float32 |

so rows of data stay aligned, and whatever copies or frees whole pages needs to know nothing of this. Block-head scales fill a part of
the tail. An unquantised page is K, then V.

INT8 holds K rotated by a Hadamard matrix, as q is, which leaves q . k as it was: an outlier channel, as K has them, then costs a token
little. Kernels for tensor cores rotate in passing, K and V alike; elsewhere K is multiplied by the matrix first.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

import pagedkv
from pagedkv.ops.rotation import hadamard_transform

SCALE_BYTES = 4
_READ_TOKENS = 8192  # decoded at a time: what that takes in float32 is then small, and still in a large card's L2


@dataclasses.dataclass(frozen=True)
class Pages:
    """Views of an engine's buffer: K, V `[num_blocks, block_size, num_kv_heads, head_dim]`; scales as `quantize_kv` makes them, or None."""

    memory: Tensor  # [num_blocks, elements of a page], in the buffer's dtype
    k: Tensor
    k_scale: Tensor | None
    v: Tensor
    v_scale: Tensor | None
    in_kernel: bool  # who rotates: the ops, told `rotated=True`; else K is rotated here

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @classmethod
    def view(
        cls, buffer: Tensor, block_size: int, num_kv_heads: int, head_dim: int, granularity: str = "token_head", in_kernel: bool = False
    ) -> Pages:
        """See `buffer`, `[num_blocks, ...]` with the elements of a page side by side in whatever order, as pages: INT8 if it is int8."""
        page = buffer.as_strided((buffer.shape[0], math.prod(buffer.shape[1:])), (buffer.stride(0), 1))
        shape = (buffer.shape[0], block_size, num_kv_heads, head_dim)
        plane = block_size * num_kv_heads * head_dim
        k, v = (page[:, i * plane : (i + 1) * plane].view(shape) for i in range(2))
        if buffer.dtype != torch.int8:
            return cls(page, k, None, v, None, in_kernel)
        scale_shape = shape[:3] if granularity == "token_head" else (shape[0], num_kv_heads)
        scales = math.prod(scale_shape[1:])
        tail = page[:, 2 * plane : 2 * (plane + SCALE_BYTES * scales)].view(torch.float32)
        k_scale, v_scale = (tail[:, i * scales : (i + 1) * scales].view(scale_shape) for i in range(2))
        return cls(page, k, k_scale, v, v_scale, in_kernel)

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """`pagedkv.reshape_and_cache`. Unquantised, what is to be skipped goes to slot 0, which is of vLLM's null block and never read."""
        if self.k_scale is not None:
            if not self.in_kernel:
                key = key @ _rotation(key)
            pagedkv.reshape_and_cache(key, value, self.k, self.k_scale, self.v, self.v_scale, slot_mapping, rotated=self.in_kernel)
            return
        slots = slot_mapping.clamp(min=0)
        block, offset = slots // self.block_size, slots % self.block_size
        self.k[block, offset] = key.to(self.k.dtype)
        self.v[block, offset] = value.to(self.v.dtype)

    def decode(self, q: Tensor, block_tables: Tensor, seq_lens: Tensor, sm_scale: float, **options) -> Tensor:
        """Attention of one token per sequence: `pagedkv.quant_paged_attention`, or `paged_attention`."""
        if self.k_scale is None:
            return pagedkv.paged_attention(q, self.k, self.v, block_tables, seq_lens, sm_scale, **options)
        if not self.in_kernel:
            q, sm_scale = q @ _rotation(q), sm_scale / _size(q)
        return pagedkv.quant_paged_attention(
            q, self.k, self.k_scale, self.v, self.v_scale, block_tables, seq_lens, sm_scale, rotated=self.in_kernel, **options
        )

    def read(self, block_table: Tensor, begin: int, k: Tensor, v: Tensor) -> None:
        """Decode the positions from `begin` on of one sequence into `k` and `v`, contiguous `[num_tokens, num_kv_heads, head_dim]`.

        block_table: int32 `[max_blocks]`.
        """
        end, size = begin + len(k), self.block_size
        for first in range(begin // size, -(-end // size), _READ_TOKENS // size):
            part = self._copy(block_table[first : min(first + _READ_TOKENS // size, -(-end // size))])
            start = first * size
            tokens = slice(max(begin, start), min(end, start + len(part.k) * size))
            within, of_out = slice(tokens.start - start, tokens.stop - start), slice(tokens.start - begin, tokens.stop - begin)
            for out, cache, scale, rotated in (
                (k[of_out], part.k, part.k_scale, True),
                (v[of_out], part.v, part.v_scale, self.in_kernel),
            ):
                if scale is None:
                    out.copy_(cache.flatten(0, 1)[within])
                elif rotated:
                    factor = _size(cache) ** (-0.5 if self.in_kernel else -1.0)
                    values = pagedkv.dequantize_kv(cache, scale * factor).flatten(0, 1)[within].to(out.dtype)
                    torch.mm(values.flatten(0, 1), _rotation(out), out=out.flatten(0, 1))
                else:
                    out.copy_(pagedkv.dequantize_kv(cache, scale).flatten(0, 1)[within])

    def _copy(self, blocks: Tensor) -> Pages:
        """Some of the pages, whole and in order: one gather of 4-byte words, or of whatever an unquantised page is made of."""
        _, size, num_kv_heads, head_dim = self.k.shape
        if self.k_scale is None:
            return Pages.view(self.memory.index_select(0, blocks), size, num_kv_heads, head_dim)
        copied = self.memory.view(torch.int32).index_select(0, blocks).view(torch.int8)
        granularity = "token_head" if self.k_scale.dim() == 3 else "block_head"
        return Pages.view(copied, size, num_kv_heads, head_dim, granularity, self.in_kernel)


def _size(x: Tensor) -> int:
    """Of the blocks of the matrix that rotates the last dimension: the largest power of two that divides it."""
    return x.shape[-1] & -x.shape[-1]


def _rotation(x: Tensor) -> Tensor:
    """What to multiply `x` by: the matrix of `hadamard_transform` without its factor, ones and minus ones, exact in any dtype."""
    return _hadamard(x.shape[-1], x.dtype, x.device)


@functools.cache
def _hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return hadamard_transform(torch.eye(dim)).sign().to(device, dtype)
