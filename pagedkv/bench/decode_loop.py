"""A decode loop under a budget: each sequence grows by a token a step, and lets a block go whenever it has grown by one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

import pagedkv

# What a period of the loop does, each with all of those before it.
VARIANTS = ("append and attend", "block mass", "accumulate", "evict")


@dataclasses.dataclass(frozen=True)
class Setting:
    """`budget` blocks for each sequence; KV in INT8 with block-head scales."""

    budget: int
    num_seqs: int = 64
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"{self.num_seqs}x{self.budget * self.block_size}"


def settings(device: torch.device, quick: bool = False) -> list[Setting]:
    """Budgets of 1,024, 2,048 and 8,192 tokens on a GPU; a smaller model and 512 tokens on a CPU."""
    if device.type == "cpu":
        return [Setting(32, num_heads=8, num_kv_heads=2, head_dim=64)]
    return [Setting(budget) for budget in ((64,) if quick else (64, 128, 512))]


class Loop:
    """Sequences at their budget, at every phase of filling their last block, and a period of the loop as one call.

    A period is `block_size` steps, in which each sequence fills one block. Then the accumulated mass is the score (H2O), each sequence
    lets its lowest block go, and gets it back, empty, as the next to fill: so memory stays as it is, and nothing is decided on the host.

    Attributes:
        block_tables: int32 `[num_seqs, budget + 1]`: the blocks held, and the next one.
        total: int64 `[num_blocks]`, mass since a block got its owner, a period's mean for each period.
        out: what attention returned last.
    """

    def __init__(self, setting: Setting, device: torch.device | str = "cpu", seed: int = 0):
        self.setting, self.device = setting, torch.device(device)
        s, rng = setting, torch.Generator(self.device).manual_seed(seed)
        steps, num_blocks = s.block_size, s.num_seqs * (s.budget + 1)
        planes = (num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
        k, v = (torch.randint(-127, 128, planes, dtype=torch.int8, device=self.device, generator=rng) for _ in range(2))
        self.cache = (k, k.new_full(planes[::2], 2**-7, dtype=torch.float32), v, v.new_full(planes[::2], 2**-7, dtype=torch.float32))
        q = (steps, s.num_seqs, s.num_heads, s.head_dim)
        self.queries = torch.randn(q, device=self.device, generator=rng).half()
        self.keys, self.values = (
            torch.randn((steps, s.num_seqs, s.num_kv_heads, s.head_dim), device=self.device, generator=rng).half() for _ in range(2)
        )
        self.block_tables = torch.randperm(num_blocks, device=self.device, generator=rng).int().view(s.num_seqs, s.budget + 1)
        self.total = torch.zeros(num_blocks, dtype=torch.int64, device=self.device)

        phase = torch.arange(s.num_seqs, device=self.device) % s.block_size
        position = s.budget * s.block_size - phase + torch.arange(steps, device=self.device)[:, None]  # of each step's tokens
        self._places, self._offsets = position // s.block_size, position % s.block_size
        self.lens = (position + 1).int()  # [steps, num_seqs], when the step's tokens are in
        self.slots = torch.empty_like(position)
        self._find_slots()
        self.out: Tensor | None = None

    def _find_slots(self) -> None:
        blocks = self.block_tables.gather(1, self._places.T).T
        torch.add(self._offsets, blocks, alpha=self.setting.block_size, out=self.slots)

    def period(self, variant: str) -> None:
        """`block_size` steps, and what follows them if `variant` evicts."""
        depth = VARIANTS.index(variant)
        masses = []
        for step in range(self.setting.block_size):
            pagedkv.reshape_and_cache(self.keys[step], self.values[step], *self.cache, self.slots[step])
            results = pagedkv.quant_paged_attention(
                self.queries[step],
                *self.cache,
                self.block_tables,
                self.lens[step],
                self.setting.head_dim**-0.5,
                return_block_mass=depth >= 1,
            )
            self.out, mass = results if depth >= 1 else (results, None)
            masses.append(mass)
        if depth >= 2:
            self.accumulate(masses)
        if depth >= 3:
            self.evict()

    def accumulate(self, masses: list[Tensor]) -> None:
        """The mean over a period's steps, in one call, since the tables stay as they are until it ends: ranks blocks as the sum does."""
        pagedkv.accumulate_block_mass(torch.stack(masses).mean(0), self.block_tables, self.total)

    def evict(self) -> None:
        """Every sequence is one block over its budget: one goes, and is the next to be filled."""
        s = self.setting
        tables, _, freed, _ = pagedkv.select_per_sequence(
            self.total.float(), self.block_tables, self.lens[-1], s.budget, block_size=s.block_size
        )
        freed = freed[: s.num_seqs]  # one of each sequence, in their order
        self.total.index_fill_(0, freed.long(), 0)
        torch.cat((tables[:, : s.budget], freed[:, None]), 1, out=self.block_tables)
        self._find_slots()

    def sound(self) -> dict:
        """What has to hold however long the loop ran."""
        blocks = self.block_tables.flatten().sort().values
        every_block_once = torch.equal(blocks, torch.arange(len(blocks), dtype=torch.int32, device=self.device))
        return {"every_block_once": every_block_once, "finite": bool(torch.isfinite(self.out).all())}


def run(loop: Loop, periods: int) -> dict[str, list[float]]:
    """Microseconds a step of each variant, period by period. The variants take turns, so that a drift of the clock hits all alike.

    On CUDA each is one graph, replayed, and timed by events; on the CPU by the host's clock.
    """
    timers = {variant: _timer(loop, variant) for variant in VARIANTS}
    samples: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(periods):
        for variant, timed in timers.items():
            samples[variant].append(timed() / loop.setting.block_size)
    return samples


def _timer(loop: Loop, variant: str) -> Callable[[], float]:
    """A call that carries out a period and returns its microseconds."""
    if loop.device.type == "cpu":

        def on_host() -> float:
            begin = time.perf_counter()
            loop.period(variant)
            return 1e6 * (time.perf_counter() - begin)

        return on_host

    side = torch.cuda.Stream(loop.device)
    side.wait_stream(torch.cuda.current_stream(loop.device))
    with torch.cuda.stream(side):
        loop.period(variant)  # lazy initialisation is no part of a capture
    torch.cuda.current_stream(loop.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.period(variant)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def on_device() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    return on_device


def rows(setting: Setting, samples: dict[str, list[float]]) -> Iterator[dict]:
    """A row for each variant, and one with the shares of a step, in percent: medians of what the turns say, each by itself."""
    steps = len(samples["evict"]) * setting.block_size
    for variant, times in samples.items():
        p10, p50, p90 = (round(float(p), 3) for p in np.percentile(times, (10, 50, 90)))
        yield {"kind": "step", "setting": setting.name, "variant": variant, "steps": steps, "p10_us": p10, "p50_us": p50, "p90_us": p90}
    bare, mass, accumulate, evict = (np.array(samples[variant]) for variant in VARIANTS)
    shares = {"block_mass": mass - bare, "accumulate": accumulate - mass, "evict": evict - accumulate, "decode_share": evict - mass}
    medians = {name: round(float(100 * np.median(difference / evict)), 4) for name, difference in shares.items()}
    yield {"kind": "share", "setting": setting.name, "steps": steps, **medians}
