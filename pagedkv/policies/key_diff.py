from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from pagedkv.ops.statistics import channel_statistics, token_moments
from pagedkv.policies.base import Observation, Policy, Sequence


@dataclasses.dataclass(frozen=True)
class KeyDiff(Policy):
    """Keys that point where all keys point say little. KeyDiff (Park et al., 2025, arXiv:2504.15364).

    `anchor = mean over tokens of k / |k|`, `score[block] = -mean over tokens and KV heads of cos(k, anchor)`
    """

    name = "key_diff"
    needs = ("k_cache",)

    def score(self, seen: Observation) -> Tensor:
        tokens = (seen.k_cache, seen.k_scale, seen.block_tables, seen.seq_lens)
        whole = max(1, seen.block_tables.shape[1])  # one group: the sequence
        _, _, direction = channel_statistics(*tokens, blocks_per_group=whole)
        anchor = torch.nn.functional.normalize(direction, dim=-1)
        along, _ = token_moments(*tokens, blocks_per_group=whole, shift=torch.zeros_like(anchor), gain=anchor)
        return -seen.mean(along / seen.norms("k").clamp(min=1e-12))

    def reference(self, sequence: Sequence) -> np.ndarray:
        unit = _unit(sequence.k)
        return -sequence.mean((unit * _unit(unit.mean(0))).sum(-1))


def _unit(x: np.ndarray) -> np.ndarray:
    """Vectors of length 1; one of zeros stays what it is, and points nowhere."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)
