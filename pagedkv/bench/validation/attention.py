"""Decode attention against its reference: values, repeats, streams of captured graphs, other devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

import pagedkv
from pagedkv import reference
from pagedkv.bench.bandwidth import gather_roof
from pagedkv.bench.inputs import PagedInputs, shape
from pagedkv.bench.validation import oracle
from pagedkv.bench.validation.attention_cases import CASES, Case, huge_pool, problem, sweep
from pagedkv.bench.validation.judge import Check, max_error, tolerance, worst
from pagedkv.bench.validation.oracle import Problem

_OUTPUTS = ("out", "lse", "block_mass")
_REPEATS = 20


def checks(device: torch.device, quick: bool) -> Iterator[Check]:
    oracle_error = 0.0
    for case, q_dtype, cache in sweep(quick):
        p = case.build(device, q_dtype, cache)
        exact = oracle.attention(p)
        if not case.large:
            # What judges the large cases is itself judged on the small ones, relative to the largest value.
            want = p.reference()
            oracle_error = max(oracle_error, *(max_error(a, b) / max(1.0, _magnitude(b)) for a, b in zip(exact, want, strict=True)))
            yield from _judge(p, case.name, cache, want, "pagedkv.reference")
        else:
            yield from _judge(p, case.name, cache, exact, "PyTorch in float64")
    yield Check("float64 oracle", "every small case", "float64", "PyTorch in float64 against plain loops", oracle_error, 1e-9)
    for q_dtype in (torch.float16,) if quick else (torch.float16, torch.float32):
        yield from _huge(device, q_dtype)
    yield from _repeats(device, quick)
    yield from _merge(device)
    if device.type == "cuda":
        yield from _graph(device, quick)
        yield from _second_device(device)
        yield from _gather(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _judge(p: Problem, case: str, cache: str, want, judge: str) -> Iterator[Check]:
    """One check an output. The op runs twice, bare and with everything asked for: the two may take different kernels."""
    dtype = _name(p.q.dtype)
    try:
        bare, full = p.run(), p.run(return_lse=True, return_block_mass=True)
    except (RuntimeError, TypeError, ValueError) as error:  # an op that refuses a case ends that case, not the table
        yield Check(p.op, case, dtype, cache, math.inf, 0.0, judge, reason=f"{type(error).__name__}: {error}"[:300])
        return
    for name, got, right, by_torch in zip(_OUTPUTS, full, want, p.yardstick(), strict=True):
        results = [got, bare] if name == "out" else [got]
        yield Check(p.op, case, dtype, f"{name}, {cache}", *worst(results, right, by_torch, p.q.dtype), judge)


def _magnitude(x) -> float:
    return float(torch.as_tensor(x).double().nan_to_num(0, 0, 0).abs().max()) if x.size else 0.0


def _huge(device: torch.device, q_dtype: torch.dtype) -> Iterator[Check]:
    case = "a pool past 2^31 bytes, K and V interleaved"
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 6 << 30:
        yield Check("quant_paged_attention", case, _name(q_dtype), "", 0.0, 0.0, reason="needs 6 GiB of GPU memory", absent=True)
        return
    p = huge_pool(device, q_dtype)
    yield from _judge(p, case, "int8_block_head", oracle.attention(p), "PyTorch in float64")


def _case(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


def _repeats(device: torch.device, quick: bool) -> Iterator[Check]:
    """Bitwise equality from call to call; the error is the number of repeats that differ."""
    for cache in ("int8_block_head", "float16") if quick else ("int8_block_head", "int8_token_head", "float16", "float32"):
        for name in ("plain", "a long sequence", "window, soft cap and sinks"):
            p = _case(name).build(device, torch.float16, cache)
            first = [x.clone() for x in p.run(return_lse=True, return_block_mass=True)]
            count = 3 if quick else _REPEATS
            differ = sum(not _bitwise(p.run(return_lse=True, return_block_mass=True), first) for _ in range(count))
            yield Check(p.op, f"{count} repeats, bitwise", "float16", f"{name}, {cache}", float(differ), 0.0, "the first call")


def _bitwise(a, b) -> bool:
    views = {2: torch.int16, 4: torch.int32}
    return all(torch.equal(x.view(views[x.itemsize]), y.view(views[y.itemsize])) for x, y in zip(a, b, strict=True))


def _merge(device: torch.device) -> Iterator[Check]:
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
            for name, x, right, rounded in zip(("out", "lse"), got, want, baseline, strict=True):
                limit = tolerance(rounded, right, dtype, x.dtype)
                yield Check(
                    "merge_attention_states",
                    "empty and distant states",
                    _name(dtype),
                    f"{name}, head_dim {head_dim}",
                    max_error(x, right),
                    limit,
                )


def _torch_merge(a, lse_a, b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weigh = [(x - lse).exp().nan_to_num(0.0)[..., None] for x in (lse_a, lse_b)]
    out = sum(torch.where(w == 0, 0, x * w.to(x.dtype)) for w, x in zip(weigh, (a, b), strict=True))
    return out, lse


def _graph(device: torch.device, quick: bool) -> Iterator[Check]:
    """A captured call, replayed with other queries, tables and lengths in place, against an eager call: bitwise."""
    for cache in ("int8_block_head", "float16") if quick else ("int8_block_head", "int8_token_head", "float16", "float32"):
        p = problem(device, torch.float16, cache, lens=(700, 33, 0, 512), heads=(8, 2), head_dim=128)
        other = problem(device, torch.float16, cache, lens=(5, 700, 650, 0), heads=(8, 2), head_dim=128, seed=1)
        other.block_tables %= p.k_cache.shape[0]
        p.run(return_lse=True, return_block_mass=True)  # lazy initialisation is no part of a capture
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
        yield Check(
            p.op, "CUDA graph, replayed with other queries, tables and lengths", "float16", cache, float(differ), 0.0, "an eager call"
        )
        # The eager call that judged the last replay is judged here.
        yield from _judge(p, "CUDA graph, the last replay's arguments", cache, oracle.attention(p), "PyTorch in float64")


def _second_device(device: torch.device) -> Iterator[Check]:
    case = "another device than the current one"
    if torch.cuda.device_count() < 2:
        yield Check("quant_paged_attention", case, "float16", "", 0.0, 0.0, reason="this machine has one GPU", absent=True)
        return
    second = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    for cache in ("int8_block_head", "float16"):
        p = problem(second, torch.float16, cache)
        yield from _judge(p, case, cache, p.reference(), "pagedkv.reference")


def _gather(device: torch.device) -> Iterator[Check]:
    """The roof of the benchmarks reads every byte: its checksum is the exclusive or of all the words of K and V."""
    for kv_dtype in ("int8_block_head", "float16"):
        for name in ("3x512", "2x1040", "2x256_d64"):  # whole steps of 16 tokens, which is what it reads
            inputs = PagedInputs(shape(name), device, num_rotations=1)
            calls = gather_roof(inputs, kv_dtype)
            if calls is None:
                yield Check("paged_gather", f"checksum, {name}", kv_dtype, "", 0.0, 0.0, reason="no gather kernel here", absent=True)
                continue
            checksum = calls[0]()
            checksum.zero_()
            calls[0]()
            cache, words = inputs.cache(kv_dtype), np.int32(0)
            for pool in (cache[0], cache[2 if len(cache) == 4 else 1]):
                blocks = pool[inputs.block_tables[0].long().flatten()].cpu()
                words ^= np.bitwise_xor.reduce(blocks.contiguous().view(torch.int32).numpy(), axis=None)
            yield Check("paged_gather", f"checksum, {name}", kv_dtype, "", float(int(checksum) != int(words)), 0.0, "NumPy")
