from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from pagedkv.policies.base import Observation, Policy, Sequence


@dataclasses.dataclass(frozen=True)
class ValueKeyNorm(Policy):
    """A token matters as its value is large and its key small, a page as its tokens do.

    PagedEviction (Chitty-Venkata et al., 2025, arXiv:2509.04377).

    `score[block] = mean over tokens and KV heads of |v| / |k|`
    """

    name = "value_key_norm"
    needs = ("k_cache", "v_cache")

    def score(self, seen: Observation) -> Tensor:
        return seen.mean(seen.norms("v") / seen.norms("k"))

    def reference(self, sequence: Sequence) -> np.ndarray:
        return sequence.mean(np.linalg.norm(sequence.v, axis=-1) / np.linalg.norm(sequence.k, axis=-1))
