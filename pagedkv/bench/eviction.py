"""Time eviction: score every block of a pool and pick those with the lowest scores.

What the published host does, what PyTorch can do, and this project's ops, on the same statistics. An implementation's
ids are compared with a stable sort of its scores before it is timed; a row says whether they are `exact`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import pagedkv
from pagedkv.bench.inputs import MAX_ROTATIONS, ROTATE_OVER_CACHE, last_level_cache
from pagedkv.evidence.timing import GRAPH_MAX_CALLS, measure

MODES = {"cpu": ("cpu",), "cuda": ("graph", "flush")}
NUM_BLOCKS = (1_024, 16_384, 131_072, 1_048_576)
QUICK_NUM_BLOCKS = (1_024, 16_384)
FRACTIONS = {"cpu": (0.15,), "cuda": (0.15, 0.01, 0.5)}
BLOCK_SIZE = 16
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
        made.host = tuple(x.cpu().numpy() for x in made)
        return made


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
class Implementation:
    """`prepare(statistics, k)` returns the call to time. `part`: what of the work it does.

    On CUDA, what goes through the host cannot be captured (`host`) and is timed by the host's clock. `scores` is what it
    sorts: implementations sum in different orders, and a score that rounds differently may change places.
    """

    name: str
    prepare: Callable[[Statistics, int], Ids]
    part: str = "score + select"
    scores: Callable = pagedkv.eviction_scores
    ours: bool = False
    host: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")


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
    for fraction in fractions:
        k = int(num_blocks * fraction)
        for implementation in IMPLEMENTATIONS:
            if device.type not in implementation.devices or (device.type == "cuda" and implementation.host and fraction != fractions[0]):
                continue  # the host sorts the same whatever k is: on a GPU's clock it is timed once
            row = {"kind": "eviction", "blocks": num_blocks, "k": k, "fraction": fraction, "implementation": implementation.name,
                   "part": implementation.part, "ours": implementation.ours}  # fmt: skip
            modes = ("cpu",) if implementation.host else MODES[device.type]
            try:
                rotated = pools[:1] if device.type == "cuda" and implementation.host else pools
                calls = [implementation.prepare(pool, k) for pool in rotated]
                exact = _exact(implementation, calls[0](), pools[0])
                measured = [measure(device=device, mode=mode, rotate=calls, budget_s=budget_s) for mode in modes]
            except Exception as error:  # a baseline that breaks is a finding; breaking ourselves is not
                if implementation.ours:
                    raise
                yield row | {"status": "absent", "reason": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
                continue
            if implementation.ours and exact is False:
                raise AssertionError(f"{implementation.name}: its ids on {num_blocks} blocks, k = {k}, are not those of a stable sort")
            for times in measured:
                extra = {}
                if implementation.part != "select" and read_gb_per_s:
                    moved = pool_bytes(num_blocks) + (8 * k if "select" in implementation.part else 0)
                    roof_us = moved / read_gb_per_s / 1e3
                    extra = {"bytes": moved, "roof_us": roof_us, "roof_fraction": roof_us / times["p50_us"]}
                yield row | {"status": "measured", **times, "exact": exact, **extra}
    gc.collect()


def _exact(implementation: Implementation, result: object, pool: Statistics) -> bool | None:
    """Whether the ids are those of a stable sort of the implementation's own scores."""
    if implementation.part == "score":
        return None
    ids = result.cpu().numpy() if isinstance(result, Tensor) else result
    scores = numpy_scores(*pool.host) if implementation.scores is numpy_scores else implementation.scores(*pool).cpu().numpy()
    return np.array_equal(ids, np.argsort(scores, kind="stable")[: len(ids)])


# -------------------------------------------------------------------------------------------- derived

# quantity: prefix of the peers' names. Each is the fastest such peer's p50 over the fused op's: above 1, ours is faster.
_RATIOS = {
    "vs_numpy": ("NumPy", "cpu"),
    "vs_eager": ("torch eager", None),
    "vs_compile": ("torch.compile", None),
    "vs_topk_alone": ("torch.topk alone", None),
    "fused_vs_separate": ("pagedkv, separate", None),
}


def derived_rows(rows: list[dict]) -> Iterator[dict]:
    """Ratios within one run, from its rows: `kind` "derived", `blocks`, `fraction`, `mode`, `quantity`, `value`, `peer`."""
    measured = [r for r in rows if r.get("kind") == "eviction" and r["status"] == "measured"]
    for ours in measured:
        if ours["implementation"] != "pagedkv, fused":
            continue
        for quantity, (prefix, mode) in _RATIOS.items():
            row = {"kind": "derived", "blocks": ours["blocks"], "fraction": ours["fraction"], "mode": ours["mode"], "quantity": quantity}
            peers = [r for r in measured if r["implementation"].startswith(prefix) and r["mode"] == (mode or ours["mode"])
                     and (r["blocks"], r["fraction"]) == (ours["blocks"], ours["fraction"])]  # fmt: skip
            if peers:
                best = min(peers, key=lambda r: r["p50_us"])
                yield row | {"status": "measured", "value": best["p50_us"] / ours["p50_us"], "peer": best["implementation"]}
            else:
                yield row | {"status": "absent", "reason": "no such peer ran, see its row"}
