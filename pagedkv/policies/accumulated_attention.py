from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from pagedkv.policies.base import Observation, Policy, Sequence


@dataclasses.dataclass(frozen=True)
class AccumulatedAttention(Policy):
    """Heavy hitters: what was attended to most will be again. H2O (Zhang et al., 2023, arXiv:2306.14048).

    `score[block] = sum over queries and over the block's tokens of softmax mass / tokens`, averaged over query heads.

    The sum is the caller's, by `accumulate_block_mass` after each decode step: with decay 1 it is the paper's, below 1 it forgets. H2O
    keeps the recent half of its budget besides: give `select_per_sequence` a `protect_last`.
    """

    name = "accumulated_attention"
    needs = ("total_mass",)

    def score(self, seen: Observation) -> Tensor:
        return seen.total_mass / seen.num_tokens.clamp(min=1)

    def reference(self, sequence: Sequence) -> np.ndarray:
        return sequence.total_mass / sequence.num_tokens
