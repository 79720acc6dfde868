"""What the CUDA kernels do where nobody looks: memory checkers over every variant, split counts, repeats, captured graphs.

`python -m pagedkv.bench.robustness --device cuda` makes the calls of `variants` and nothing else: the program that the checkers watch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import pagedkv
from pagedkv.bench import child, fuzz
from pagedkv.bench.bandwidth import gather_roof
from pagedkv.bench.inputs import PagedInputs, shape
from pagedkv.bench.toolchain import demangled
from pagedkv.bench.validation.attention_cases import problem
from pagedkv.evidence import hardware
from pagedkv.ops import build

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
MAX_SPLITS = 64
REPEATS = 100
PROBLEMS = {"cpu": 150, "cuda": 10_000}  # random ones, two calls each
_TIMEOUT_S = 300

# Kernels that no sweep on such a device can launch, and why.
UNREACHABLE = {
    "probe": "never launched: a kernel's attributes say what the library was compiled for",
    "select_stage": "for devices without cooperative launches",
}

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_CACHES = ("int8_block_head", "int8_token_head", "float16", "bfloat16", "float32")


def workers(device: torch.device) -> int:
    """Processes that share the random problems: each spends most of its time launching from Python; some hold 5 GB."""
    if device.type != "cuda":
        return 1
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(1, min(12, len(os.sched_getaffinity(0)) - 2, memory // (8 << 30)))


# -------------------------------------------------------------------------------------------- the sweep


def variants(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Small calls, each with what it is, that launch every kernel of the library in every form: dtypes, sizes, alignments, plans."""
    yield from _attention_variants(device)
    yield from _eviction_variants(device)
    yield from _sequence_variants(device)
    yield from _quantization_variants(device)
    yield from _write_variants(device)
    yield from _merge_variants(device)
    for kv_dtype, name in itertools.product(("int8_block_head", "float16"), ("2x64", "1x1040", "2x64_d64", "2x64_d256")):
        calls = gather_roof(PagedInputs(shape(name), device, num_rotations=1), kv_dtype)
        if calls is not None:
            yield f"paged_gather {name} {kv_dtype}", calls[0]


def _attention_variants(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    # Lengths that are cut from shapes alone (short tables; one sequence) and on the device.
    plans = ((37, 0, 16), (1300, 5), (1500,))
    options = {"sliding_window": 21, "logits_soft_cap": 5.0, "sinks": 2.0}
    for head_dim, q_dtype, cache in itertools.product((64, 128, 256, 80), _DTYPES, _CACHES):
        for lens in plans if q_dtype == torch.float16 else plans[:2]:
            p = problem(device, q_dtype, cache, lens=lens, heads=(4, 1), head_dim=head_dim)
            yield f"{p.op} {head_dim} {q_dtype} {cache} {lens[:3]}", p.run
            yield f"{p.op} {head_dim} {q_dtype} {cache} {lens[:3]} with mass", lambda p=p: p.run(return_lse=True, return_block_mass=True)
        block_size = 16 if head_dim == 128 else 5
        p = problem(device, q_dtype, cache, lens=(70, 2, 1200), heads=(22, 2), head_dim=head_dim, block_size=block_size, **options)
        yield f"{p.op} {head_dim} {q_dtype} {cache}, all options", lambda p=p: p.run(return_lse=True, return_block_mass=True)
    for q_dtype, cache in itertools.product(_DTYPES, _CACHES):  # rows that 16-byte loads do not fit
        p = problem(device, q_dtype, cache, lens=(37, 0, 16), heads=(4, 1))
        p.k_cache, p.v_cache = _unaligned(p.k_cache), _unaligned(p.v_cache)
        yield f"{p.op} {q_dtype} {cache} unaligned", lambda p=p: p.run(return_lse=True, return_block_mass=True)
    for head_dim, cache in itertools.product((128, 80), ("int8_block_head", "float16")):  # too many sequences to cut
        p = problem(device, torch.float16, cache, lens=(1100, *[3] * 700), heads=(4, 1), head_dim=head_dim)
        yield f"{p.op} {head_dim} {cache} 701 sequences", lambda p=p: p.run(return_lse=True, return_block_mass=True)


def _eviction_variants(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for n, ties in itertools.product((300, 3_000, 20_000), (False, True)):
        recency, frequency = (torch.rand(n, device=device).round(decimals=1 if ties else 6) for _ in range(2))
        mass, valid = torch.rand(n, 16, device=device), torch.rand(n, 16, device=device) > 0.3
        if ties:
            mass.zero_()
        for block_size in (16, 5):
            statistics = (recency, frequency, mass[:, :block_size], valid[:, :block_size])
            yield f"eviction_scores {n} {block_size}", lambda s=statistics: pagedkv.eviction_scores(*s)
            for k in (1, n // 7, n):
                yield f"evict_blocks {n} {block_size} {k}", lambda s=statistics, k=k: pagedkv.evict_blocks(*s, k)
        for k in (1, n // 7, n):
            yield f"select_eviction_candidates {n} {k}", lambda r=recency, k=k: pagedkv.select_eviction_candidates(r, k)


def _sequence_variants(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """What decides which blocks of a sequence go: its mass, its selection, statistics of its K and V."""
    for cache, head_dim, aligned in itertools.product(_CACHES, (64, 128, 72), (True, False)):
        p = problem(device, torch.float16, cache, lens=(37, 0, 300), heads=(2, 2), head_dim=head_dim)
        kv = p.k_cache if aligned else _unaligned(p.k_cache)
        paged, groups = (kv, p.k_scale, p.block_tables, p.seq_lens), -(-p.block_tables.shape[1] // 4)
        shift, gain = torch.randn(2, len(p.seq_lens), groups, *kv.shape[2:], device=device)
        yield f"token_moments {cache} {head_dim}", lambda a=paged: pagedkv.token_moments(*a)
        yield (
            f"token_moments {cache} {head_dim}, shifted",
            lambda a=paged, shift=shift, gain=gain: pagedkv.token_moments(*a, blocks_per_group=4, shift=shift, gain=gain),
        )
        yield f"channel_statistics {cache} {head_dim}", lambda a=paged: pagedkv.channel_statistics(*a, blocks_per_group=4)
    tables, pool = p.block_tables, torch.rand(len(p.k_cache), device=device)
    total = torch.zeros(len(pool), dtype=torch.int64, device=device)
    for decay in (1.0, 0.9):
        yield (
            "accumulate_block_mass",
            lambda d=decay: pagedkv.accumulate_block_mass(torch.rand(tables.shape, device=device), tables, total, d),
        )
    many = tables.repeat(200, 1)  # rows, of which a thread takes several
    yield "accumulate_block_mass", lambda: pagedkv.accumulate_block_mass(torch.rand(many.shape, device=device), many, total)
    for scores, references in (
        (pool, None),
        (torch.rand(tables.shape, device=device), None),
        (pool, torch.ones_like(pool, dtype=torch.int32)),
    ):
        yield (
            "select_per_sequence",
            lambda s=scores, r=references: pagedkv.select_per_sequence(s, tables, p.seq_lens, 5, block_size=16, references=r),
        )


def _unaligned(x: Tensor) -> Tensor:
    """The same values, every row one element off."""
    base = torch.zeros((*x.shape[:-1], x.shape[-1] + 1), dtype=x.dtype, device=x.device)
    base[..., 1:] = x
    return base[..., 1:]


def _quantization_variants(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for head_dim, block_size, aligned in itertools.product((8, 32, 64, 128, 256), (3, 16, 256), (True, False)):
        kv = torch.randn(3, block_size, 2, head_dim, device=device)
        for granularity in ("block_head", "token_head"):
            for dtype, rotated in itertools.product(_DTYPES, (False, True) if block_size == 16 else (False,)):
                x = kv.to(dtype) if aligned else _unaligned(kv.to(dtype))
                yield (
                    f"quantize_kv {head_dim} {block_size} {dtype} {granularity} {rotated}",
                    lambda x=x, g=granularity, r=rotated: pagedkv.quantize_kv(x, g, rotated=r),
                )
            q, scale = pagedkv.quantize_kv(kv, granularity)
            q = q if aligned else _unaligned(q)
            yield f"dequantize_kv {head_dim} {block_size} {granularity}", lambda q=q, scale=scale: pagedkv.dequantize_kv(q, scale)


def _write_variants(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for head_dim, granularity, tokens, aligned in itertools.product(
        (32, 64, 128, 256), ("block_head", "token_head"), (3, 300, 1500), (True, False)
    ):
        num_blocks = 1700 // 16
        size = (num_blocks, 16, 1, head_dim)
        cache = [torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2)]
        cache = cache if aligned else [_unaligned(x) for x in cache]
        scales = [torch.ones(size[::2] if granularity == "block_head" else size[:3], device=device) for _ in range(2)]
        slots = torch.randperm(num_blocks * 16, device=device)[:tokens]
        slots[0] = -1
        for dtype, rotated in itertools.product(_DTYPES, (False, True)):
            key, value = (torch.randn(tokens, 1, head_dim, device=device).to(dtype) for _ in range(2))
            key, value = (key, value) if aligned else (_unaligned(key), _unaligned(value))
            yield (
                f"reshape_and_cache {head_dim} {granularity} {tokens} {dtype} {rotated}",
                lambda a=(key, value, cache[0], scales[0], cache[1], scales[1], slots), r=rotated: pagedkv.reshape_and_cache(*a, rotated=r),
            )


def _merge_variants(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype, aligned in itertools.product(_DTYPES, (True, False)):
        a, b = (torch.randn(5, 3, 72, device=device).to(dtype) for _ in range(2))
        a, b = (a, b) if aligned else (_unaligned(a), _unaligned(b))
        lse_a, lse_b = torch.randn(5, 3, device=device), torch.randn(5, 3, device=device)
        yield f"merge_attention_states {dtype}", lambda x=(a, lse_a, b, lse_b): pagedkv.merge_attention_states(*x)


def sweep(device: torch.device) -> int:
    """Make every call once; returns how many. A call that fails raises."""
    count = 0
    for _, call in variants(device):
        call()
        count += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return count


# What a checker must find, or its silence means nothing: a read past a tensor's end, and one of memory never written. Both go past
# the library's own checks of arguments.
def _planted(device: torch.device, tool: str) -> None:
    if tool == "initcheck":
        torch.ops.pagedkv_cuda.dequantize_kv(torch.empty(64, 16, 2, 128, dtype=torch.int8, device=device), torch.ones(64, 2, device=device))
    else:
        whole, short = torch.ones(4096, 4, 64, device=device), torch.ones(1, 4, 64, device=device)
        lse = torch.zeros(4096, 4, device=device)
        torch.ops.pagedkv_cuda.merge_attention_states(whole, lse, short, lse)
    torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------ the checkers


def sanitizer() -> str | None:
    """compute-sanitizer's path: on PATH, or beside nvcc."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin:{home}/compute-sanitizer")


def sanitizer_rows(device: torch.device, archs: dict[str, str | None]) -> Iterator[dict]:
    """Every tool over the sweep, for each of `archs` (name: what `PAGEDKV_CUDA_ARCH` takes, None for the device's own), side by side.

    Yields:
        Rows of `kind` "sanitizer": `tool`, `arch`, `calls`, `reports` (errors, or hazards of racecheck), `seconds`, `first_report`; then,
        for the tools that a fault can be planted for, of `kind` "control", whose `reports` have to be above zero. Without
        compute-sanitizer one row, `status` "absent".

    Raises:
        RuntimeError: the sweep did not end under a tool; the message ends with what it printed last.
    """
    path = sanitizer()
    if path is None:
        yield {"kind": "sanitizer", "status": "absent", "reason": "no compute-sanitizer was found (it is part of the CUDA toolkit)"}
        return
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(tool, name, arch, False) for name, arch in archs.items() for tool in TOOLS]
        jobs += [(tool, "native", None, True) for tool in ("memcheck", "initcheck")]
        running = [(job, *_watched(path, device, job[0], *job[2:], Path(folder) / f"{i}.log")) for i, job in enumerate(jobs)]
        for (tool, name, _, planted), process, started, report in running:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
            seconds = round(time.monotonic() - started, 1)
            text = report.read_text() if report.exists() else ""
            reports = reports_in(text)
            calls = re.search(r"^(\d+) calls$", output, re.MULTILINE)
            if reports is None or (calls is None and not planted):  # what is planted may end the program
                raise RuntimeError(f"{tool} ({name}) ended with {process.returncode}: {(output + text)[-2000:]}")
            row = {"kind": "control" if planted else "sanitizer", "tool": tool, "arch": name, "status": "measured"}
            row |= {} if planted else {"calls": int(calls[1])}
            yield row | {"reports": reports, "seconds": seconds, "first_report": first_report(text)}


def _watched(path: str, device: torch.device, tool: str, arch: str | None, planted: bool, report: Path):
    # Without torch's caching allocator each tensor is an allocation of its own, whose end the tools know. initcheck has to see every write.
    command = [path, "--tool", tool, "--log-file", str(report), "--print-limit", "5", "--report-api-errors", "no"]
    if tool != "initcheck":
        command += ["--kernel-name", "kernel_substring=pagedkv"]
    command += child.command("pagedkv.bench.robustness", "--device", device, *(["--plant", tool] if planted else []))
    environment = child.environment(arch, PYTORCH_NO_CUDA_MEMORY_CACHING="1", OMP_NUM_THREADS="1")
    started = time.monotonic()
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), started, report


def reports_in(text: str) -> int | None:
    """How many errors or hazards compute-sanitizer's summary counts; None where there is no summary."""
    found = re.search(r"ERROR SUMMARY: (\d+) error", text) or re.search(r"RACECHECK SUMMARY: (\d+) hazard", text)
    return int(found[1]) if found else None


def first_report(text: str) -> str | None:
    """The first lines of the first report, or None."""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    lines = [line for line in lines if line and not line.startswith("COMPUTE-SANITIZER") and "SUMMARY" not in line]
    return "; ".join(lines[:3])[:300] or None


# --------------------------------------------------------------------------------------------- coverage


def launches(call: Callable[[], object]) -> list[dict]:
    """The kernels that `call` launches, as CUPTI tells it: `{name, grid}`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    return [{"name": e["name"], "grid": e["args"]["grid"]} for e in events if e.get("cat") == "kernel"]


def kernels_in(library: Path) -> list[str] | None:
    """The kernels of a compiled library by their full names; None where no cuobjdump is found or it finds none."""
    tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=f"{os.environ.get('CUDA_HOME') or '/usr/local/cuda'}/bin")
    if tool is None:
        return None
    done = subprocess.run([tool, "-res-usage", str(library)], capture_output=True, text=True)
    names = sorted(set(re.findall(r"Function (\S+?):", done.stdout)))
    return demangled(names, parameters=True) if names else None


def coverage_row(device: torch.device, archs: dict[str, str | None]) -> dict:
    """Which of the library's kernels the sweep launches, built for one or the other of `archs` (as `sanitizer_rows` takes them).

    `kind` "coverage", `kernels`, `launched`, `unreachable` (see `UNREACHABLE`), `missed`, `names` (of what was missed).
    """
    row = {"kind": "coverage"}
    held = kernels_in(next(build.load("cuda").glob("*.so")))
    if held is None:
        return row | {"status": "absent", "reason": "no cuobjdump was found, or it does not read this library"}
    launched = set()
    for output in _side_by_side({name: _started(device, arch, "--list") for name, arch in archs.items()}):
        launched |= {_plain(line) for line in output.splitlines()}
    missed = [name for name in held if _plain(name) not in launched]
    unreachable = [name for name in missed if any(part in name for part in UNREACHABLE)]
    names = [name for name in missed if name not in unreachable]
    return row | {"status": "measured", "kernels": len(held), "launched": len(held) - len(missed), "unreachable": len(unreachable),
                  "missed": len(names), "names": names}  # fmt: skip


def _started(device: torch.device, arch: str | None, *options: object) -> subprocess.Popen:
    """This module in a process of its own, with kernels for `arch`."""
    command = child.command("pagedkv.bench.robustness", "--device", device, *options)
    return subprocess.Popen(command, env=child.environment(arch), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _side_by_side(running: dict[str, subprocess.Popen]) -> Iterator[str]:
    """What each process printed, in order. Raises `RuntimeError` where one died; the message ends with what it printed last."""
    try:
        for name, process in running.items():
            output, errors = process.communicate(timeout=_TIMEOUT_S)
            if process.returncode != 0:
                raise RuntimeError(f"{name} ended with {process.returncode}: {(output + errors)[-2000:]}")
            yield output
    finally:
        for process in running.values():
            process.kill()


def _plain(name: str) -> str:
    return re.sub(r"\s+|\(anonymous namespace\)::", "", name)


# ------------------------------------------------------------------------------- splits, repeats, graphs


def sameness_rows(device: torch.device, archs: dict[str, str | None], repeats: int = REPEATS) -> Iterator[dict]:
    """`repeat_rows`, on CUDA `split_rows` and `graph_rows` too, for each of `archs` (as `sanitizer_rows` takes them), which `arch` names.

    Another architecture's code runs in a process of its own, beside this one's.

    Raises:
        RuntimeError: a process died; the message ends with what it printed last.
    """
    others = {name: _started(device, arch, "--sameness", repeats) for name, arch in archs.items() if arch is not None}
    try:
        yield from (row | {"arch": name} for name in archs if name not in others for row in _sameness(device, repeats))
        for name, output in zip(others, _side_by_side(others), strict=True):
            yield from (json.loads(line) | {"arch": name} for line in output.splitlines() if line.startswith("{"))
    finally:
        for process in others.values():
            process.kill()


def _sameness(device: torch.device, repeats: int) -> Iterator[dict]:
    yield from repeat_rows(device, repeats)
    if device.type == "cuda":
        yield from split_rows(device)
        yield from graph_rows(device, repeats)


def split_rows(device: torch.device) -> Iterator[dict]:
    """One sequence, cut in every number of splits from 1 to `MAX_SPLITS`, each against the float64 reference.

    Nothing asks the op for a number of splits: shapes that bring each about are tried, and the launch itself, whose grid has a row for each
    split, says what came about. One row, `kind` "splits": `counts` (how many of 1 .. 64 were seen), `missing`, `failures`, `worst_share` of
    the tolerance.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    seen: dict[int, float] = {}
    for kv_heads, tokens in _split_shapes(sms):
        p = problem(device, torch.float16, "int8_block_head", lens=(tokens,), heads=(kv_heads, kv_heads), head_dim=64, spare_blocks=1)
        decode = next(e for e in launches(p.run) if "decode" in e["name"])
        splits = decode["grid"][1] * decode["grid"][2]
        if splits <= MAX_SPLITS and splits not in seen:
            seen[splits] = fuzz.judge(p)
        if len(seen) == MAX_SPLITS:
            break
    yield {"kind": "splits", "status": "measured", "counts": len(seen), "missing": sorted(set(range(1, MAX_SPLITS + 1)) - set(seen)),
           "failures": sum(share > 1 for share in seen.values()), "worst_share": max(seen.values())}  # fmt: skip


def _split_shapes(sms: int) -> Iterator[tuple[int, int]]:
    """`(heads, tokens)`: as many units of 64 tokens as splits are wanted; or so many heads that few splits fill the device."""
    yield 1, 64
    for units in range(17, MAX_SPLITS + 1):
        yield 1, 64 * units
    for ctas_per_sm, splits in itertools.product((4, 8, 2, 16), range(1, 17)):
        yield -(-ctas_per_sm * sms // splits), 1088
    for units in range(2, 17):
        yield 1, 64 * units


def repeat_rows(device: torch.device, repeats: int = REPEATS) -> Iterator[dict]:
    """The same call again and again, compared bit for bit. `kind` "repeats": `op`, `cache`, `repeats`, `differ`."""
    for cache, lens in itertools.product(("int8_block_head", "int8_token_head", "float16", "float32"), ((4000, 1, 700), (512,) * 8)):
        p = problem(device, torch.float16, cache, lens=lens, heads=(8, 2), head_dim=128)
        first = [x.clone() for x in p.run(return_lse=True, return_block_mass=True)]
        differ = sum(not _same_bits(p.run(return_lse=True, return_block_mass=True), first) for _ in range(repeats))
        row = {"kind": "repeats", "op": p.op, "cache": cache, "lens": list(lens), "status": "measured"}
        yield row | {"repeats": repeats, "differ": differ}
    pool = (*torch.rand(2, 100_000, device=device), torch.rand(100_000, 16, device=device), torch.rand(100_000, 16, device=device) > 0.3)
    first = pagedkv.evict_blocks(*pool, 15_000)
    differ = sum(not _same_bits(pagedkv.evict_blocks(*pool, 15_000), first) for _ in range(repeats))
    yield {"kind": "repeats", "op": "evict_blocks", "status": "measured", "repeats": repeats, "differ": differ}


def graph_rows(device: torch.device, replays: int = REPEATS) -> Iterator[dict]:
    """A captured call, replayed with other queries, lengths and tables in place.

    `kind` "graph": `replays`, `differ` (from an eager call, bit for bit), `failures` (against the float64 reference).
    """
    for cache in ("int8_block_head", "int8_token_head", "float16", "float32"):
        p = problem(device, torch.float16, cache, lens=(4000, 600, 33, 0), heads=(8, 2), head_dim=128)
        p.run(return_lse=True, return_block_mass=True)  # lazy initialisation is no part of a capture
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = p.run(return_lse=True, return_block_mass=True)
        generator, capacity = torch.Generator(device).manual_seed(0), p.block_tables.shape[1] * p.k_cache.shape[1]
        differ = failures = 0
        for _ in range(replays):
            p.q.normal_(generator=generator)
            p.seq_lens.random_(0, capacity + 1, generator=generator)
            p.block_tables.random_(0, p.k_cache.shape[0], generator=generator)
            graph.replay()
            differ += not _same_bits(captured, p.run(return_lse=True, return_block_mass=True))
            failures += fuzz.judge(p) > 1
        row = {"kind": "graph", "op": p.op, "cache": cache, "status": "measured"}
        yield row | {"replays": replays, "differ": differ, "failures": failures}


def _same_bits(a, b) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pagedkv.bench.robustness", description="Launch every kernel once, for a memory checker to watch."
    )
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--list", action="store_true", help="print the names of the kernels that were launched, instead of how many calls")
    parser.add_argument("--sameness", type=int, metavar="REPEATS", help="instead: repeats, splits and graphs, a row a line as JSON")
    parser.add_argument("--plant", choices=TOOLS, help="instead: a fault that this tool has to find")
    arguments = parser.parse_args()
    device = hardware.resolve(arguments.device)
    pagedkv.backend(device)
    if arguments.list:
        print(*sorted({launch["name"] for launch in launches(lambda: sweep(device))}), sep="\n")
    elif arguments.sameness:
        for row in _sameness(device, arguments.sameness):
            print(json.dumps(row), flush=True)
    elif arguments.plant:
        _planted(device, arguments.plant)
    else:
        print(f"{sweep(device)} calls", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
