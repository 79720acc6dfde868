from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from pagedkv.policies.base import Observation, Policy, Sequence


@dataclasses.dataclass(frozen=True)
class LastQueryAttention(Policy):
    """What the last query attended to least goes. TOVA (Oren et al., 2024, arXiv:2401.06104).

    `score[block] = sum over the block's tokens of the last query's softmax mass / tokens`, averaged over query heads.
    """

    name = "last_query_attention"
    needs = ("block_mass",)

    def score(self, seen: Observation) -> Tensor:
        return seen.block_mass / seen.num_tokens.clamp(min=1)

    def reference(self, sequence: Sequence) -> np.ndarray:
        return sequence.block_mass / sequence.num_tokens
