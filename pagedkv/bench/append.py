"""Time the cache write: quantise new tokens into their slots, beside what PyTorch and FlashInfer do, against the copy ceiling of
the same run. And see how far a block that was filled token by token is from one that was written at once.

A prompt fills whole blocks, in order within each; a decode step puts one token into a block of each sequence. What an implementation
wrote is decoded and compared with its input before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import pagedkv
from pagedkv.bench.comparison import MODES, CacheImplementation, compare, import_flashinfer, ratios, rel_error
from pagedkv.bench.inputs import MAX_ROTATIONS, ROTATE_OVER_CACHE, last_level_cache
from pagedkv.evidence.timing import GRAPH_MAX_CALLS, measure
from pagedkv.ops.rotation import hadamard_transform

TOKENS = {"cpu": (4_096, 64), "cuda": (65_536, 64)}  # of a prompt, of a decode step
QUICK_TOKENS = (512, 64)
DECODE_TOKENS = 64  # a call of so many or fewer is a decode step: each token has a block of its own
FILLS, QUICK_FILLS = 10_000, 500
NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16

_BUDGET_S = {"cpu": 0.4, "cuda": 0.12}  # of timing, for each row
_MAX_REL_ERROR = {"float16": 0.0, "float8_e4m3fn": 0.05, "int8_block_head": 0.02, "int8_token_head": 0.02}  # of what was written
_FLOATS = {"float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}

Call = Callable[[], object]


# -------------------------------------------------------------------------------------------------- inputs


def moved_bytes(tokens: int, kv_dtype: str) -> int:
    """Bytes that one call has to move: K and V are read in float16, and written in `kv_dtype` with the scales of what they fill."""
    values = 2 * tokens * NUM_KV_HEADS * HEAD_DIM
    scales = {"int8_token_head": tokens, "int8_block_head": tokens if tokens <= DECODE_TOKENS else -(-tokens // BLOCK_SIZE)}
    return 2 * values + values * (2 if kv_dtype == "float16" else 1) + 4 * 2 * NUM_KV_HEADS * scales.get(kv_dtype, 0)


class Inputs:
    """`rotations` calls of `tokens` tokens each, into disjoint blocks of one pool, so that none finds its own in the last-level cache.

    A pool is made when it is first asked for and lives until `forget`.

    Attributes:
        keys, values: per rotation, float16 `[tokens, num_kv_heads, head_dim]`, unit normal.
        blocks: per rotation, int32: the blocks written, in random order.
        positions: int32 `[tokens]`: where in those blocks, laid end to end, each token goes.
        slots: per rotation, int64 `[tokens]`: the same as the contract's slot mapping.
    """

    def __init__(self, tokens: int, device: torch.device, *, rotations: int | None = None, seed: int = 0):
        self.tokens, self.device = tokens, torch.device(device)
        if rotations is None:
            most = GRAPH_MAX_CALLS if self.device.type == "cuda" else MAX_ROTATIONS
            wanted = ROTATE_OVER_CACHE[self.device.type] * last_level_cache(self.device)
            rotations = max(1, min(most, -(-wanted // moved_bytes(tokens, "int8_block_head"))))
        rng = torch.Generator(self.device).manual_seed(seed)
        shape = (rotations, tokens, NUM_KV_HEADS, HEAD_DIM)
        self.keys, self.values = (torch.randn(shape, device=self.device, generator=rng, dtype=torch.float16) for _ in range(2))
        if tokens <= DECODE_TOKENS:
            each, offsets = tokens, torch.randint(BLOCK_SIZE, (tokens,), device=self.device, generator=rng)
            self.positions = torch.arange(tokens, device=self.device) * BLOCK_SIZE + offsets
        else:
            each, self.positions = -(-tokens // BLOCK_SIZE), torch.arange(tokens, device=self.device)
        self.num_blocks = rotations * each
        self.blocks = torch.randperm(self.num_blocks, device=self.device, generator=rng).view(rotations, each)
        self.slots = self.blocks[:, self.positions // BLOCK_SIZE] * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self._pools: dict[str, tuple[Tensor, ...]] = {}

    def pool(self, kv_dtype: str) -> tuple[Tensor, ...]:
        """`(k_cache, k_scale, v_cache, v_scale)` of int8, `(k_cache, v_cache)` of floats.

        Scales cover six standard deviations already: in a block that has seen a few tokens, one more seldom raises them.
        """
        if kv_dtype not in self._pools:
            shape = (self.num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
            dtype = _FLOATS.get(kv_dtype, torch.int8)
            planes = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2)]
            if dtype == torch.int8:
                groups = shape[:3] if kv_dtype == "int8_token_head" else shape[::2]
                scales = [torch.full(groups, 6 / 127, device=self.device) for _ in range(2)]
                planes = [planes[0], scales[0], planes[1], scales[1]]
            self._pools[kv_dtype] = tuple(planes)
        return self._pools[kv_dtype]

    def forget(self) -> None:
        self._pools.clear()

    def written_k(self, kv_dtype: str, rotation: int = 0) -> Tensor:
        """What the pool holds as K at the slots of a rotation, float32 like its keys."""
        k, *rest = self.pool(kv_dtype)
        blocks, offsets = self.blocks[rotation][self.positions // BLOCK_SIZE], self.positions % BLOCK_SIZE
        rows = k[blocks, offsets].float()
        if k.dtype != torch.int8:
            return rows
        return rows * (rest[0][blocks, offsets] if kv_dtype == "int8_token_head" else rest[0][blocks])[..., None]


# ----------------------------------------------------------------------------------------- implementations


def _each(inputs: Inputs, kv_dtype: str, write: Callable[..., object]) -> list[Call]:
    """`write(key, value, *pool, slots)` for each rotation."""
    pool = inputs.pool(kv_dtype)
    return [lambda k=k, v=v, s=s: write(k, v, *pool, s) for k, v, s in zip(inputs.keys, inputs.values, inputs.slots, strict=True)]


def _pagedkv(**options) -> Callable[[Inputs, str], list[Call]]:
    return lambda inputs, kv_dtype: _each(inputs, kv_dtype, lambda *args: pagedkv.reshape_and_cache(*args, **options))


def torch_write(key: Tensor, value: Tensor, k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, slots: Tensor) -> None:
    """Token-head INT8 in a few lines of PyTorch, as one would write it without this library. Slots of padding are not heeded."""
    for x, cache, scale in ((key.float(), k_cache, k_scale), (value.float(), v_cache, v_scale)):
        largest = x.abs().amax(-1)
        step = torch.where(largest > 0, largest / 127, 1.0)
        cache.view(-1, *cache.shape[2:])[slots] = (x / step[..., None]).round().to(torch.int8)
        scale.view(-1, scale.shape[2])[slots] = step


# One kernel for each number of tokens, as a user of fixed shapes gets it.
_compiled_write = torch.compile(torch_write, dynamic=False)


def _torch_copy(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    for x, cache in ((key, k_cache), (value, v_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = x


def _flashinfer(inputs: Inputs, kv_dtype: str) -> list[Call]:
    """FlashInfer's append takes what it writes in the cache's dtype, so FP8 is cast first, without a scale."""
    flashinfer = import_flashinfer()
    pool, dtype = inputs.pool(kv_dtype), _FLOATS[kv_dtype]
    # To it, the blocks of a rotation are one sequence: nothing of what it does per token depends on that.
    positions, batch = inputs.positions.int(), torch.zeros(inputs.tokens, dtype=torch.int32, device=inputs.device)
    indptr = torch.tensor([0, inputs.blocks.shape[1]], dtype=torch.int32, device=inputs.device)
    last_page_len = torch.tensor([BLOCK_SIZE], dtype=torch.int32, device=inputs.device)

    def call(key: Tensor, value: Tensor, blocks: Tensor) -> Call:
        return lambda: flashinfer.append_paged_kv_cache(
            key.to(dtype), value.to(dtype), batch, positions, pool, blocks, indptr, last_page_len
        )

    return [call(k, v, blocks) for k, v, blocks in zip(inputs.keys, inputs.values, inputs.blocks.int(), strict=True)]


# To add one, add a line.
IMPLEMENTATIONS = (
    CacheImplementation("pagedkv", "int8_block_head", _pagedkv(), ours=True),
    CacheImplementation("pagedkv", "int8_token_head", _pagedkv(), ours=True),
    CacheImplementation("pagedkv, rotated", "int8_block_head", _pagedkv(rotated=True), ours=True, read=hadamard_transform),
    CacheImplementation("pagedkv, rotated", "int8_token_head", _pagedkv(rotated=True), ours=True, read=hadamard_transform),
    CacheImplementation("torch eager", "int8_token_head", lambda inputs, kv_dtype: _each(inputs, kv_dtype, torch_write)),
    CacheImplementation("torch.compile", "int8_token_head", lambda inputs, kv_dtype: _each(inputs, kv_dtype, _compiled_write)),
    CacheImplementation("torch eager", "float16", lambda inputs, kv_dtype: _each(inputs, kv_dtype, _torch_copy)),
    CacheImplementation("FlashInfer", "float16", _flashinfer, devices=("cuda",)),
    CacheImplementation("FlashInfer, cast first", "float8_e4m3fn", _flashinfer, devices=("cuda",)),
)


# --------------------------------------------------------------------------------------------------- sweep


def copy_rows(moved: int, device: torch.device, modes: tuple[str, ...]) -> list[dict]:
    """The copy ceiling: `moved` bytes, half of them read and half written, in the ways that PyTorch has.

    Returns rows with `kind` "bandwidth", `implementation`, `mode`, `bytes`, the times and `gb_per_s`.
    """
    words = moved // 8  # float32
    pairs = max(2, -(-ROTATE_OVER_CACHE[device.type] * last_level_cache(device) // moved))
    sources, targets = (torch.zeros(min(pairs, MAX_ROTATIONS), words, device=device) for _ in range(2))
    ways = {"copy": lambda s, t: t.copy_(s), "negated copy": lambda s, t: torch.neg(s, out=t)}  # a memcpy, and a kernel
    rows = []
    for mode in modes:
        for name, way in ways.items():
            calls = [lambda s=s, t=t, way=way: way(s, t) for s, t in zip(sources, targets, strict=True)]
            times = measure(device=device, mode=mode, rotate=calls, budget_s=2 * _BUDGET_S[device.type])
            rows.append({"kind": "bandwidth", "implementation": name, "status": "measured", "bytes": 8 * words, **times,
                         "gb_per_s": 8 * words / times["p50_us"] / 1e3})  # fmt: skip
    return rows


def copy_gb_per_s(rows: list[dict], mode: str) -> float:
    """The fastest of `copy_rows` in one timing mode, in 1e9 bytes a second."""
    return max(r["gb_per_s"] for r in rows if r["mode"] == mode)


def size_rows(
    tokens: int, device: torch.device, copies: list[dict], *, modes: tuple[str, ...] | None = None, budget_s: float | None = None
) -> Iterator[dict]:
    """Measure every implementation on calls of `tokens` tokens.

    Args:
        copies: `copy_rows` of the same run.
        modes: timing modes; default `MODES` of the device.
        budget_s: seconds of timing for each row; default `_BUDGET_S` of the device.

    Yields:
        `kind` "append", `tokens`, `implementation`, `kv_dtype`, `ours`, `status` ("measured", or "absent" with a `reason`), `mode`, the
        times, `bytes` (see `moved_bytes`), `gb_per_s`, `roof_us` (the bytes at the copy ceiling), `roof_fraction`, and `rel_error`
        of the K written.

    Raises:
        AssertionError: this project wrote something else than it was given. A peer that did is absent.
    """
    modes = modes or MODES[device.type]
    budget_s = budget_s or _BUDGET_S[device.type]
    inputs = Inputs(tokens, device)

    def measured(i: CacheImplementation) -> Iterator[dict]:
        calls = i.prepare(inputs, i.kv_dtype)
        calls[0]()
        error = rel_error(i.read(inputs.written_k(i.kv_dtype)), inputs.keys[0])
        if not error <= _MAX_REL_ERROR[i.kv_dtype]:
            raise AssertionError(f"{i.name} ({i.kv_dtype}), {tokens} tokens: relative error {error:.3g} of what was written")
        moved = moved_bytes(tokens, i.kv_dtype)
        for mode in modes:
            times = measure(device=device, mode=mode, rotate=calls, budget_s=budget_s)
            roof_us = moved / copy_gb_per_s(copies, mode) / 1e3
            yield {**times, "bytes": moved, "gb_per_s": moved / times["p50_us"] / 1e3,
                   "roof_us": roof_us, "roof_fraction": roof_us / times["p50_us"], "rel_error": error}  # fmt: skip

    yield from compare(IMPLEMENTATIONS, device, {"kind": "append", "tokens": tokens}, measured, inputs.forget)


_RATIOS = {
    "vs_eager": ("torch eager", {"kv_dtype": "int8_token_head"}),
    "vs_compile": ("torch.compile", {"kv_dtype": "int8_token_head"}),
    "vs_flashinfer_fp16": ("FlashInfer", {"kv_dtype": "float16"}),
    "vs_flashinfer_fp8": ("FlashInfer", {"kv_dtype": "float8_e4m3fn"}),
}


def derived_rows(rows: list[dict]) -> Iterator[dict]:
    """Ratios within one run: `kind` "derived", `tokens`, `kv_dtype` (of this project's row), `mode`, `quantity`, `value`, `peer`."""
    return ratios([r for r in rows if r.get("kind") == "append"], "pagedkv", ("tokens", "kv_dtype", "mode"), _RATIOS)


# --------------------------------------------------------------------------------------------- consistency


def further_roundings(fills: int, device: torch.device, granularity: str, *, head_dim: int = HEAD_DIM, seed: int = 0) -> Tensor:
    """How much more than once a block was rounded that was filled one token at a time: float64 `[2 * fills]`, K's blocks, then V's.

    Each fill is a block of unit normal tokens. The token at offset 0 comes first, since it starts a block afresh, the others in random
    order. Written at once, an element is off by at most half of the block's scale: one rounding. Token by token, what the block holds is
    re-quantised whenever the scale grows, and ends with the same scale; the largest error in it, in halves of that scale, less the
    one that both have, is the number returned: 0 where there was no more.

    Raises:
        AssertionError: the two ways end with different scales.
    """
    rng = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(fills, BLOCK_SIZE, 1, head_dim, generator=rng).to(device) for _ in range(2))
    order = torch.cat([torch.zeros(fills, 1), 1 + torch.rand(fills, BLOCK_SIZE - 1, generator=rng).argsort(1)], 1).long().to(device)
    first = torch.arange(fills, device=device) * BLOCK_SIZE

    def empty() -> list[Tensor]:
        scale = torch.ones(fills, *((BLOCK_SIZE, 1) if granularity == "token_head" else (1,)), device=device)
        cache = torch.zeros(key.shape, dtype=torch.int8, device=device)
        return [cache, scale, cache.clone(), scale.clone()]

    at_once, stepwise = empty(), empty()
    slots = (first[:, None] + torch.arange(BLOCK_SIZE, device=device)).flatten()
    pagedkv.reshape_and_cache(key.flatten(0, 1), value.flatten(0, 1), *at_once, slots)
    every = torch.arange(fills, device=device)
    for offset in order.T:
        pagedkv.reshape_and_cache(key[every, offset], value[every, offset], *stepwise, first + offset)
    found = []
    for x, cache, scale, wanted in ((key, *stepwise[:2], at_once[1]), (value, *stepwise[2:], at_once[3])):
        if not torch.equal(scale, wanted):
            raise AssertionError(f"{granularity}: a block filled token by token has another scale than one written at once")
        step = (scale if granularity == "token_head" else scale[:, None])[..., None].double()
        halves = ((cache * step - x).abs() / (step / 2)).flatten(1).amax(1)
        found.append((halves - 1).clamp(min=0))
    return torch.cat(found)


def consistency_row(granularity: str, found: Tensor) -> dict:
    """`further_roundings` in a row: `kind` "consistency", `fills`, `worst`, `mean`, `share_above_1`."""
    return {"kind": "consistency", "granularity": granularity, "status": "measured", "fills": len(found) // 2, "blocks": len(found),
            "worst": float(found.max()), "mean": float(found.mean()), "share_above_1": float((found > 1).double().mean())}  # fmt: skip
