"""What a notebook talks to: it asks for a device, adds rows and figures, and finishes into one record."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from pagedkv.evidence import figures as styles
from pagedkv.evidence import hardware
from pagedkv.evidence import record as records
from pagedkv.evidence.root import find_root

_PACKAGES = ("numpy", "triton", "flashinfer-python", "transformers", "vllm", "nvidia-cudnn-frontend")

# Run by hand, a record covers everything that could matter; a rule names what does.
_ALL_SOURCES = ("kernels/**/*.h", "kernels/**/*.cpp", "kernels/**/*.cu", "kernels/**/*.cuh", "pagedkv/**/*.py")


class Experiment:
    """One experiment on one device.

    `name`: the record's name; `notebook`: its path from the root; `device`: auto, cpu, cuda or cuda:N;
    `quick`: a smoke run. `record` and `figures` are the file and folder to write; without them (a notebook
    opened by hand) they lie under build/interactive/<device>/ and figures are shown inline as well.
    `rule`, `sources` and `inputs` come from the rule: paths from the root, whose hashes go into the record.
    Further keyword arguments are the notebook's own parameters and go into the record too.

    Attributes: `device` (`torch.device`), `quick`, `backend` (see `pagedkv.backend`), `rows`, `root`, `sources` (path: sha256).
    Raises `ValueError` or `RuntimeError` for a device that is unknown or not here.
    """

    def __init__(
        self,
        name: str,
        notebook: str,
        device: str = "auto",
        quick: bool = False,
        record: str | Path | None = None,
        figures: str | Path | None = None,
        rule: str | None = None,
        sources: Iterable[str] | None = None,
        inputs: Iterable[str] | None = None,
        **parameters,
    ):
        self.name = name
        self.root = find_root()
        self.device = hardware.resolve(device)
        self.quick = bool(quick)
        self.rows: list[dict] = []
        self._started = time.monotonic()
        interactive = Path("build") / "interactive" / self.device.type
        self._record = self.root / (record or interactive / f"{name}.json")
        self._figures = self.root / (figures or interactive / "figures")
        self._notebook = notebook
        self._rule = rule
        self._parameters = records.plain({"device": str(device), "quick": self.quick, **parameters}, "parameters")
        self.sources = _source_hashes(self.root, notebook, sources)
        self._inputs = records.hashes(inputs or (), self.root)
        self._drawn: dict[str, str] = {}
        styles.use_style()
        print(f"{name}: {hardware.describe(self.device)['name']} ({self.device}){', quick' if self.quick else ''}", flush=True)

    @functools.cached_property
    def backend(self) -> str:
        """What computes the ops here; compiles the kernels if that has not happened yet."""
        import pagedkv

        return pagedkv.backend(self.device)

    def use_every_core(self) -> None:
        """Nothing here is timed: from now on torch may use the whole machine, where `--cores 1` gives timings one thread.

        A quick run stays within what it was given, since others run beside it.
        """
        if not self.quick:
            torch.set_num_threads(hardware.describe("cpu")["threads"])

    def row(self, **fields) -> dict:
        """Add one measured row and print it. Raises `ValueError` for a NaN or an infinity: None says there is no number."""
        row = records.plain(fields, f"row {len(self.rows)}")
        if not row:
            raise ValueError("row: expected at least one field")
        self.rows.append(row)
        print(f"  {self.name} {len(self.rows):3d}  " + "  ".join(f"{k}={_short(v)}" for k, v in row.items()), flush=True)
        return row

    def figure(self, figure, name: str) -> None:
        """Write a matplotlib figure as `<name>.svg` into the figures' folder."""
        if not re.fullmatch(r"[a-z0-9_]+", name):
            raise ValueError(f"figure: expected a name of a-z, 0-9 and _, got {name!r}")
        text = styles.svg(figure)
        records.write_text(self._figures / f"{name}.svg", text)
        self._drawn[f"{name}.svg"] = hashlib.sha256(text.encode()).hexdigest()
        print(f"  {self.name} figure {name}.svg", flush=True)
        import matplotlib.pyplot as plt

        if "inline" in plt.get_backend():
            plt.show()
        plt.close(figure)

    def finish(self) -> Path:
        """Check the record against the schema, write it whole, and return its path.

        Raises `RecordError` where there is no row, the schema refuses it, or it cannot be written.
        """
        if not self.rows:
            raise records.RecordError(f"{self.name}: nothing was measured, so there is no record to write")
        record = {
            "schema_version": records.SCHEMA_VERSION,
            "kind": "measured",
            "experiment": self.name,
            "hardware": hardware.describe(self.device),
            "software": {**_software(self.device), "backend": self.backend},
            "provenance": {
                "rule": self._rule,
                "notebook": self._notebook,
                "parameters": self._parameters,
                "sources": self.sources,
                "inputs": self._inputs,
                "figures": self._drawn,
                "finished_at": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "seconds": round(time.monotonic() - self._started, 1),
            },
            "rows": self.rows,
        }
        records.write(record, self._record, self.root)
        shown = self._record.relative_to(self.root) if self._record.is_relative_to(self.root) else self._record
        print(f"{self.name}: {len(self.rows)} rows in {record['provenance']['seconds']:.0f} s -> {shown}", flush=True)
        return self._record


def _source_hashes(root: Path, notebook: str, sources: Iterable[str] | None) -> dict[str, str]:
    """Taken when the run starts, so that a file edited meanwhile leaves the record stale."""
    if sources is None:
        sources = [p.relative_to(root).as_posix() for pattern in _ALL_SOURCES for p in root.glob(pattern)]
    return records.hashes({notebook, *sources}, root)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _software(device: torch.device) -> dict:
    """Versions of what computed; None where it is absent."""
    import pagedkv

    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "pagedkv": pagedkv.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "torch_threads": torch.get_num_threads(),
        "compiler": _first_line(os.environ.get("CXX", "c++"), "--version"),
        "system": " ".join([platform.system(), platform.machine(), *platform.libc_ver()]),
        "packages": versions,
    }


def _first_line(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.splitlines()[0] if output else None
