"""Decode attention in PyTorch float64, for cases that are too large for the plain loops of `pagedkv.reference`.

The sweep checks the one against the other on every small case.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

import pagedkv
from pagedkv import reference
from pagedkv.ops.rotation import hadamard_transform


@dataclass
class Problem:
    """Arguments of one attention call; scales are None for an unquantised cache."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    sm_scale: float
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    options: dict = field(default_factory=dict)  # sliding_window, logits_soft_cap, sinks, rotated

    @property
    def op(self) -> str:
        return "paged_attention" if self.k_scale is None else "quant_paged_attention"

    def _arguments(self) -> tuple:
        cache = (self.k_cache, self.v_cache) if self.k_scale is None else (self.k_cache, self.k_scale, self.v_cache, self.v_scale)
        return (self.q, *cache, self.block_tables, self.seq_lens, self.sm_scale)

    def yardstick(self):
        """`(out, lse, block_mass)` by PyTorch in `q`'s dtype, what the tolerance is made of."""
        cache = (self.k_cache, self.k_scale, self.v_cache, self.v_scale)
        with _one_thread():
            return reference.attention_like_pytorch(self.q, *cache, self.block_tables, self.seq_lens, self.sm_scale, **self.options)

    def run(self, **flags):
        """The op under test."""
        return getattr(pagedkv, self.op)(*self._arguments(), **self.options, **flags)

    def reference(self):
        """`(out, lse, block_mass)` of the NumPy reference."""
        return getattr(reference, self.op)(*self._arguments(), **self.options, return_lse=True, return_block_mass=True)


@contextlib.contextmanager
def _one_thread():
    """Products this small only make threads wait for each other, for long where other programs hold the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def attention(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """`(out, lse, block_mass)` in float64, sequence by sequence, every hostile case included."""
    num_seqs, num_heads, head_dim = p.q.shape
    num_blocks, block_size, num_kv_heads, _ = p.k_cache.shape
    max_blocks = p.block_tables.shape[1]
    options = {"dtype": torch.float64, "device": p.q.device}
    out = torch.zeros(num_seqs, num_heads, head_dim, **options)
    lse = torch.full((num_seqs, num_heads), -math.inf, **options)
    mass = torch.zeros(num_seqs, max_blocks, **options)
    window, cap, sinks = (p.options.get(name) for name in ("sliding_window", "logits_soft_cap", "sinks"))
    query = p.q.double()
    if p.options.get("rotated"):
        query = hadamard_transform(query)
    for s, length in enumerate(p.seq_lens.tolist()):
        if length == 0:
            continue
        first = max(0, length - window) if window else 0
        begin, end = first // block_size, -(-length // block_size)
        blocks = p.block_tables[s, begin : min(end, max_blocks)].long()
        if not 0 <= length <= max_blocks * block_size or bool(((blocks < 0) | (blocks >= num_blocks)).any()):
            out[s], lse[s], mass[s] = math.nan, math.nan, math.nan
            continue
        tokens = slice(first - begin * block_size, length - begin * block_size)
        k, v = (_decode(cache, scale, blocks)[tokens].transpose(0, 1)
                for cache, scale in ((p.k_cache, p.k_scale), (p.v_cache, p.v_scale)))  # fmt: skip
        q = query[s].reshape(num_kv_heads, -1, head_dim)
        logits = (torch.matmul(q, k.transpose(1, 2)) * p.sm_scale).flatten(0, 1)
        if cap:
            logits = cap * torch.tanh(logits / cap)
        joined = logits if sinks is None else torch.cat([logits, sinks.double()[:, None]], 1)
        lse[s] = joined.logsumexp(1)
        weights = joined.softmax(1)[:, : logits.shape[1]]
        out[s] = torch.matmul(weights.view(num_kv_heads, -1, logits.shape[1]), v).flatten(0, 1)
        seen = logits.softmax(1).mean(0)
        padded = torch.zeros((end - begin) * block_size, **options)
        padded[tokens] = seen
        mass[s, begin:end] = padded.view(-1, block_size).sum(1)
    return hadamard_transform(out) if p.options.get("rotated") else out, lse, mass


def _decode(cache: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
    """The tokens of `blocks` as `[tokens, num_kv_heads, head_dim]`."""
    values = cache[blocks].double()
    if scale is not None:
        scale = scale[blocks].double()
        values = values * (scale[:, None, :, None] if scale.dim() == 2 else scale[..., None])
    return values.flatten(0, 1)
