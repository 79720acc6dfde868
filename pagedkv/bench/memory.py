"""How many bytes a paged KV cache takes: by arithmetic, and as the library's own tensors hold them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import torch
from torch import Tensor

import pagedkv

MIB = 1 << 20
GRANULARITIES = ("block_head", "token_head")


@dataclasses.dataclass(frozen=True)
class Pool:
    """The shape of a KV pool: K and V are each `[num_blocks, block_size, num_kv_heads, head_dim]`."""

    num_blocks: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"{self.num_blocks}x{self.num_kv_heads}x{self.head_dim}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim

    def values(self) -> int:
        """Elements of K and V together."""
        return 2 * self.num_blocks * self.block_size * self.num_kv_heads * self.head_dim

    def fp16_bytes(self) -> int:
        return 2 * self.values()

    def int8_bytes(self, granularity: str) -> int:
        """One byte a value and one float32 scale a group."""
        group = self.head_dim * (self.block_size if granularity == "block_head" else 1)
        return self.values() + 4 * self.values() // group


# The published configurations: about a 7B model's pool, four times that, and a 13B model without GQA.
PUBLISHED = (Pool(4096, 8, 128), Pool(16384, 8, 128), Pool(16384, 40, 128))


def held(*tensors: Tensor) -> int:
    """Bytes of the storages behind these tensors, so that padding or a view into something larger would show."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def measured(pool: Pool, granularity: str, device: torch.device | str = "cpu") -> dict:
    """`fp16_bytes` and `int8_bytes` of a real pool quantised by `quantize_kv`, and how that was found out.

    K and V have one shape, so one is made and counted twice. `how`: `allocated`; or `shapes`, where the device has
    no room for it and the op's own shape function (meta tensors) says what it would return.
    """
    need, free = pool.fp16_bytes() // 2 + pool.int8_bytes(granularity) // 2, free_bytes(device)
    how = "allocated" if need < 0.8 * free else "shapes"
    kv = torch.zeros(pool.shape, dtype=torch.float16, device=device if how == "allocated" else "meta")
    q, scale = pagedkv.quantize_kv(kv, granularity)
    if how == "shapes":
        sizes = [t.numel() * t.element_size() for t in (kv, q, scale)]
        how = f"shapes ({need / MIB:,.0f} MiB are needed, {free / MIB:,.0f} are free)"
        return {"fp16_bytes": 2 * sizes[0], "int8_bytes": 2 * (sizes[1] + sizes[2]), "how": how}
    return {"fp16_bytes": 2 * held(kv), "int8_bytes": 2 * held(q, scale), "how": how}


def free_bytes(device: torch.device | str) -> int:
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def rows(pools: tuple[Pool, ...], device: torch.device | str = "cpu") -> Iterator[dict]:
    """One row for each pool and granularity, the formula beside what was measured."""
    for pool in pools:
        for granularity in GRANULARITIES:
            found = measured(pool, granularity, device)
            yield {
                "pool": pool.name,
                **dataclasses.asdict(pool),
                "granularity": granularity,
                **found,
                "fp16_mib": found["fp16_bytes"] / MIB,
                "int8_mib": found["int8_bytes"] / MIB,
                "savings_percent": 100 * (1 - found["int8_bytes"] / found["fp16_bytes"]),
                "formula_int8_bytes": pool.int8_bytes(granularity),
                "formula_fp16_bytes": pool.fp16_bytes(),
                "agrees": (found["fp16_bytes"], found["int8_bytes"]) == (pool.fp16_bytes(), pool.int8_bytes(granularity)),
            }
