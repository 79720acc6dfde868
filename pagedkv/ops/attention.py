"""Decode attention over a paged KV cache, and the algebra that joins its partial results. For inference: no op has a gradient, and a
backward pass through one raises `NotImplementedError`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.ops import checks, eager, registry


def quant_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    k_scale: Tensor,
    v_cache: Tensor,
    v_scale: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    *,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_block_mass: bool = False,
    rotated: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of one query token per sequence over an INT8 paged KV cache.

    For sequence `s`, query head `h` and KV head `g = h // (num_heads / num_kv_heads)`, over token positions
    `t = 0 .. seq_lens[s]-1`, which lie in block `block_tables[s, t // block_size]` at offset `t % block_size`:

        logit[t] = sm_scale * sum_d q[s, h, d] * k_cache[..., g, d] * k_scale
        out[s, h] = sum_t softmax(logit)[t] * v_cache[..., g, :] * v_scale

    Args:
        q: float16, bfloat16 or float32 `[num_seqs, num_heads, head_dim]`.
        k_cache, v_cache: int8 `[num_blocks, block_size, num_kv_heads, head_dim]`; `block_size` 1 to 256, `head_dim` a
            multiple of 8 up to 256, `num_heads` a multiple of `num_kv_heads`.
        k_scale, v_scale: float32, both `[num_blocks, num_kv_heads]` (block-head) or both
            `[num_blocks, block_size, num_kv_heads]` (token-head). See `quantize_kv`.
        block_tables: int32 `[num_seqs, max_blocks]`. Entries past the last block of a sequence are not read.
        seq_lens: int32 `[num_seqs]`, tokens in the cache. Of a block's slots past that, nothing matters, NaN included.
        sm_scale: the factor of the logits, usually `head_dim ** -0.5`; finite.
        sliding_window: attend to the last so many tokens only. Blocks wholly before them are not read.
        logits_soft_cap: replace each logit by `cap * tanh(logit / cap)` (Gemma 2).
        sinks: float32 `[num_heads]`, a logit per head that joins the softmax denominator and has no value (GPT-OSS);
            neither scaled nor capped. inf takes all the weight: the output is 0, `lse` inf. One beyond 2.3e38 may count as infinite.
        return_lse: also return `lse`, the natural log of the softmax denominator, sink included.
        return_block_mass: also return `block_mass`, the softmax mass of each logical block over the tokens attended to
            (sinks left out), averaged over query heads.
        rotated: K and V are stored multiplied over head_dim by the block-diagonal orthonormal Hadamard matrix (as `quantize_kv` and
            `reshape_and_cache` do when told the same). q is multiplied by it and the output by its inverse, both in float32; so
            the result is that over K and V themselves.

    All tensors live on one device; any strides with a contiguous last dimension.

    Returns:
        `out`, like `q` and contiguous; with `return_lse` and `return_block_mass` a tuple of `out` and, in this order,
        `lse` float32 `[num_seqs, num_heads]` and `block_mass` float32 `[num_seqs, max_blocks]`, whose rows sum to 1.
        A sequence of length 0 gives zeros, `lse` -inf and mass 0. A sequence with an attended block outside the pool,
        or with a length that is negative or past its table, gives NaN in all three and disturbs no other.

    Raises:
        TypeError: an argument of another type or dtype.
        ValueError: another shape, device or stride; a number out of its range; with `PAGEDKV_CHECK=1` in the
            environment also a bad block id or length (this copies the tables to the host).
    """
    checks.tensors(q=q, k_cache=k_cache, k_scale=k_scale, v_cache=v_cache, v_scale=v_scale, block_tables=block_tables, seq_lens=seq_lens)
    checks.booleans(return_lse=return_lse, return_block_mass=return_block_mass, rotated=rotated)
    if sinks is not None:
        checks.tensors(sinks=sinks)
    sm_scale, sliding_window, logits_soft_cap = _numbers(sm_scale, sliding_window, logits_soft_cap)
    results = torch.ops.pagedkv.quant_paged_attention(
        q,
        k_cache,
        k_scale,
        v_cache,
        v_scale,
        block_tables,
        seq_lens,
        sm_scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_lse=return_lse,
        return_block_mass=return_block_mass,
        rotated=rotated,
    )
    return _asked_for(*results, return_lse, return_block_mass)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    *,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_block_mass: bool = False,
    rotated: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`quant_paged_attention` over an unquantised cache.

    Args:
        k_cache, v_cache: float16, bfloat16 or float32 `[num_blocks, block_size, num_kv_heads, head_dim]`, both of one
            dtype, which need not be that of `q`.

    Other arguments, returns and errors as there.
    """
    checks.tensors(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, seq_lens=seq_lens)
    checks.booleans(return_lse=return_lse, return_block_mass=return_block_mass, rotated=rotated)
    if sinks is not None:
        checks.tensors(sinks=sinks)
    sm_scale, sliding_window, logits_soft_cap = _numbers(sm_scale, sliding_window, logits_soft_cap)
    results = torch.ops.pagedkv.paged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        sm_scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_lse=return_lse,
        return_block_mass=return_block_mass,
        rotated=rotated,
    )
    return _asked_for(*results, return_lse, return_block_mass)


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of tokens into attention over their union.

    `lse = log(exp(lse_a) + exp(lse_b))` and `out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b`, in float32. States
    form a commutative monoid (up to rounding); the empty one has `lse` -inf, and its `out` is ignored. Two empty states
    give zeros and -inf. An `lse` of inf (a sink of inf) outweighs every finite one, and two of them weigh the same. (Ye et al.,
    "FlashInfer", 2025, section 3.)

    Args:
        out_a, out_b: float16, bfloat16 or float32 `[num_seqs, num_heads, head_dim]`, of one dtype.
        lse_a, lse_b: float32 `[num_seqs, num_heads]`, natural log. A sink may be in one of them, not in both.

    Returns:
        `(out, lse)`, like `out_a` and `lse_a`, contiguous.

    Raises:
        TypeError, ValueError: a type, dtype, shape, device or stride other than the above.
    """
    checks.tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    return torch.ops.pagedkv.merge_attention_states(out_a, lse_a, out_b, lse_b)


def _numbers(sm_scale: float, sliding_window: int | None, logits_soft_cap: float | None) -> tuple[float, int | None, float | None]:
    window = None if sliding_window is None else checks.integer("sliding_window", sliding_window)
    cap = None if logits_soft_cap is None else checks.number("logits_soft_cap", logits_soft_cap)
    return checks.number("sm_scale", sm_scale), window, cap


def _asked_for(out: Tensor, lse: Tensor, block_mass: Tensor, return_lse: bool, return_block_mass: bool) -> Tensor | tuple[Tensor, ...]:
    """The raw op always returns three tensors, empty where not asked for."""
    if return_lse:
        return (out, lse, block_mass) if return_block_mass else (out, lse)
    return (out, block_mass) if return_block_mass else out


def _fake_attention(q: Tensor, block_tables: Tensor, return_lse: bool, return_block_mass: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32),
        q.new_empty(block_tables.shape if return_block_mass else (0,), dtype=torch.float32),
    )


_OPTIONS = (
    "Tensor block_tables, Tensor seq_lens, float sm_scale, *, SymInt? sliding_window=None, float? logits_soft_cap=None,"
    " Tensor? sinks=None, bool return_lse=False, bool return_block_mass=False, bool rotated=False) -> (Tensor, Tensor, Tensor)"
)
registry.define(
    f"quant_paged_attention(Tensor q, Tensor k_cache, Tensor k_scale, Tensor v_cache, Tensor v_scale, {_OPTIONS}",
    check=checks.quant_paged_attention,
    check_values=checks.quant_paged_attention_values,
    fake=lambda q, kc, ks, vc, vs, block_tables, seq_lens, sm_scale, w, c, s, lse, mass, _: _fake_attention(q, block_tables, lse, mass),
    eager=eager.quant_paged_attention,
)
registry.define(
    f"paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, {_OPTIONS}",
    check=checks.paged_attention,
    check_values=checks.paged_attention_values,
    fake=lambda q, kc, vc, block_tables, seq_lens, sm_scale, w, c, s, lse, mass, _: _fake_attention(q, block_tables, lse, mass),
    eager=eager.paged_attention,
)
registry.define(
    "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    check=checks.merge_attention_states,
    fake=lambda out_a, lse_a, out_b, lse_b: (out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)),
    eager=eager.merge_attention_states,
)
