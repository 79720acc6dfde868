"""Score KV blocks and pick those to evict."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.ops import checks, eager, registry


def eviction_scores(
    recency: Tensor,
    frequency: Tensor,
    attention_mass: Tensor,
    valid_mask: Tensor,
    w_recency: float = 0.4,
    w_frequency: float = 0.3,
    w_attention: float = 0.3,
) -> Tensor:
    """Worth of each KV block, a weighted sum; the lowest is evicted first.

    `scores[b] = w_recency * recency[b] + w_frequency * frequency[b] + w_attention * mean(attention_mass[b, valid])`,
    where the mean is 0 for a block without valid tokens. The rule of PagedKV-Fusion 0.1.1.

    Args:
        recency, frequency: float32 `[num_blocks]`.
        attention_mass: float32 `[num_blocks, block_size]`, softmax mass of each token.
        valid_mask: bool `[num_blocks, block_size]`; what it leaves out is never read into the mean, NaN included.
        w_recency, w_frequency, w_attention: finite in float32.

    Returns:
        float32 `[num_blocks]`.

    Raises:
        TypeError, ValueError: a dtype, shape, device or stride other than the above.
    """
    checks.tensors(recency=recency, frequency=frequency, attention_mass=attention_mass, valid_mask=valid_mask)
    weights = _weights(w_recency, w_frequency, w_attention)
    return torch.ops.pagedkv.eviction_scores(recency, frequency, attention_mass, valid_mask, *weights)


def select_eviction_candidates(scores: Tensor, k: int) -> Tensor:
    """The `k` blocks with the lowest scores, as int64 `[k]` block ids, best candidate first.

    Ascending as numbers (-0.0 equals 0.0), ties to the lower id, `-inf` first, NaN last.

    Args:
        scores: float32 `[num_blocks]`.
        k: `0 <= k <= num_blocks`.

    Raises:
        TypeError, ValueError: another dtype, shape or stride, or `k` out of range.
    """
    checks.tensors(scores=scores)
    k = checks.integer("k", k)
    return torch.ops.pagedkv.select_eviction_candidates(scores, k)


def evict_blocks(
    recency: Tensor,
    frequency: Tensor,
    attention_mass: Tensor,
    valid_mask: Tensor,
    k: int,
    w_recency: float = 0.4,
    w_frequency: float = 0.3,
    w_attention: float = 0.3,
) -> tuple[Tensor, Tensor]:
    """`eviction_scores` and `select_eviction_candidates` in one: `(ids int64 [k], scores float32 [num_blocks])`.

    Equal to the two bit for bit. Arguments and errors as there.
    """
    checks.tensors(recency=recency, frequency=frequency, attention_mass=attention_mass, valid_mask=valid_mask)
    k = checks.integer("k", k)
    weights = _weights(w_recency, w_frequency, w_attention)
    return torch.ops.pagedkv.evict_blocks(recency, frequency, attention_mass, valid_mask, k, *weights)


def _weights(w_recency: float, w_frequency: float, w_attention: float) -> tuple[float, float, float]:
    return checks.number("w_recency", w_recency), checks.number("w_frequency", w_frequency), checks.number("w_attention", w_attention)


registry.define(
    "eviction_scores(Tensor recency, Tensor frequency, Tensor attention_mass, Tensor valid_mask,"
    " float w_recency=0.4, float w_frequency=0.3, float w_attention=0.3) -> Tensor",
    check=checks.eviction_scores,
    fake=lambda recency, *_: torch.empty_like(recency),
    eager=eager.eviction_scores,
)
registry.define(
    "select_eviction_candidates(Tensor scores, SymInt k) -> Tensor",
    check=checks.select_eviction_candidates,
    fake=lambda scores, k: scores.new_empty((k,), dtype=torch.int64),
    eager=eager.select_eviction_candidates,
)
registry.define(
    "evict_blocks(Tensor recency, Tensor frequency, Tensor attention_mass, Tensor valid_mask, SymInt k,"
    " float w_recency=0.4, float w_frequency=0.3, float w_attention=0.3) -> (Tensor, Tensor)",
    check=checks.evict_blocks,
    fake=lambda recency, f, a, v, k, *_: (recency.new_empty((k,), dtype=torch.int64), torch.empty_like(recency)),
    eager=eager.evict_blocks,
)
