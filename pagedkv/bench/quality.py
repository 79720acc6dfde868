"""What a compressed cache costs in accuracy: each scheme's attention output against float64 attention on the original K and V."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

import pagedkv
from pagedkv.bench.distributions import Problem, causal
from pagedkv.kv_dump import Dump


def exact_attention(problem: Problem) -> Tensor:
    """Softmax attention in float64 over the unquantised cache, on the CPU: `[num_seqs, num_heads, head_dim]`.

    Dense matrix products rather than the loops of `pagedkv.reference`, which a test checks it against: the
    reference takes a minute for one layer of a real dump.
    """
    p = problem.to("cpu")
    group = p.q.shape[1] // p.k.shape[2]
    out = torch.empty(p.q.shape, dtype=torch.float64)
    sharing: dict[tuple, list[int]] = {}  # the decode steps of one dump share a block table
    for s, row in enumerate(p.block_tables.tolist()):
        sharing.setdefault(tuple(row), []).append(s)
    for seqs in sharing.values():
        lengths = p.seq_lens[seqs]
        longest = int(lengths.max())
        blocks = p.block_tables[seqs[0], : -(-longest // p.k.shape[1])]
        k, v = (_dense(pool, blocks, group)[:, :longest] for pool in (p.k, p.v))
        logits = torch.einsum("shd,hld->shl", p.q[seqs].double(), k) * p.sm_scale
        beyond = torch.arange(longest) >= lengths[:, None, None]
        weights = logits.masked_fill(beyond, -torch.inf).softmax(dim=2)
        weights = torch.where(lengths[:, None, None] == 0, 0.0, weights)  # a softmax over nothing is NaN; its output is 0
        out[seqs] = torch.einsum("shl,hld->shd", weights, v)
    return out


def _dense(pool: Tensor, blocks: Tensor, group: int) -> Tensor:
    """`[num_heads, tokens, head_dim]` in float64, KV heads repeated to query heads."""
    return pool[blocks.long()].flatten(0, 1).transpose(0, 1).double().repeat_interleave(group, dim=0)


# -------------------------------------------------------------------------------------------- schemes


def int8(granularity: str) -> Callable[[Problem], Tensor]:
    """`quantize_kv` at a granularity, then `quant_paged_attention`: the kernels that this project offers."""

    def attention(p: Problem) -> Tensor:
        k, k_scale = pagedkv.quantize_kv(p.k, granularity)
        v, v_scale = pagedkv.quantize_kv(p.v, granularity)
        return pagedkv.quant_paged_attention(p.q, k, k_scale, v, v_scale, p.block_tables, p.seq_lens, p.sm_scale)

    return attention


def fp8_e4m3(p: Problem) -> Tensor:
    """A peer's format: FP8 E4M3 with one float32 scale for each token and head, computed on in float32.

    Rounded by torch and decoded before attention, so that what is measured is the format and not a kernel.
    """
    return pagedkv.paged_attention(p.q, round_to_fp8(p.k), round_to_fp8(p.v), p.block_tables, p.seq_lens, p.sm_scale)


def round_to_fp8(kv: Tensor) -> Tensor:
    """The values that FP8 E4M3 with a scale for each token and head holds, in the dtype of `kv` `[..., head_dim]`."""
    largest = kv.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    return (kv / scale).to(torch.float8_e4m3fn).to(kv.dtype) * scale


def float16(p: Problem) -> Tensor:
    """What a cache that is not compressed holds: the yardstick for the rest."""
    return pagedkv.paged_attention(p.q, p.k.half(), p.v.half(), p.block_tables, p.seq_lens, p.sm_scale)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A way to hold the cache: how attention over it is computed, and what it takes."""

    attention: Callable[[Problem], Tensor]
    value_bytes: int
    granularity: str | None = None  # of float32 scales; None: it has none

    def percent_of_fp16(self, p: Problem) -> float:
        _, block_size, _, head_dim = p.k.shape
        group = {None: math.inf, "token_head": head_dim, "block_head": block_size * head_dim}[self.granularity]
        return 100 * (self.value_bytes + 4 / group) / 2


# To add a scheme, add a line: the notebook, its figure and the tests go over this table.
SCHEMES: dict[str, Scheme] = {
    "int8_block_head": Scheme(int8("block_head"), 1, "block_head"),
    "int8_token_head": Scheme(int8("token_head"), 1, "token_head"),
    "fp8_e4m3_token_head": Scheme(fp8_e4m3, 1, "token_head"),
    "float16": Scheme(float16, 2),
}


# --------------------------------------------------------------------------------------- measurements


def errors(output: Tensor, truth: Tensor) -> dict[str, float]:
    """`rmse` and `max_abs` of the difference, `out_std` of the truth, and `rel_error`: norm of the difference over norm of the truth."""
    output, truth = output.detach().cpu().double(), truth.double()
    difference = output - truth
    return {
        "rmse": difference.square().mean().sqrt().item(),
        "max_abs": difference.abs().max().item(),
        "out_std": truth.std(correction=0).item(),
        "rel_error": (difference.norm() / truth.norm()).item(),
    }


def measure(problem: Problem, device: torch.device | str = "cpu", schemes: Iterable[str] = tuple(SCHEMES)) -> Iterator[dict]:
    """One row a scheme: `{scheme, percent_of_fp16, rmse, max_abs, out_std, rel_error}`, the scheme computed on `device`."""
    truth = exact_attention(problem)
    there = problem.to(device)
    for name in schemes:
        scheme = SCHEMES[name]
        yield {"scheme": name, "percent_of_fp16": scheme.percent_of_fp16(there), **errors(scheme.attention(there), truth)}


def layers(dump: Dump, device: torch.device | str = "cpu") -> Iterator[dict]:
    """`measure` on each layer of a dump, with the model's own queries; rows carry `layer` and the largest |K| and |V|."""
    for layer in range(dump.num_layers):
        k, v = dump.k[layer], dump.v[layer]
        sizes = {"k_abs_max": k.abs().max().item(), "k_rms": k.square().mean().sqrt().item(), "v_abs_max": v.abs().max().item()}
        for row in measure(causal(dump.q[layer], k, v, dump.sm_scale), device):
            yield {"layer": layer, **row, **sizes}


def summarise(rows: Iterable[dict]) -> Iterator[dict]:
    """Over the rows of `layers`, one a scheme: mean and worst relative error, and in how many layers FP8 is better."""
    by_scheme: dict[str, dict[int, float]] = {}
    percent: dict[str, float] = {}
    for row in rows:
        by_scheme.setdefault(row["scheme"], {})[row["layer"]] = row["rel_error"]
        percent[row["scheme"]] = row["percent_of_fp16"]
    peer = by_scheme["fp8_e4m3_token_head"]
    for scheme, by_layer in by_scheme.items():
        worst = max(by_layer, key=by_layer.get)
        yield {
            "scheme": scheme,
            "percent_of_fp16": percent[scheme],
            "layers": len(by_layer),
            "rel_error": sum(by_layer.values()) / len(by_layer),
            "rel_error_worst": by_layer[worst],
            "worst_layer": worst,
            "layers_fp8_better": sum(peer[i] < error for i, error in by_layer.items()),
        }
