"""One scheduler step, the three parts composed: score and evict blocks, quantise the pool, decode over what is left."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import pagedkv
from pagedkv.bench import distributions, quality
from pagedkv.bench.distributions import Problem
from pagedkv.bench.memory import MIB, held

SEED = 2026
EVICT_FRACTION = 0.15
# (num_seqs, max_seq_len) of the published runs: 1,155 blocks on its CPU, 568 on its GPU.
PUBLISHED = {"cpu": (48, 768), "cuda": (32, 512)}


@dataclasses.dataclass(frozen=True)
class Step:
    """A pool of float32 KV and the statistics that its blocks are scored by, all on one device."""

    problem: Problem
    recency: Tensor
    frequency: Tensor
    attention_mass: Tensor
    valid_mask: Tensor
    num_evicted: int
    setup_ms: float


def prepare(num_seqs: int, max_seq_len: int, device: torch.device | str = "cpu", seed: int = SEED) -> Step:
    """The published inputs: MHA with 8 heads of 64, statistics uniform in 0..1, every slot counted as valid."""
    started = time.perf_counter()
    rng = np.random.default_rng(seed)
    problem = distributions.published(rng, num_seqs=num_seqs, max_seq_len=max_seq_len, num_kv_heads=8).to(device)
    num_blocks, block_size = problem.k.shape[:2]
    recency, frequency, mass = (
        torch.from_numpy(rng.random(shape).astype(np.float32)).to(device) for shape in (num_blocks, num_blocks, (num_blocks, block_size))
    )
    valid = torch.ones(num_blocks, block_size, dtype=torch.bool, device=device)
    evicted = max(1, int(EVICT_FRACTION * num_blocks))
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return Step(problem, recency, frequency, mass, valid, evicted, 1e3 * (time.perf_counter() - started))


def drop_blocks(block_tables: Tensor, seq_lens: Tensor, evicted: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Block tables and lengths without the evicted blocks, the order of what remains kept.

    Only the youngest block of a sequence may be partly filled, and it either stays last or goes, so every block
    that is kept in front of it is full. A sequence that loses all its blocks has length 0.
    """
    columns = torch.arange(block_tables.shape[1], device=block_tables.device)
    used = columns * block_size < seq_lens[:, None]
    keep = used & ~torch.isin(block_tables, evicted.to(block_tables.dtype))
    tokens = (seq_lens[:, None] - columns * block_size).clamp(0, block_size)
    order = torch.argsort((~keep).to(torch.uint8), dim=1, stable=True)
    tables = torch.where(keep, block_tables, -1).gather(1, order)
    return tables, (tokens * keep).sum(dim=1).to(seq_lens.dtype)


@dataclasses.dataclass(frozen=True)
class Composition:
    """The step carried out once: what it returned, and each stage as a call that can be timed again."""

    facts: dict
    stages: dict[str, Callable[[], object]]
    total_ms: float


def compose(step: Step, granularity: str = "block_head") -> Composition:
    """Evict, quantise, decode over the whole pool (as published) and over the blocks that remain.

    `facts`: counts, bytes, and the error of the INT8 output over the remaining blocks against float64 attention
    over the same blocks: what eviction itself changes in the output is not an error of the kernels.
    """
    p = step.problem
    block_size = p.k.shape[1]

    def evict():
        return pagedkv.evict_blocks(step.recency, step.frequency, step.attention_mass, step.valid_mask, step.num_evicted)

    def quantise():
        return (*pagedkv.quantize_kv(p.k, granularity), *pagedkv.quantize_kv(p.v, granularity))

    started = time.perf_counter()
    evicted, _ = evict()
    tables, seq_lens = drop_blocks(p.block_tables, p.seq_lens, evicted, block_size)
    cache = quantise()

    def decode(tables, seq_lens):
        return pagedkv.quant_paged_attention(p.q, *cache, tables, seq_lens, p.sm_scale)

    whole, left = decode(p.block_tables, p.seq_lens), decode(tables, seq_lens)
    if p.q.is_cuda:
        torch.cuda.synchronize(p.q.device)
    total_ms = 1e3 * (time.perf_counter() - started)

    fp32, int8 = held(p.k, p.v), held(*cache)
    remaining = dataclasses.replace(p, block_tables=tables, seq_lens=seq_lens)
    facts = {
        "num_seqs": p.q.shape[0],
        "num_blocks": p.k.shape[0],
        "evicted": evicted.numel(),
        "evicted_in_use": int(torch.isin(p.block_tables, evicted.int()).sum()),
        "seqs_touched": int(torch.isin(p.block_tables, evicted.int()).any(dim=1).sum()),
        "seqs_emptied": int((seq_lens == 0).sum()),
        "tokens_before": int(p.seq_lens.sum()),
        "tokens_after": int(seq_lens.sum()),
        "fp32_mib": fp32 / MIB,
        "int8_mib": int8 / MIB,
        "savings_percent_vs_fp32": 100 * (1 - int8 / fp32),
        "finite": bool(torch.isfinite(whole).all() and torch.isfinite(left).all()),
        **{f"{key}_after_eviction": value for key, value in quality.errors(left, quality.exact_attention(remaining)).items()},
    }
    stages = {
        "evict": evict,
        "drop_blocks": lambda: drop_blocks(p.block_tables, p.seq_lens, evicted, block_size),
        "quantise": quantise,
        "attention, whole pool": lambda: decode(p.block_tables, p.seq_lens),
        "attention, remaining blocks": lambda: decode(tables, seq_lens),
    }
    return Composition(facts, stages, total_ms)
