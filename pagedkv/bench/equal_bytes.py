"""Which way to hold a cache loses least at the same bytes: every scheme on synthetic caches and on a real model's, layer by layer.

A real model's K is held as most engines do, after the rotary embedding, or before it, where channels have a steadier range (KVQuant,
Hooper et al., 2024). No kernel here rotates K as it reads it, so what was held before is decoded and embedded ahead of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

import pagedkv
from pagedkv.bench import distributions
from pagedkv.bench.distributions import Problem, causal
from pagedkv.bench.quality import Truth, errors
from pagedkv.bench.schemes import BUDGET, SCHEMES, Held, rounded
from pagedkv.kv_dump import Dump

# name: (seed, head_dim) -> Problem
DISTRIBUTIONS: dict[str, Callable[[int, int], Problem]] = {
    "gaussian": distributions.gaussian,
    "heavy_tailed": distributions.heavy_tailed,
    "channel_outliers": distributions.channel_outliers,
}
HEAD_DIM = 128  # a scale for each token just fits the budget
PUBLISHED_HEAD_DIM = 64  # of the published heavy-tailed test
QUERIES = 16  # of a real model, the last; each sees about the whole text, so more of them say little more

BASE = "int8_block_head"  # what ratios are to
_METRICS = ("rmse", "rel_error", "weight_kl", "top1_agreement")


# ----------------------------------------------------------------------------------------------- synthetic


def synthetic(
    name: str, head_dim: int, seed: int, device: torch.device | str = "cpu", schemes: Iterable[str] = tuple(SCHEMES)
) -> Iterator[dict]:
    """One row a scheme: `data`, `head_dim`, `seed`, `scheme`, `percent_of_fp16`, `within_budget`, and what `measure` says."""
    problem = DISTRIBUTIONS[name](seed, head_dim)
    there, truth = problem.to(device), Truth(problem)
    for scheme in schemes:
        yield {"data": name, "head_dim": head_dim, "seed": seed, **_cost(scheme, problem), **_loss(SCHEMES[scheme].hold(there), truth)}


def bound(name: str, head_dim: int, seed: int) -> dict:
    """A row like those of `synthetic` for the least that any code of `BUDGET` can lose on the normal values that the data are made of.

    A code of R bits a value leaves normal values of variance s^2 an error of at least s^2 / 4^R (Shannon), here as normal noise on K and V;
    outliers and scales are taken to cost nothing.
    """
    problem = DISTRIBUTIONS[name](seed, head_dim)
    rng = torch.Generator().manual_seed(seed)

    def noisy(kv: Tensor) -> Tensor:
        spread = kv.abs().median() / 0.6745  # of the normal values, whatever the outliers
        return kv + spread * 2 ** (-16 * BUDGET / 100) * torch.randn(kv.shape, generator=rng)

    scheme = rounded(noisy, noisy, lambda block_size, dim: 4 * dim * BUDGET / 100)
    cost = {"scheme": "bound", "percent_of_fp16": BUDGET, "within_budget": True}
    return {"data": name, "head_dim": head_dim, "seed": seed, **cost, **_loss(scheme.hold(problem), Truth(problem))}


def _cost(scheme: str, problem: Problem) -> dict:
    percent = SCHEMES[scheme].percent_of_fp16(problem)
    return {"scheme": scheme, "percent_of_fp16": percent, "within_budget": percent <= BUDGET}


def _loss(held: Held, truth: Truth) -> dict:
    return {**errors(held.out, truth.out), **truth.weight_errors(held.k)}


# -------------------------------------------------------------------------------------------- a real model


def layers(
    dump: Dump, label: str, device: torch.device | str = "cpu", schemes: Iterable[str] = tuple(SCHEMES), count: int | None = None
) -> Iterator[dict]:
    """A row for each layer (the first `count`), place (`stored`: "after rope", "before rope") and scheme, with the model's last queries."""
    for layer in range(dump.num_layers if count is None else count):
        q = dump.q[layer, -QUERIES:]
        after = causal(q, dump.k[layer], dump.v[layer], dump.sm_scale)
        truth = Truth(after)
        places = {"after rope": (after, None)}
        if dump.k_before_rope is not None:
            before = causal(q, dump.k_before_rope[layer], dump.v[layer], dump.sm_scale)
            places["before rope"] = before, rope_between(before.k, after.k)
        for stored, (problem, rope) in places.items():
            there = problem.to(device)
            for scheme in schemes:
                held = SCHEMES[scheme].hold(there)
                if rope is not None:
                    held = embedded(held, rope.to(device), there)
                yield {"data": label, "stored": stored, "layer": layer, **_cost(scheme, problem), **_loss(held, truth)}


def rope_between(before: Tensor, after: Tensor) -> Tensor:
    """The rotary embedding that leads from one K to the other, complex `[..., 1, head_dim / 2]` for K `[..., num_kv_heads, head_dim]`.

    It turns each pair of channels (i, i + head_dim / 2) by an angle of the token's position, the same in all heads; so the dump itself says
    which, whatever base or scaling the model has. 1 where both are zero.

    Raises:
        ValueError: no such turn leads from `before` to `after`.
    """
    b, a = _pairs(before), _pairs(after)
    turn = (b.conj() * a).sum(-2, keepdim=True)
    rope = torch.where(turn.abs() > 0, turn / turn.abs().clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    if not (b * rope - a).norm() <= 1e-3 * a.norm():
        raise ValueError("before, after: expected K before and after a rotary embedding of channels i and i + head_dim / 2")
    return rope


def embedded(held: Held, rope: Tensor, problem: Problem) -> Held:
    """What was held before the rotary embedding, as attention sees it: K embedded, and the output over that."""
    turned = _pairs(held.k) * rope
    k = torch.cat([turned.real, turned.imag], -1)
    p = problem
    return Held(k, held.v, pagedkv.paged_attention(p.q, k, held.v, p.block_tables, p.seq_lens, p.sm_scale))


def _pairs(k: Tensor) -> Tensor:
    return torch.complex(*k.chunk(2, dim=-1))


# ------------------------------------------------------------------------------------------------ summary


def summarise(rows: Iterable[dict]) -> Iterator[dict]:
    """Over draws or layers: one row for each data set, place, head_dim and scheme, `over` that many rows.

    `rmse`: root of the mean square of theirs, `rmse_ratio` to that of block-head scales; of the others the mean; `rel_error_worst`.
    `worse_than_fp8`: rows on which FP8 has the smaller relative error.
    """
    groups: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        groups.setdefault((row["data"], row.get("stored"), row.get("head_dim")), {}).setdefault(row["scheme"], []).append(row)
    for (data, stored, head_dim), by_scheme in groups.items():

        def pooled(scheme: str, by_scheme: dict[str, list[dict]] = by_scheme) -> float:
            return math.sqrt(_mean([row["rmse"] ** 2 for row in by_scheme[scheme]]))

        for scheme, found in by_scheme.items():
            fp8 = by_scheme.get("fp8_e4m3_token_head", [])
            yield {
                "data": data,
                "stored": stored,
                "head_dim": head_dim,
                "scheme": scheme,
                "over": len(found),
                "summary": True,
                "percent_of_fp16": _mean([row["percent_of_fp16"] for row in found]),
                "within_budget": all(row["within_budget"] for row in found),
                **{metric: _mean([row[metric] for row in found]) for metric in _METRICS},
                "rmse": pooled(scheme),
                "rmse_ratio": pooled(scheme) / pooled(BASE),
                "rel_error_worst": max(row["rel_error"] for row in found),
                "worse_than_fp8": sum(row["rel_error"] > peer["rel_error"] for row, peer in zip(found, fp8, strict=False)),
            }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
