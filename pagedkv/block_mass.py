"""What attention gave to each block of each sequence, gathered step by step: the statistic that attention-based eviction needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockMass:
    """Softmax mass by row of a batch and logical block, summed over layers and over the queries that were watched.

    Attributes:
        total: float32 `[batch, blocks]`, over all queries so far (H2O, Zhang et al., 2023).
        last: float32 `[batch, blocks]`, of each row's latest query alone (TOVA, Oren et al., 2024).

    Both are as of the last step that was committed.
    """

    def __init__(self) -> None:
        self.total = self.last = torch.zeros(0, 0)
        self._step: tuple[Tensor, Tensor] | None = None  # the two as they will be

    def begin(self, batch: int, blocks: int, device: torch.device) -> None:
        """A step over a batch whose longest row has so many blocks begins; one that was not committed is forgotten."""
        total = torch.zeros(batch, blocks, device=device)
        total[: len(self.total), : self.total.shape[1]] = self.total[:, :blocks]
        self._step = total, torch.zeros_like(total)

    def add(self, mass: Tensor, rows: Tensor) -> None:
        """`mass`: float32 `[queries, blocks]`, as the decode kernel returns it; `rows`: int64 `[queries]`, ascending, the row of each."""
        mass, (total, last) = mass.detach(), self._step
        total.index_add_(0, rows, mass)
        latest = torch.ones_like(rows, dtype=torch.bool)
        latest[:-1] = rows[1:] != rows[:-1]
        last.index_add_(0, rows[latest], mass[latest])

    def commit(self) -> None:
        """The step's mass counts, if one has begun."""
        if self._step is not None:
            (self.total, self.last), self._step = self._step, None

    def choose(self, rows: Sequence[int]) -> None:
        """The batch becomes these rows of itself."""
        self.total, self.last = self.total[rows], self.last[rows]

    def evict(self, row: int, logical_blocks: Sequence[int]) -> None:
        """Blocks of a row are gone, and later ones move up."""
        for mass in (self.total, self.last):
            left = torch.ones(mass.shape[1], dtype=torch.bool, device=mass.device)
            left[list(logical_blocks)] = False
            kept = mass[row, left]
            mass[row] = 0
            mass[row, : len(kept)] = kept
