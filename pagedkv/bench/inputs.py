"""Paged KV caches to measure on.

Every implementation of a comparison attends to the same numbers: the int8 data are random, the scales powers
of two, so the float16 and bfloat16 caches made from them hold exactly what the int8 ones decode to, and any two
outputs may be compared before they are timed.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pagedkv.evidence import hardware

# Calls that follow one another must find nothing of their own input in the cache, so the inputs rotate over
# this many times the last-level cache (a GPU's L2 is no LRU: a few times its size still leaves hits); the cap
# bounds memory where one input is tiny.
ROTATE_OVER_CACHE = {"cpu": 2, "cuda": 8}
MAX_ROTATIONS = 32

_NAME = re.compile(r"(?P<kind>ragged_|skewed_)?(?P<seqs>\d+)x(?P<len>\d+)(?:_kv(?P<kv>\d+))?(?:_d(?P<dim>\d+))?")


@dataclass(frozen=True)
class Shape:
    """One decode step: a query token for each sequence, against that sequence's paged cache."""

    name: str
    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def uniform(self) -> bool:
        return len(set(self.seq_lens)) == 1

    @property
    def num_blocks(self) -> int:
        return sum(math.ceil(n / self.block_size) for n in self.seq_lens)

    def kv_bytes(self, kv_dtype: str) -> int:
        """Bytes of K, V and scales that one step has to read; `kv_dtype` as in `PagedInputs.cache`, or `int8`: no scales."""
        tokens = sum(self.seq_lens)
        values = 2 * tokens * self.num_kv_heads * self.head_dim
        if kv_dtype == "int8_block_head":
            return values + 2 * self.num_blocks * self.num_kv_heads * 4
        if kv_dtype == "int8_token_head":
            return values + 2 * tokens * self.num_kv_heads * 4
        return values * {"int8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4}[kv_dtype]


def shape(name: str) -> Shape:
    """The shape that `name` spells.

    `64x2048`: 64 sequences of 2,048 tokens, 32 query and 8 KV heads, head_dim 128, block_size 16.
    `ragged_64x2048`: lengths uniform in 2048/8 .. 2048. `skewed_64x100000`: one sequence of 100,000 tokens among 63
    of 512. A suffix changes the heads (`_kv32`: MHA) and then the head dimension (`_d64`).

    Raises:
        ValueError: another spelling.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"shape: expected something like 64x2048, ragged_64x2048 or 64x2048_kv32_d64, got {name!r}")
    seqs, length = int(match["seqs"]), int(match["len"])
    lens = [length] * seqs
    if match["kind"] == "ragged_":
        draw = random.Random(name)
        lens = [draw.randint(max(1, length // 8), length) for _ in range(seqs)]
    elif match["kind"] == "skewed_":
        lens = [length] + [512] * (seqs - 1)
    return Shape(name, tuple(lens), num_kv_heads=int(match["kv"] or 8), head_dim=int(match["dim"] or 128))


def last_level_cache(device: torch.device) -> int:
    """Bytes of a GPU's L2 or a CPU's L3; 0 where the system does not say."""
    return hardware.l2_bytes(device) if device.type == "cuda" else hardware.describe(device)["l3_bytes"] or 0


def rotations(shape: Shape, device: torch.device) -> int:
    """How many disjoint inputs a measurement cycles through."""
    wanted = ROTATE_OVER_CACHE[device.type] * last_level_cache(device) / shape.kv_bytes("int8_block_head")
    return max(1, min(MAX_ROTATIONS, math.ceil(wanted)))


class PagedInputs:
    """A pool of blocks in several formats, and `rotations` disjoint sets of random block tables over it.

    Formats are made when first asked for and live until `forget`.

    Attributes:
        queries: per rotation, float16 `[num_seqs, num_heads, head_dim]`.
        block_tables: per rotation, int32 `[num_seqs, max_blocks]`; the unused tail of a row holds -1.
        seq_lens: int32 `[num_seqs]`.
    """

    def __init__(self, shape: Shape, device: torch.device, *, num_rotations: int | None = None, seed: int = 0):
        self.shape, self.device = shape, torch.device(device)
        self.num_rotations = rotations(shape, self.device) if num_rotations is None else num_rotations
        self.sm_scale = shape.head_dim**-0.5
        generator = torch.Generator(self.device).manual_seed(seed)
        used = self.num_rotations * shape.num_blocks
        self.pool_blocks = used + used // 8 + 1  # a pool is never full: the tables skip some blocks
        size = (self.pool_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._k, self._v = (torch.randint(-127, 128, size, dtype=torch.int8, device=self.device, generator=generator) for _ in range(2))
        heads = (self.pool_blocks, shape.num_kv_heads)
        self._k_scale, self._v_scale = (
            2.0 ** torch.randint(-8, -5, heads, device=self.device, generator=generator).float() for _ in range(2)
        )
        self.seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32, device=self.device)
        queries = (self.num_rotations, shape.num_seqs, shape.num_heads, shape.head_dim)
        self.queries = list(torch.randn(queries, device=self.device, generator=generator).half())
        self.block_tables = self._tables(generator)

    def _tables(self, generator: torch.Generator) -> list[Tensor]:
        shape, order = self.shape, torch.randperm(self.pool_blocks, device=self.device, generator=generator).int()
        counts = [math.ceil(n / shape.block_size) for n in shape.seq_lens]
        tables, start = [], 0
        for _ in range(self.num_rotations):
            table = torch.full((shape.num_seqs, max(counts)), -1, dtype=torch.int32, device=self.device)
            for row, count in zip(table, counts, strict=True):
                row[:count] = order[start : start + count]
                start += count
            tables.append(table)
        return tables

    def cache(self, kv_dtype: str) -> tuple[Tensor, ...]:
        """The pool in one format.

        `int8_block_head`, `int8_token_head`: `(k_cache, k_scale, v_cache, v_scale)`; `float16`, `bfloat16`, `float32`,
        `float8_e4m3fn` (rounded): `(k_cache, v_cache)`.
        """
        if kv_dtype == "int8_block_head":
            return self._k, self._k_scale, self._v, self._v_scale
        if kv_dtype == "int8_token_head":
            return self._k, self._token_scales[0], self._v, self._token_scales[1]
        if kv_dtype not in self._float_pools:
            dtype = getattr(torch, kv_dtype)
            self._float_pools[kv_dtype] = tuple(
                self._decode(q, scale, torch.float16 if dtype.itemsize == 1 else dtype).to(dtype)
                for q, scale in ((self._k, self._k_scale), (self._v, self._v_scale))
            )
        return self._float_pools[kv_dtype]

    @cached_property
    def _float_pools(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def _token_scales(self) -> tuple[Tensor, Tensor]:
        return tuple(s[:, None].expand(-1, self.shape.block_size, -1).contiguous() for s in (self._k_scale, self._v_scale))

    def forget(self) -> None:
        """Drop every format but int8 with block-head scales, from which the others are made."""
        self.__dict__.pop("_float_pools", None)
        self.__dict__.pop("_token_scales", None)

    @staticmethod
    def _decode(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return q.to(dtype).mul_(scale[:, None, :, None].to(dtype))

    def dense(self, kv_dtype: str, rotation: int = 0) -> tuple[Tensor, Tensor]:
        """K and V of one rotation outside pages, contiguous `[num_seqs, num_kv_heads, seq_len, head_dim]`.

        Raises:
            ValueError: lengths differ, so that no dense tensor holds just them.
        """
        if not self.shape.uniform:
            raise ValueError("dense K and V need sequences of one length")
        seq_len = self.shape.seq_lens[0]
        # From the int8 pool: a whole pool in another format may not fit beside the dense copy.
        dtype, table = getattr(torch, kv_dtype), self.block_tables[rotation].long()
        return tuple(
            self._decode(q[table].flatten(0, 1), scale[table].flatten(0, 1), dtype)
            .unflatten(0, table.shape)
            .flatten(1, 2)[:, :seq_len]
            .transpose(1, 2)
            .contiguous()
            for q, scale in ((self._k, self._k_scale), (self._v, self._v_scale))
        )
