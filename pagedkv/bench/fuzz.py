"""Decode attention on random problems, judged by a batched float64 computation in PyTorch.

Problem `n` is drawn from the seed `n` alone, so that a failure is repeated by its number:

    python -m pagedkv.bench.fuzz --device cuda --first 4711 --problems 1

What is drawn is what users of such kernels report as broken: every dtype, granularity, head ratio and layout, lengths from 0 to
thousands, NaN wherever nobody may look, garbage in the tables, bad block ids and lengths, pools past 2^31 bytes. Each problem is two
calls, bare and with everything asked for: the two may take different kernels.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from pagedkv.bench import child
from pagedkv.bench.validation.judge import FLOOR
from pagedkv.bench.validation.oracle import Problem
from pagedkv.evidence import hardware

CALLS_PER_PROBLEM = 2
_MAX_FAILURES = 20  # described in full; the rest is counted
_INT32 = torch.iinfo(torch.int32)
_GARBAGE = (-1, _INT32.max, _INT32.min, 10**9)
_HUGE = (128, 16, 8)  # head_dim, block_size, num_kv_heads of the pool past 2^31 bytes


# ------------------------------------------------------------------------------------------- reference


def attention_in(p: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`(out, lse, block_mass)` of all sequences at once, computed in `dtype`.

    In float64 it is the reference, in `q`'s own dtype the yardstick of the tolerance. Tables are gathered whole: for problems of which
    a padded copy of K and V fits.
    """
    num_seqs, num_heads, head_dim = p.q.shape
    num_blocks, block_size, num_kv_heads, _ = p.k_cache.shape
    max_blocks = p.block_tables.shape[1]
    window, cap, sinks = (p.options.get(name) for name in ("sliding_window", "logits_soft_cap", "sinks"))
    lens, ids = p.seq_lens.long(), p.block_tables.long()
    bad = (lens < 0) | (lens > max_blocks * block_size)
    lens = lens.masked_fill(bad, 0)
    position = torch.arange(max_blocks * block_size, device=p.q.device)
    first = (lens - window).clamp(min=0) if window else torch.zeros_like(lens)
    live = (position >= first[:, None]) & (position < lens[:, None])  # [num_seqs, tokens]
    live_blocks = live.view(num_seqs, max_blocks, block_size).any(2)
    inside = (ids >= 0) & (ids < num_blocks)
    bad = bad | (live_blocks & ~inside).any(1)
    ids = ids.masked_fill(~inside, 0)

    def gathered(cache: Tensor, scale: Tensor | None) -> Tensor:  # [num_seqs, num_kv_heads, tokens, head_dim]
        x = cache[ids]
        if scale is not None:
            wide = torch.promote_types(dtype, torch.float32)
            per_token = scale[ids][:, :, None] if scale.dim() == 2 else scale[ids]
            x = x.to(wide) * per_token[..., None].to(wide)
        return x.to(dtype).flatten(1, 2).masked_fill(~live[:, :, None, None], 0).transpose(1, 2)

    group = num_heads // num_kv_heads
    q = p.q.to(dtype).view(num_seqs, num_kv_heads, group, head_dim)
    logits = torch.matmul(q, gathered(p.k_cache, p.k_scale).transpose(2, 3)).flatten(1, 2) * p.sm_scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    logits = logits.masked_fill(~live[:, None], -math.inf)
    sink = logits.new_full((num_heads,), -math.inf) if sinks is None else sinks.to(dtype)
    joined = torch.cat([logits, sink[None, :, None].expand(num_seqs, -1, -1)], 2)
    weights = joined.softmax(2)[..., :-1]
    out = torch.matmul(weights.view(num_seqs, num_kv_heads, group, weights.shape[2]), gathered(p.v_cache, p.v_scale)).view(p.q.shape)
    lse = joined.logsumexp(2)
    mass = logits.softmax(2).mean(1).view(num_seqs, max_blocks, block_size).sum(2)
    for result, empty in ((out, 0.0), (lse, -math.inf), (mass, 0.0)):
        shape = (-1, *[1] * (result.dim() - 1))
        result.masked_fill_((lens == 0).view(shape), empty).masked_fill_(bad.view(shape), math.nan)
    return out, lse, mass


def share_of_tolerance(got: Tensor, want: Tensor, yardstick: Tensor, q_dtype: torch.dtype) -> Tensor:
    """The largest error of each sequence over what `judge.tolerance` allows it, `[num_seqs]`: above 1 is wrong. No host synchronisation."""
    if got.numel() == 0:
        return torch.zeros(len(got), dtype=torch.float64, device=got.device)
    got_d, want, yardstick = (x.double().flatten(1) for x in (got, want, yardstick))

    def error(x: Tensor) -> Tensor:
        same = (x == want) | (x.isnan() & want.isnan())
        difference = torch.where(x.isfinite() & want.isfinite(), (x - want).abs(), math.inf)
        return torch.where(same, 0.0, difference).amax(1)

    largest = torch.where(want.isfinite(), want.abs(), 0.0).amax(1)
    by_torch = error(yardstick)
    allowed = torch.maximum(largest * torch.finfo(got.dtype).eps / 2, torch.where(by_torch.isfinite(), by_torch, 0.0))
    return error(got_d) / (2 * allowed + FLOOR[q_dtype])


# ------------------------------------------------------------------------------------------- problems


def draw(number: int, device: torch.device) -> tuple[Problem, list[str]]:
    """Problem `number`, and the features that it has."""
    rng = random.Random(number)
    generator = torch.Generator(device).manual_seed(number)
    q_dtype = rng.choice((torch.float16, torch.float16, torch.bfloat16, torch.float32))
    cache = rng.choice(("int8_block_head",) * 3 + ("int8_token_head",) * 2 + ("float16", "bfloat16", "float32"))
    if cache == "float16" and _chance(rng, 0.5):
        cache = str(q_dtype).removeprefix("torch.")  # the fast kernels want the two alike
    head_dim = rng.choice((64, 128, 128, 256, 8 * rng.randint(1, 32)))
    block_size = rng.choice((16, 16, 32, 64, rng.randint(1, 256), rng.randint(1, 40)))
    num_kv_heads = rng.choice((1, 1, 2, 2, 3, 4, 8))
    huge, many_blocks = _chance(rng, 0.03) and _huge_pool_fits(device), _chance(rng, 0.04)
    if huge:
        cache, head_dim, block_size, num_kv_heads = "int8_block_head", *_HUGE
    elif many_blocks:
        head_dim, block_size, num_kv_heads = rng.choice((8, 24, 64)), rng.choice((1, 3, 16)), 1
    group = rng.choice((1, 2, 4, 4, 8, rng.randint(1, 16), rng.choice((32, 64)) if num_kv_heads <= 2 else 5))
    features = [str(q_dtype).removeprefix("torch.") + " q", f"{cache} cache"]

    longest = rng.choice((40, 200, 700, 1500, 6000 if num_kv_heads * head_dim <= 256 else 2500))
    lens = [rng.choice((0, 1, min(block_size, longest), longest, rng.randint(0, longest))) for _ in range(rng.choice((1, 2, 3, 5)))]
    counts = [math.ceil(n / block_size) for n in lens]
    if huge:
        pool = _huge_pool(device)
        features.append("pool past 2^31 bytes")
    else:
        spare = 66_000 if many_blocks else rng.randint(0, 5)
        pool = _pool((sum(counts) + spare + 1, block_size, num_kv_heads, head_dim), cache, device, generator)
    num_blocks = pool["k_cache"].shape[0]
    tables = _tables(rng, counts, num_blocks, spare_columns=rng.choice((0, 0, 1, 7)))
    q = torch.randn(len(lens), num_kv_heads * group, head_dim, device=device, generator=generator).to(q_dtype)
    options: dict = {}
    if _chance(rng, 0.25):
        options["sliding_window"] = rng.randint(1, longest)
    if _chance(rng, 0.2):
        options["logits_soft_cap"] = rng.choice((0.5, 5.0, 30.0))
    if _chance(rng, 0.25):
        options["sinks"] = torch.randn(q.shape[1], device=device, generator=generator) * rng.choice((1.0, 20.0))
    features += options
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    p = Problem(q=q, **pool, block_tables=tables.to(device), seq_lens=seq_lens, sm_scale=head_dim**-0.5, options=options)

    if not huge:  # that pool is every such problem's
        if _chance(rng, 0.5):
            _poison(p)
            features.append("NaN past the end")
        _lay_out(p, rng, features)
    _spoil(p, rng, features)
    if num_blocks > 65_536:
        features.append("block ids past 65,535")
    if 0 in lens:
        features.append("an empty sequence")
    if block_size % 16 or head_dim not in (64, 128, 256):
        features.append("odd block_size or head_dim")
    return p, features


def _chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def _pool(size: tuple[int, ...], cache: str, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """`k_cache` and `v_cache` of `size`; for int8 `k_scale` and `v_scale`, too."""
    if not cache.startswith("int8"):
        dtype = getattr(torch, cache)
        return {name: torch.randn(size, device=device, generator=generator).to(dtype) for name in ("k_cache", "v_cache")}
    pool = {name: torch.randint(-127, 128, size, dtype=torch.int8, device=device, generator=generator) for name in ("k_cache", "v_cache")}
    groups = size[::2] if cache == "int8_block_head" else size[:3]
    return pool | {name: _scales(groups, device, generator) for name in ("k_scale", "v_scale")}


def _tables(rng: random.Random, counts: list[int], num_blocks: int, spare_columns: int) -> Tensor:
    """Distinct blocks for each sequence, half of the time from the pool's far end, where offsets are the largest; garbage behind them."""
    held = range(num_blocks - sum(counts) - 1, num_blocks) if _chance(rng, 0.5) else range(num_blocks)
    blocks = iter(rng.sample(held, sum(counts)))
    width = max(counts) + spare_columns
    rows = [[next(blocks) for _ in range(count)] + [rng.choice(_GARBAGE) for _ in range(width - count)] for count in counts]
    return torch.tensor(rows, dtype=torch.int32).view(len(counts), width)


def _scales(size: tuple[int, ...], device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.rand(size, device=device, generator=generator) * 0.015 + 0.005


def _poison(p: Problem) -> None:
    """NaN (in int8: 127 under a NaN scale) in every slot that no sequence attends to, whatever window it has."""
    num_blocks, block_size = p.k_cache.shape[:2]
    position = torch.arange(p.block_tables.shape[1] * block_size, device=p.q.device)
    held = position < p.seq_lens[:, None]
    slots = (p.block_tables.long().repeat_interleave(block_size, 1) * block_size + position % block_size)[held]
    dead = torch.ones(num_blocks * block_size, dtype=torch.bool, device=p.q.device)
    dead[slots] = False
    dead = dead.view(num_blocks, block_size)
    for cache, scale in ((p.k_cache, p.k_scale), (p.v_cache, p.v_scale)):
        cache.masked_fill_(dead[:, :, None, None], 127 if scale is not None else math.nan)
        if scale is not None:
            scale.masked_fill_(dead[..., None] if scale.dim() == 3 else dead.all(1)[:, None], math.nan)


def _lay_out(p: Problem, rng: random.Random, features: list[str]) -> None:
    """Another layout in memory of the same numbers, for one problem in three."""
    layout = rng.choice(("contiguous",) * 6 + ("K and V interleaved", "heads first", "rows 4 elements further apart"))
    if layout == "contiguous":
        return
    features.append(layout)
    if layout == "K and V interleaved":
        both = torch.stack([p.k_cache, p.v_cache], 1)
        p.k_cache, p.v_cache = both[:, 0], both[:, 1]
    elif layout == "heads first":
        p.k_cache, p.v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (p.k_cache, p.v_cache))
    else:
        p.k_cache, p.v_cache = (torch.cat([x, x[..., :4]], -1)[..., :-4] for x in (p.k_cache, p.v_cache))


def _spoil(p: Problem, rng: random.Random, features: list[str]) -> None:
    """A bad block id or length in one sequence, now and then: its output is NaN, the others are right."""
    seq = rng.randrange(len(p.seq_lens))
    if _chance(rng, 0.1) and p.block_tables.shape[1] > 0:
        p.block_tables[seq, rng.randrange(p.block_tables.shape[1])] = rng.choice((*_GARBAGE, p.k_cache.shape[0]))
        features.append("a bad block id")
    if _chance(rng, 0.07):
        p.seq_lens[seq] = rng.choice((-1, _INT32.min, _INT32.max, p.block_tables.shape[1] * p.k_cache.shape[1] + 1))
        features.append("a bad length")


def _huge_pool_fits(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > 20 << 30


@functools.cache
def _huge_pool(device: torch.device) -> dict[str, Tensor]:
    """An int8 pool of which K alone takes more than 2^31 bytes, interleaved with V; made once."""
    generator = torch.Generator(device).manual_seed(0)
    head_dim, block_size, num_kv_heads = _HUGE
    num_blocks = 2**31 // (block_size * num_kv_heads * head_dim) + 64
    size = (num_blocks, 2, block_size, num_kv_heads, head_dim)
    both = torch.randint(-127, 128, size, dtype=torch.int8, device=device, generator=generator)
    k_scale, v_scale = (_scales((num_blocks, num_kv_heads), device, generator) for _ in range(2))
    return {"k_cache": both[:, 0], "v_cache": both[:, 1], "k_scale": k_scale, "v_scale": v_scale}


# -------------------------------------------------------------------------------------------- running


def judge(p: Problem) -> float:
    """The worst share of the tolerance over both calls, their outputs and the sequences; infinite where a call is refused."""
    try:
        bare, full = p.run(), p.run(return_lse=True, return_block_mass=True)
    except (RuntimeError, TypeError, ValueError):
        return math.inf
    want, yardstick = attention_in(p, torch.float64), attention_in(p, p.q.dtype)
    shares = [share_of_tolerance(got, right, rounded, p.q.dtype) for got, right, rounded in zip(full, want, yardstick, strict=True)]
    shares.append(share_of_tolerance(bare, want[0], yardstick[0], p.q.dtype))
    worst = float(torch.cat(shares).amax())
    return math.inf if math.isnan(worst) else worst


def fuzz(device: torch.device, first: int, problems: int) -> dict:
    """Judge `problems` problems from number `first` on.

    Returns:
        `problems`, `calls`; `failures`, how many problems came out wrong, and `failed`, the first of them: `problem` (its number), `share`
        of the tolerance (null: infinite), `features`; `worst_share` and `worst_problem` of the others; `features`, the calls that had each.
    """
    counts: collections.Counter[str] = collections.Counter()
    failed, failures, worst, worst_problem = [], 0, 0.0, None
    for number in range(first, first + problems):
        p, features = draw(number, device)
        share = judge(p)
        counts.update(dict.fromkeys(features, CALLS_PER_PROBLEM))
        if share > 1:
            failures += 1
            if len(failed) < _MAX_FAILURES:
                failed.append({"problem": number, "share": share if math.isfinite(share) else None, "features": features})
        elif share >= worst:
            worst, worst_problem = share, number
    return {"problems": problems, "calls": problems * CALLS_PER_PROBLEM, "failures": failures, "worst_share": worst,
            "worst_problem": worst_problem, "failed": failed, "features": dict(sorted(counts.items()))}  # fmt: skip


def fuzz_in_processes(device: torch.device, first: int, problems: int, workers: int, arch: str | None = None) -> dict:
    """`fuzz`, spread over `workers` processes; with `arch`, over kernels built for it (as `PAGEDKV_CUDA_ARCH` takes it).

    Raises:
        RuntimeError: a process died; the message ends with what it printed last.
    """
    each = math.ceil(problems / workers)
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for start in range(first, first + problems, each):
            output = Path(folder) / f"{start}.json"
            count = min(each, first + problems - start)
            command = child.command("pagedkv.bench.fuzz", "--device", device, "--first", start, "--problems", count, "--output", output)
            with open(output.with_suffix(".log"), "w") as log:
                process = subprocess.Popen(command, env=child.environment(arch, OMP_NUM_THREADS="1"), stdout=log, stderr=subprocess.STDOUT)
            running.append((process, output))
        for process, _ in running:
            process.wait()
        parts = []
        for process, output in running:
            if not output.exists():  # status 1 alone says that problems failed, which the result tells
                raise RuntimeError(f"fuzzing ended with {process.returncode}: {output.with_suffix('.log').read_text()[-2000:]}")
            parts.append(json.loads(output.read_text()))
    return merged(parts)


def merged(parts: list[dict]) -> dict:
    """The results of several runs as one."""
    worst = max(parts, key=lambda part: part["worst_share"])
    features: collections.Counter[str] = collections.Counter()
    for part in parts:
        features.update(part["features"])
    return {
        **{name: sum(part[name] for part in parts) for name in ("problems", "calls", "failures")},
        **{name: worst[name] for name in ("worst_share", "worst_problem")},
        "failed": [failure for part in parts for failure in part["failed"]][:_MAX_FAILURES],
        "features": dict(sorted(features.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pagedkv.bench.fuzz", description="Decode attention on random problems. Exit status 1: some came out wrong."
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem (its seed)")
    parser.add_argument("--problems", type=int, default=1000, help="how many; each is two calls")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--output", type=Path, help="write the result here, as JSON")
    arguments = parser.parse_args()
    device = hardware.resolve(arguments.device)
    if arguments.workers > 1:
        result = fuzz_in_processes(device, arguments.first, arguments.problems, arguments.workers)
    else:
        result = fuzz(device, arguments.first, arguments.problems)
    if arguments.output:
        arguments.output.write_text(json.dumps(result))
    print(json.dumps(result, indent=1))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
