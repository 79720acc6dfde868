"""Where an op becomes `torch.ops.pagedkv.<name>`.

An op is a schema and three functions: `check` validates the arguments (raises `TypeError` or `ValueError`),
`fake` makes empty outputs (for meta tensors and `torch.compile`), `eager` computes it in plain PyTorch.
On a CPU or CUDA tensor the op validates, then runs the compiled kernel of that device; `eager` serves only
where no compiler is found (see `backend`).
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable

import torch

from pagedkv.ops import build

_library = torch.library.Library("pagedkv", "DEF")
NAMES: list[str] = []


def define(schema: str, *, check: Callable, fake: Callable, eager: Callable) -> None:
    """Register `schema` (as in native_functions.yaml, without namespace) for CPU, CUDA and Meta."""
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = name.partition(".")[0].rpartition("::")[2]
    NAMES.append(name)
    for device_type in ("cpu", "cuda"):

        def kernel(*args, device_type=device_type, **kwargs):
            check(*args, **kwargs)
            return _implementation(device_type, name, eager)(*args, **kwargs)

        _library.impl(name, kernel, device_type.upper())

    def checked_fake(*args, **kwargs):
        check(*args, **kwargs)
        return fake(*args, **kwargs)

    torch.library.register_fake(f"pagedkv::{name}", checked_fake, lib=_library)


def backend(device: torch.device | str | int = "cpu") -> str:
    """What computes the ops on `device`: `"c++ (avx512_vnni)"`, `"cuda (sm_90)"` or `"pytorch"` (no compiler found).

    Compiles the kernels if that has not happened yet. Raises `RuntimeError` where compilation fails, and
    where `device` is a CUDA device that this machine lacks.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device: cuda was asked for, but torch finds no CUDA device")
    library = _compiled(device.type)
    if library is None:
        return "pytorch"
    return f"{'c++' if device.type == 'cpu' else 'cuda'} ({library.instruction_set()})"


@functools.cache
def _implementation(device_type: str, name: str, eager: Callable) -> Callable:
    library = _compiled(device_type)
    return eager if library is None else getattr(library, name).default


@functools.cache
def _compiled(device_type: str):
    """The namespace of compiled functions for a device type, or None where there is no compiler."""
    if os.environ.get("PAGEDKV_BACKEND") == "pytorch":
        return None
    missing = build.missing_tool(device_type)
    if missing:
        warnings.warn(f"pagedkv: {missing}; the {device_type} ops run in plain PyTorch, which is slow", RuntimeWarning, stacklevel=4)
        return None
    build.load(device_type)
    return getattr(torch.ops, f"pagedkv_{device_type}")
