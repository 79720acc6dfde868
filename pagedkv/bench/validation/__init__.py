"""Every op against its reference over hostile cases: one row for each op, case and dtype.

`python -m pagedkv.bench.validation --device cuda --output rows.json` runs the same sweep in a process of its own, for
instance with `PAGEDKV_CUDA_ARCH=75+PTX` to run the code that a Turing card would.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pagedkv.bench import child
from pagedkv.bench.validation import attention, eviction, quantization, registration, sequence_eviction
from pagedkv.bench.validation.judge import merged

PARTS = {
    "attention": attention.checks,
    "quantization": quantization.checks,
    "eviction": eviction.checks,
    "sequence_eviction": sequence_eviction.checks,
    "registration": registration.checks,
}


def sweep(device: torch.device, quick: bool = False, part: str | None = None) -> Iterator[dict]:
    """Rows of all parts or of one: `op, case, dtype, status, checks, worst, max_error, tolerance, judge, ok`; see `judge.merged`.

    A case that this machine cannot hold is a row with `status` "absent", a `reason` and `ok` null.
    """
    for name, checks in PARTS.items():
        if part in (None, name):
            yield from merged(checks(device, quick))


def sweep_compiled_for(arch: str, device: torch.device, quick: bool = False) -> list[dict]:
    """The sweep in another process, with the CUDA kernels built for `arch` (as `PAGEDKV_CUDA_ARCH` takes it).

    Raises:
        RuntimeError: that process failed; the message ends with what it printed last.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = child.command("pagedkv.bench.validation", "--device", device, "--output", output, *(["--quick"] if quick else []))
        done = subprocess.run(command, env=child.environment(arch), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode not in (0, 1) or not output.exists():  # 1: rows that are not ok, for the caller to judge
            raise RuntimeError(f"validation for {arch} ended with {done.returncode}: {done.stdout[-2000:]}")
        return json.loads(output.read_text())


def failures(rows: list[dict]) -> list[str]:
    """One line for each row that is not ok."""
    lines = []
    for r in rows:
        if r["ok"] is False:
            error = "infinite" if r["max_error"] is None else f"{r['max_error']:.3g}"
            reason = f", {r['reason']}" if r.get("reason") else ""
            lines.append(f"{r['op']}: {r['case']} ({r['dtype']}), {r['worst']}: error {error}, allowed {r['tolerance']:.3g}{reason}")
    return lines


def share_of_tolerance(row: dict) -> float | None:
    """Error over tolerance of a row's worst check; None where that is infinite (a row that fails) or nothing ran."""
    if row["status"] == "absent" or row["max_error"] is None:
        return None
    if row["max_error"] == 0:
        return 0.0
    return row["max_error"] / row["tolerance"] if row["tolerance"] > 0 else None


def summary(rows: list[dict]) -> list[dict]:
    """A row for each op and `arch`: cases, checks, failed and absent rows, and the case nearest to its tolerance."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["arch"]), []).append(row)
    summaries = []
    for (op, arch), group in groups.items():
        ran = [row for row in group if row["status"] == "measured"]
        shares = {i: share for i, row in enumerate(ran) if (share := share_of_tolerance(row)) is not None}
        worst = max(shares, key=shares.get, default=None)
        summaries.append(
            {
                "kind": "summary",
                "op": op,
                "arch": arch,
                "cases": len(ran),
                "checks": sum(row["checks"] for row in ran),
                "failed": sum(row["ok"] is False for row in ran),
                "absent": len(group) - len(ran),
                "worst_share_of_tolerance": None if worst is None else shares[worst],
                "worst_case": None if worst is None else f"{ran[worst]['case']} ({ran[worst]['dtype']}), {ran[worst]['worst']}",
            }
        )
    return summaries
