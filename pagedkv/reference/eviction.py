"""Eviction scores and selection in NumPy."""

from __future__ import annotations

import math

import numpy as np

from pagedkv.reference.arrays import exact


def eviction_scores(recency, frequency, attention_mass, valid_mask, w_recency=0.4, w_frequency=0.3, w_attention=0.3):
    """See `pagedkv.eviction_scores`."""
    recency, frequency, attention_mass, valid_mask = (exact(x) for x in (recency, frequency, attention_mass, valid_mask))
    scores = np.zeros(len(recency))
    for b in range(len(scores)):
        valid = [mass for mass, is_valid in zip(attention_mass[b], valid_mask[b], strict=True) if is_valid]
        mean = sum(valid) / len(valid) if valid else 0.0
        scores[b] = w_recency * recency[b] + w_frequency * frequency[b] + w_attention * mean
    return scores


def select_eviction_candidates(scores, k):
    """See `pagedkv.select_eviction_candidates`."""
    scores = exact(scores)
    order = sorted(range(len(scores)), key=lambda b: (math.isnan(scores[b]), 0 if math.isnan(scores[b]) else scores[b], b))
    return np.array(order[:k], dtype=np.int64)


def evict_blocks(recency, frequency, attention_mass, valid_mask, k, w_recency=0.4, w_frequency=0.3, w_attention=0.3):
    """See `pagedkv.evict_blocks`."""
    scores = eviction_scores(recency, frequency, attention_mass, valid_mask, w_recency, w_frequency, w_attention)
    return select_eviction_candidates(scores, k), scores
