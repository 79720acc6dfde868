from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from pagedkv.policies.base import Observation, Policy, Sequence


@dataclasses.dataclass(frozen=True)
class KeyNorm(Policy):
    """Keys of small norm are attended to most. L2 norm (Devoto et al., 2024, arXiv:2406.11430).

    `score[block] = -mean over tokens and KV heads of |k|`
    """

    name = "key_norm"
    needs = ("k_cache",)

    def score(self, seen: Observation) -> Tensor:
        return -seen.mean(seen.norms("k"))

    def reference(self, sequence: Sequence) -> np.ndarray:
        return -sequence.mean(np.linalg.norm(sequence.k, axis=-1))
