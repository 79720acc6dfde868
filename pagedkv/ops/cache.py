"""Writing new tokens into an INT8 paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.ops import checks, eager, registry


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    k_scale: Tensor,
    v_cache: Tensor,
    v_scale: Tensor,
    slot_mapping: Tensor,
    *,
    rotated: bool = False,
) -> None:
    """Quantise new tokens and write them, in place, to their slots `block * block_size + offset`.

    Token-head scales: each slot and its scale stand alone. Block-head scales: all tokens of the call that fall into one
    block are taken together, in any order, and

    - a token at offset 0 starts the block afresh: what the block held becomes zeros and its scale counts no more;
    - otherwise the scale only grows: to the new tokens' `max|x| / 127` where that is more, and then what the block
      holds is re-quantised, each element by one further rounding (at most half of the new scale);
    - a block that holds zeros only has scale 1, which does not hold back the scale of smaller values to come;
    - NaN or inf in a token makes the scale of its head in that block NaN, and the values there 0, until the block is
      started afresh; no other head or block is touched.

    Args:
        key, value: float16, bfloat16 or float32 `[num_tokens, num_kv_heads, head_dim]`, of one dtype.
        k_cache, v_cache: int8 `[num_blocks, block_size, num_kv_heads, head_dim]`, written.
        k_scale, v_scale: float32 `[num_blocks, num_kv_heads]` or `[num_blocks, block_size, num_kv_heads]`, written; both of
            one rank.
        slot_mapping: int64 `[num_tokens]`. Negative: the token is skipped; so is one past the pool. If a slot is
            named twice, the later token stays (the scale covers both).
        rotated: key and value are multiplied over head_dim by the block-diagonal orthonormal Hadamard matrix, in float32, before
            they are quantised; attention has to be told the same. A NaN or inf spreads over its block of the matrix.

    All tensors live on one device; any strides with a contiguous last dimension. K and V may be slices of one tensor, but not
    share an element.

    Raises:
        TypeError: an argument of another type or dtype.
        ValueError: another shape, device or stride; a K and a V that overlap (as far as slices of one tensor
            show it); with `PAGEDKV_CHECK=1` also a slot past the pool.
    """
    checks.tensors(key=key, value=value, k_cache=k_cache, k_scale=k_scale, v_cache=v_cache, v_scale=v_scale, slot_mapping=slot_mapping)
    checks.booleans(rotated=rotated)
    torch.ops.pagedkv.reshape_and_cache(key, value, k_cache, k_scale, v_cache, v_scale, slot_mapping, rotated=rotated)


registry.define(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) k_scale, Tensor(c!) v_cache, Tensor(d!) v_scale,"
    " Tensor slot_mapping, *, bool rotated=False) -> ()",
    check=checks.reshape_and_cache,
    check_values=checks.reshape_and_cache_values,
    fake=lambda *_: None,
    eager=eager.reshape_and_cache,
)
