"""A process of its own: for kernels built for another architecture, for many at once, for a tool that watches a whole program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pagedkv


def command(module: str, *arguments: object) -> list[str]:
    """Run `module` by this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment(arch: str | None = None, **more: str) -> dict[str, str]:
    """This process's environment, with this package on the path. `arch`: what the CUDA kernels are for, as `PAGEDKV_CUDA_ARCH` takes it."""
    package = str(Path(pagedkv.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | ({"PAGEDKV_CUDA_ARCH": arch} if arch is not None else {}) | more
