"""Scoring and selection against the reference: values, order, ties, every special number."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

import pagedkv
from pagedkv import reference
from pagedkv.bench.validation.judge import Check, as_float64, max_error, tolerance

_WEIGHTS = {"w_recency": 0.4, "w_frequency": 0.3, "w_attention": 0.3}


def checks(device: torch.device, quick: bool) -> Iterator[Check]:
    yield from _scores(device, quick)
    yield from _selection(device, quick)
    yield from _fused(device, quick)


def _statistics(num_blocks: int, block_size: int, device: torch.device, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((num_blocks,), (num_blocks,), (num_blocks, block_size))
    made = [torch.rand(size, generator=generator) for size in sizes]
    return [x.to(device) for x in (*made, torch.rand((num_blocks, block_size), generator=generator) > 0.2)]


def _torch_scores(recency: Tensor, frequency: Tensor, mass: Tensor, valid: Tensor) -> Tensor:
    mean = torch.where(valid, mass, 0).sum(1) / valid.sum(1).clamp(min=1)
    return 0.4 * recency + 0.3 * frequency + 0.3 * mean


def _scores(device: torch.device, quick: bool) -> Iterator[Check]:
    cases = {}
    for block_size in (1, 16, 48) if quick else (1, 5, 12, 16, 48, 256):
        cases[f"block_size {block_size}"] = _statistics(100, block_size, device)
    empty = _statistics(60, 16, device)
    empty[3][::3] = False
    cases["blocks without valid tokens"] = empty
    poisoned = _statistics(60, 16, device)
    poisoned[2][~poisoned[3]] = math.nan
    cases["NaN where the mask is false"] = poisoned
    nan = _statistics(60, 16, device)
    nan[0][3], nan[1][5] = math.nan, math.inf
    cases["NaN and inf in the statistics"] = nan
    wide = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in _statistics(60, 16, device)]
    cases["strided rows"] = wide
    cases["no blocks"] = _statistics(0, 16, device)
    for case, statistics in cases.items():
        want = reference.eviction_scores(*statistics, **_WEIGHTS)
        got = pagedkv.eviction_scores(*statistics, **_WEIGHTS)
        limit = tolerance(_torch_scores(*statistics), want, torch.float32, torch.float32)
        yield Check("eviction_scores", case, "float32", "scores", max_error(got, want), limit)


def score_distributions(n: int, device: torch.device) -> dict[str, Tensor]:
    """Scores that break a selection: ties, special numbers, and orders that defeat a pivot or a histogram."""
    generator = torch.Generator().manual_seed(n)
    uniform = torch.rand(n, generator=generator)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38])
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32)
    made = {
        "uniform": uniform,
        "all equal": torch.full((n,), 0.5),
        "few values": (uniform * 4).floor(),
        "one bit apart": (torch.full((n,), 0.5).view(torch.int32) + (bits & 1)).view(torch.float32),
        "zeros of both signs": torch.where(bits % 2 == 0, 0.0, -0.0),
        "special numbers": special[(bits.long() % len(special)).abs()],
        "random bits": bits.view(torch.float32),
        "all NaN": torch.full((n,), math.nan),
        "denormal": uniform * 1e-39,
        "ascending": torch.arange(n, dtype=torch.float32),
        "descending": -torch.arange(n, dtype=torch.float32),
        "two clusters": torch.where(uniform < 0.5, uniform * 1e-6, 1e6 + uniform),
        "exponents from end to end": torch.ldexp(uniform + 1, torch.randint(-140, 127, (n,), generator=generator)),
    }
    return {name: x.to(device) for name, x in made.items()}


def _selection(device: torch.device, quick: bool) -> Iterator[Check]:
    """The error is the number of places at which the ids differ."""
    sizes = (1, 1000) if quick else (1, 2, 31, 257, 1000, 5003, *((65_537, 1_000_003) if device.type == "cuda" else ()))
    for case in score_distributions(1, device):
        for n in sizes:
            scores = score_distributions(n, device)[case]
            order = reference.select_eviction_candidates(scores, n)
            for k in sorted({0, 1, n // 7, n // 2, n - 1, n} & set(range(n + 1))):
                got = pagedkv.select_eviction_candidates(scores, k)
                differ = float((as_float64(got) != order[:k]).sum())
                yield Check("select_eviction_candidates", case, "float32", f"n = {n}, k = {k}", differ, 0.0)


def _fused(device: torch.device, quick: bool) -> Iterator[Check]:
    """Bit for bit the two separate ops, and the same again and again."""
    for n in (1000,) if quick else (1, 257, 1000, 16_384):
        statistics = _statistics(n, 16, device)
        statistics[0][: n // 3] = statistics[1][: n // 3] = 0
        statistics[3][: n // 3] = False  # ties
        scores = pagedkv.eviction_scores(*statistics)
        for k in sorted({0, n // 7, n}):
            ids = pagedkv.select_eviction_candidates(scores, k)
            differ = 0
            for _ in range(5):
                got_ids, got_scores = pagedkv.evict_blocks(*statistics, k)
                differ += int((got_ids != ids).sum()) + int((got_scores.view(torch.int32) != scores.view(torch.int32)).sum())
            yield Check("evict_blocks", "5 calls, bit for bit", "float32", f"n = {n}, k = {k}", float(differ), 0.0, "the separate ops")
