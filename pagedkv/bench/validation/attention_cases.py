"""The hostile cases of decode attention: what users of such kernels report, each a small problem.

A case builds a `Problem` for one dtype of `q` and one kind of cache. To add one, add a line to `CASES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedkv.bench.validation.oracle import Problem

Q_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CACHES = ("int8_block_head", "int8_token_head", "float16", "bfloat16", "float32")
_INT32_MAX, _INT32_MIN = 2**31 - 1, -(2**31)


def lengths(block_size: int) -> tuple[int, ...]:
    """Empty, one token, around a block's end, several blocks."""
    return (0, 1, block_size, block_size + 1, 3 * block_size + block_size // 2, 5 * block_size)


def problem(
    device: torch.device,
    q_dtype: torch.dtype,
    cache: str,
    *,
    lens=None,
    heads=(4, 2),
    head_dim=64,
    block_size=16,
    spare_blocks=5,
    seed=0,
    **options,
) -> Problem:
    """Random attention over random blocks of a pool with `spare_blocks` that no sequence holds; table tails are -1."""
    lens = lengths(block_size) if lens is None else lens
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    counts = [math.ceil(n / block_size) for n in lens]
    num_blocks = sum(counts) + spare_blocks
    order = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = torch.full((len(lens), max(counts, default=0)), -1, dtype=torch.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    size = (num_blocks, block_size, num_kv_heads, head_dim)
    scales = {}
    if cache.startswith("int8"):
        k, v = (torch.randint(-127, 128, size, dtype=torch.int8, generator=generator) for _ in range(2))
        groups = (num_blocks, num_kv_heads) if cache == "int8_block_head" else size[:3]
        scales = {name: (torch.rand(groups, generator=generator) * 0.015 + 0.005).to(device) for name in ("k_scale", "v_scale")}
    else:
        k, v = (torch.randn(size, generator=generator).to(getattr(torch, cache)) for _ in range(2))
    q = torch.randn((len(lens), num_heads, head_dim), generator=generator).to(q_dtype)
    if options.get("sinks"):
        options["sinks"] = (torch.randn(num_heads, generator=generator) * options["sinks"]).to(device)
    return Problem(
        *(x.to(device) for x in (q, k, v, tables, torch.tensor(lens, dtype=torch.int32))),
        sm_scale=head_dim**-0.5,
        **scales,
        options=options,
    )


# ----------------------------------------------------------------------------------------- mutations


def _poison_unused(p: Problem) -> None:
    """NaN (or, in int8, garbage under a NaN scale) in every slot past a sequence's end and in every block of no sequence."""
    block_size = p.k_cache.shape[1]
    live = torch.zeros(p.k_cache.shape[:2], dtype=torch.bool)
    for table, length in zip(p.block_tables.tolist(), p.seq_lens.tolist(), strict=True):
        for position in range(length):
            live[table[position // block_size], position % block_size] = True
    live = live.to(p.q.device)
    for cache, scale in ((p.k_cache, p.k_scale), (p.v_cache, p.v_scale)):
        cache[~live] = 127 if scale is not None else math.nan
        if scale is not None:
            scale[~live if scale.dim() == 3 else ~live.any(1)] = math.nan


def _garbage_tail(p: Problem) -> None:
    tail = p.block_tables < 0
    count = int(tail.sum())
    garbage = torch.tensor([_INT32_MAX, _INT32_MIN, -1, 10**9], dtype=torch.int32).repeat(count)[:count]
    p.block_tables[tail] = garbage.to(p.q.device)


def _bad_ids(p: Problem) -> None:
    """A block id outside the pool in the last, the first and a middle attended block of three sequences."""
    p.block_tables[3, 1], p.block_tables[4, 0], p.block_tables[5, 2] = p.k_cache.shape[0], -1, _INT32_MAX


def _bad_lengths(p: Problem) -> None:
    p.seq_lens[1], p.seq_lens[2] = -1, _INT32_MIN
    p.seq_lens[3], p.seq_lens[4] = p.block_tables.shape[1] * p.k_cache.shape[1] + 1, _INT32_MAX


def _bad_ids_before_window(p: Problem) -> None:
    """Blocks that lie wholly before the window are not read, so their ids do not matter."""
    window = p.options["sliding_window"]
    for row, length in zip(p.block_tables, p.seq_lens.tolist(), strict=True):
        row[: max(0, length - window) // p.k_cache.shape[1]] = _INT32_MAX


def _interleaved(p: Problem) -> None:
    """K and V as the two halves of one tensor, as vLLM keeps them."""
    both = torch.stack([p.k_cache, p.v_cache], dim=1)
    p.k_cache, p.v_cache = both[:, 0], both[:, 1]


def _heads_first(p: Problem) -> None:
    """A cache that lies in memory as [num_blocks, num_kv_heads, block_size, head_dim]."""
    p.k_cache, p.v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (p.k_cache, p.v_cache))


def _odd_rows(p: Problem) -> None:
    """Head rows 4 elements further apart than they are long: what an inline scale does to their alignment."""
    p.k_cache, p.v_cache = (torch.cat([x, x[..., :4]], -1)[..., :-4] for x in (p.k_cache, p.v_cache))


def _strided_arguments(p: Problem) -> None:
    """q as a slice of a fused qkv, tables and scales as slices of wider ones."""
    p.q = torch.cat([p.q, p.q, p.q], 1)[:, : p.q.shape[1]]
    p.block_tables = torch.cat([p.block_tables, p.block_tables], 1)[:, : p.block_tables.shape[1]]
    if p.k_scale is not None:
        p.k_scale, p.v_scale = (torch.cat([x, x], -1)[..., : x.shape[-1]] for x in (p.k_scale, p.v_scale))


def _nan_query(p: Problem) -> None:
    p.q[5, 1] = math.nan


def _outlier_channels(p: Problem) -> None:
    """Channels in which q is 1,000 times as large as in the others and K small, as in real models: the others still count."""
    for row, channels in enumerate((1, 20)):
        p.q[row, :, :channels] *= 1000
    p.k_cache[..., :20] = torch.sign(p.k_cache[..., :20])


def _low_logits(p: Problem) -> None:
    """Every logit below -5e4: a kernel that starts its maximum at a finite number loses them."""
    p.sm_scale = 1e4
    p.q.abs_()
    p.k_cache.copy_(-p.k_cache.abs() if p.k_scale is None else -p.k_cache.abs().clamp(min=64))


def _scale_by(factor: float) -> Callable[[Problem], None]:
    def mutate(p: Problem) -> None:
        p.v_scale.mul_(factor)

    return mutate


def _zero_keys(p: Problem) -> None:
    p.k_cache.zero_()


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """`shape`: keyword arguments of `problem`; `mutate` makes it hostile; `caches`, `q_dtypes`: where it makes sense.

    `large`: the NumPy reference would take too long; PyTorch in float64 judges instead.
    """

    name: str
    shape: dict = field(default_factory=dict)
    mutate: Callable[[Problem], None] | None = None
    caches: tuple[str, ...] = CACHES
    q_dtypes: tuple[torch.dtype, ...] = Q_DTYPES
    large: bool = False
    quick: bool = False

    def build(self, device: torch.device, q_dtype: torch.dtype, cache: str) -> Problem:
        made = problem(device, q_dtype, cache, **self.shape)
        if self.mutate is not None:
            self.mutate(made)
        return made


_INT8 = CACHES[:2]
_ALL_OPTIONS = {"sliding_window": 21, "logits_soft_cap": 5.0, "sinks": 2.0}

CASES = (
    Case("plain", quick=True),
    *(Case(f"head_dim {d}", {"head_dim": d}, quick=d in (8, 80, 256)) for d in (8, 16, 24, 80, 96, 112, 128, 192, 256)),
    *(Case(f"block_size {b}", {"block_size": b}, quick=b in (1, 5, 256)) for b in (1, 5, 12, 32, 48, 64, 256)),
    *(Case(f"GQA ratio {r}", {"heads": (2 * r, 2), "lens": (37, 0, 16)}, quick=r in (7, 64)) for r in (1, 3, 5, 7, 8, 9, 16, 64)),
    Case("one KV head", {"heads": (8, 1)}),
    Case("32 query heads, 8 KV heads, head_dim 128", {"heads": (32, 8), "head_dim": 128, "lens": (100, 16, 1)}),
    *(Case(f"window {w}", {"sliding_window": w}, quick=w == 7) for w in (1, 7, 16, 33, 1000)),
    Case("window, bad ids before it", {"sliding_window": 7}, _bad_ids_before_window, quick=True),
    *(Case(f"soft cap {c:g}", {"logits_soft_cap": c}) for c in (0.5, 30.0)),
    *(Case(f"sinks of size {s:g}", {"sinks": s}) for s in (1.0, 60.0)),
    Case("window, soft cap and sinks", _ALL_OPTIONS, quick=True),
    *(Case(f"rotated, head_dim {d}", {"head_dim": d, "rotated": True}, quick=d in (64, 80)) for d in (8, 64, 80, 96, 128, 256)),
    Case("rotated, window, soft cap and sinks", {"rotated": True, **_ALL_OPTIONS}, _strided_arguments),
    Case("rotated, block ids outside the pool", {"rotated": True}, _bad_ids),
    Case("no sequences", {"lens": ()}),
    Case("every sequence empty", {"lens": (0, 0, 0)}),
    Case("every sequence empty, sinks", {"lens": (0, 0), "sinks": 1.0}),
    Case("NaN past the end and in unused blocks", mutate=_poison_unused, quick=True),
    Case("NaN past the end, block_size 5, window", {"block_size": 5, "sliding_window": 7}, _poison_unused),
    Case("garbage in the tail of the tables", mutate=_garbage_tail, quick=True),
    Case("block ids outside the pool", mutate=_bad_ids, quick=True),
    Case("block ids outside the pool, all options", _ALL_OPTIONS, _bad_ids),
    Case("lengths negative or past the table", mutate=_bad_lengths, quick=True),
    Case("NaN in one query head", mutate=_nan_query),
    Case("K and V interleaved in one tensor", mutate=_interleaved, quick=True),
    Case("heads-first cache", mutate=_heads_first),
    Case("misaligned head rows", {"head_dim": 128}, _odd_rows, quick=True),
    Case("strided q, tables and scales", mutate=_strided_arguments),
    Case("outlier channels of q", {"head_dim": 128, "lens": (60, 37)}, _outlier_channels, q_dtypes=Q_DTYPES[1:], quick=True),
    Case("logits below -5e4", mutate=_low_logits, q_dtypes=(torch.float32,), quick=True),
    Case("keys all zero", mutate=_zero_keys),
    Case("tiny value scales", mutate=_scale_by(1e-30), caches=_INT8, q_dtypes=(torch.float32, torch.bfloat16)),
    Case("subnormal value scales", mutate=_scale_by(1e-38), caches=_INT8, q_dtypes=(torch.float32, torch.bfloat16)),
    Case("huge value scales", mutate=_scale_by(1e30), caches=_INT8, q_dtypes=(torch.float32, torch.bfloat16)),
    Case(
        "block ids past 65,535",
        {"block_size": 1, "heads": (2, 1), "head_dim": 8, "lens": (9, 70), "spare_blocks": 70_000},
        large=True,
        quick=True,
    ),
    Case("a long sequence", {"lens": (4099,), "heads": (8, 2), "head_dim": 128}, large=True, quick=True),
    Case("long and short sequences", {"lens": (3000, 1, 17, 0, 2048), "heads": (8, 2)}, large=True),
    Case(
        "long, all options",
        {"lens": (3000, 5, 2000), "heads": (8, 2), "sliding_window": 1111, "logits_soft_cap": 20.0, "sinks": 3.0},
        large=True,
    ),
    Case("rotated, a long sequence", {"lens": (4099, 0, 7), "heads": (8, 2), "head_dim": 128, "rotated": True}, large=True, quick=True),
    Case("300 sequences", {"lens": tuple(range(300)), "heads": (4, 1)}, large=True),
)


def sweep(quick: bool) -> Iterator[tuple[Case, torch.dtype, str]]:
    """Every (case, q dtype, cache); a quick sweep takes a part of the cases and walks through the combinations."""
    turn = 0
    for case in CASES:
        pairs = [(dtype, cache) for dtype in case.q_dtypes for cache in case.caches]
        if quick and not case.quick:
            continue
        if quick:
            pairs = [pairs[(turn + i * 4) % len(pairs)] for i in range(2)]
            turn += 1
        for dtype, cache in dict.fromkeys(pairs):
            yield case, dtype, cache


def huge_pool(device: torch.device, q_dtype: torch.dtype) -> Problem:
    """An int8 pool of more than 2^31 bytes in which block id times stride overflows int32; K and V interleaved.

    On the CPU its memory is reserved, not touched: only the blocks in use are written.
    """
    small = problem(device, q_dtype, "int8_block_head", heads=(8, 8), head_dim=128, lens=(40, 17))
    num_blocks, size = 2**31 // (16 * 8 * 128) + 64, small.k_cache.shape[1:]
    pool: Tensor = torch.empty((num_blocks, 2, *size), dtype=torch.int8, device=device)
    shift = num_blocks - small.k_cache.shape[0]  # the used blocks move to the end of the pool
    scales = []
    for half, (cache, scale) in enumerate(((small.k_cache, small.k_scale), (small.v_cache, small.v_scale))):
        pool[shift:, half] = cache
        wide = torch.ones((num_blocks, scale.shape[1]), device=device)
        wide[shift:] = scale
        scales.append(wide)
    small.block_tables[small.block_tables >= 0] += shift
    return Problem(small.q, pool[:, 0], pool[:, 1], small.block_tables, small.seq_lens, small.sm_scale, *scales)
