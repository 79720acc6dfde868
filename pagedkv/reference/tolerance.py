"""How exact attention has to be, as one rule.

Against the float64 reference on the same cache, an output's error is at most twice that of the same computation done by
PyTorch in q's dtype, plus 1e-6 (float32) or 1e-3 (half). A row that is NaN where the reference is finite always fails.
PyTorch's error counts as at least the rounding of the exact result: over one token it is zero by luck, not by skill.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pagedkv.ops.rotation import hadamard_transform
from pagedkv.reference.arrays import exact

ABSOLUTE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-3}


def attention_like_pytorch(
    q: Tensor,
    k_cache: Tensor,
    k_scale: Tensor | None,
    v_cache: Tensor,
    v_scale: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    *,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    rotated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one would write in PyTorch, sequence by sequence, everything in q's dtype: `(out, lse, block_mass)`.

    Gathers and decodes K and V, then softmax(q K') V. It is the yardstick of the tolerance and knows no hostile case:
    sequences that are empty or bad (see `pagedkv.quant_paged_attention`) give NaN.
    """
    if rotated:
        q = hadamard_transform(q).to(q.dtype)
    num_seqs, num_heads, _ = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    max_blocks = block_tables.shape[1]
    out = torch.full_like(q, math.nan)
    lse = q.new_full((num_seqs, num_heads), math.nan)
    mass = q.new_full((num_seqs, max_blocks), math.nan)

    def tokens(cache, scale, ids, first, length):
        x = cache[ids]
        if scale is not None:
            x = x.to(torch.promote_types(q.dtype, torch.float32)) * (scale[ids] if scale.dim() == 3 else scale[ids][:, None])[..., None]
        x = x.flatten(0, 1)[first:length].to(q.dtype)
        return x.repeat_interleave(num_heads // num_kv_heads, dim=1).transpose(0, 1)  # [num_heads, tokens, head_dim]

    for s, length in enumerate(seq_lens.tolist()):
        first = 0 if sliding_window is None else max(0, length - sliding_window)
        blocks = slice(first // block_size, -(-length // block_size))
        ids = block_tables[s, blocks].long()
        if not 0 < length <= max_blocks * block_size or bool(((ids < 0) | (ids >= num_blocks)).any()):
            continue
        within = first - blocks.start * block_size, length - blocks.start * block_size
        k, v = tokens(k_cache, k_scale, ids, *within), tokens(v_cache, v_scale, ids, *within)
        logits = (k @ q[s, :, :, None]).squeeze(-1) * sm_scale
        if logits_soft_cap is not None:
            logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
        weights = torch.softmax(logits, dim=-1)
        lse[s] = torch.logsumexp(logits, dim=-1)
        mass[s] = 0
        owner = torch.arange(first, length, device=q.device) // block_size
        mass[s] = mass[s].index_add(0, owner, weights.mean(0))
        if sinks is not None:
            with_sink = torch.cat([logits, sinks[:, None].to(q.dtype)], dim=-1)
            weights = torch.softmax(with_sink, dim=-1)[:, :-1]
            lse[s] = torch.logsumexp(with_sink, dim=-1)
        out[s] = (weights[:, None, :] @ v).squeeze(1)
    return hadamard_transform(out).to(q.dtype) if rotated else out, lse, mass


def allowed_error(exact_result, yardstick, dtype: torch.dtype) -> float:
    """The largest absolute error that a result may have. Arguments as in `outside_tolerance`."""
    pairs = zip(exact(yardstick), exact(exact_result), strict=True)
    return 2 * max((_error(by_torch, want, dtype) for by_torch, want in pairs), default=0.0) + ABSOLUTE[dtype]


def outside_tolerance(result: Tensor, exact_result, yardstick: Tensor, dtype: torch.dtype) -> list[str]:
    """What breaks the rule, a line for each sequence; empty if nothing does.

    Args:
        result: what an op returned, first dimension the sequences.
        exact_result: the reference's, same shape.
        yardstick: the same from `attention_like_pytorch`. Its largest error counts, or the rounding of the largest exact
            value, also where PyTorch makes NaN of a sequence (it is empty, or q's dtype overflowed).
        dtype: q's.
    """
    result, exact_result, yardstick = exact(result), exact(exact_result), exact(yardstick)
    if result.shape != exact_result.shape:
        return [f"shape {result.shape}, expected {exact_result.shape}"]
    allowed = allowed_error(exact_result, yardstick, dtype)

    complaints = []
    for s, (got, want) in enumerate(zip(result, exact_result, strict=True)):
        regular = np.isfinite(want)
        if not np.array_equal(got[~regular], want[~regular], equal_nan=True):
            complaints.append(f"sequence {s}: {got[~regular][:4]} where {want[~regular][:4]} was expected")
        elif not np.all(np.isfinite(got[regular])):
            complaints.append(f"sequence {s}: not finite where the reference is")
        elif regular.any() and np.max(np.abs(got - want)[regular]) > allowed:
            error = np.max(np.abs(got - want)[regular])
            complaints.append(f"sequence {s}: error {error:.3g}, allowed {allowed:.3g}")
    return complaints


def _error(yardstick: np.ndarray, want: np.ndarray, dtype: torch.dtype) -> float:
    """PyTorch's error for one sequence, at least that of rounding the largest value to the nearest."""
    regular = np.isfinite(want)
    if not regular.any():
        return 0.0
    rounding = torch.finfo(dtype).eps / 2 * np.max(np.abs(want[regular]))
    error = np.max(np.abs(yardstick - want)[regular])
    return max(error, rounding) if np.isfinite(error) else rounding
