"""What decode attention is compared with: this project's ops, the published baseline and the peers of anchors.

An implementation prepares itself on `PagedInputs` (copies, plans, compilation: all outside the timed part) and
returns one callable for each rotation. It raises `Absent` where it cannot run, and says why.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import pagedkv
from pagedkv.bench import child
from pagedkv.bench.comparison import Absent, CacheImplementation, import_flashinfer
from pagedkv.bench.inputs import PagedInputs, shape
from pagedkv.ops.rotation import hadamard_transform

Call = Callable[[], Tensor]


# ------------------------------------------------------------------------------------- this project


def _pagedkv(**options):
    """The op of `kv_dtype`, with these options; the attention output alone."""

    def prepare(inputs: PagedInputs, kv_dtype: str) -> list[Call]:
        cache = inputs.cache(kv_dtype)
        op = pagedkv.quant_paged_attention if kv_dtype.startswith("int8") else pagedkv.paged_attention

        def call(q: Tensor, table: Tensor) -> Call:
            def run() -> Tensor:
                out = op(q, *cache, table, inputs.seq_lens, inputs.sm_scale, **options)
                return out if isinstance(out, Tensor) else out[0]

            return run

        return [call(q, table) for q, table in zip(inputs.queries, inputs.block_tables, strict=True)]

    return prepare


def _pagedkv_rotated(inputs: PagedInputs, kv_dtype: str) -> list[Call]:
    """The same bytes, read as K and V that were rotated. The op rotates q once more, so its logits are those of the plain cache."""
    rotated = copy.copy(inputs)
    rotated.queries = [hadamard_transform(q).to(q.dtype) for q in inputs.queries]
    return _pagedkv(rotated=True)(rotated, kv_dtype)


# ------------------------------------------------------------------------------------------- PyTorch


def _gather_expand_sdpa(inputs: PagedInputs, kv_dtype: str) -> list[Call]:
    """The published baseline: gather the pages of a float16 pool, repeat KV heads to query heads, SDPA with a mask.

    Every step pays for the gather, as it has to where the cache is paged and the kernel is not.
    """
    shape, (k_cache, v_cache) = inputs.shape, inputs.cache(kv_dtype)
    group = shape.num_heads // shape.num_kv_heads
    padded_len = inputs.block_tables[0].shape[1] * shape.block_size
    live = torch.arange(padded_len, device=inputs.device)[None] < inputs.seq_lens[:, None]
    mask = None if bool(live.all()) else live[:, None, None]

    def gather(pool: Tensor, table: Tensor) -> Tensor:
        pages = pool[table].flatten(1, 2).transpose(1, 2)
        return pages.repeat_interleave(group, dim=1)

    def call(q: Tensor, table: Tensor) -> Call:
        q, table = q[:, :, None].to(k_cache.dtype), table.long().clamp(min=0)
        return lambda: F.scaled_dot_product_attention(
            q, gather(k_cache, table), gather(v_cache, table), attn_mask=mask, scale=inputs.sm_scale
        ).squeeze(2)

    return [call(q, table) for q, table in zip(inputs.queries, inputs.block_tables, strict=True)]


def _dense_sdpa(*backends: SDPBackend):
    """SDPA on KV that lies dense already: it pays neither for pages nor for the gather."""

    def prepare(inputs: PagedInputs, kv_dtype: str) -> list[Call]:
        if not inputs.shape.uniform:
            raise Absent("dense SDPA takes sequences of one length")

        def call(rotation: int) -> Call:
            k, v = inputs.dense(kv_dtype, rotation)
            q = inputs.queries[rotation][:, :, None].to(k.dtype)

            def run() -> Tensor:
                with sdpa_kernel(list(backends)):
                    return F.scaled_dot_product_attention(q, k, v, scale=inputs.sm_scale, enable_gqa=True).squeeze(2)

            return run

        return [call(rotation) for rotation in range(inputs.num_rotations)]

    return prepare


# ---------------------------------------------------------------------------------------- FlashInfer

_FLASHINFER_WORKSPACE = 128 << 20


def _flashinfer(tensor_cores: bool):
    """FlashInfer's paged decode wrapper; the plan is made here, outside the timed part."""

    def prepare(inputs: PagedInputs, kv_dtype: str) -> list[Call]:
        flashinfer = import_flashinfer()
        shape, cache = inputs.shape, inputs.cache(kv_dtype)
        # The float workspace only holds partial results within a call, so the rotations share it.
        workspace = torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=inputs.device)
        counts = (inputs.seq_lens + shape.block_size - 1) // shape.block_size
        indptr = F.pad(counts.cumsum(0), (1, 0)).int()
        last_page_len = (inputs.seq_lens - (counts - 1) * shape.block_size).int()

        def call(q: Tensor, table: Tensor) -> Call:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
            wrapper.plan(
                indptr,
                table[table >= 0],
                last_page_len,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.block_size,
                q_data_type=q.dtype,
                kv_data_type=getattr(torch, kv_dtype),
                sm_scale=inputs.sm_scale,
            )
            return lambda: wrapper.run(q, cache)

        return [call(q, table) for q, table in zip(inputs.queries, inputs.block_tables, strict=True)]

    return prepare


_cpu, _cuda = ("cpu",), ("cuda",)

# To add a peer, add a line.
IMPLEMENTATIONS = (
    CacheImplementation("pagedkv", "int8_block_head", _pagedkv(), ours=True),
    CacheImplementation("pagedkv", "int8_token_head", _pagedkv(), ours=True),
    CacheImplementation("pagedkv", "float16", _pagedkv(), ours=True),
    CacheImplementation("pagedkv, block mass", "int8_block_head", _pagedkv(return_block_mass=True), ours=True),
    CacheImplementation("pagedkv, rotated", "int8_block_head", _pagedkv_rotated, ours=True, read=hadamard_transform),
    CacheImplementation("gather + expand + SDPA", "float16", _gather_expand_sdpa),
    CacheImplementation("SDPA enable_gqa, dense", "float32", _dense_sdpa(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH), devices=_cpu),
    CacheImplementation("SDPA enable_gqa, dense", "bfloat16", _dense_sdpa(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH), devices=_cpu),
    CacheImplementation("SDPA enable_gqa, dense", "float16", _dense_sdpa(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH), devices=_cpu),
    CacheImplementation("SDPA flash, dense", "float16", _dense_sdpa(SDPBackend.FLASH_ATTENTION), devices=_cuda),
    CacheImplementation("SDPA cuDNN, dense", "float16", _dense_sdpa(SDPBackend.CUDNN_ATTENTION), devices=_cuda),
    CacheImplementation("FlashInfer, tensor cores", "float16", _flashinfer(True), devices=_cuda),
    CacheImplementation("FlashInfer, CUDA cores", "float16", _flashinfer(False), devices=_cuda),
    CacheImplementation("FlashInfer, tensor cores", "float8_e4m3fn", _flashinfer(True), devices=_cuda),
    CacheImplementation("FlashInfer, CUDA cores", "float8_e4m3fn", _flashinfer(False), devices=_cuda),
)


# ---------------------------------------------------------------------------------------- compilation


def compile_all(shapes: Iterable[str], device: torch.device) -> None:
    """Compile, side by side, what FlashInfer would compile one after another when first used on `shapes`, for each head dimension.

    A peer that fails here fails again where it is measured, and says why there.
    """
    dims = sorted({shape(name).head_dim for name in shapes})
    due = [i for i in IMPLEMENTATIONS if "FlashInfer" in i.name and device.type in i.devices and importlib.util.find_spec("flashinfer")]
    running = [
        subprocess.Popen(
            child.command("pagedkv.bench.attention_peers", i.name, i.kv_dtype, dim, device),
            env=child.environment(MAX_JOBS="2", OMP_NUM_THREADS="1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i, dim in itertools.product(due, dims)
    ]
    for process in running:
        process.wait()


def main(name: str, kv_dtype: str, head_dim: str, device: str) -> None:
    """One call of one implementation on a tiny shape."""
    inputs = PagedInputs(shape(f"2x64_d{head_dim}"), torch.device(device), num_rotations=1)
    implementation = next(i for i in IMPLEMENTATIONS if (i.name, i.kv_dtype) == (name, kv_dtype))
    implementation.prepare(inputs, kv_dtype)[0]()


if __name__ == "__main__":
    main(*sys.argv[1:])
