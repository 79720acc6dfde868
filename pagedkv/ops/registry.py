"""Where an op becomes `torch.ops.pagedkv.<name>`.

An op is a schema and three functions: `check` validates the arguments (raises `TypeError` or `ValueError`),
`fake` makes empty outputs (for meta tensors and `torch.compile`), `eager` computes it in plain PyTorch; all
take the schema's arguments in its order. An op whose arguments hold indices has a fourth, `check_values`, which
reads them on the host when `PAGEDKV_CHECK=1`. On a CPU or CUDA tensor the op validates, then runs the compiled
kernel of that device; `eager` serves only where no compiler is found (see `backend`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator

import torch

from pagedkv.ops import build, checks
from pagedkv.ops.gradient import without_gradient

NAMES: list[str] = []
_library = torch.library.Library("pagedkv", "DEF")
_compiling = threading.Lock()
_plain_pytorch = False


def define(schema: str, *, check: Callable, fake: Callable, eager: Callable, check_values: Callable | None = None) -> None:
    """Register `schema` (as in native_functions.yaml, without namespace) for CPU, CUDA and Meta."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    NAMES.append(name)
    in_order = _in_schema_order(name)
    names = [a.name for a in getattr(torch.ops.pagedkv, name).default._schema.arguments]

    def kernel_for(device_type: str) -> Callable:
        def kernel(*args, **kwargs):
            args = in_order(args, kwargs)
            check(*args)
            if check_values is not None and os.environ.get("PAGEDKV_CHECK") == "1":
                check_values(*args)
            compiled = None if _plain_pytorch else _compiled_op(device_type, name)
            return eager(*args) if compiled is None else compiled(*args)

        return kernel

    def kernel_for_the_rest(*args, **kwargs):
        """Of tensors that are not dense, or on another device."""
        named = [(n, x) for n, x in zip(names, in_order(args, kwargs), strict=True) if isinstance(x, torch.Tensor)]
        for argument in named:
            checks.dense(*argument)
        for argument, value in named:
            raise ValueError(f"{argument}: expected device cpu or cuda, got {value.device}")

    def checked_fake(*args, **kwargs):
        args = in_order(args, kwargs)
        check(*args)
        return fake(*args)

    kernels = {"CPU": kernel_for("cpu"), "CUDA": kernel_for("cuda")}
    for device, kernel in kernels.items():
        _library.impl(name, kernel, device)
    for rest in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA"):
        _library.impl(name, kernel_for_the_rest, rest)
    torch.library.register_fake(f"pagedkv::{name}", checked_fake, lib=_library)
    _library.impl(name, without_gradient(getattr(torch.ops.pagedkv, name).default, kernels), "Autograd", with_keyset=True)


def backend(device: torch.device | str | int = "cpu") -> str:
    """What computes the ops on `device`: `"c++ (avx512_vnni)"`, `"cuda (sm_90)"` or `"pytorch"` (no compiler found).

    Compiles the kernels if that has not happened yet. Raises `RuntimeError` where compilation fails, and
    where `device` is a CUDA device that this machine lacks.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    checks.present(device)
    library = None if _plain_pytorch else _compiled(device.type)
    if library is None:
        return "pytorch"
    return f"{'c++' if device.type == 'cpu' else 'cuda'} ({library.instruction_set()})"


@contextlib.contextmanager
def plain_pytorch() -> Iterator[None]:
    """Within this context the ops run as on a machine without a compiler. For tests and comparisons; not thread-safe."""
    global _plain_pytorch
    before, _plain_pytorch = _plain_pytorch, True
    try:
        yield
    finally:
        _plain_pytorch = before


def _in_schema_order(name: str) -> Callable[[tuple, dict], tuple]:
    """The dispatcher leaves out arguments that equal their default and names those after `*`; compiled ops want all, in order."""
    arguments = [(a.name, a.default_value) for a in getattr(torch.ops.pagedkv, name).default._schema.arguments]
    defaults = tuple(default for _, default in arguments)

    def in_order(args: tuple, kwargs: dict) -> tuple:
        given = len(args)
        if not kwargs:
            return args + defaults[given:]
        return (*args, *[kwargs.get(name, default) for name, default in arguments[given:]])

    return in_order


@functools.cache
def _compiled_op(device_type: str, name: str) -> Callable | None:
    library = _compiled(device_type)
    return None if library is None else getattr(library, name).default


def _compiled(device_type: str):
    """The namespace of compiled functions for a device type, or None where there is no compiler."""
    with _compiling:
        return _load(device_type)


@functools.cache
def _load(device_type: str):
    asked = os.environ.get("PAGEDKV_BACKEND", "")
    if asked == "pytorch":
        return None
    if asked:
        raise ValueError(f"PAGEDKV_BACKEND: expected pytorch, or nothing for the compiled kernels, got {asked!r}")
    missing = build.missing_tool(device_type)
    if missing:
        warnings.warn(f"pagedkv: {missing}; the {device_type} ops run in plain PyTorch, which is slow", RuntimeWarning, stacklevel=5)
        return None
    build.load(device_type)
    return getattr(torch.ops, f"pagedkv_{device_type}")
