"""INT8 encoding of KV blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.ops import checks, eager, registry


def quantize_kv(kv: Tensor, granularity: str = "block_head", *, rotated: bool = False) -> tuple[Tensor, Tensor]:
    """Encode KV blocks as int8 with one float32 scale per group: `kv ~ q * scale`.

    Symmetric: `scale = max|x| / 127` over a group, `q = round(x / scale)` half to even, in -127..127. An all-zero group
    has scale 1. A scale that would be subnormal is rounded up, and one whose product with 127 would overflow is rounded
    down, so that every finite group keeps `|x - q * scale| <= scale / 2` up to one float32 rounding. A group that holds
    NaN or inf gets scale NaN and q 0, and touches no other.

    Args:
        kv: float16, bfloat16 or float32 `[num_blocks, block_size, num_kv_heads, head_dim]`; any strides with a
            contiguous last dimension. `block_size` 1 to 256, `head_dim` a multiple of 8 up to 256.
        granularity: `"block_head"`: a group is one head of one block; `"token_head"`: one head of one token.
        rotated: `kv` is multiplied over head_dim by the block-diagonal orthonormal Hadamard matrix first, in float32; `dequantize_kv`
            gives it back as it is stored, rotated.

    Returns:
        `(q, scale)`, contiguous: int8 like `kv`, and float32 `[num_blocks, num_kv_heads]` or
        `[num_blocks, block_size, num_kv_heads]`.

    Raises:
        TypeError, ValueError: a type, dtype, shape, stride or granularity other than the above.
    """
    checks.tensors(kv=kv)
    if not isinstance(granularity, str):
        raise TypeError(f"granularity: expected a str, got {type(granularity).__name__}")
    checks.booleans(rotated=rotated)
    return torch.ops.pagedkv.quantize_kv(kv, granularity, rotated=rotated)


def dequantize_kv(q: Tensor, scale: Tensor) -> Tensor:
    """Decode what `quantize_kv` made: `q * scale`, float32.

    Args:
        q: int8 `[num_blocks, block_size, num_kv_heads, head_dim]`.
        scale: float32 `[num_blocks, num_kv_heads]` or `[num_blocks, block_size, num_kv_heads]`; the rank says the granularity.

    Returns:
        float32 like `q`, contiguous.

    Raises:
        TypeError, ValueError: a type, dtype, shape, device or stride other than the above.
    """
    checks.tensors(q=q, scale=scale)
    return torch.ops.pagedkv.dequantize_kv(q, scale)


def _fake_quantize(kv: Tensor, granularity: str, rotated: bool) -> tuple[Tensor, Tensor]:
    num_blocks, block_size, num_kv_heads, _ = kv.shape
    groups = (num_blocks, block_size, num_kv_heads) if granularity == "token_head" else (num_blocks, num_kv_heads)
    return kv.new_empty(kv.shape, dtype=torch.int8), kv.new_empty(groups, dtype=torch.float32)


registry.define(
    'quantize_kv(Tensor kv, str granularity="block_head", *, bool rotated=False) -> (Tensor, Tensor)',
    check=checks.quantize_kv,
    fake=_fake_quantize,
    eager=eager.quantize_kv,
)
registry.define(
    "dequantize_kv(Tensor q, Tensor scale) -> Tensor",
    check=checks.dequantize_kv,
    fake=lambda q, scale: q.new_empty(q.shape, dtype=torch.float32),
    eager=eager.dequantize_kv,
)
