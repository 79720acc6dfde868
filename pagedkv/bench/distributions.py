"""Float KV caches with known statistics, as the published report drew them, and paged layouts of dense ones.

The generators draw from NumPy in the order that PagedKV-Fusion 0.1.1 documents, so that a seed gives the data
its figures were measured on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Problem:
    """One decode step over an unquantised paged cache; the arguments of `pagedkv.paged_attention`, float32.

    `q [num_seqs, num_heads, head_dim]`, `k, v [num_blocks, block_size, num_kv_heads, head_dim]`, `block_tables`
    int32 `[num_seqs, max_blocks]` (-1 past a sequence's end), `seq_lens` int32 `[num_seqs]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    sm_scale: float

    def to(self, device: torch.device | str) -> Problem:
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Problem(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in moved.items()})


def published(
    rng: np.random.Generator,
    *,
    num_seqs: int,
    max_seq_len: int,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    head_dim: int = 64,
    kv_scale: float = 1.0,
) -> Problem:
    """Normal q, K and V; lengths uniform in 1..max_seq_len; blocks in random order, three of them unused."""
    seq_lens = rng.integers(1, max_seq_len + 1, size=num_seqs).astype(np.int32)
    counts = -(-seq_lens // BLOCK_SIZE)
    num_blocks = int(counts.sum()) + 3
    tables = _tables(rng.permutation(num_blocks), counts)
    q = rng.standard_normal((num_seqs, num_heads, head_dim))
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    k, v = (kv_scale * rng.standard_normal(shape) for _ in range(2))
    return _problem(q, k, v, tables, seq_lens, 1 / math.sqrt(head_dim))


def gaussian(seed: int = 0, head_dim: int = 64) -> Problem:
    """Unit normal K and V: 8 sequences of up to 512 tokens, 8 query heads, 4 KV heads."""
    return published(np.random.default_rng(seed), num_seqs=8, max_seq_len=512, head_dim=head_dim)


def heavy_tailed(seed: int = 0, head_dim: int = 64) -> Problem:
    """K and V eight times as large, and one entry of K in a thousand ten times larger still."""
    rng = np.random.default_rng(seed)
    problem = published(rng, num_seqs=8, max_seq_len=512, kv_scale=8.0, head_dim=head_dim)
    spikes = torch.from_numpy(rng.random(problem.k.shape) < 0.001)
    return dataclasses.replace(problem, k=torch.where(spikes, problem.k * 10, problem.k))


def channel_outliers(seed: int = 0, head_dim: int = 64) -> Problem:
    """Unit normal, but four channels of each K head lie around a constant of 5 to 15, as those of real models do."""
    rng = np.random.default_rng(seed)
    problem = published(rng, num_seqs=8, max_seq_len=512, head_dim=head_dim)
    offsets = np.zeros((problem.k.shape[2], head_dim), np.float32)
    for head in offsets:
        head[rng.choice(head_dim, 4, replace=False)] = rng.uniform(5, 15, 4) * rng.choice([-1, 1], 4)
    return dataclasses.replace(problem, k=problem.k + torch.from_numpy(offsets))


# Those of the published figures; the quality notebook and its tests go over this table.
DISTRIBUTIONS: dict[str, Callable[[int], Problem]] = {"gaussian": gaussian, "heavy_tailed": heavy_tailed}


def causal(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, seed: int = 0) -> Problem:
    """The last `queries` positions of one sequence as one decode step each, over a shuffled paged cache.

    `q [queries, num_heads, head_dim]`, `k, v [tokens, num_kv_heads, head_dim]`; query `i` sees the positions up to
    `tokens - queries + i`. The block that holds the youngest tokens is full already when the early queries read
    it, so its scale may be a little larger than it was when such a query was made.
    """
    queries, (tokens, heads, dim) = q.shape[0], k.shape
    count = math.ceil(tokens / BLOCK_SIZE)
    order = np.random.default_rng(seed).permutation(count)
    place = torch.from_numpy(order)

    def pool(dense: Tensor) -> Tensor:
        padded = torch.zeros(count * BLOCK_SIZE, heads, dim)
        padded[:tokens] = dense
        blocks = torch.empty(count, BLOCK_SIZE, heads, dim)
        blocks[place] = padded.view(count, BLOCK_SIZE, heads, dim)
        return blocks

    seq_lens = torch.arange(tokens - queries + 1, tokens + 1, dtype=torch.int32)
    tables = place.int().expand(queries, count).contiguous()
    return Problem(q.float().contiguous(), pool(k), pool(v), tables, seq_lens, sm_scale)


def _tables(order: np.ndarray, counts: np.ndarray) -> np.ndarray:
    starts = np.cumsum(counts) - counts
    columns = np.arange(counts.max())
    positions = np.minimum(starts[:, None] + columns, len(order) - 1)
    return np.where(columns < counts[:, None], order[positions], -1)


def _problem(q, k, v, tables, seq_lens, sm_scale) -> Problem:
    floats = (torch.from_numpy(np.asarray(x, dtype=np.float32)) for x in (q, k, v))
    return Problem(*floats, torch.from_numpy(tables.astype(np.int32)), torch.from_numpy(seq_lens), sm_scale)
