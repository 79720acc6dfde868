"""Statistics of K or V in NumPy."""

from __future__ import annotations

import numpy as np

from pagedkv.reference.arrays import exact
from pagedkv.reference.quantization import dequantize_kv


def paged_tokens(cache, scale, block_tables, seq_lens):
    """The tokens of each sequence, decoded: float64 `[tokens, num_kv_heads, head_dim]`, or None where its length cannot be.

    A token in a block outside the pool is NaN.
    """
    cache = exact(cache) if scale is None else dequantize_kv(cache, scale)
    block_tables, seq_lens = exact(block_tables), exact(seq_lens)
    block_size = cache.shape[1]
    for table, length in zip(block_tables, seq_lens.tolist(), strict=True):
        if not 0 <= length <= len(table) * block_size:
            yield None
            continue
        tokens = np.full((length, *cache.shape[2:]), np.nan)
        for t in range(length):
            block = table[t // block_size]
            if 0 <= block < len(cache):
                tokens[t] = cache[block, t % block_size]
        yield tokens


def token_moments(cache, scale, block_tables, seq_lens, *, blocks_per_group=1, shift=None, gain=None):
    """See `pagedkv.token_moments`."""
    block_tables = exact(block_tables)
    _, block_size, num_kv_heads, _ = cache.shape
    sums, squares = (np.zeros((len(block_tables), block_tables.shape[1] * block_size, num_kv_heads)) for _ in range(2))
    for s, tokens in enumerate(paged_tokens(cache, scale, block_tables, seq_lens)):
        if tokens is None:
            sums[s] = squares[s] = np.nan
            continue
        for t, x in enumerate(tokens):
            if shift is not None:
                group = t // block_size // blocks_per_group
                x = (x - exact(shift)[s, group]) * exact(gain)[s, group]
            sums[s, t], squares[s, t] = x.sum(-1), (x * x).sum(-1)
    shape = (*block_tables.shape, block_size, num_kv_heads)
    return sums.reshape(shape), squares.reshape(shape)


def channel_statistics(cache, scale, block_tables, seq_lens, *, blocks_per_group):
    """See `pagedkv.channel_statistics`."""
    block_tables, lens = exact(block_tables), exact(seq_lens)
    num_blocks, block_size, *heads = cache.shape
    num_groups = -(-block_tables.shape[1] // blocks_per_group)
    low, high, direction = (np.full((len(block_tables), num_groups, *heads), value) for value in (np.inf, -np.inf, 0.0))
    for s, tokens in enumerate(paged_tokens(cache, scale, block_tables, seq_lens)):
        for g in range(num_groups):
            places = range(g * blocks_per_group, min((g + 1) * blocks_per_group, block_tables.shape[1]))
            held = [j for j in places if j * block_size < lens[s]]
            if tokens is None or any(not 0 <= block_tables[s, j] < num_blocks for j in held):
                low[s, g] = high[s, g] = direction[s, g] = np.nan
                continue
            for x in tokens[g * blocks_per_group * block_size : (g + 1) * blocks_per_group * block_size]:
                low[s, g], high[s, g] = np.fmin(low[s, g], x), np.fmax(high[s, g], x)
                norm = np.sqrt((x * x).sum(-1, keepdims=True))
                direction[s, g] += x * np.divide(1.0, norm, out=np.zeros_like(norm), where=norm != 0)
    return low, high, direction
