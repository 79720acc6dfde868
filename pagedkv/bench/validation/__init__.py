"""Every op against its reference over hostile cases: one row for each op, case and dtype.

`python -m pagedkv.bench.validation --device cuda --output rows.json` runs the same sweep in a process of its own, for
instance with `PAGEDKV_CUDA_ARCH=75+PTX` to run the code that a Turing card would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pagedkv.bench.validation import attention, eviction, quantization
from pagedkv.bench.validation.judge import merged

PARTS = {"attention": attention.checks, "quantization": quantization.checks, "eviction": eviction.checks}


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
        command = [
            sys.executable,
            "-m",
            "pagedkv.bench.validation",
            "--device",
            str(device),
            "--output",
            str(output),
            *(["--quick"] if quick else []),
        ]
        package = str(Path(__file__).resolve().parents[3])
        environment = os.environ | {"PAGEDKV_CUDA_ARCH": arch, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode not in (0, 1) or not output.exists():  # 1: rows that are not ok, for the caller to judge
            raise RuntimeError(f"validation for {arch} ended with {done.returncode}: {done.stdout[-2000:]}")
        return json.loads(output.read_text())


def failures(rows: list[dict]) -> list[str]:
    """One line for each row that is not ok."""
    return [
        f"{r['op']}: {r['case']} ({r['dtype']}), {r['worst']}: error {'infinite' if r['max_error'] is None else format(r['max_error'], '.3g')},"
        f" allowed {r['tolerance']:.3g}{', ' + r['reason'] if r.get('reason') else ''}"
        for r in rows
        if r["ok"] is False
    ]
