"""Ways to hold a KV cache: this project's INT8 specs, and the formats of others, to compare at equal bytes.

A format of others is rounded by PyTorch and decoded before float32 attention, so that the format is measured and not a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

import pagedkv
from pagedkv.bench.distributions import Problem
from pagedkv.ops.rotation import hadamard_transform
from pagedkv.quant_spec import KV_SPECS, KVQuantSpec

BUDGET = 51.6  # % of float16: int8 and a float32 scale for each token and head, at head_dim 128


@dataclasses.dataclass(frozen=True)
class Held:
    """A cache as a scheme holds it: K and V as attention sees them, float32 pools, and the attention output over them."""

    k: Tensor
    v: Tensor
    out: Tensor


@dataclasses.dataclass(frozen=True)
class Scheme:
    """`hold` encodes K and V of a problem; `bytes_per_token` is of one KV head's K and V, from the problem's shape."""

    hold: Callable[[Problem], Held]
    bytes_per_token: Callable[[Problem], float]

    def percent_of_fp16(self, p: Problem) -> float:
        return 100 * self.bytes_per_token(p) / (4 * p.k.shape[-1])


# ---------------------------------------------------------------------------------------------------- this project's


def int8(spec: KVQuantSpec) -> Scheme:
    """What `PagedKVCache` does with a spec, by the ops that it calls: `quantize_kv`, then `quant_paged_attention`."""

    def hold(p: Problem) -> Held:
        mean = prompt_means(p) if spec.subtract_k_mean else 0.0
        (k, k_scale), (v, v_scale) = (pagedkv.quantize_kv(x, spec.granularity, rotated=spec.rotate) for x in (p.k - mean, p.v))
        # Softmax does not see that the mean is missing.
        out = pagedkv.quant_paged_attention(p.q, k, k_scale, v, v_scale, p.block_tables, p.seq_lens, p.sm_scale, rotated=spec.rotate)
        decoded = [pagedkv.dequantize_kv(q, scale) for q, scale in ((k, k_scale), (v, v_scale))]
        if spec.rotate:
            decoded = [hadamard_transform(x) for x in decoded]
        return Held(decoded[0] + mean, decoded[1], out)

    def bytes_per_token(p: Problem) -> float:
        _, block_size, num_kv_heads, head_dim = p.k.shape
        mean = 0.0
        if spec.subtract_k_mean:
            sequences = _sequences(p)
            mean = 4 * head_dim * len(sequences) / sum(int(p.seq_lens[seqs].max()) for seqs in sequences)
        return spec.bytes_per_token(block_size, num_kv_heads, head_dim) / num_kv_heads + mean

    return Scheme(hold, bytes_per_token)


def prompt_means(p: Problem) -> Tensor:
    """For each token of the pool, the mean K of its sequence's prompt: what the sequence's first query sees. Like `p.k`."""
    means = torch.zeros_like(p.k)
    for seqs in _sequences(p):
        length = int(p.seq_lens[seqs].min())
        blocks = p.block_tables[seqs[0]].long()
        blocks = blocks[blocks >= 0]
        means[blocks] = p.k[blocks].flatten(0, 1)[:length].mean(0)
    return means


def _sequences(p: Problem) -> list[list[int]]:
    """Rows that share a block table are decode steps of one sequence."""
    sequences: dict[tuple, list[int]] = {}
    for s, row in enumerate(p.block_tables.tolist()):
        sequences.setdefault(tuple(row), []).append(s)
    return list(sequences.values())


# ------------------------------------------------------------------------------------------------------------ of others


def rounded(k: Callable[[Tensor], Tensor], v: Callable[[Tensor], Tensor], bytes_per_token: Callable[[int, int], float]) -> Scheme:
    """K and V through functions that encode and decode; `bytes_per_token(block_size, head_dim)`."""

    def hold(p: Problem) -> Held:
        decoded = k(p.k), v(p.v)
        # float32, so that attention itself adds no rounding to speak of
        return Held(*decoded, pagedkv.paged_attention(p.q, *decoded, p.block_tables, p.seq_lens, p.sm_scale))

    return Scheme(hold, lambda p: bytes_per_token(p.k.shape[1], p.k.shape[3]))


def round_to_fp8(kv: Tensor) -> Tensor:
    """The values that FP8 E4M3 with a float32 scale for each token and head holds, in the dtype of `kv` `[..., head_dim]`."""
    largest = kv.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    return (kv / scale).to(torch.float8_e4m3fn).to(kv.dtype) * scale


def asymmetric(kv: Tensor, dim: int) -> Tensor:
    """256 levels from the least to the largest value along `dim`, with scale and offset in float16."""
    low, high = kv.amin(dim, keepdim=True), kv.amax(dim, keepdim=True)
    scale, offset = ((high - low) / 255).half().float(), low.half().float()
    scale = torch.where(scale > 0, scale, 1.0)
    return ((kv - offset) / scale).round().clamp(0, 255) * scale + offset


def float16(kv: Tensor) -> Tensor:
    return kv.half().float()


# To add a scheme, add a line: notebooks, figures and tests go over this table.
SCHEMES: dict[str, Scheme] = {
    **{f"int8_{name}": int8(spec) for name, spec in KV_SPECS.items() if spec.quantised},
    "fp8_e4m3_token_head": rounded(round_to_fp8, round_to_fp8, lambda _, head_dim: 2 * (head_dim + 4)),
    # LMDeploy's format: asymmetric, each token and head.
    "asymmetric_token_head": rounded(lambda k: asymmetric(k, 3), lambda v: asymmetric(v, 3), lambda _, head_dim: 2 * (head_dim + 4)),
    # KIVI (Liu et al., 2024) at 8 bits and with a block as its group: K by channel, V by token.
    "k_per_channel": rounded(
        lambda k: asymmetric(k, 1), lambda v: asymmetric(v, 3), lambda block_size, head_dim: 2 * head_dim + 4 * head_dim / block_size + 4
    ),
    "float16": rounded(float16, float16, lambda _, head_dim: 4 * head_dim),
}
