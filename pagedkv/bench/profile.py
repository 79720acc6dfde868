"""What Nsight Compute's counters say of the final kernels: bytes, throughput, issue rate, occupancy, what warps wait for.

`python -m pagedkv.bench.profile --device cuda` is the program that is profiled: each case once, inside the range that ncu watches.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import pagedkv
from pagedkv.bench import child
from pagedkv.bench.eviction import Statistics, pool_bytes
from pagedkv.bench.inputs import PagedInputs, shape
from pagedkv.evidence import hardware

_TIMEOUT_S = 240

_SECTIONS = ("WarpStateStats", "LaunchStats")  # of Nsight Compute: why warps stall; registers, shared memory, waves

# A row's field: Nsight Compute's metric, in base units, and a factor.
_FIELDS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "dram_read_bytes": ("dram__bytes_read.sum", 1),
    "dram_write_bytes": ("dram__bytes_write.sum", 1),
    "dram_percent_of_peak": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "l2_hit_percent": ("lts__t_sector_hit_rate.pct", 1),
    "issue_per_cycle": ("smsp__issue_active.avg.per_cycle_active", 1),
    "sm_percent_of_peak": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "registers": ("launch__registers_per_thread", 1),
    "static_shared_bytes": ("launch__shared_mem_per_block_static", 1),
    "dynamic_shared_bytes": ("launch__shared_mem_per_block_dynamic", 1),
    "waves": ("launch__waves_per_multiprocessor", 1),
}
_STALL = re.compile(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.(?:ratio|pct)")
_MAX_STALLS = 5


@dataclass(frozen=True)
class Case:
    """A call to profile; `needed_bytes`: what it has to read from memory."""

    prepare: Callable[[torch.device], Callable[[], object]]
    needed_bytes: int


_POOL, _TOKENS = 1 << 20, 8192
_SEQS, _SEQ_BLOCKS = 256, 256


def _decode(name: str, kv_dtype: str = "int8_block_head") -> Case:
    def prepare(device: torch.device) -> Callable[[], object]:
        inputs = PagedInputs(shape(name), device, num_rotations=1)
        arguments = (inputs.queries[0], *inputs.cache(kv_dtype), inputs.block_tables[0], inputs.seq_lens, inputs.sm_scale)
        op = pagedkv.quant_paged_attention if kv_dtype.startswith("int8") else pagedkv.paged_attention
        return lambda: op(*arguments)

    return Case(prepare, shape(name).kv_bytes(kv_dtype))


def _evict(device: torch.device) -> Callable[[], object]:
    statistics = Statistics.random(_POOL, device)
    return lambda: pagedkv.evict_blocks(*statistics, _POOL * 15 // 100)


def _select(device: torch.device) -> Callable[[], object]:
    """An eighth of each of `_SEQS` sequences goes, by a score for each block of the pool."""
    blocks = _SEQS * _SEQ_BLOCKS
    tables = torch.randperm(blocks, device=device).int().view(_SEQS, _SEQ_BLOCKS)
    scores, lens = torch.rand(blocks, device=device), torch.full((_SEQS,), 16 * _SEQ_BLOCKS, dtype=torch.int32, device=device)
    return lambda: pagedkv.select_per_sequence(scores, tables, lens, _SEQ_BLOCKS * 7 // 8, block_size=16)


def _write(device: torch.device) -> Callable[[], object]:
    """A prefill into blocks of 16, in order within a block."""
    heads, dim, block_size = 8, 128, 16
    key, value = torch.randn(2, _TOKENS, heads, dim, device=device).half()
    blocks = 2 * _TOKENS // block_size
    cache = []
    for _ in range(2):
        cache += [torch.zeros(blocks, block_size, heads, dim, dtype=torch.int8, device=device), torch.ones(blocks, heads, device=device)]
    order = torch.randperm(blocks, device=device)[: _TOKENS // block_size, None]
    slots = (order * block_size + torch.arange(block_size, device=device)).flatten()
    return lambda: pagedkv.reshape_and_cache(key, value, *cache, slots)


CASES = {
    **{f"decode {name}": _decode(name) for name in ("256x4096", "64x8192", "8x512", "64x4096_d64", "64x4096_d256")},
    "decode 64x8192, token scales": _decode("64x8192", "int8_token_head"),
    "decode 64x8192, float16": _decode("64x8192", "float16"),
    f"evict_blocks {_POOL}": Case(_evict, pool_bytes(_POOL)),
    f"select_per_sequence {_SEQS}x{16 * _SEQ_BLOCKS}": Case(_select, _SEQS * _SEQ_BLOCKS * 8),  # an id and a score for each block
    f"reshape_and_cache {_TOKENS}": Case(_write, _TOKENS * 2 * 8 * 128 * 2),  # float16 K and V
}


def run_cases(device: torch.device) -> None:
    """Each case once with the profiler on, after a warm-up with it off; a fill kernel, told by its name, goes before each."""
    cudart = torch.cuda.cudart()
    marker = torch.empty(1, device=device)
    for case in CASES.values():
        call = case.prepare(device)
        call()
        torch.cuda.synchronize(device)
        cudart.cudaProfilerStart()
        marker.fill_(1.0)
        call()
        torch.cuda.synchronize(device)
        cudart.cudaProfilerStop()
        del call
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------- ncu


def ncu() -> str | None:
    """Nsight Compute's command line: on PATH, or beside nvcc."""
    return shutil.which("ncu") or shutil.which("ncu", path=f"{os.environ.get('CUDA_HOME') or '/usr/local/cuda'}/bin")


def profile_rows(device: torch.device) -> Iterator[dict]:
    """Profile the cases in a process of their own. Clocks are left as they are.

    Yields a row of `kind` "kernel" for each kernel that a case launches; see `parse`. Where ncu is missing, may not read the counters or
    fails, one row, `kind` "profile", `status` "absent", with the reason in one line.
    """
    path = ncu()
    if path is None:
        yield {"kind": "profile", "status": "absent", "reason": "no ncu was found (Nsight Compute, part of the CUDA toolkit)"}
        return
    text = _watched(path, device)
    rows = parse(text, list(CASES))
    yield from rows or [{"kind": "profile", "status": "absent", "reason": refusal(text)}]


def _watched(path: str, device: torch.device) -> str:
    """What ncu wrote and printed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        counters = [metric for metric, _ in _FIELDS.values() if not metric.startswith("launch__")]  # those are a section's
        command = [path, "--clock-control", "none", "--profile-from-start", "off", "--log-file", str(log)]
        command += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(counters)]
        for section in _SECTIONS:
            command += ["--section", section]
        command += child.command("pagedkv.bench.profile", "--device", device)
        try:
            done = subprocess.run(command, env=child.environment(), capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"==ERROR== ncu did not end within {_TIMEOUT_S} s"
        return (log.read_text() if log.exists() else "") + done.stdout + done.stderr


def refusal(text: str) -> str:
    """Why ncu gave nothing, in a line."""
    errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
    permission = next((line for line in errors if "ERR_NVGPUCTRPERM" in line), None)
    return permission or (errors[0] if errors else "ncu printed no table: " + " ".join(text.split())[-200:])


def parse(text: str, cases: list[str]) -> list[dict]:
    """Rows from what `ncu --csv --page raw --print-units base` printed of `run_cases`.

    Returns:
        For each kernel: `kind` "kernel", `case`, `kernel` (its name without parameters), `grid`, `block`, what `_FIELDS` names (None where
        this ncu has no such metric), `dram_gb_per_s`, and `stalls`: the largest reasons why a warp did not issue, in cycles for
        each instruction issued.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    table = [line for line in lines[start:] if line.startswith('"')]
    rows, case = [], -1
    for record in csv.DictReader(table):
        if not record["ID"]:  # the line of units
            continue
        if "FillFunctor" in record["Kernel Name"]:
            case += 1
            continue
        row = {"kind": "kernel", "status": "measured", "case": cases[case], "kernel": _short(record["Kernel Name"]),
               "grid": record["Grid Size"], "block": record["Block Size"]}  # fmt: skip
        for field, (metric, factor) in _FIELDS.items():
            value = _number(record.get(metric))
            row[field] = None if value is None else value * factor
        read, written, us = row["dram_read_bytes"], row["dram_write_bytes"], row["us"]
        row["dram_gb_per_s"] = None if None in (read, written) or not us else (read + written) / us / 1e3
        stalls = {m[1]: value for name, text in record.items() if name and (m := _STALL.fullmatch(name)) and (value := _number(text))}
        stalls.pop("selected", None)  # which is no stall
        row["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1])[:_MAX_STALLS])
        rows.append(row)
    return rows


def bytes_rows(rows: list[dict]) -> Iterator[dict]:
    """For each case, `kind` "bytes": `us` and `dram_read_bytes` of all its kernels, `needed_bytes`, `bytes_ratio` (read over needed)."""
    for name in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == name]
        us, read = (None if any(row[f] is None for row in mine) else sum(row[f] for row in mine) for f in ("us", "dram_read_bytes"))
        needed = CASES[name].needed_bytes
        yield {"kind": "bytes", "case": name, "status": "measured", "us": us, "needed_bytes": needed, "dram_read_bytes": read,
               "bytes_ratio": None if read is None else read / needed}  # fmt: skip


def _number(text: str | None) -> float | None:
    try:
        return float(text.replace(",", ""))
    except (AttributeError, ValueError):
        return None


def _short(name: str) -> str:
    """`void pagedkv::attention::decode_mma<pagedkv::...>(...)` -> `decode_mma<...>`, without namespaces and parameters."""
    return re.sub(r"(\w+::|\(anonymous namespace\)::|<unnamed>::)", "", re.sub(r"\((?!anonymous).*$", "", name.removeprefix("void ")))[:120]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.bench.profile", description="Run each case once, for a profiler to watch.")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    options = parser.parse_args()
    device = hardware.resolve(options.device)
    pagedkv.backend(device)
    run_cases(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
