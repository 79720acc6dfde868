from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from pagedkv.policies.base import Observation, Policy, Sequence

_LEAST = 1e-12  # length of a key


@dataclasses.dataclass(frozen=True)
class ValueKeyNorm(Policy):
    """A token matters as its value is large and its key small, a page as its tokens do.

    PagedEviction (Chitty-Venkata et al., 2025, arXiv:2509.04377).

    `score[block] = mean over tokens and KV heads of |v| / |k|`, where a key of zeros counts as one of length 1e-12.
    """

    name = "value_key_norm"
    needs = ("k_cache", "v_cache")

    def score(self, seen: Observation) -> Tensor:
        return seen.mean(seen.norms("v") / seen.norms("k").clamp(min=_LEAST))

    def reference(self, sequence: Sequence) -> np.ndarray:
        v, k = (np.linalg.norm(x, axis=-1) for x in (sequence.v, sequence.k))
        return sequence.mean(v / np.maximum(k, _LEAST))
