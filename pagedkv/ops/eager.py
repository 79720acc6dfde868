"""The ops in plain PyTorch, on any device: what runs where no compiler is found.

Vectorised, in float32, and without reading a tensor on the host, so they too can be captured in a CUDA graph.
Arguments arrive validated, in the order of each op's schema.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedkv.ops.rotation import hadamard_transform

_FLOAT32_MIN_NORMAL = torch.finfo(torch.float32).tiny
_MASS_ONE = 2.0**36  # kMassFractionBits of kernels/ops.h
_LARGEST_SCALE = float.fromhex("0x1.020406p121")  # times 127 it is still finite in float32; the next float is not
_GATHERED_ELEMENTS = 1 << 25  # attention gathers K and V of so many sequences at once that they fit this (256 MiB as float64)

# ------------------------------------------------------------------------------------------------------------------ attention


def quant_paged_attention(
    q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale,
    sliding_window, logits_soft_cap, sinks, return_lse, return_block_mass, rotated,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _attention(
        q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale,
        sliding_window, logits_soft_cap, sinks, return_lse, return_block_mass, rotated,
    )  # fmt: skip


def paged_attention(
    q, k_cache, v_cache, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap, sinks, return_lse, return_block_mass, rotated
) -> tuple[Tensor, Tensor, Tensor]:
    return _attention(
        q, k_cache, None, v_cache, None, block_tables, seq_lens, sm_scale,
        sliding_window, logits_soft_cap, sinks, return_lse, return_block_mass, rotated,
    )  # fmt: skip


def _attention(
    q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale, window, cap, sinks, return_lse, return_block_mass, rotated
):
    num_seqs, num_heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((num_seqs, num_heads), dtype=torch.float32)
    mass = q.new_empty(block_tables.shape, dtype=torch.float32)
    per_sequence = max(1, block_tables.shape[1] * k_cache[0:1].numel())
    chunk = max(1, _GATHERED_ELEMENTS // per_sequence)
    for s in range(0, num_seqs, chunk):
        part = slice(s, s + chunk)
        out[part], lse[part], mass[part] = _attend(
            q[part], k_cache, k_scale, v_cache, v_scale, block_tables[part], seq_lens[part], sm_scale, window, cap, sinks, rotated
        )
    nothing = q.new_empty((0,), dtype=torch.float32)
    return out, lse if return_lse else nothing, mass if return_block_mass else nothing.clone()


def _attend(q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale, window, cap, sinks, rotated):
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
    k = _gather(k_cache, k_scale, block_ids).double()
    # A masked value must be a zero: its weight is 0, and 0 * NaN is NaN.
    v = torch.where(attended[:, :, None, None], _gather(v_cache, v_scale, block_ids), 0.0).double()

    # In float64: the order in which a device's matmul adds up would show in float32's last digits.
    exact = (hadamard_transform(q) if rotated else q).double()
    grouped = exact.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
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
    if sinks is not None:
        share = total / (total + torch.exp(sinks[:, None] - largest))  # the tokens' of the denominator; again not by lse
        out = out * torch.where(length[:, :, None] == 0, 0.0, share)
        lse = torch.where(length == 0, -math.inf, torch.logaddexp(lse, sinks))
    if rotated:
        out = hadamard_transform(out)
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
    # No difference of two infinities; what weights two empty states get is left out below.
    weight_a, weight_b = (torch.where(lse == largest, 1.0, torch.exp(lse - largest)) for lse in (lse_a, lse_b))
    total = weight_a + weight_b
    parts = (
        torch.where(lse == -math.inf, 0.0, weight / total)[..., None] * torch.where((lse == -math.inf)[..., None], 0.0, out.float())
        for lse, weight, out in ((lse_a, weight_a, out_a), (lse_b, weight_b, out_b))
    )
    return sum(parts).to(out_a.dtype).contiguous(), (largest + torch.log(total)).contiguous()


# --------------------------------------------------------------------------------------------------------------- quantisation


def quantize_kv(kv, granularity, rotated) -> tuple[Tensor, Tensor]:
    x = hadamard_transform(kv) if rotated else kv.float()
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
    scale = (max_abs / torch.full_like(max_abs, 127)).clamp(max=_LARGEST_SCALE)  # by a number, CUDA multiplies by its inverse
    too_small = (scale < _FLOAT32_MIN_NORMAL) & (scale.double() * 127 < max_abs.double())
    scale = torch.where(too_small, torch.nextafter(scale, max_abs), scale)
    return torch.where(max_abs == math.inf, math.nan, scale)


def _encode(x: Tensor, scale: Tensor) -> Tensor:
    # In float64, where no quotient of float32s rounds to a half that is not one. round() is half to even.
    return torch.nan_to_num(torch.round(x.double() / scale), nan=0.0).clamp(-127, 127).to(torch.int8)


# ---------------------------------------------------------------------------------------------------------------- cache write


def reshape_and_cache(key, value, k_cache, k_scale, v_cache, v_scale, slot_mapping, rotated) -> None:
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
        x = hadamard_transform(x) if rotated else x.float()
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
        again = _encode(row.double() * held[:, :, None], new[:, :, None])
        cache[block, o] = torch.where(((new == held) | ~touched)[:, :, None], row, again)
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


# ------------------------------------------------------------------------------------------- eviction, sequence by sequence


def accumulate_block_mass(block_mass, block_tables, total, decay) -> None:
    if decay != 1:
        total.copy_((total.double() * decay).round())
    counts = (block_mass > 0) & (block_tables >= 0) & (block_tables < len(total))
    amount = torch.where(counts, (block_mass.clamp(max=1) * _MASS_ONE).round(), 0.0).long()
    if len(total) > 0:
        total.scatter_add_(0, torch.where(counts, block_tables, 0).flatten().long(), amount.flatten())


def select_per_sequence(
    scores, block_tables, seq_lens, budget, protect_first, protect_last, block_size, references, budgets
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    max_blocks = block_tables.shape[1]
    pool = scores if scores.dim() == 1 else references
    num_blocks = 2**31 - 1 if pool is None else len(pool)
    in_pool = (block_tables >= 0) & (block_tables < num_blocks)
    block = torch.where(in_pool, block_tables, 0).long()

    place = torch.arange(max_blocks, device=scores.device)
    good = ((seq_lens >= 0) & (seq_lens <= max_blocks * block_size))[:, None]
    blocks = torch.where(good, (seq_lens[:, None] + block_size - 1) // block_size, max_blocks)
    last = torch.maximum((seq_lens[:, None] % block_size != 0).int(), torch.full_like(blocks, min(protect_last, max_blocks)))
    candidate = good & (place >= protect_first) & (place < blocks - last)
    over = blocks - (min(budget, max_blocks) if budgets is None else budgets[:, None].clamp(min=0))
    drop = torch.minimum(over.clamp(min=0), candidate.sum(1, keepdim=True))

    if scores.dim() == 1:
        scores = torch.where(in_pool, scores[block], math.nan) if num_blocks > 0 else torch.full_like(block, math.nan, dtype=torch.float32)
    # A stable ascending sort puts NaN last and ties at the lower place; a second one puts the candidates first.
    order = torch.sort(scores + 0.0, dim=1, stable=True).indices
    order = order.gather(1, torch.sort((~candidate.gather(1, order)).int(), dim=1, stable=True).indices)
    rank = torch.empty_like(order).scatter_(1, order, place.expand_as(order))
    goes = candidate & (rank < drop)

    kept = torch.sort((goes | (place >= blocks)).int(), dim=1, stable=True).indices
    tables = torch.where(place < blocks - drop, block_tables.gather(1, kept), -1).to(torch.int32)
    lens = (seq_lens - drop[:, 0] * block_size).to(torch.int32)

    freed = (goes & in_pool).flatten()
    block = block.flatten()
    if references is not None and num_blocks > 0:
        references.scatter_add_(0, block, -freed.int())
        at = torch.arange(block.numel(), device=scores.device)
        first = at.new_full((num_blocks,), block.numel()).scatter_reduce(0, block, torch.where(freed, at, block.numel()), "amin")
        freed &= (references[block] == 0) & (first[block] == at)
    named = torch.sort((~freed).int(), stable=True).indices
    count = freed.sum(dtype=torch.int32).view(1)
    listed = torch.where(torch.arange(block.numel(), device=scores.device) < count, block[named], -1).to(torch.int32)
    return tables, lens, listed, count


# ----------------------------------------------------------------------------------------------------- statistics of K or V


def token_moments(cache, scale, block_tables, seq_lens, blocks_per_group, shift, gain) -> tuple[Tensor, Tensor]:
    sums = cache.new_empty((*block_tables.shape, *cache.shape[1:3]), dtype=torch.float32)
    squares = torch.empty_like(sums)
    for part in _sequences_at_once(cache, block_tables):
        x, used, lost = _tokens(cache, scale, block_tables[part], seq_lens[part])
        if shift is not None:
            offset, factor = (y[part].repeat_interleave(min(blocks_per_group, x.shape[1]), 1)[:, : x.shape[1], None] for y in (shift, gain))
            x = (x - offset) * factor
        for into, values in ((sums, x), (squares, x * x)):
            into[part] = torch.where(lost[..., None], math.nan, torch.where(used[..., None], values.sum(-1), 0.0))
    return sums, squares


def channel_statistics(cache, scale, block_tables, seq_lens, blocks_per_group) -> tuple[Tensor, Tensor, Tensor]:
    num_seqs, max_blocks = block_tables.shape
    num_groups = -(-max_blocks // blocks_per_group)
    results = [cache.new_empty((num_seqs, num_groups, *cache.shape[2:]), dtype=torch.float32) for _ in range(3)]
    if max_blocks == 0:
        return tuple(results)
    for part in _sequences_at_once(cache, block_tables):
        x, used, lost = (_by_group(y, num_groups, blocks_per_group) for y in _tokens(cache, scale, block_tables[part], seq_lens[part]))
        used, lost = used[..., None, None], lost.any(2)[..., None, None]
        norm = x.square().sum(-1, keepdim=True).sqrt()
        unit = x * torch.where(norm == 0, 0.0, 1 / norm)
        seen = used & ~x.isnan()
        for into, values in zip(
            results,
            (
                torch.where(seen, x, math.inf).amin(2),
                torch.where(seen, x, -math.inf).amax(2),
                torch.where(used, unit, 0.0).sum(2),
            ),
            strict=True,
        ):
            into[part] = torch.where(lost, math.nan, values)
    return tuple(results)


def _sequences_at_once(cache, block_tables) -> list[slice]:
    """Parts of the batch whose tokens, gathered as float32, take no more than `_GATHERED_ELEMENTS`."""
    chunk = max(1, _GATHERED_ELEMENTS // max(1, block_tables.shape[1] * cache.shape[1:].numel()))
    return [slice(s, s + chunk) for s in range(0, len(block_tables), chunk)]


def _tokens(cache, scale, block_tables, seq_lens) -> tuple[Tensor, Tensor, Tensor]:
    """Of each slot that the tables name: its vectors, whether it holds a token, and whether it should and cannot be read.

    float32 `[num_seqs, max_blocks, block_size, num_kv_heads, head_dim]` and twice bool `[num_seqs, max_blocks, block_size]`.
    """
    max_blocks = block_tables.shape[1]
    num_blocks, block_size = cache.shape[:2]
    in_pool = (block_tables >= 0) & (block_tables < num_blocks)
    x = _gather(cache, scale, torch.where(in_pool, block_tables, 0).long()).unflatten(1, (max_blocks, block_size))
    position = torch.arange(max_blocks * block_size, device=cache.device).view(max_blocks, block_size)
    length = seq_lens[:, None, None]
    used = position < length
    return x, used, (used & ~in_pool[..., None]) | (length < 0) | (length > max_blocks * block_size)


def _by_group(x: Tensor, num_groups: int, blocks_per_group: int) -> Tensor:
    """`[num_seqs, max_blocks, block_size, ...]` as `[num_seqs, num_groups, tokens, ...]`, the last group filled up with zeros."""
    blocks_per_group = min(blocks_per_group, x.shape[1])
    missing = num_groups * blocks_per_group - x.shape[1]
    x = torch.cat([x, x.new_zeros((len(x), missing, *x.shape[2:]))], 1)
    return x.unflatten(1, (num_groups, blocks_per_group)).flatten(2, 3)
