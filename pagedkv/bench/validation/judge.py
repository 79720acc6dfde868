"""How an output is judged: the contract's tolerance, and the row that says what came of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

FLOOR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-3}


def as_float64(x) -> np.ndarray:
    """A tensor (bfloat16 too) or an array as float64."""
    return x.detach().double().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, dtype=np.float64)


def max_error(got, want) -> float:
    """The largest absolute difference; infinite where `got` is not finite and `want` is, or the other way round.

    A NaN or an infinity that `want` holds too is no error.
    """
    got, want = as_float64(got), as_float64(want)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, expected {want.shape}")
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    finite = np.isfinite(got) & np.isfinite(want)
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.where(finite, np.abs(got - want), np.inf))
    return float(difference.max(initial=0.0))


def tolerance(yardstick, want, q_dtype: torch.dtype, out_dtype: torch.dtype) -> float:
    """The contract's rule: twice PyTorch's own error in `q`'s dtype (`yardstick`), plus a floor.

    PyTorch's error counts as at least half a unit in the last place of the largest value, in `out_dtype`: it may land on the right
    digits by luck, which no implementation can be asked to double. Where PyTorch overflows, only that is granted.
    """
    want = as_float64(want)
    largest = np.abs(want[np.isfinite(want)]).max(initial=0.0)
    rounding = largest * torch.finfo(out_dtype).eps / 2
    error = max_error(yardstick, want)
    return 2 * max(rounding, error if math.isfinite(error) else 0.0) + FLOOR[q_dtype]


def worst(results: list, want, yardstick, q_dtype: torch.dtype) -> tuple[float, float]:
    """`(max_error, tolerance)` of the worst sequence among `results`, each judged sequence by sequence (first dimension)."""
    pairs = [
        (max_error(result[s], want[s]), tolerance(yardstick[s], want[s], q_dtype, result.dtype))
        for result in results
        for s in range(len(want))
    ]
    return max(pairs, key=lambda pair: pair[0] / pair[1], default=(0.0, FLOOR[q_dtype]))


@dataclass(frozen=True)
class Check:
    """One judged output; `detail` says which of a case's many (cache format, output, size)."""

    op: str
    case: str
    dtype: str
    detail: str
    error: float
    tolerance: float
    judge: str = "pagedkv.reference"
    reason: str | None = None  # why there is no output
    absent: bool = False  # this machine cannot hold the case

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    @property
    def severity(self) -> float:
        if self.error == 0:
            return 0.0
        return self.error / self.tolerance if self.tolerance > 0 else math.inf


def merged(checks: Iterable[Check]) -> Iterator[dict]:
    """A row for each run of checks of one (op, case, dtype): how many, the worst, and whether all are `ok`.

    `max_error` and `tolerance` are those of the check nearest to (or furthest past) its tolerance; an infinite error is null.
    """
    for (op, case, dtype), group in itertools.groupby(checks, key=lambda c: (c.op, c.case, c.dtype)):
        group = list(group)
        worst = max(group, key=lambda c: c.severity)
        row = {"op": op, "case": case, "dtype": dtype}
        if worst.absent:
            yield row | {"status": "absent", "reason": worst.reason, "ok": None}
            continue
        row |= {"status": "measured", "checks": len(group), "worst": worst.detail, "judge": worst.judge}
        row |= {"max_error": worst.error if math.isfinite(worst.error) else None, "tolerance": worst.tolerance}
        yield row | {"ok": all(c.ok for c in group)} | ({"reason": worst.reason} if worst.reason else {})
