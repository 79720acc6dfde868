"""Time eviction: score every block of a pool and pick those with the lowest scores.

What the published host does, what PyTorch and FlashInfer can do, and this project's ops, on the same statistics. An
implementation's ids are compared with a stable sort of its scores before it is timed; a row says whether they are `exact`.
Scores that are hard to select among are timed beside uniform ones (`adversarial_rows`), and thousands of random pools
are checked (`exact_trials`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

import pagedkv
from pagedkv.bench import comparison
from pagedkv.bench.comparison import MODES, Absent, compare, import_flashinfer, ratios
from pagedkv.bench.inputs import MAX_ROTATIONS, ROTATE_OVER_CACHE, last_level_cache
from pagedkv.evidence.timing import GRAPH_MAX_CALLS, measure

NUM_BLOCKS = {"cpu": (1_024, 16_384, 131_072, 1_048_576), "cuda": (1_024, 16_384, 131_072, 1_048_576, 16_777_216)}
QUICK_NUM_BLOCKS = (1_024, 16_384)
FRACTIONS = {"cpu": (0.15,), "cuda": (0.15, 0.01, 0.5)}
BLOCK_SIZE = 16
ADVERSARIAL_BLOCKS = {"cpu": 131_072, "cuda": 1_048_576}
TRIALS = {"cpu": 1_000, "cuda": 6_000}
_MAX_HOST_BLOCKS = 1_048_576  # beyond, NumPy takes seconds
_MAX_FLASHINFER_BLOCKS = 1_048_576
_BUDGET_S = {"cpu": 0.2, "cuda": 0.08}  # of timing, for each row
_WEIGHTS = (0.4, 0.3, 0.3)

Ids = Callable[[], object]


@dataclass
class Statistics:
    """What a cache knows of its blocks: `recency, frequency` float32 `[n]`, `mass` float32 and `valid` bool `[n, 16]`."""

    recency: Tensor
    frequency: Tensor
    mass: Tensor
    valid: Tensor
    host: tuple[np.ndarray, ...] = field(default=(), repr=False)

    def __iter__(self):
        return iter((self.recency, self.frequency, self.mass, self.valid))

    @classmethod
    def random(cls, num_blocks: int, device: torch.device, seed: int = 0) -> Statistics:
        """Uniform statistics, one token in ten invalid; float32 scores of so many blocks contain ties."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.rand(size, device=device, generator=generator)

        made = cls(draw(num_blocks), draw(num_blocks), draw(num_blocks, BLOCK_SIZE), draw(num_blocks, BLOCK_SIZE) > 0.1)
        if num_blocks <= _MAX_HOST_BLOCKS:
            made.host = tuple(x.cpu().numpy() for x in made)
        return made


def order(scores: Tensor) -> Tensor:
    """Block ids by a stable sort: ascending as numbers (-0.0 equals 0.0), NaN last, ties to the lower id. int64 `[n]`.

    The scores are turned into integers first, so that no sort's own view of zeros and NaN counts.
    """
    bits = (scores + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.sort(torch.where(scores.isnan(), 0x7FFFFFFF, keys), stable=True).indices


def pool_bytes(num_blocks: int) -> int:
    """Bytes that scoring has to read (two float32 a block, a float32 and a bool a token) and write (a float32 a block)."""
    return num_blocks * (4 + 4 + BLOCK_SIZE * 5 + 4)


# ------------------------------------------------------------------------------------ implementations


def torch_scores(recency: Tensor, frequency: Tensor, mass: Tensor, valid: Tensor) -> Tensor:
    """The contract's score in a few lines of PyTorch, as one would write it without this library."""
    mean = (mass * valid).sum(1) / valid.sum(1).clamp(min=1)
    return _WEIGHTS[0] * recency + _WEIGHTS[1] * frequency + _WEIGHTS[2] * mean


def numpy_scores(recency: np.ndarray, frequency: np.ndarray, mass: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    mean = (mass * valid).sum(1) / np.maximum(valid.sum(1), 1)
    return (_WEIGHTS[0] * recency + _WEIGHTS[1] * frequency + _WEIGHTS[2] * mean).astype(np.float32)


def _numpy_argsort(arrays: tuple[np.ndarray, ...], k: int) -> np.ndarray:
    return np.argsort(numpy_scores(*arrays), kind="stable")[:k]


def _numpy_argpartition(arrays: tuple[np.ndarray, ...], k: int) -> np.ndarray:
    """The k lowest, then sorted: less work than sorting all; ties at the boundary fall either way."""
    scores = numpy_scores(*arrays)
    lowest = np.argpartition(scores, min(k, len(scores) - 1))[:k]
    return lowest[np.argsort(scores[lowest], kind="stable")]


def _transferred(pick: Callable) -> Callable:
    return lambda s, k: lambda: pick(tuple(x.cpu().numpy() for x in s), k)


def _on_host(pick: Callable) -> Callable:
    return lambda s, k: lambda: pick(s.host, k)


# One kernel for each size of pool, as a user of fixed shapes gets it.
_compiled_scores = torch.compile(torch_scores, dynamic=False)


def _compiled(s: Statistics, k: int) -> Ids:
    return lambda: torch.topk(_compiled_scores(*s), k, largest=False, sorted=True).indices


def _separate(s: Statistics, k: int) -> Ids:
    return lambda: pagedkv.select_eviction_candidates(pagedkv.eviction_scores(*s), k)


def _select_only(select: Callable[[Tensor, int], Tensor]) -> Callable:
    def prepare(s: Statistics, k: int) -> Ids:
        scores = pagedkv.eviction_scores(*s)
        return lambda: select(scores, k)

    return prepare


@dataclass(frozen=True)
class Implementation(comparison.Implementation):
    """`prepare(statistics, k)` returns the call to time. `part`: what of the work it does.

    On CUDA, what goes through the host cannot be captured (`host`) and is timed by the host's clock. `scores` is what it
    sorts: implementations sum in different orders, and a score that rounds differently may change places.
    """

    labels = ("part",)
    prepare: Callable[[Statistics, int], Ids]
    part: str = "score + select"
    scores: Callable = pagedkv.eviction_scores
    host: bool = False


def _flashinfer(s: Statistics, k: int) -> Ids:
    """FlashInfer takes the k largest, hence the sign; `sorted` orders them, but not ties."""
    flashinfer = import_flashinfer()
    if len(s.recency) > _MAX_FLASHINFER_BLOCKS:
        raise Absent(f"not asked above {_MAX_FLASHINFER_BLOCKS} blocks: of 2^24, flashinfer-python 0.6.4 did not return within minutes")
    negated = -pagedkv.eviction_scores(*s)[None]
    return lambda: flashinfer.top_k(negated, k, sorted=True)[1][0]


# To add one, add a line.
_topk, _topk_unsorted = (lambda x, k, o=o: torch.topk(x, k, largest=False, sorted=o).indices for o in (True, False))


def _stable_sort(scores: Tensor, k: int) -> Tensor:
    return torch.sort(scores, stable=True).indices[:k]


IMPLEMENTATIONS = (
    Implementation("pagedkv, fused", lambda s, k: lambda: pagedkv.evict_blocks(*s, k)[0], ours=True),
    Implementation("pagedkv, separate", _separate, ours=True),
    Implementation("pagedkv, scores alone", lambda s, k: lambda: pagedkv.eviction_scores(*s), "score", ours=True),
    Implementation("pagedkv, selection alone", _select_only(pagedkv.select_eviction_candidates), "select", ours=True),
    Implementation("NumPy, argsort", _on_host(_numpy_argsort), scores=numpy_scores, host=True),
    Implementation("NumPy, argpartition", _on_host(_numpy_argpartition), scores=numpy_scores, host=True),
    Implementation(
        "NumPy, argsort, with device-to-host copy", _transferred(_numpy_argsort), scores=numpy_scores, host=True, devices=("cuda",)
    ),
    Implementation(
        "NumPy, argpartition, with device-to-host copy",
        _transferred(_numpy_argpartition),
        scores=numpy_scores,
        host=True,
        devices=("cuda",),
    ),
    Implementation("torch eager, topk", lambda s, k: lambda: _topk(torch_scores(*s), k), scores=torch_scores),
    Implementation("torch eager, stable sort", lambda s, k: lambda: _stable_sort(torch_scores(*s), k), scores=torch_scores),
    Implementation("torch.compile, topk", _compiled, scores=_compiled_scores),
    Implementation("torch.topk alone, sorted", _select_only(_topk), "select"),
    Implementation("torch.topk alone, unsorted", _select_only(_topk_unsorted), "select"),
    Implementation("torch stable sort alone", _select_only(_stable_sort), "select"),
    Implementation("FlashInfer top-k alone, sorted", _flashinfer, "select", devices=("cuda",)),
)


# ---------------------------------------------------------------------------------------------- sweep


def rotations(num_blocks: int, device: torch.device) -> int:
    """How many pools the calls rotate over, so that each finds nothing of its own in the last-level cache.

    A graph holds so many calls, and no more pools are made. 1,024 blocks are 94 kB, of which no graph holds enough to outgrow
    a large L2: `MAX_ROTATIONS` then, and in graph mode those rows are of a warm cache (`flush` has the cold one).
    """
    wanted = max(1, -(-ROTATE_OVER_CACHE[device.type] * last_level_cache(device) // pool_bytes(num_blocks)))
    return wanted if wanted <= GRAPH_MAX_CALLS and device.type == "cuda" else min(wanted, MAX_ROTATIONS)


def size_rows(
    num_blocks: int,
    device: torch.device,
    *,
    fractions: tuple[float, ...] | None = None,
    read_gb_per_s: float | None = None,
    budget_s: float | None = None,
) -> Iterator[dict]:
    """Measure every implementation on a pool of `num_blocks` blocks.

    Args:
        fractions: of the pool to evict; default `FRACTIONS` of the device.
        read_gb_per_s: memory bandwidth measured in the same run, for `roof_us` and `roof_fraction`.
        budget_s: seconds of timing for each row; default `_BUDGET_S` of the device.

    Yields:
        `kind` "eviction", `blocks`, `k`, `fraction`, `implementation`, `part`, `ours`, `status` ("measured", or "absent"
        with a `reason`), `mode`, the times, `exact` (null where only scores come out), and for what scores `bytes`, `roof_us`
        and `roof_fraction`.

    Raises:
        AssertionError: this project's ids are not those of a stable sort of its scores.
    """
    pools = [Statistics.random(num_blocks, device, seed) for seed in range(rotations(num_blocks, device))]
    budget_s = budget_s or _BUDGET_S[device.type]
    fractions = fractions or FRACTIONS[device.type]

    def measured(k: int, i: Implementation) -> Iterator[dict]:
        calls = [i.prepare(pool, k) for pool in (pools[:1] if device.type == "cuda" and i.host else pools)]
        exact = _exact(i, calls[0](), pools[0])
        if i.ours and exact is False:
            raise AssertionError(f"{i.name}: its ids on {num_blocks} blocks, k = {k}, are not those of a stable sort")
        for mode in ("cpu",) if i.host else MODES[device.type]:
            times = measure(device=device, mode=mode, rotate=calls, budget_s=budget_s)
            extra = {}
            if i.part != "select" and read_gb_per_s:
                moved = pool_bytes(num_blocks) + (8 * k if "select" in i.part else 0)
                roof_us = moved / read_gb_per_s / 1e3
                extra = {"bytes": moved, "roof_us": roof_us, "roof_fraction": roof_us / times["p50_us"]}
            yield {**times, "exact": exact, **extra}

    for fraction in fractions:
        asked = [i for i in IMPLEMENTATIONS if num_blocks <= _MAX_HOST_BLOCKS or not i.host]
        row = {"kind": "eviction", "blocks": num_blocks, "k": int(num_blocks * fraction), "fraction": fraction}
        yield from compare(asked, device, row, partial(measured, row["k"]))


def _exact(implementation: Implementation, result: object, pool: Statistics) -> bool | None:
    """Whether the ids are those of a stable sort of the implementation's own scores."""
    if implementation.part == "score":
        return None
    if implementation.scores is numpy_scores:
        return np.array_equal(result, np.argsort(numpy_scores(*pool.host), kind="stable")[: len(result)])
    return torch.equal(result, order(implementation.scores(*pool))[: len(result)])


# ---------------------------------------------------------------------------------------- hard scores

Draw = Callable[[int, torch.Generator], Tensor]


def _random(n: int, g: torch.Generator) -> Tensor:
    return torch.rand(n, generator=g, device=g.device)


def _among(values: tuple[float, ...]) -> Draw:
    def draw(n: int, g: torch.Generator) -> Tensor:
        return torch.tensor(values, device=g.device)[torch.randint(len(values), (n,), generator=g, device=g.device)]

    return draw


def _one_outlier(n: int, g: torch.Generator) -> Tensor:
    scores = torch.ones(n, device=g.device)
    scores[n // 2] = 1.1
    return scores


def _runs(n: int, g: torch.Generator) -> Tensor:
    level = torch.rand(n // 100 + 1, generator=g, device=g.device)
    return level.repeat_interleave(100)[:n] + 1e-4 * _random(n, g)


# Name: (blocks, generator) -> scores. What a selection by sampling, by histogram or by the bits of a float may stumble over.
DISTRIBUTIONS: dict[str, Draw] = {
    "uniform": _random,
    "all equal": _among((0.25,)),
    "one bit apart": _among((1 - 2.0**-24, 1.0, 1 + 2.0**-23)),
    "infinities and NaN": _among((math.inf, -math.inf, math.nan, 0.0, -1.0)),
    "all NaN": _among((math.nan,)),
    "denormals": _among((-(2.0**-148), -(2.0**-149), 0.0, 2.0**-149, 2.0**-148)),
    "both zeros": _among((0.0, -0.0)),
    "a hundred values": _among(tuple(i / 100 for i in range(100))),
    "halving values": _among(tuple(2.0**-i for i in range(20))),
    "sorted": lambda n, g: torch.arange(n, device=g.device).float(),
    "reversed": lambda n, g: -torch.arange(n, device=g.device).float(),
    "two clusters": lambda n, g: _random(n, g) * 1e-6 + (_random(n, g) < 0.5),
    "one outlier": _one_outlier,
    "within one percent": lambda n, g: 0.5 + 0.01 * _random(n, g),
    "within one percent, amid a bin": lambda n, g: 0.51 + 0.01 * _random(n, g),
    "within a tenth of a percent": lambda n, g: 0.5 + 0.001 * _random(n, g),
    "runs of a hundred near each other": _runs,
    "all magnitudes": lambda n, g: (_random(n, g) - 0.5) * 10.0 ** ((_random(n, g) * 70).floor() - 35),
}


def adversarial_rows(num_blocks: int, device: torch.device, *, fraction: float = 0.15, budget_s: float | None = None) -> Iterator[dict]:
    """Time the fused op on scores of each of `DISTRIBUTIONS`: recency holds them, and the other weights are 0.

    Yields:
        `kind` "adversarial", `blocks`, `k`, `fraction`, `distribution`, `mode`, the times, and `ratio` to the uniform distribution's
        median in the same mode; then for each mode one of `kind` "derived", `quantity` "worst_ratio", `value`, `distribution`.

    Raises:
        AssertionError: the ids on a distribution are not those of a stable sort.
    """
    k = int(num_blocks * fraction)
    pools = [Statistics.random(num_blocks, device, seed) for seed in range(rotations(num_blocks, device))]
    generator = torch.Generator(device).manual_seed(0)
    rows: list[dict] = []
    for name, draw in DISTRIBUTIONS.items():
        for pool in pools:
            pool.recency = draw(num_blocks, generator)
        calls = [lambda pool=pool: pagedkv.evict_blocks(*pool, k, 1.0, 0.0, 0.0) for pool in pools]
        ids, scores = calls[0]()
        if not torch.equal(ids, order(scores)[:k]):
            raise AssertionError(f"evict_blocks: its ids on {num_blocks} blocks, {name}, are not those of a stable sort")
        for mode in MODES[device.type]:
            times = measure(device=device, mode=mode, rotate=calls, budget_s=budget_s or _BUDGET_S[device.type])
            uniform = next((r["p50_us"] for r in rows if r["mode"] == mode), times["p50_us"])
            rows.append({"kind": "adversarial", "blocks": num_blocks, "k": k, "fraction": fraction, "distribution": name,
                         "status": "measured", **times, "ratio": times["p50_us"] / uniform})  # fmt: skip
            yield rows[-1]
    for mode in MODES[device.type]:
        worst = max((r for r in rows if r["mode"] == mode), key=lambda r: r["ratio"])
        yield {"kind": "derived", "blocks": num_blocks, "fraction": fraction, "mode": mode, "quantity": "worst_ratio", "status": "measured",
               "value": worst["ratio"], "distribution": worst["distribution"]}  # fmt: skip


def exact_trials(trials: int, device: torch.device, *, max_blocks: int = 65_536, seed: int = 0) -> dict:
    """Select from random pools and compare with a stable sort: how many of `trials` are equal, id for id.

    Pools of 1 to `max_blocks` blocks (as many of each magnitude), scores of each of `DISTRIBUTIONS` in turn, k of any size. What is
    compared stays on the device until the end.

    Returns a row of `kind` "trials": `trials`, `exact` (of them), `max_blocks`.
    """
    sizes = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    draws = list(DISTRIBUTIONS.values())
    equal = []
    for trial in range(trials):
        n = int(math.exp(sizes.uniform(0, math.log(max_blocks + 1))))
        k = sizes.choice((sizes.randint(0, n), sizes.randint(0, n), n * 15 // 100, n))
        scores = draws[trial % len(draws)](n, generator)
        equal.append((pagedkv.select_eviction_candidates(scores, k) == order(scores)[:k]).all())
    return {"kind": "trials", "trials": trials, "exact": int(torch.stack(equal).sum()), "max_blocks": max_blocks, "status": "measured"}


# -------------------------------------------------------------------------------------------- derived

_RATIOS = {
    "vs_numpy": ("NumPy", {"mode": "cpu"}),
    "vs_eager": ("torch eager", {}),
    "vs_compile": ("torch.compile", {}),
    "vs_topk_alone": ("torch.topk alone", {}),
    "vs_stable_sort_alone": ("torch stable sort alone", {}),
    "vs_flashinfer_alone": ("FlashInfer top-k alone", {}),
    "fused_vs_separate": ("pagedkv, separate", {}),
}


def derived_rows(rows: list[dict]) -> Iterator[dict]:
    """Ratios within one run, from its rows: `kind` "derived", `blocks`, `fraction`, `mode`, `quantity`, `value`, `peer`."""
    return ratios([r for r in rows if r.get("kind") == "eviction"], "pagedkv, fused", ("blocks", "fraction", "mode"), _RATIOS)
