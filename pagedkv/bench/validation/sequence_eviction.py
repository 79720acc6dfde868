"""Mass and selection sequence by sequence, to the last bit; statistics of K and V within float32's rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

import pagedkv
from pagedkv import reference
from pagedkv.bench.validation.attention_cases import CASES
from pagedkv.bench.validation.eviction import score_distributions
from pagedkv.bench.validation.judge import Check, as_float64

_EPS = 2.0**-23
_CACHES = ("int8_block_head", "float16", "int8_token_head", "float32")


def checks(device: torch.device, quick: bool) -> Iterator[Check]:
    yield from _mass(device)
    yield from _selection(device, quick)
    yield from _statistics(device, quick)


def _differ(got, want) -> float:
    return float((as_float64(got) != as_float64(want)).sum())


def _tables(lengths: list[int], block_size: int, shared: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables whose first `shared` places are the same in all, garbage behind them; lengths; how often each block is held."""
    counts = [-(-n // block_size) for n in lengths]
    num_blocks = shared + sum(counts)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    prefix = [order.pop() for _ in range(shared)]
    tables = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    references = torch.zeros(num_blocks, dtype=torch.int32)
    for s, count in enumerate(counts):
        blocks = [prefix[j] if j < shared else order.pop() for j in range(count)]
        tables[s, :count] = torch.tensor(blocks, dtype=torch.int32)
        for block in blocks:
            references[block] += 1
    return tables, torch.tensor(lengths, dtype=torch.int32), references


def _mass(device: torch.device) -> Iterator[Check]:
    tables, lens, references = _tables([1600, 37, 0, 16, 800], 16, shared=3)
    mass = torch.softmax(3 * torch.randn(tables.shape, generator=torch.Generator().manual_seed(1)), 1)
    mass[torch.arange(tables.shape[1]) * 16 >= lens[:, None]] = 0
    start = torch.arange(len(references)) * 2**33
    bad = mass.clone()
    bad[1], bad[0, 5] = math.nan, math.inf
    for case, masses in (("shared blocks, garbage past the end", mass), ("NaN and inf", bad)):
        for decay in (1.0, 0.9, 0.0):
            total = start.to(device)
            want = reference.accumulate_block_mass(masses, tables, start, decay)
            pagedkv.accumulate_block_mass(masses.to(device), tables.to(device), total, decay)
            yield Check("accumulate_block_mass", case, "float32", f"decay {decay}", _differ(total, want), 0.0)


def _selection(device: torch.device, quick: bool) -> Iterator[Check]:
    """The error is the number of entries that differ, in what is returned and in the reference counts."""
    batches = {
        "ragged": ([1600, 37, 0, 1, 16, 801], 16, 0),
        "shared prefix": ([320, 330, 340, 100], 16, 8),
        **({} if quick else {"longer than shared memory holds": ([20_000, 5], 1, 2), "many sequences": ([64] * 700, 16, 1)}),
    }
    for batch, (lengths, block_size, shared) in batches.items():
        tables, lens, references = _tables(lengths, block_size, shared)
        for case, scores in score_distributions(len(references), torch.device("cpu")).items():
            if quick and case not in ("uniform", "few values", "special numbers"):
                continue
            for budget in (0, 4, tables.shape[1] // 2):
                want = reference.select_per_sequence(scores, tables, lens, budget, block_size=block_size, references=references)
                counts = references.clone().to(device)
                arguments = (x.to(device) for x in (scores, tables, lens))
                got = pagedkv.select_per_sequence(*arguments, budget, block_size=block_size, references=counts)
                differ = sum(_differ(a, b) for a, b in zip((*got, counts), want, strict=True))
                yield Check("select_per_sequence", batch, "float32", f"{case}, budget {budget}", differ, 0.0)


def _statistics(device: torch.device, quick: bool) -> Iterator[Check]:
    """In units of what float32 rounds off: the sum of the terms' absolute values, times its epsilon, times the head dimension."""
    for case in CASES:
        if case.large or (quick and case.name not in ("plain", "NaN past the end and in unused blocks", "block ids outside the pool")):
            continue
        for cache in [cache for cache in case.caches if cache in (_CACHES[:2] if quick else _CACHES)]:
            p = case.build(device, torch.float32, cache)
            tokens = (p.k_cache, p.k_scale, p.block_tables, p.seq_lens)
            head_dim = p.k_cache.shape[-1]
            total, squares = reference.token_moments(*tokens)
            low, high, direction = reference.channel_statistics(*tokens, blocks_per_group=2)
            got = (*pagedkv.token_moments(*tokens), *pagedkv.channel_statistics(*tokens, blocks_per_group=2))
            bounds = (np.sqrt(squares * head_dim), squares, np.abs(low), np.abs(high), np.full_like(direction, 2 * p.k_cache.shape[1]))
            names = ("sum", "sum of squares", "low", "high", "direction")
            for i, (name, bound) in enumerate(zip(names, bounds, strict=True)):
                op = "token_moments" if i < 2 else "channel_statistics"
                error = _relative(got[i], (total, squares, low, high, direction)[i], bound * _EPS * head_dim)
                yield Check(op, case.name, cache, name, error, 1.0)


def _relative(got: Tensor, want: np.ndarray, bound: np.ndarray) -> float:
    """The largest error in units of its bound; infinite where one is finite or NaN and the other is not."""
    got = as_float64(got)
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite) or not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return math.inf
    return float((np.abs(got[finite] - want[finite]) / (bound[finite] + 1e-30)).max(initial=0.0))
