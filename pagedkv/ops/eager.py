"""The ops in plain PyTorch, on any device: what runs where no compiler is found.

Vectorised, in float32, and without reading a tensor on the host, so they too can be captured in a CUDA graph.
Arguments arrive validated, in the order of each op's schema.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FLOAT32_MIN_NORMAL = torch.finfo(torch.float32).tiny
_LARGEST_SCALE = float.fromhex("0x1.020406p121")  # times 127 it is still finite in float32; the next float is not
_GATHERED_ELEMENTS = 1 << 25  # attention gathers K and V of so many sequences at once that they fit this (128 MiB as float32)

# ------------------------------------------------------------------------------------------------------------------ attention


def quant_paged_attention(
    q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale,
    sliding_window, logits_soft_cap, sinks, return_lse, return_block_mass,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _attention(
        q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale,
        sliding_window, logits_soft_cap, sinks, return_lse, return_block_mass,
    )  # fmt: skip


def paged_attention(
    q, k_cache, v_cache, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap, sinks, return_lse, return_block_mass
) -> tuple[Tensor, Tensor, Tensor]:
    return _attention(
        q, k_cache, None, v_cache, None, block_tables, seq_lens, sm_scale,
        sliding_window, logits_soft_cap, sinks, return_lse, return_block_mass,
    )  # fmt: skip


def _attention(q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale, window, cap, sinks, return_lse, return_block_mass):
    num_seqs, num_heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((num_seqs, num_heads), dtype=torch.float32)
    mass = q.new_empty(block_tables.shape, dtype=torch.float32)
    per_sequence = max(1, block_tables.shape[1] * k_cache[0:1].numel())
    chunk = max(1, _GATHERED_ELEMENTS // per_sequence)
    for s in range(0, num_seqs, chunk):
        part = slice(s, s + chunk)
        out[part], lse[part], mass[part] = _attend(
            q[part], k_cache, k_scale, v_cache, v_scale, block_tables[part], seq_lens[part], sm_scale, window, cap, sinks
        )
    nothing = q.new_empty((0,), dtype=torch.float32)
    return out, lse if return_lse else nothing, mass if return_block_mass else nothing.clone()


def _attend(q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale, window, cap, sinks):
    num_seqs, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    max_blocks = block_tables.shape[1]

    # Which tokens count, and which sequences are bad.
    position = torch.arange(max_blocks * block_size, device=q.device)
    length = seq_lens.long()[:, None]
    attended = position < length
    if window is not None:
        attended &= position >= length - window
    in_pool = (block_tables >= 0) & (block_tables < num_blocks)
    bad = (length < 0) | (length > max_blocks * block_size)
    bad |= (attended.view(num_seqs, max_blocks, block_size).any(-1) & ~in_pool).any(-1, keepdim=True)

    block_ids = torch.where(in_pool, block_tables, 0).long()
    k = _gather(k_cache, k_scale, block_ids)
    # A masked value must be a zero: its weight is 0, and 0 * NaN is NaN.
    v = torch.where(attended[:, :, None, None], _gather(v_cache, v_scale, block_ids), 0.0)

    grouped = q.float().view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    logits = torch.einsum("sgrd,stgd->sgrt", grouped, k).reshape(num_seqs, num_heads, len(position)) * sm_scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = torch.where(attended[:, None, :], logits, -math.inf)

    # Not exp(logit - lse): the rounding of a large lse would scale all weights.
    largest = logits.amax(-1, keepdim=True) if max_blocks > 0 else logits.new_full((num_seqs, num_heads, 1), -math.inf)
    weights = torch.exp(logits - torch.where(largest == -math.inf, 0.0, largest))
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total == 0, 0.0, weights / total)
    lse = (largest + torch.log(total)).squeeze(-1)
    mass = weights.view(num_seqs, num_heads, max_blocks, block_size).sum(-1).mean(1)
    out = torch.einsum("sgrt,stgd->sgrd", weights.view(*grouped.shape[:3], len(position)), v).reshape(q.shape)
    if sinks is not None:  # the tokens' share of the denominator is sigmoid(lse - sink)
        out = out * torch.where(length == 0, 0.0, torch.sigmoid(lse - sinks))[:, :, None]
        lse = torch.where(length == 0, -math.inf, torch.logaddexp(lse, sinks))
    return (
        torch.where(bad[:, :, None], math.nan, out).to(q.dtype),
        torch.where(bad, math.nan, lse),
        torch.where(bad, math.nan, mass),
    )


def _gather(cache: Tensor, scale: Tensor | None, block_ids: Tensor) -> Tensor:
    """The blocks of each sequence one after the other, decoded: float32 `[num_seqs, tokens, num_kv_heads, head_dim]`."""
    if cache.shape[0] == 0:  # no block to read; whoever asks for one is a bad sequence
        return cache.new_zeros((*block_ids.shape, *cache.shape[1:]), dtype=torch.float32).flatten(1, 2)
    values = cache[block_ids].float()
    if scale is not None:
        values = values * _per_token(scale)[block_ids][..., None]
    return values.flatten(1, 2)


def merge_attention_states(out_a, lse_a, out_b, lse_b) -> tuple[Tensor, Tensor]:
    largest = torch.maximum(lse_a, lse_b)
    shift = torch.where(largest == -math.inf, 0.0, largest)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    parts = (
        torch.where(lse == -math.inf, 0.0, weight / total)[..., None] * torch.where((lse == -math.inf)[..., None], 0.0, out.float())
        for lse, weight, out in ((lse_a, weight_a, out_a), (lse_b, weight_b, out_b))
    )
    return sum(parts).to(out_a.dtype).contiguous(), (largest + torch.log(total)).contiguous()


# --------------------------------------------------------------------------------------------------------------- quantisation


def quantize_kv(kv, granularity) -> tuple[Tensor, Tensor]:
    x = kv.float()
    scale = _scale_of(_max_abs(x, (3,) if granularity == "token_head" else (1, 3)))
    scale = torch.where(scale == 0, 1.0, scale)
    return _encode(x, _per_token(scale)[..., None]).contiguous(), scale


def dequantize_kv(q, scale) -> Tensor:
    return (q.float() * _per_token(scale)[..., None]).contiguous()


def _per_token(scale: Tensor) -> Tensor:
    """`[num_blocks, block_size or 1, num_kv_heads]`."""
    return scale if scale.dim() == 3 else scale[:, None, :]


def _max_abs(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest magnitude; inf where a value is not finite, since not every reduction carries NaN."""
    return torch.nan_to_num(x.abs(), nan=math.inf, posinf=math.inf).amax(dims)


def _scale_of(max_abs: Tensor) -> Tensor:
    """`max_abs / 127`, NaN for inf. Rounded up where it is subnormal: there rounding down could lose most of a step."""
    scale = (max_abs / 127).clamp(max=_LARGEST_SCALE)
    too_small = (scale < _FLOAT32_MIN_NORMAL) & (scale.double() * 127 < max_abs.double())
    scale = torch.where(too_small, torch.nextafter(scale, max_abs), scale)
    return torch.where(max_abs == math.inf, math.nan, scale)


def _encode(x: Tensor, scale: Tensor) -> Tensor:
    # A true division: the reciprocal of a subnormal scale overflows. round() is half to even.
    return torch.nan_to_num(torch.round(x / scale), nan=0.0).clamp(-127, 127).to(torch.int8)


# ---------------------------------------------------------------------------------------------------------------- cache write


def reshape_and_cache(key, value, k_cache, k_scale, v_cache, v_scale, slot_mapping) -> None:
    num_tokens, num_blocks, block_size = key.shape[0], k_cache.shape[0], k_cache.shape[1]
    num_slots = num_blocks * block_size
    if num_tokens == 0 or num_slots == 0:
        return
    written = (slot_mapping >= 0) & (slot_mapping < num_slots)
    # A skipped token is sent to slot 0, where it writes what that slot holds anyway (below): nothing here depends on a value.
    slot = torch.where(written, slot_mapping, 0)
    token = torch.where(written, torch.arange(num_tokens, device=key.device), -1)
    last = torch.full((num_slots,), -1, device=key.device).scatter_reduce(0, slot, token, "amax")[slot]
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        block, offset = slot // block_size, slot % block_size
        x = x.float()
        if scale.dim() == 3:
            token_scale = _scale_of(_max_abs(x, (2,)))[last.clamp(min=0)]
            at_slot = torch.where((last >= 0)[:, None], torch.where(token_scale == 0, 1.0, token_scale), scale[block, offset])
            scale[block, offset] = at_slot
        else:
            at_slot = _grow_blocks(x, cache, scale, block, offset, written)
        encoded = _encode(x[last.clamp(min=0)], at_slot[:, :, None])
        cache[block, offset] = torch.where((last >= 0)[:, None, None], encoded, cache[block, offset])


def _grow_blocks(x, cache, scale, block, offset, written) -> Tensor:
    """Give each written block the scale that it needs now, re-quantise what it holds, and return the scale per token.

    All work is per token: tokens of one block compute, and write, the same values.
    """
    num_blocks, num_kv_heads = scale.shape
    max_abs = torch.where(written[:, None], _max_abs(x, (2,)), 0.0)
    block_max = scale.new_zeros((num_blocks, num_kv_heads)).scatter_reduce(0, block[:, None].expand_as(max_abs), max_abs, "amax")
    touched = _any_token(written, block, num_blocks)[block][:, None]
    fresh = _any_token(written & (offset == 0), block, num_blocks)[block][:, None]

    old = scale[block]
    holds = torch.zeros_like(old, dtype=torch.bool)
    for o in range(cache.shape[1]):
        holds |= (cache[block, o] != 0).any(-1)
    held = torch.where(fresh | ((old == 1) & ~holds) | (old <= 0), 0.0, torch.where(old == math.inf, math.nan, old))
    needed = torch.maximum(held, _scale_of(block_max[block]))  # NaN wins
    new = torch.where(touched, torch.where(needed == 0, 1.0, needed), old)
    for o in range(cache.shape[1]):
        row = cache[block, o]
        cache[block, o] = torch.where(((new == held) | ~touched)[:, :, None], row, _encode(row * held[:, :, None], new[:, :, None]))
    scale[block] = new
    return new


def _any_token(flag: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    return torch.zeros(num_blocks, dtype=torch.int32, device=flag.device).scatter_reduce(0, block, flag.int(), "amax") > 0


# ------------------------------------------------------------------------------------------------------------------- eviction


def eviction_scores(recency, frequency, attention_mass, valid_mask, w_recency, w_frequency, w_attention) -> Tensor:
    total = torch.where(valid_mask, attention_mass, 0.0).sum(dim=1)
    mean = total / valid_mask.sum(dim=1).clamp(min=1)
    return w_recency * recency + w_frequency * frequency + w_attention * mean


def select_eviction_candidates(scores, k) -> Tensor:
    # A stable ascending sort puts NaN last and ties at the lower id; + 0.0 turns -0.0 into 0.0.
    return torch.sort(scores + 0.0, stable=True).indices[:k].clone()


def evict_blocks(recency, frequency, attention_mass, valid_mask, k, w_recency, w_frequency, w_attention) -> tuple[Tensor, Tensor]:
    scores = eviction_scores(recency, frequency, attention_mass, valid_mask, w_recency, w_frequency, w_attention)
    return select_eviction_candidates(scores, k), scores
