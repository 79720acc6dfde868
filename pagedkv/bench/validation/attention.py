"""Decode attention against its reference: values, repeats, streams of captured graphs, other devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

import pagedkv
from pagedkv import reference
from pagedkv.bench.validation import oracle
from pagedkv.bench.validation.attention_cases import CASES, Case, huge_pool, problem, sweep
from pagedkv.bench.validation.judge import max_error, row, tolerance, worst
from pagedkv.bench.validation.oracle import Problem

_OUTPUTS = ("out", "lse", "block_mass")
_REPEATS = 20


def rows(device: torch.device, quick: bool) -> Iterator[dict]:
    for case, q_dtype, cache in sweep(quick):
        yield from _judge(case.build(device, q_dtype, cache), case.name, cache, large=case.large)
    for q_dtype in (torch.float16,) if quick else (torch.float16, torch.float32):
        yield from _huge(device, q_dtype)
    yield from _repeats(device, quick)
    yield from _merge(device)
    if device.type == "cuda":
        yield from _graph(device, quick)
        yield from _second_device(device)


def _name(q_dtype: torch.dtype, cache: str) -> str:
    return f"{str(q_dtype).removeprefix('torch.')} q, {cache}"


def _judge(p: Problem, case: str, cache: str, *, large: bool) -> Iterator[dict]:
    """One row an output. The op runs twice, bare and with everything asked for: the two may take different kernels."""
    exact = oracle.attention(p)
    want = exact if large else p.reference()
    judge = "PyTorch in float64" if large else "pagedkv.reference"
    label = _name(p.q.dtype, cache)
    if not large:
        # What judges the large cases is itself judged on the small ones.
        agreement = max(max_error(a, b) for a, b in zip(exact, want))
        yield row("float64 oracle", case, label, "all", agreement, 1e-9 * max(1.0, _magnitude(want)), judge=judge)
    yardstick = p.yardstick()
    try:
        bare, full = p.run(), p.run(return_lse=True, return_block_mass=True)
    except (RuntimeError, TypeError, ValueError) as error:  # an op that refuses a case ends that case, not the table
        yield row(p.op, case, label, "all", math.inf, 0.0, judge=judge, reason=f"{type(error).__name__}: {error}"[:300])
        return
    for name, got, right, by_torch in zip(_OUTPUTS, full, want, yardstick):
        results = [got, bare] if name == "out" else [got]
        yield row(p.op, case, label, name, *worst(results, right, by_torch, p.q.dtype), judge=judge)


def _magnitude(outputs) -> float:
    return max((float(torch.as_tensor(x).double().nan_to_num(0, 0, 0).abs().max()) for x in outputs if x.size), default=0.0)


def _huge(device: torch.device, q_dtype: torch.dtype) -> Iterator[dict]:
    case, label = "a pool past 2^31 bytes, K and V interleaved", _name(q_dtype, "int8_block_head")
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 6 << 30:
        yield {"op": "quant_paged_attention", "case": case, "dtype": label, "status": "absent", "reason": "needs 6 GiB of GPU memory", "ok": None}
        return
    yield from _judge(huge_pool(device, q_dtype), case, "int8_block_head", large=True)


def _case(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


def _repeats(device: torch.device, quick: bool) -> Iterator[dict]:
    """Bitwise equality from call to call; the error is the number of repeats that differ."""
    for name in ("plain", "a long sequence", "window, soft cap and sinks"):
        for cache in ("int8_block_head", "float16") if quick else ("int8_block_head", "int8_token_head", "float16", "float32"):
            p = _case(name).build(device, torch.float16, cache)
            first = [x.clone() for x in p.run(return_lse=True, return_block_mass=True)]
            count = 3 if quick else _REPEATS
            differ = sum(not _bitwise(p.run(return_lse=True, return_block_mass=True), first) for _ in range(count))
            yield row(p.op, f"{count} repeats, bitwise: {name}", _name(p.q.dtype, cache), "all", float(differ), 0.0, judge="the first call")


def _bitwise(a, b) -> bool:
    views = {2: torch.int16, 4: torch.int32}
    return all(torch.equal(x.view(views[x.itemsize]), y.view(views[y.itemsize])) for x, y in zip(a, b))


def _merge(device: torch.device) -> Iterator[dict]:
    """Two states, some of them empty, some far apart; and a split of one sequence against the whole."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head_dim in (8, 128, 256):
            a, b = (torch.randn(7, 5, head_dim, generator=generator).to(dtype).to(device) for _ in range(2))
            lse_a, lse_b = (torch.randn(7, 5, generator=generator).to(device) * 3 for _ in range(2))
            lse_a[0], lse_b[1] = -math.inf, -math.inf
            lse_a[2], lse_b[2] = -math.inf, -math.inf
            lse_a[3], lse_b[3], lse_b[4] = 5e4, -5e4, 300.0
            a[0], b[1] = math.nan, math.nan  # what an empty state carries is ignored
            want = reference.merge_attention_states(a, lse_a, b, lse_b)
            got = pagedkv.merge_attention_states(a, lse_a, b, lse_b)
            baseline = _torch_merge(a, lse_a, b, lse_b)
            for name, x, right, rounded in zip(("out", "lse"), got, want, baseline):
                limit = tolerance(rounded, right, dtype, x.dtype)
                yield row("merge_attention_states", f"empty and distant states, head_dim {head_dim}", str(dtype).removeprefix("torch."), name,
                          max_error(x, right), limit, judge="pagedkv.reference")  # fmt: skip


def _torch_merge(a, lse_a, b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weigh = [(x - lse).exp().nan_to_num(0.0)[..., None] for x in (lse_a, lse_b)]
    out = sum(torch.where(w == 0, 0, x * w.to(x.dtype)) for w, x in zip(weigh, (a, b)))
    return out, lse


def _graph(device: torch.device, quick: bool) -> Iterator[dict]:
    """A captured call, replayed with other queries, tables and lengths in place, against an eager call: bitwise."""
    for cache in ("int8_block_head", "float16") if quick else ("int8_block_head", "int8_token_head", "float16", "float32"):
        p = problem(device, torch.float16, cache, lens=(700, 33, 0, 512), heads=(8, 2), head_dim=128)
        other = problem(device, torch.float16, cache, lens=(5, 700, 650, 0), heads=(8, 2), head_dim=128, seed=1)
        other.block_tables %= p.k_cache.shape[0]
        p.run()  # lazy initialisation is no part of a capture
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = p.run(return_lse=True, return_block_mass=True)
        differ = 0
        width = min(p.block_tables.shape[1], other.block_tables.shape[1])
        for q, tables, lens in ((p.q.clone(), p.block_tables.clone(), p.seq_lens.clone()), (other.q, other.block_tables, other.seq_lens)):
            p.q.copy_(q)
            p.block_tables[:, :width].copy_(tables[:, :width])
            p.seq_lens.copy_(lens)
            graph.replay()
            torch.cuda.synchronize(device)
            differ += not _bitwise(captured, p.run(return_lse=True, return_block_mass=True))
        yield row(p.op, "CUDA graph, replayed with other queries, tables and lengths", _name(p.q.dtype, cache), "all", float(differ), 0.0,
                  judge="an eager call")  # fmt: skip
        # The eager call that judged the last replay is judged here.
        yield from _judge(p, "CUDA graph, the last replay's arguments", cache, large=True)


def _second_device(device: torch.device) -> Iterator[dict]:
    case = "another device than the current one"
    if torch.cuda.device_count() < 2:
        yield {"op": "quant_paged_attention", "case": case, "status": "absent", "reason": "this machine has one GPU", "ok": None}
        return
    second = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    for cache in ("int8_block_head", "float16"):
        yield from _judge(problem(second, torch.float16, cache), case, cache, large=False)
