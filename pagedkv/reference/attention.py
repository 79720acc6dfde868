"""Paged decode attention and the merge of partial results, in NumPy float64."""

from __future__ import annotations

import math

import numpy as np

from pagedkv.reference.arrays import exact
from pagedkv.reference.rotation import rotate


def quant_paged_attention(
    q,
    k_cache,
    k_scale,
    v_cache,
    v_scale,
    block_tables,
    seq_lens,
    sm_scale,
    *,
    sliding_window=None,
    logits_soft_cap=None,
    sinks=None,
    return_lse=False,
    return_block_mass=False,
    rotated=False,
):
    """See `pagedkv.quant_paged_attention`."""
    k_cache, k_scale, v_cache, v_scale = exact(k_cache), exact(k_scale), exact(v_cache), exact(v_scale)

    def decoded(cache, scale, block, offset, head):
        return cache[block, offset, head] * (scale[block, head] if scale.ndim == 2 else scale[block, offset, head])

    return _attention(
        q,
        lambda *where: decoded(k_cache, k_scale, *where),
        lambda *where: decoded(v_cache, v_scale, *where),
        k_cache.shape,
        block_tables,
        seq_lens,
        sm_scale,
        sliding_window,
        logits_soft_cap,
        sinks,
        return_lse,
        return_block_mass,
        rotated,
    )


def paged_attention(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    sm_scale,
    *,
    sliding_window=None,
    logits_soft_cap=None,
    sinks=None,
    return_lse=False,
    return_block_mass=False,
    rotated=False,
):
    """See `pagedkv.paged_attention`."""
    k_cache, v_cache = exact(k_cache), exact(v_cache)
    return _attention(
        q,
        lambda block, offset, head: k_cache[block, offset, head],
        lambda block, offset, head: v_cache[block, offset, head],
        k_cache.shape,
        block_tables,
        seq_lens,
        sm_scale,
        sliding_window,
        logits_soft_cap,
        sinks,
        return_lse,
        return_block_mass,
        rotated,
    )


def _attention(
    q, key, value, cache_shape, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap, sinks, return_lse, return_block_mass,
    rotated,
):  # fmt: skip
    """`key(block, offset, head)` and `value(...)` are one vector of the cache, decoded."""
    q, block_tables, seq_lens = exact(q), exact(block_tables), exact(seq_lens)
    q = rotate(q) if rotated else q
    num_seqs, num_heads, _ = q.shape
    num_blocks, block_size, num_kv_heads, _ = cache_shape
    max_blocks = block_tables.shape[1]

    out = np.zeros(q.shape)
    lse = np.full((num_seqs, num_heads), -np.inf)
    block_mass = np.zeros((num_seqs, max_blocks))
    for s in range(num_seqs):
        length = int(seq_lens[s])
        first = 0 if sliding_window is None else max(0, length - sliding_window)
        positions = range(first, length)
        if not 0 <= length <= max_blocks * block_size or any(not 0 <= block_tables[s, t // block_size] < num_blocks for t in positions):
            out[s], lse[s], block_mass[s] = np.nan, np.nan, np.nan
            continue
        if length == 0:
            continue
        for h in range(num_heads):
            g = h // (num_heads // num_kv_heads)
            logits = []
            for t in positions:
                logit = sm_scale * np.dot(q[s, h], key(block_tables[s, t // block_size], t % block_size, g))
                if logits_soft_cap is not None:
                    logit = logits_soft_cap * math.tanh(logit / logits_soft_cap)
                logits.append(logit)
            largest = max(logits) if not any(math.isnan(x) for x in logits) else math.nan
            weights = [math.exp(x - largest) for x in logits]
            total = sum(weights)
            lse[s, h] = largest + math.log(total)
            for t, weight in zip(positions, weights, strict=True):
                out[s, h] += weight / total * value(block_tables[s, t // block_size], t % block_size, g)
                block_mass[s, t // block_size] += weight / total / num_heads
            if sinks is not None:
                without = lse[s, h]
                with np.errstate(invalid="ignore"):
                    lse[s, h] = np.logaddexp(without, float(exact(sinks)[h]))
                out[s, h] *= math.exp(without - lse[s, h])

    asked = [rotate(out) if rotated else out]
    if return_lse:
        asked.append(lse)
    if return_block_mass:
        asked.append(block_mass)
    return out if len(asked) == 1 else tuple(asked)


def merge_attention_states(out_a, lse_a, out_b, lse_b):
    """See `pagedkv.merge_attention_states`."""
    out_a, lse_a, out_b, lse_b = exact(out_a), exact(lse_a), exact(out_b), exact(lse_b)
    out, lse = np.zeros(out_a.shape), np.full(lse_a.shape, -np.inf)
    for s in range(out.shape[0]):
        for h in range(out.shape[1]):
            with np.errstate(invalid="ignore"):
                lse[s, h] = np.logaddexp(lse_a[s, h], lse_b[s, h])
            largest = np.maximum(lse_a[s, h], lse_b[s, h])
            parts = [(x[s, h], y[s, h]) for x, y in ((out_a, lse_a), (out_b, lse_b)) if y[s, h] != -np.inf]  # empty: whatever its out holds
            weights = [1 if part_lse == largest else math.exp(part_lse - largest) for _, part_lse in parts]
            for (part, _), weight in zip(parts, weights, strict=True):
                out[s, h] += weight / sum(weights) * part
    return out, lse
