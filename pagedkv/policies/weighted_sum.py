from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from pagedkv.ops.eviction import eviction_scores
from pagedkv.policies.base import Observation, Policy, Sequence

_LEAST = 1e-30  # of the largest total: where nothing was attended to, frequency is 0


@dataclasses.dataclass(frozen=True)
class WeightedSum(Policy):
    """Recency, frequency and attention, weighed against each other: the rule of PagedKV-Fusion 0.1.1, `pagedkv.eviction_scores`.

    `score = w_recency * recency + w_frequency * frequency + w_attention * attention`

    The published demonstration drew its statistics at random. Here they are measured: `recency` is a block's place over the number of
    blocks (the newest: 1), `frequency` what all queries attended to over the most that a block of the sequence got, `attention` what
    the last query attended to, a token.
    """

    w_recency: float = 0.4
    w_frequency: float = 0.3
    w_attention: float = 0.3

    name = "weighted_sum"
    needs = ("block_mass", "total_mass")

    def score(self, seen: Observation) -> Tensor:
        held = seen.num_tokens > 0
        recency = (seen.places + 1) / seen.num_blocks.clamp(min=1)
        total = torch.where(held, seen.total_mass, 0.0)
        frequency = total / total.amax(1, keepdim=True).clamp(min=_LEAST)
        attention = seen.block_mass / seen.num_tokens.clamp(min=1)
        one_token_a_place = (x.reshape(-1, 1) for x in (attention, held))
        weights = (self.w_recency, self.w_frequency, self.w_attention)
        return eviction_scores(recency.float().flatten(), frequency.flatten(), *one_token_a_place, *weights).view(held.shape)

    def reference(self, sequence: Sequence) -> np.ndarray:
        recency = (np.arange(sequence.num_blocks) + 1) / sequence.num_blocks
        frequency = sequence.total_mass / max(sequence.total_mass.max(), _LEAST)
        attention = sequence.block_mass / sequence.num_tokens
        return self.w_recency * recency + self.w_frequency * frequency + self.w_attention * attention
