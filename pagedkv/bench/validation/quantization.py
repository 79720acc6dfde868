"""The int8 encoding and the quantising cache write against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

import pagedkv
from pagedkv import reference
from pagedkv.bench.validation.judge import Check, as_float64, max_error
from pagedkv.ops.rotation import hadamard_transform

_GRANULARITIES = ("block_head", "token_head")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ULP = 2.0**-23
_TINY = 2.0**-149  # the smallest float32


def checks(device: torch.device, quick: bool) -> Iterator[Check]:
    yield from _quantize(device, quick)
    yield from _dequantize(device)
    yield from _write(device, quick)
    yield from _rotated(device, quick)


def _wide(scale: np.ndarray, rank: int) -> np.ndarray:
    """Scales broadcast against [num_blocks, block_size, num_kv_heads, head_dim]."""
    return scale[:, None, :, None] if rank == 2 else scale[..., None]


def _kv(size=(6, 16, 3, 64), seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _with_bad_values(kv: Tensor) -> Tensor:
    kv[1, 3, 1, 5], kv[2, 0, 0, 0], kv[4, 15, 2, 63] = math.nan, math.inf, -math.inf
    return kv


def _encodings(quick: bool) -> dict[str, tuple[Callable[[], Tensor], tuple[torch.dtype, ...]]]:
    """Name: (values in float32, dtypes that can hold them)."""
    wide = (torch.float32, torch.bfloat16)
    cases = {
        "Gaussian": (_kv, _DTYPES),
        "all zero": (lambda: torch.zeros(3, 16, 2, 64), _DTYPES),
        "some groups zero": (lambda: _kv() * (torch.arange(6) % 2)[:, None, None, None], _DTYPES),
        "NaN and inf in some groups": (lambda: _with_bad_values(_kv()), _DTYPES),
        "ties between levels": (lambda: (torch.arange(-254, 255) / 2)[:504].reshape(1, 3, 3, 56).clamp(max=127), _DTYPES),
        "tiny": (lambda: _kv() * 1e-30, wide),
        "subnormal": (lambda: _kv() * 1e-40, wide),
        "the smallest numbers": (lambda: torch.full((2, 4, 2, 8), _TINY) * torch.arange(8), (torch.float32,)),
        "huge": (lambda: _kv() * 5e37, wide),
        "one outlier": (lambda: torch.where(torch.arange(64) == 7, 1e4, _kv()), _DTYPES),
        **{f"block_size {b}": (lambda b=b: _kv((4, b, 2, 64)), _DTYPES) for b in (1, 5, 12, 48, 256)},
        **{f"head_dim {d}": (lambda d=d: _kv((4, 16, 2, d)), _DTYPES) for d in (8, 80, 96, 112, 128, 256)},
        "no blocks": (lambda: torch.zeros(0, 16, 2, 64), _DTYPES),
    }
    if quick:
        keep = ("Gaussian", "NaN and inf in some groups", "ties between levels", "subnormal", "block_size 5")
        cases = {name: case for name, case in cases.items() if name in keep}
    return cases


def _quantize(device: torch.device, quick: bool) -> Iterator[Check]:
    for case, (make, dtypes) in _encodings(quick).items():
        for dtype in dtypes:
            kv = make().to(dtype).to(device)
            for granularity in _GRANULARITIES:
                yield from _judge_encoding(kv, granularity, case, "contiguous")
                yield from _judge_encoding(torch.stack([kv, kv], 1)[:, 1], granularity, case, "strided")


def _judge_encoding(kv: Tensor, granularity: str, case: str, layout: str) -> Iterator[Check]:
    dtype = str(kv.dtype).removeprefix("torch.")

    def check(what: str, error: float, limit: float, judge: str = "pagedkv.reference") -> Check:
        return Check("quantize_kv", case, dtype, f"{what}, {granularity}, {layout}", error, limit, judge)

    q, scale = (x.cpu().numpy() for x in pagedkv.quantize_kv(kv, granularity))
    want_q, want_scale = reference.quantize_kv(kv, granularity)
    # One float32 rounding of max|x| / 127; NaN where the group holds NaN or inf, and only there.
    yield check("scale, relative", _relative(scale, want_scale), _ULP)
    x = as_float64(kv)
    wide = _wide(as_float64(scale), scale.ndim)
    finite = np.isfinite(wide) & np.isfinite(x)
    step = np.where(finite, wide, 1)
    error = np.where(finite, np.abs(np.where(finite, x, 0) - q * step), 0)
    # |x - dq| <= scale / 2 and one rounding of x: here in units of the scale, whose rounding moves level 127 by 127 ulp.
    slack = (np.abs(np.where(finite, x, 0)) * 2 * _ULP + _TINY) / step
    yield check(
        "|x - dq| / scale beyond a half", max(0.0, float((error / step - slack - 0.5).max(initial=0.0))), 0.0, "the contract's bound"
    )
    # Division in float32 may fall on the other side of a tie that float64 sees: elsewhere the levels are the reference's.
    exact = np.where(finite, x, 0) / step
    tie = np.abs(np.abs(exact - np.floor(exact)) - 0.5) <= 127 * _ULP
    apart = np.abs(q.astype(int) - want_q.astype(int))
    yield check("levels that differ off a tie", float((apart > tie).sum()), 0.0)


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    """max_error in units of `want`; equal NaN count as equal, and a difference of one subnormal as none."""
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return math.inf
    got, want = np.nan_to_num(got.astype(np.float64), nan=1.0), np.nan_to_num(want.astype(np.float64), nan=1.0)
    return float((np.maximum(np.abs(got - want) - _TINY, 0) / want).max(initial=0.0))


def _dequantize(device: torch.device) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(0)
    for size in ((6, 16, 3, 64), (4, 5, 1, 8), (2, 256, 2, 256), (0, 16, 2, 64)):
        for groups, name in ((size[::2], "block_head"), (size[:3], "token_head")):
            q = torch.randint(-127, 128, size, dtype=torch.int8, generator=generator).to(device)
            scale = torch.rand(groups, generator=generator).to(device)
            # One float32 product: bitwise.
            want = reference.dequantize_kv(q, scale).astype(np.float32)
            error = max_error(pagedkv.dequantize_kv(q, scale), want)
            yield Check("dequantize_kv", "bit for bit", "int8", f"shape {list(size)}, {name}", error, 0.0)


# ------------------------------------------------------------------------------------------- cache write


def _write(device: torch.device, quick: bool) -> Iterator[Check]:
    for dtype in (torch.float16,) if quick else _DTYPES:
        for granularity in _GRANULARITIES:
            for block_size in (16,) if quick else (1, 5, 16, 256):
                yield from _token_by_token(device, dtype, granularity, block_size)
        for granularity in _GRANULARITIES:
            yield from _scattered(device, dtype, granularity)


class _Written:
    """A cache under test beside the reference's, and what was written to it."""

    def __init__(self, device: torch.device, granularity: str, size: tuple[int, int, int, int]):
        groups = size[::2] if granularity == "block_head" else size[:3]
        generator = torch.Generator().manual_seed(1)
        # What an earlier owner left in the blocks: it must not matter once they start afresh.
        self.cache = []
        for _ in range(2):
            held = torch.randint(-127, 128, size, dtype=torch.int8, generator=generator)
            self.cache += [held.to(device), (torch.rand(groups, generator=generator) * 9).to(device)]
        self.want = [x.cpu().numpy() for x in self.cache]

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        pagedkv.reshape_and_cache(key, value, *self.cache, slots)
        self.want = list(reference.reshape_and_cache(key, value, *self.want, slots))

    def checks(self, case: str, dtype: torch.dtype, detail: str) -> Iterator[Check]:
        dtype = str(dtype).removeprefix("torch.")
        for name, q, scale in (("key", 0, 1), ("value", 2, 3)):
            got_q, got_scale = self.cache[q].cpu().numpy(), self.cache[scale].cpu().numpy()
            error = _relative(got_scale, self.want[scale])
            yield Check("reshape_and_cache", case, dtype, f"{name} scale, relative, {detail}", error, _ULP)
            apart = np.abs(got_q.astype(int) - self.want[q].astype(int))  # one: a tie, seen from float32
            yield Check("reshape_and_cache", case, dtype, f"{name} levels more than one apart, {detail}", float((apart > 1).sum()), 0.0)


def _token_by_token(device: torch.device, dtype: torch.dtype, granularity: str, block_size: int) -> Iterator[Check]:
    """Decode steps that fill blocks while the values grow, so that a block-head scale is raised again and again.

    The error of a token is half a scale from its own rounding and at most half of each scale that it was re-quantised to.
    """
    steps = min(2 * block_size, 40) + 1
    written = _Written(device, granularity, (-(-steps // block_size) + 1, block_size, 2, 64))
    tokens = _kv((steps, 2, 2, 64), seed=2) * torch.linspace(0.1, 3, steps)[:, None, None, None]
    tokens = tokens.to(dtype).to(device)
    allowed = np.zeros((steps, 2))
    for i, token in enumerate(tokens):
        before = [written.cache[j].cpu().numpy().copy() for j in (1, 3)]
        written.write(token[None, 0], token[None, 1], torch.tensor([i], device=device))
        for half, j in enumerate((1, 3)):
            scale = written.cache[j].cpu().numpy()
            block = i // block_size
            raised = granularity == "block_head" and i % block_size != 0 and not np.array_equal(scale[block], before[half][block])
            if raised:
                allowed[block * block_size : i, half] += scale[block].max() / 2
            allowed[i, half] = (scale[block] if granularity == "block_head" else scale[block, i % block_size]).max() / 2
    case, detail = "token by token, values that grow", f"{granularity}, block_size {block_size}"
    for half, (q, scale) in enumerate(((0, 1), (2, 3))):
        decoded = as_float64(pagedkv.dequantize_kv(written.cache[q], written.cache[scale])).reshape(-1, 2, 64)[:steps]
        error = np.abs(decoded - as_float64(tokens[:, half])).max(axis=(1, 2))
        excess = max(0.0, float((error / (allowed[:, half] * (1 + 256 * _ULP))).max()) - 1)
        what = f"{('key', 'value')[half]} error beyond the roundings allowed, {detail}"
        yield Check("reshape_and_cache", case, str(dtype).removeprefix("torch."), what, excess, 0.0, "the contract's bound")
    yield from written.checks(case, dtype, detail)


def _scattered(device: torch.device, dtype: torch.dtype, granularity: str) -> Iterator[Check]:
    """A prefill into scattered slots, then a second one into the same blocks; skipped tokens; K and V in one tensor."""
    written = _Written(device, granularity, (9, 16, 3, 80))
    both = torch.stack([written.cache[0], written.cache[2]], 1)
    written.cache[0], written.cache[2] = both[:, 0], both[:, 1]
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(9, generator=generator)
    first = (order[:6, None] * 16 + torch.arange(10)).flatten()  # ten tokens of each of six blocks
    second = (order[:3, None] * 16 + torch.arange(10, 16)).flatten()
    for turn, slots in enumerate((first, second)):
        slots = slots[torch.randperm(len(slots), generator=generator)]
        slots = torch.cat([slots, torch.tensor([-1, -7, 9 * 16, 2**40])]).to(device)  # skipped
        key, value = (((turn + 1) * _kv((len(slots), 3, 80), seed=turn * 2 + i)).to(dtype).to(device) for i in range(2))
        written.write(key, value, slots)
    case = "scattered slots, twice, with tokens to skip; NaN in a token"
    yield from written.checks(case, dtype, granularity)
    bad_key, bad_value = (_kv((2, 3, 80), seed=9 + i).to(dtype).to(device) for i in range(2))
    bad_key[0, 1, 3] = math.nan
    written.write(bad_key, bad_value, torch.tensor([int(order[7]) * 16, int(order[8]) * 16], device=device))
    yield from written.checks(case, dtype, f"{granularity}, NaN")


# ---------------------------------------------------------------------------------------------- rotation


def _rotated(device: torch.device, quick: bool) -> Iterator[Check]:
    """Rotating on the way in, against rotating in PyTorch first; the error is the number of bytes that differ."""
    both = {"quantize_kv": _both_encodings, "reshape_and_cache": _both_writes}
    for op, results in both.items():
        for dtype in (torch.float16,) if quick else _DTYPES:
            for granularity in _GRANULARITIES:
                for head_dim in (80, 128) if quick else (8, 80, 96, 128, 256):
                    pairs = results(_kv((6, 16, 3, head_dim)).to(dtype).to(device), granularity)
                    yield _same_bytes(op, dtype, f"{granularity}, head_dim {head_dim}", pairs)


def _both_encodings(kv: Tensor, granularity: str) -> Iterator[tuple[Tensor, Tensor]]:
    rotated = pagedkv.quantize_kv(kv, granularity, rotated=True)
    return zip(rotated, pagedkv.quantize_kv(hadamard_transform(kv), granularity), strict=True)


def _both_writes(kv: Tensor, granularity: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The planes of two caches: one written with `rotated`, one with tokens that were rotated before; in two parts, shuffled."""
    tokens = kv.flatten(0, 1)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(4))
    caches = []
    for rotated in (True, False):
        groups = kv.shape[:3] if granularity == "token_head" else kv.shape[::2]
        cache = [
            torch.zeros(size, dtype=d, device=kv.device) for _ in range(2) for size, d in ((kv.shape, torch.int8), (groups, torch.float32))
        ]
        for part in (order[: len(order) // 3], order[len(order) // 3 :]):
            new = tokens[part.to(kv.device)]
            new = new if rotated else hadamard_transform(new)
            pagedkv.reshape_and_cache(new, new * 2, *cache, part.to(kv.device), rotated=rotated)
        caches.append(cache)
    return zip(*caches, strict=True)


def _same_bytes(op: str, dtype: torch.dtype, detail: str, pairs) -> Check:
    differ = sum(int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()) for a, b in pairs)
    return Check(
        op, "rotated, bit for bit", str(dtype).removeprefix("torch."), detail, float(differ), 0.0, "PyTorch's rotation, then the op"
    )
