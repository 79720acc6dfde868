"""Inputs for the op tests: paged caches of any shape, layout and encoding, with poison wherever nobody may look."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

import pagedkv
from pagedkv import reference

QUANTISED = ("block_head", "token_head")
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
CACHES = (*QUANTISED, *FLOATS)
INT32 = torch.iinfo(torch.int32)
GARBAGE_IDS = (-1, INT32.max, INT32.min, 65536, -65536)

# How a tensor lies in memory; each keeps the last dimension contiguous.
LAYOUTS = ("contiguous", "sliced", "unaligned", "heads_first")


def in_layout(x: Tensor, layout: str) -> Tensor:
    """The values of `x`, stored with gaps, at an odd address, or with dimensions 1 and 2 swapped."""
    if layout == "contiguous":
        return x.contiguous()
    if layout == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 3 else x.contiguous()
    before, after = (2, 3) if layout == "sliced" else (0, 0)
    dims = [n + (before + after if 0 < i < x.dim() - 1 else 0) for i, n in enumerate(x.shape)]
    dims[-1] += 16 if layout == "sliced" else 3
    base = torch.empty(dims, dtype=x.dtype, device=x.device)
    base.fill_(math.nan if x.dtype.is_floating_point else 77)
    view = base[..., 16 if layout == "sliced" else 3 :]
    for i in range(1, x.dim() - 1):
        view = view.narrow(i, before, x.shape[i])
    return view.copy_(x)


def interleaved(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a block side by side in one tensor, as vLLM keeps them."""
    both = torch.stack([k, v], dim=1)
    return both[:, 0], both[:, 1]


@dataclasses.dataclass
class Decode:
    """The arguments of one attention call. `k_scale` and `v_scale` are None for an unquantised cache."""

    q: Tensor
    k_cache: Tensor
    k_scale: Tensor | None
    v_cache: Tensor
    v_scale: Tensor | None
    block_tables: Tensor
    seq_lens: Tensor
    sm_scale: float
    options: dict

    @property
    def arguments(self) -> tuple:
        cache = (self.k_cache, self.k_scale, self.v_cache, self.v_scale)
        return (self.q, *(x for x in cache if x is not None), self.block_tables, self.seq_lens, self.sm_scale)

    def run(self, **more):
        op = pagedkv.paged_attention if self.k_scale is None else pagedkv.quant_paged_attention
        return op(*self.arguments, **self.options, **more)

    def exact(self):
        op = reference.paged_attention if self.k_scale is None else reference.quant_paged_attention
        return op(*self.arguments, **self.options, return_lse=True, return_block_mass=True)

    def yardstick(self):
        return self.yardstick_in(self.q.dtype)

    def yardstick_in(self, dtype: torch.dtype):
        """The same computation by PyTorch in a dtype."""
        cache = (self.k_cache, self.k_scale, self.v_cache, self.v_scale)
        return reference.attention_like_pytorch(self.q.to(dtype), *cache, self.block_tables, self.seq_lens, self.sm_scale, **self.options)

    def check(self) -> None:
        """All three results are within the tolerance of the contract."""
        results = self.run(return_lse=True, return_block_mass=True)
        assert results[0].dtype == self.q.dtype and results[0].is_contiguous()
        for name, result, exact, yardstick in zip(("out", "lse", "block_mass"), results, self.exact(), self.yardstick(), strict=True):
            complaints = reference.outside_tolerance(result, exact, yardstick, self.q.dtype)
            assert not complaints, f"{name}: {complaints}"


def decode(
    device,
    *,
    lengths: tuple[int, ...] = (37, 0, 1, 16, 64),
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    cache: str = "block_head",
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    interleave: bool = False,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool | Tensor = False,
    magnitude: float = 1.0,
    spare_blocks: int = 3,
    rotated: bool = False,
    seed: int = 0,
) -> Decode:
    """Sequences of the given lengths, each in blocks of its own, in random order in the pool.

    What no sequence attends to is poison: NaN values and scales, garbage ids in the tails of the block tables and before
    the window. Whoever reads it gets a NaN or reads outside the pool.
    """
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    max_blocks = max([*counts, 0]) + 2
    num_blocks = sum(counts) + spare_blocks
    order = torch.randperm(num_blocks, generator=rng).tolist()
    tables = torch.tensor(GARBAGE_IDS).repeat(len(lengths) * max_blocks)[: len(lengths) * max_blocks].view(len(lengths), max_blocks)
    attended = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for s, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        for t in range(first, length):
            if t == first or t % block_size == 0:
                tables[s, t // block_size] = order.pop()
            attended[tables[s, t // block_size], t % block_size] = True

    shape = (num_blocks, block_size, kv_heads, head_dim)
    k, v = (torch.randn(shape, generator=rng) * magnitude for _ in range(2))
    if cache in QUANTISED:
        (k, k_scale), (v, v_scale) = reference_encoding(k, cache), reference_encoding(v, cache)
        for scale in (k_scale, v_scale):
            scale[~(attended if cache == "token_head" else attended.any(1))] = math.nan
        k[~attended], v[~attended] = 127, -127
        k_scale, v_scale = in_layout(k_scale.to(device), layout), in_layout(v_scale.to(device), layout)
    else:
        k_scale = v_scale = None
        k, v = k.to(FLOATS[cache]), v.to(FLOATS[cache])
        k[~attended], v[~attended] = math.nan, math.nan
    k, v = k.to(device), v.to(device)
    k, v = interleaved(k, v) if interleave else (in_layout(k, layout), in_layout(v, layout))

    q = torch.randn(len(lengths), heads, head_dim, generator=rng).to(dtype)
    options = {"sliding_window": window, "logits_soft_cap": cap, "rotated": rotated}
    if sinks is True:
        sinks = torch.randn(heads, generator=rng) * 2
    options["sinks"] = sinks.to(device) if isinstance(sinks, Tensor) else None
    return Decode(
        in_layout(q.to(device), layout),
        k,
        k_scale,
        v,
        v_scale,
        in_layout(tables.to(device, torch.int32), layout),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        head_dim**-0.5,
        options,
    )


def reference_encoding(kv: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    q, scale = reference.quantize_kv(kv, granularity)
    return torch.from_numpy(q), torch.from_numpy(scale)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: NaN equals itself, and -0.0 is not 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() > 0 else bool(a == b)
