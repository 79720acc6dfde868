from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from pagedkv.policies.base import Observation, Policy, Sequence


@dataclasses.dataclass(frozen=True)
class SinksAndRecency(Policy):
    """The first blocks and the latest stay. StreamingLLM (Xiao et al., 2024, arXiv:2309.17453).

    `score[block] = inf` for the first `sink_blocks`, its place for others.

    The paper keeps 4 tokens at the start; here it is whole blocks. It also gives the tokens that are left new positions, which a cache
    that holds K after RoPE cannot.
    """

    sink_blocks: int = 1

    name = "sinks_and_recency"

    def score(self, seen: Observation) -> Tensor:
        return torch.where(seen.places < self.sink_blocks, torch.inf, seen.places.float()).expand(seen.block_tables.shape).contiguous()

    def reference(self, sequence: Sequence) -> np.ndarray:
        places = np.arange(sequence.num_blocks, dtype=np.float64)
        return np.where(places < self.sink_blocks, np.inf, places)
