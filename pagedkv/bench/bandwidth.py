"""The roofs: how fast this machine reads and copies memory, and gathers pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagedkv.bench.inputs import PagedInputs, last_level_cache
from pagedkv.evidence.timing import measure

_READ_BYTES = {"cpu": 1 << 29, "cuda": 1 << 30}

# Several reductions, because no one of them is the fastest everywhere; the roof is the best of them.
_READS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of float32": lambda x: x.view(torch.float32).sum(),
    "maximum of float32": lambda x: x.view(torch.float32).amax(),
    "sum of int64": lambda x: x.view(torch.int64).sum(),
}


def bandwidth_rows(device: torch.device, modes: tuple[str, ...]) -> list[dict]:
    """Read (a reduction) and copy (read plus write) bandwidth of a buffer far larger than any cache.

    Returns rows with `kind` "bandwidth", `implementation`, `mode`, `bytes`, the times and `gb_per_s`.
    """
    size = max(_READ_BYTES[device.type], 8 * last_level_cache(device))
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    size = size // 1024 * 1024
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = {f"read: {name}": (lambda read=read: read(source), size) for name, read in _READS.items()}
    calls["copy"] = (lambda: target.copy_(source), 2 * size)
    rows = []
    for mode in modes:
        for name, (call, moved) in calls.items():
            times = measure(call, device, mode=mode, budget_s=0.4)
            rows.append({"kind": "bandwidth", "implementation": name, "status": "measured", "bytes": moved, **times,
                         "gb_per_s": moved / times["p50_us"] / 1e3})  # fmt: skip
    return rows


def read_gb_per_s(rows: list[dict], mode: str) -> float:
    """The best read bandwidth among `bandwidth_rows` of one timing mode, in 1e9 bytes a second."""
    return max(r["gb_per_s"] for r in rows if r["mode"] == mode and r["implementation"].startswith("read"))


def gather_roof(inputs: PagedInputs, kv_dtype: str) -> list[Callable[[], object]] | None:
    """Calls (one a rotation) that read K and V of `inputs` page by page and compute nothing, or None where no kernel does that.

    The true roof of a paged kernel: it pays for the block table and for the scattered pages, not for arithmetic. The kernel
    is kernels/cuda/paged_gather.cu; it serves the shapes of the fast decode path, on sm_80 up. A call returns the checksum that
    all of them share: int32 `[1]`, to which it adds the exclusive or of the words read.
    """
    if inputs.device.type != "cuda" or not hasattr(torch.ops.pagedkv_cuda, "paged_gather"):
        return None
    cache = inputs.cache(kv_dtype)
    k_cache, v_cache = cache[0], cache[-2 if len(cache) == 4 else -1]
    checksum = torch.zeros(1, dtype=torch.int32, device=inputs.device)

    def call(q: Tensor, table: Tensor) -> Callable[[], object]:
        def run() -> Tensor:
            torch.ops.pagedkv_cuda.paged_gather(q, k_cache, v_cache, table, inputs.seq_lens, checksum)
            return checksum

        return run

    calls = [call(q, table) for q, table in zip(inputs.queries, inputs.block_tables, strict=True)]
    try:
        calls[0]()
    except RuntimeError as error:
        if "paged_gather" not in str(error):
            raise
        return None  # it says so of the shapes and architectures that it does not serve
    return calls
