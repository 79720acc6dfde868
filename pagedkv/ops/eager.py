"""The ops in plain PyTorch, on any device: what runs where no compiler is found."""

from __future__ import annotations

import torch
from torch import Tensor


def eviction_scores(recency, frequency, attention_mass, valid_mask, w_recency=0.4, w_frequency=0.3, w_attention=0.3) -> Tensor:
    total = torch.where(valid_mask, attention_mass, 0.0).sum(dim=1)
    mean = total / valid_mask.sum(dim=1).clamp(min=1)
    return w_recency * recency + w_frequency * frequency + w_attention * mean


def select_eviction_candidates(scores, k) -> Tensor:
    # A stable ascending sort puts NaN last and ties at the lower id; + 0.0 turns -0.0 into 0.0.
    return torch.sort(scores + 0.0, stable=True).indices[:k]


def evict_blocks(recency, frequency, attention_mass, valid_mask, k, w_recency=0.4, w_frequency=0.3, w_attention=0.3):
    scores = eviction_scores(recency, frequency, attention_mass, valid_mask, w_recency, w_frequency, w_attention)
    return select_eviction_candidates(scores, k), scores
