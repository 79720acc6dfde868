"""The ladder: INT8 paged decode from the plain kernel to the library's op, a rung at a time.

Rungs 1 to 4 are kernels/ladder/decode.cu, compiled here and called through ctypes: no part of the library. A rung says before it
is timed what it should take, from quantities that can be known in advance; see `predicted_us` and `predicted_top_us`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import pagedkv
from pagedkv.bench.attention import expected
from pagedkv.bench.bandwidth import gather_roof
from pagedkv.bench.comparison import rel_error
from pagedkv.bench.inputs import PagedInputs, Shape, shape
from pagedkv.evidence import hardware
from pagedkv.evidence.timing import measure
from pagedkv.ops import build

SHAPES = ("256x4096", "1x131072")
QUICK_SHAPES = ("8x512",)
_MAX_REL_ERROR = 1e-3
_CHECKED_SEQS = 4
_BUDGET_S = 0.3


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder, with what is known of it before it runs.

    A CTA handles `tokens` tokens in `cycles` of latency that nothing within it hides, and its warps issue `instructions` in
    that time; `ctas_per_sm` of them share an SM. K and V are read `passes` times.
    """

    number: int
    name: str
    heads: int  # query heads that a CTA serves
    tokens: int
    cycles: int
    instructions: int
    ctas_per_sm: int
    passes: int
    splits: bool

    def num_splits(self, shape: Shape, sms: int) -> int:
        """Splits of each sequence: as many as fill the device, but none shorter than 16 pages."""
        if not self.splits:
            return 1
        ctas = shape.num_seqs * shape.num_heads // self.heads
        longest = math.ceil(max(shape.seq_lens) / (16 * shape.block_size))
        return max(1, min(longest, self.ctas_per_sm * sms // ctas))


# Cycles: a trip to memory is about 600; barriers, shuffles and chains of arithmetic 100 to 400 more. Instructions: those of a page, or of
# the page that a warp of rung 4 takes, in sm_90's disassembly (902, 438 and 433), times the four warps of a CTA.
RUNGS = (
    Rung(1, "a CTA for each query head, one pass over the pages",
         heads=1, tokens=16, cycles=16 * 700 + 800, instructions=4 * 902, ctas_per_sm=9, passes=4, splits=False),
    Rung(2, "a CTA for each KV head, 16 tokens at a time",
         heads=4, tokens=16, cycles=1000, instructions=4 * 438, ctas_per_sm=3, passes=1, splits=False),
    Rung(3, "and sequences cut in splits",
         heads=4, tokens=16, cycles=1000, instructions=4 * 438, ctas_per_sm=3, passes=1, splits=True),
    Rung(4, "and tensor cores, the next page on its way",
         heads=4, tokens=64, cycles=1000, instructions=4 * 433, ctas_per_sm=3, passes=1, splits=True),
)  # fmt: skip
TOP = len(RUNGS) + 1  # the library's op
_TRIP_CYCLES = 600  # to memory and back, when little is under way
_TOP_UNDER_WAY = 16 * 3 * 2048  # bytes on an SM: warps, half-pages of each, their size (kernels/cuda/attention/decode_mma.cuh)


def predicted_us(rung: Rung, shape: Shape, roof_us: float, sms: int, clock_ghz: float, schedulers: int = 4) -> tuple[float, str]:
    """Microseconds that `rung` should take, and what limits it: the largest of three.

    bytes         reading K and V `passes` times at the roof of the gather kernel
    latency       the trips in a row of the longest CTA, as often as CTAs follow one another on an SM
    instructions  what all CTAs issue, one instruction a cycle and scheduler, on the SMs that have work
    """
    splits = rung.num_splits(shape, sms)
    ctas = shape.num_seqs * shape.num_heads // rung.heads * splits
    steps = math.ceil(max(shape.seq_lens) / splits / rung.tokens)
    waves = max(1.0, ctas / (rung.ctas_per_sm * sms))
    limits = {
        "bytes": rung.passes * roof_us,
        "latency": waves * steps * rung.cycles / clock_ghz / 1e3,
        "instructions": ctas * steps * rung.instructions / (min(sms, ctas) * schedulers) / clock_ghz / 1e3,
    }
    limit = max(limits, key=limits.get)
    return limits[limit], limit


def predicted_top_us(shape: Shape, roof_us: float, sms: int, clock_ghz: float) -> tuple[float, str]:
    """The same of the library's op, whose instructions hide behind its loads: the larger of two.

    bytes         reading K, V and their scales, which the gather kernel does not read, at its rate
    latency       as many trips to memory in a row as it takes with `_TOP_UNDER_WAY` bytes on each SM at a time
    """
    moved = shape.kv_bytes("int8_block_head")
    limits = {
        "bytes": roof_us * moved / shape.kv_bytes("int8"),
        "latency": moved / (sms * _TOP_UNDER_WAY) * _TRIP_CYCLES / clock_ghz / 1e3,
    }
    limit = max(limits, key=limits.get)
    return limits[limit], limit


def seen(row: dict) -> str:
    """What came of a rung's prediction, in a line."""
    faster = f"; {row['step']:.3g} times as fast as the rung below" if row["step"] else ""
    return (
        f"{row['shape']}: predicted {row['predicted_us']:,.0f} us ({row['predicted_limit']}), seen {row['p50_us']:,.0f} us, "
        f"{row['over_prediction']:.2f} times as long{faster}; {100 * row['roof_fraction']:.2g} % of the roof"
    )


# ---------------------------------------------------------------------------------------- the kernels


class _Problem(ctypes.Structure):
    """`Problem` of kernels/ladder/decode.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_scale", "v_scale", "block_tables", "seq_lens", "out", "partials")),
        *((name, ctypes.c_int) for name in ("num_seqs", "num_kv_heads", "max_blocks", "num_splits")),
        ("sm_scale", ctypes.c_float),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled ladder; compiles it where that has not happened yet. Raises `RuntimeError` where it cannot be compiled."""
    missing = build.missing_tool("cuda")
    if missing:
        raise RuntimeError(f"the ladder cannot be compiled: {missing}")
    source, name = build.KERNELS / "ladder" / "decode.cu", "pagedkv_ladder"
    flags = ["-O3", "-lineinfo", *build.cuda_arch_flags()]
    directory = build.cache_dir() / f"ladder-{build.key_of([source], flags)}"
    build.compiled(directory, "the ladder", name=name, sources=[str(source)], with_cuda=True, extra_cuda_cflags=flags)
    return ctypes.CDLL(str(directory / f"{name}.so"))


def rung_calls(rung: Rung, inputs: PagedInputs) -> list[Callable[[], Tensor]]:
    """A call of the rung's kernel for each rotation of `inputs`; each returns its output, `[num_seqs, num_heads, head_dim]`."""
    s, device = inputs.shape, inputs.device
    if (s.head_dim, s.block_size, s.num_heads // s.num_kv_heads) != (128, 16, 4):
        raise ValueError("the ladder is for head_dim 128, block_size 16 and 4 query heads to a KV head")
    k, k_scale, v, v_scale = inputs.cache("int8_block_head")
    num_splits = rung.num_splits(s, torch.cuda.get_device_properties(device).multi_processor_count)
    partials = torch.empty(s.num_seqs * num_splits * s.num_heads * (s.head_dim + 2), device=device)
    launch = library().decode_rung

    def call(q: Tensor, table: Tensor) -> Callable[[], Tensor]:
        out = torch.empty_like(q)
        tensors = (q, k, v, k_scale, v_scale, table, inputs.seq_lens, out, partials)
        problem = _Problem(*(x.data_ptr() for x in tensors), s.num_seqs, s.num_kv_heads, table.shape[1], num_splits, inputs.sm_scale)

        def run() -> Tensor:
            assert tensors  # the pointers in `problem` are theirs
            status = launch(rung.number, ctypes.byref(problem), ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream))
            if status != 0:
                raise RuntimeError(f"rung {rung.number}: CUDA error {status}")
            return out

        return run

    return [call(q, table) for q, table in zip(inputs.queries, inputs.block_tables, strict=True)]


def _library_calls(inputs: PagedInputs) -> list[Callable[[], Tensor]]:
    cache = inputs.cache("int8_block_head")

    def call(q: Tensor, table: Tensor) -> Callable[[], Tensor]:
        return lambda: pagedkv.quant_paged_attention(q, *cache, table, inputs.seq_lens, inputs.sm_scale)

    return [call(q, table) for q, table in zip(inputs.queries, inputs.block_tables, strict=True)]


# ----------------------------------------------------------------------------------------- measuring


class Climb:
    """The ladder on one shape, by graph replay. `roof`: the gather kernel's row, `kind` "roof".

    Raises `RuntimeError` where the device has no gather kernel and no tensor cores for int8 (below sm_80).
    """

    def __init__(self, name: str, device: torch.device):
        self.inputs = PagedInputs(shape(name), device)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        gather = gather_roof(self.inputs, "int8_block_head")
        if gather is None:
            raise RuntimeError("the ladder needs a GPU of sm_80 or later")
        times = measure(device=device, mode="graph", rotate=gather, budget_s=_BUDGET_S)
        self.roof_us = times["p50_us"]
        gb_per_s = self.inputs.shape.kv_bytes("int8") / self.roof_us / 1e3
        self.roof = {"kind": "roof", "shape": name, "status": "measured", **times, "gb_per_s": gb_per_s}
        self._want = expected(self.inputs, min(_CHECKED_SEQS, self.inputs.shape.num_seqs))
        self._times: dict[int, float] = {}

    def rung(self, number: int) -> dict:
        """Predict, check and time one rung; `TOP` is the library's op, which plans its splits by itself.

        Returns:
            A row of `kind` "rung": `shape`, `rung`, `name`, `splits`, `predicted_us`, `predicted_limit`, the times, `over_prediction`
            (the median over what was predicted), `bytes` (K, V and scales), `gb_per_s`, `roof_fraction`, `rel_error` against float32,
            `step` (times faster than the rung below, if climbed).

        Raises:
            AssertionError: it computes something else than attention; it is not timed then.
        """
        s, name = self.inputs.shape, self.inputs.shape.name
        row = {"kind": "rung", "shape": name, "rung": number, "name": "quant_paged_attention", "status": "measured"}
        known = s, self.roof_us, self.sms, clock_ghz(self.inputs.device)
        if number == TOP:
            predicted, limit = predicted_top_us(*known)
            calls = _library_calls(self.inputs)
        else:
            rung = RUNGS[number - 1]
            predicted, limit = predicted_us(rung, *known)
            row |= {"name": rung.name, "splits": rung.num_splits(s, self.sms)}
            calls = rung_calls(rung, self.inputs)
        row |= {"predicted_us": predicted, "predicted_limit": limit}
        error = rel_error(calls[0]()[: len(self._want)], self._want)
        if not error <= _MAX_REL_ERROR:
            raise AssertionError(f"rung {number} on {name}: relative error {error:.3g} against float32")
        times = measure(device=self.inputs.device, mode="graph", rotate=calls, budget_s=_BUDGET_S)
        us, moved = times["p50_us"], s.kv_bytes("int8_block_head")
        self._times[number] = us
        below = self._times.get(number - 1)
        return row | {**times, "over_prediction": us / predicted, "bytes": moved, "gb_per_s": moved / us / 1e3,
                      "roof_fraction": self.roof_us / us, "rel_error": error, "step": below / us if below else None}  # fmt: skip

    def height(self) -> dict:
        """A row of `kind` "derived": `quantity` "vs_published_kernel", the first rung's time over the library's."""
        row = {"kind": "derived", "shape": self.inputs.shape.name, "mode": "graph", "quantity": "vs_published_kernel"}
        return row | {"status": "measured", "value": self._times[1] / self._times[TOP]}


def clock_ghz(device: torch.device) -> float:
    """The highest clock of the SMs, as the driver tells it; 1.5 where it does not."""
    mhz = re.match(r"\d+", hardware.describe(device).get("max_sm_clock") or "")
    return int(mhz[0]) / 1e3 if mhz else 1.5


def source_of(number: int) -> str:
    """The part of kernels/ladder/decode.cu that tells of a rung."""
    parts = re.split(r"^// -{20,} (.+)$", (build.KERNELS / "ladder" / "decode.cu").read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    title = next(title for title in sections if str(number) in title)
    return sections[title].partition("}  // namespace")[0].strip()
