"""What a compressed cache costs in accuracy: each scheme against float64 attention on the original K and V."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pagedkv.bench.distributions import Problem, causal
from pagedkv.bench.schemes import SCHEMES
from pagedkv.kv_dump import Dump

PLAIN = ("int8_block_head", "int8_token_head", "fp8_e4m3_token_head", "float16")  # schemes that change nothing in K, V and q
COMPARED = (*PLAIN, "int8_rotated_block_head", "int8_k_mean_rotated_block_head")  # and those that do, at block-head's bytes


def exact_attention(problem: Problem) -> Tensor:
    """Softmax attention in float64 over the unquantised cache, on the CPU: `[num_seqs, num_heads, head_dim]`."""
    return Truth(problem).out


class Truth:
    """Softmax attention in float64 over the unquantised cache, on the CPU: `out` `[num_seqs, num_heads, head_dim]`, and its weights.

    Dense matrix products rather than the loops of `pagedkv.reference`, which a test checks it against: the
    reference takes a minute for one layer of a real dump.
    """

    def __init__(self, problem: Problem):
        self.problem = p = problem.to("cpu")
        self.out = torch.empty(p.q.shape, dtype=torch.float64)
        sharing: dict[tuple, list[int]] = {}  # the decode steps of one dump share a block table
        for s, row in enumerate(p.block_tables.tolist()):
            sharing.setdefault(tuple(row), []).append(s)
        self._groups = [(seqs, self._log_weights(seqs, p.k)) for seqs in sharing.values()]
        for seqs, log_weights in self._groups:
            lengths = p.seq_lens[seqs]
            weights = torch.where(lengths[:, None, None] == 0, 0.0, log_weights.exp())  # a softmax over nothing is NaN; its output is 0
            self.out[seqs] = torch.einsum("shl,hld->shd", weights, self._dense(seqs, p.v))

    def weight_errors(self, k: Tensor) -> dict[str, float]:
        """How attention's weights change where K is `k` (a pool like the problem's), over all sequences and heads.

        `weight_kl`: mean Kullback-Leibler divergence from the true weights, in nats; `top1_agreement`: how often the token with
        the largest weight stays the same.
        """
        divergences, agreements = [], []
        for seqs, truth in self._groups:
            log_weights = self._log_weights(seqs, k.cpu())
            attended = truth > -torch.inf
            difference = torch.where(attended, truth - log_weights, 0.0)
            divergences.append((truth.exp() * difference).sum(2).flatten())
            agreements.append((truth.argmax(2) == log_weights.argmax(2)).double().flatten())
        return {"weight_kl": torch.cat(divergences).mean().item(), "top1_agreement": torch.cat(agreements).mean().item()}

    def _log_weights(self, seqs: list[int], k: Tensor) -> Tensor:
        """`[seqs, num_heads, tokens]`, -inf for tokens past a sequence's end."""
        p = self.problem
        keys = self._dense(seqs, k)
        logits = torch.einsum("shd,hld->shl", p.q[seqs].double(), keys) * p.sm_scale
        beyond = torch.arange(keys.shape[1]) >= p.seq_lens[seqs][:, None, None]
        return logits.masked_fill(beyond, -torch.inf).log_softmax(2)

    def _dense(self, seqs: list[int], pool: Tensor) -> Tensor:
        """`[num_heads, tokens, head_dim]` in float64, as far as the longest sequence goes, KV heads repeated to query heads."""
        p = self.problem
        longest = int(p.seq_lens[seqs].max())
        blocks = p.block_tables[seqs[0], : -(-longest // p.k.shape[1])].long()
        group = p.q.shape[1] // p.k.shape[2]
        return pool[blocks].flatten(0, 1)[:longest].transpose(0, 1).double().repeat_interleave(group, dim=0)


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


def measure(problem: Problem, device: torch.device | str = "cpu", schemes: Iterable[str] = COMPARED) -> Iterator[dict]:
    """One row a scheme, computed on `device`: `scheme`, `percent_of_fp16`, and what `errors` and `Truth.weight_errors` return."""
    truth = Truth(problem)
    there = problem.to(device)
    for name in schemes:
        held = SCHEMES[name].hold(there)
        percent = SCHEMES[name].percent_of_fp16(problem)
        yield {"scheme": name, "percent_of_fp16": percent, **errors(held.out, truth.out), **truth.weight_errors(held.k)}


def layers(dump: Dump, device: torch.device | str = "cpu", schemes: Iterable[str] = COMPARED) -> Iterator[dict]:
    """`measure` on each layer of a dump, with the model's own queries; rows carry `layer` and the largest |K| and |V|."""
    for layer in range(dump.num_layers):
        k, v = dump.k[layer], dump.v[layer]
        sizes = {"k_abs_max": k.abs().max().item(), "k_rms": k.square().mean().sqrt().item(), "v_abs_max": v.abs().max().item()}
        for row in measure(causal(dump.q[layer], k, v, dump.sm_scale), device, schemes):
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
