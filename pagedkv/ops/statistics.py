"""Statistics of the K or V that sequences hold: what eviction rules that look at the cache itself are made of.

Two reductions of the same tokens: over the channels of each token, and over the tokens of each channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.ops import checks, eager, registry


def token_moments(
    cache: Tensor,
    scale: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    blocks_per_group: int = 1,
    shift: Tensor | None = None,
    gain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of each token's vector `y = (x - shift) * gain`, the sum and the sum of squares over channels, head by head.

    `sum_of_squares` of x itself is its squared norm; with gain `w`, `sum` is the dot product with w; both give the standard deviation.

    Args:
        cache: K or V. int8, or float16, bfloat16 or float32, `[num_blocks, block_size, num_kv_heads, head_dim]`, as attention takes it.
        scale: float32 `[num_blocks, num_kv_heads]` or `[num_blocks, block_size, num_kv_heads]` of an int8 cache; None of another.
        block_tables: int32 `[num_seqs, max_blocks]`. Entries past the last block of a sequence are not read.
        seq_lens: int32 `[num_seqs]`.
        blocks_per_group: so many places of a table, from the first on, share a shift and a gain; `num_groups` is
            `ceil(max_blocks / blocks_per_group)`.
        shift, gain: float32 `[num_seqs, num_groups, num_kv_heads, head_dim]`; both or neither (0 and 1).

    All tensors live on one device; any strides with a contiguous last dimension.

    Returns:
        `(sum, sum_of_squares)`, float32 `[num_seqs, max_blocks, block_size, num_kv_heads]`. 0 past the end of a sequence; NaN in a block
        outside the pool, and all over a sequence whose length is negative or past its table.

    Raises:
        TypeError, ValueError: a type, dtype, shape, device or stride other than the above; with `PAGEDKV_CHECK=1` also a bad block id
            or length.
    """
    checks.tensors(cache=cache, block_tables=block_tables, seq_lens=seq_lens)
    checks.tensors(**{name: x for name, x in (("scale", scale), ("shift", shift), ("gain", gain)) if x is not None})
    blocks_per_group = checks.integer("blocks_per_group", blocks_per_group)
    return torch.ops.pagedkv.token_moments(cache, scale, block_tables, seq_lens, blocks_per_group=blocks_per_group, shift=shift, gain=gain)


def channel_statistics(
    cache: Tensor, scale: Tensor | None, block_tables: Tensor, seq_lens: Tensor, *, blocks_per_group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each channel over the tokens of a group: lowest and highest value, and the sum of the tokens' unit vectors.

    Args:
        cache, scale, block_tables, seq_lens, blocks_per_group: as in `token_moments`.

    Returns:
        `(low, high, direction)`, float32 `[num_seqs, num_groups, num_kv_heads, head_dim]`; `direction` is the sum of `x / |x|`, in which
        a zero vector counts as zero. A group without tokens has inf, -inf and 0. `low` and `high` leave NaN out, `direction` does not.
        NaN in a group with a block outside the pool, and all over a sequence whose length is negative or past its table.

    Raises:
        TypeError, ValueError: as in `token_moments`.
    """
    checks.tensors(cache=cache, block_tables=block_tables, seq_lens=seq_lens)
    if scale is not None:
        checks.tensors(scale=scale)
    blocks_per_group = checks.integer("blocks_per_group", blocks_per_group)
    return torch.ops.pagedkv.channel_statistics(cache, scale, block_tables, seq_lens, blocks_per_group=blocks_per_group)


def _fake_moments(cache: Tensor, scale, block_tables: Tensor, *_) -> tuple[Tensor, Tensor]:
    sizes = (*block_tables.shape, *cache.shape[1:3])
    return cache.new_empty(sizes, dtype=torch.float32), cache.new_empty(sizes, dtype=torch.float32)


def _fake_channels(cache: Tensor, scale, block_tables: Tensor, seq_lens, blocks_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks_per_group = torch.sym_max(blocks_per_group, 1)  # of a symbol, it is not yet known that it is no less
    num_groups = (block_tables.shape[1] + blocks_per_group - 1) // blocks_per_group
    sizes = (block_tables.shape[0], num_groups, *cache.shape[2:])
    return tuple(cache.new_empty(sizes, dtype=torch.float32) for _ in range(3))


registry.define(
    "token_moments(Tensor cache, Tensor? scale, Tensor block_tables, Tensor seq_lens, *, SymInt blocks_per_group=1,"
    " Tensor? shift=None, Tensor? gain=None) -> (Tensor, Tensor)",
    check=checks.token_moments,
    check_values=checks.paged_tokens_values,
    fake=_fake_moments,
    eager=eager.token_moments,
)
registry.define(
    "channel_statistics(Tensor cache, Tensor? scale, Tensor block_tables, Tensor seq_lens, *, SymInt blocks_per_group)"
    " -> (Tensor, Tensor, Tensor)",
    check=checks.channel_statistics,
    check_values=checks.paged_tokens_values,
    fake=_fake_channels,
    eager=eager.channel_statistics,
)
