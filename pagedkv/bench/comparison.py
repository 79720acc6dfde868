"""What the comparisons share: each implementation is checked and timed, or absent with the reason; and ratios to the fastest peer."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

MODES = {"cpu": ("cpu",), "cuda": ("graph", "flush")}  # of timing, by device


class Absent(Exception):
    """An implementation cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Implementation:
    """One way to do the work that is compared: this project's (`ours`) or a peer's. `labels`: the fields that its rows carry, too."""

    labels: ClassVar[tuple[str, ...]] = ()
    name: str
    _: KW_ONLY
    devices: tuple[str, ...] = ("cpu", "cuda")
    ours: bool = False


@dataclass(frozen=True)
class CacheImplementation(Implementation):
    """`prepare(inputs, kv_dtype)` returns a call for each rotation. `read`: from the result to what is checked."""

    labels = ("kv_dtype",)
    kv_dtype: str
    prepare: Callable[..., list[Callable[[], object]]]
    read: Callable[[Tensor], Tensor] = lambda result: result


def compare(
    implementations: Iterable[Implementation],
    device: torch.device,
    row: dict,
    measured: Callable[[Implementation], Iterable[dict]],
    forget: Callable[[], object] = lambda: None,
) -> Iterator[dict]:
    """Yields `row`, filled in for each implementation: with `status` "measured" and each of `measured(implementation)`, which prepares,
    checks and times it; or once with `status` "absent" and a `reason`.

    A peer that breaks is a finding, and absent; what breaks of this project is raised. `forget` drops what is left of each in memory.
    """
    gc.collect()
    gc.freeze()  # only what an implementation leaves is searched, not half a million objects of torch, for most of a second each time
    try:
        yield from _each(implementations, device, row, measured, forget)
    finally:
        gc.unfreeze()


def _each(implementations, device, row, measured, forget) -> Iterator[dict]:
    for implementation in implementations:
        if device.type not in implementation.devices:
            continue
        try:
            found = [{"status": "measured", **fields} for fields in measured(implementation)]
        except Absent as absent:
            found = [_absent(str(absent))]
        except torch.cuda.OutOfMemoryError:
            found = [_absent("needs more memory than this device has")]
        except Exception as error:
            if implementation.ours:
                raise
            first_line = str(error).strip().partition("\n")[0]
            found = [_absent(f"{type(error).__name__}: {first_line[:200]}")]
        labels = {"implementation": implementation.name, "ours": implementation.ours}
        labels |= {label: getattr(implementation, label) for label in implementation.labels}
        yield from (row | labels | fields for fields in found)
        forget()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def ratio(ours: dict | None, peers: list[dict]) -> dict:
    """`value`: p50 of the fastest of `peers` over p50 of `ours`, so above 1 ours is faster; `peer`: its name. Or absent."""
    if ours is None or not peers:
        return _absent("no such peer ran, see its row")
    best = min(peers, key=lambda r: r["p50_us"])
    return {"status": "measured", "value": best["p50_us"] / ours["p50_us"], "peer": best["implementation"]}


def ratios(rows: list[dict], ours: str, fields: tuple[str, ...], quantities: dict[str, tuple[str, dict]]) -> Iterator[dict]:
    """Rows of `kind` "derived": `fields` of each row of the implementation `ours`, `quantity`, and its `ratio` to peers of the same fields.

    `quantities`: by name, the prefix of the peers' names, and those fields in which they differ from ours.
    """
    measured = [r for r in rows if r["status"] == "measured"]
    for mine in (r for r in measured if r["implementation"] == ours):
        at = {field: mine[field] for field in fields}
        for quantity, (prefix, other) in quantities.items():
            peers = [r for r in measured if r["implementation"].startswith(prefix) and {f: r[f] for f in fields} == at | other]
            yield {"kind": "derived", **at, "quantity": quantity} | ratio(mine, peers)


def _absent(reason: str) -> dict:
    return {"status": "absent", "reason": reason}


def rel_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`, in float32."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def import_flashinfer():
    """The module. Raises `Absent` where it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        raise Absent("flashinfer is not installed (pip install flashinfer-python)")
    return importlib.import_module("flashinfer")
