"""Attention of a prompt, or of a piece of it, to itself and to what the cache holds of it already.

The new tokens' K and V come straight from the model, unquantised; only the tokens before them are read from the cache. FlashAttention where
vLLM brings it (CUDA, sm_80 up), prompts that begin here in one launch; else PyTorch's SDPA.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.integrations.vllm.pages import Pages


@dataclasses.dataclass(frozen=True)
class Piece:
    """The new tokens of one request: `begin .. end-1` of the batch, after `context` tokens in the cache; its row of the block table."""

    begin: int
    end: int
    context: int
    block_table: Tensor  # int32 [max_blocks]


@dataclasses.dataclass(frozen=True)
class Prefill:
    """`__call__` writes attention's output for pieces of a batch; the constructor's arguments are those of `pagedkv.paged_attention`."""

    sm_scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: Tensor | None = None
    flash_version: int | None = None  # of FlashAttention; None: use SDPA

    @property
    def options(self) -> dict:
        """For the ops. A model's sinks are weights in its dtype, which are read after the layer is made: hence not once and for all."""
        sinks = None if self.sinks is None else self.sinks.float()
        return {"sliding_window": self.sliding_window, "logits_soft_cap": self.logits_soft_cap, "sinks": sinks}

    def __call__(self, q: Tensor, key: Tensor, value: Tensor, pages: Pages, pieces: list[Piece], out: Tensor) -> None:
        """q, out: `[num_tokens, num_heads, head_dim]`; key, value: `[num_tokens, num_kv_heads, head_dim]`."""
        for begins_here, group in itertools.groupby(pieces, lambda piece: piece.context == 0):
            group = list(group)
            if begins_here and self.flash_version:
                new = slice(group[0].begin, group[-1].end)
                lengths = tuple(piece.end - piece.begin for piece in group)
                self._flash(q[new], key[new], value[new], lengths, lengths, out[new])
                continue
            for piece in group:
                new = slice(piece.begin, piece.end)
                self._one(q[new], key[new], value[new], pages, piece, out[new])

    def _one(self, q: Tensor, k: Tensor, v: Tensor, pages: Pages, piece: Piece, out: Tensor) -> None:
        if self.flash_version is None and (self.logits_soft_cap is not None or self.sinks is not None):
            out.copy_(self._token_by_token(q, pages, piece))
            return
        seen = piece.context if self.sliding_window is None else min(piece.context, self.sliding_window - 1)
        if seen:
            new_k, new_v = k, v
            k, v = (new.new_empty(seen + len(new), *new.shape[1:]) for new in (new_k, new_v))
            pages.read(piece.block_table, piece.context - seen, k[:seen], v[:seen])
            k[seen:], v[seen:] = new_k, new_v
        if self.flash_version:
            self._flash(q, k, v, (len(q),), (len(k),), out)
        else:
            out.copy_(self._sdpa(q, k, v))

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], out: Tensor) -> None:
        """Several sequences one after another, each causal and aligned to its last token."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        flash_attn_varlen_func(
            q,
            k,
            v,
            out=out,
            max_seqlen_q=max(q_lengths),
            cu_seqlens_q=_starts(q_lengths, q.device),
            max_seqlen_k=max(k_lengths),
            cu_seqlens_k=_starts(k_lengths, q.device),
            softmax_scale=self.sm_scale,
            causal=True,
            window_size=[-1, -1] if self.sliding_window is None else [self.sliding_window - 1, 0],
            softcap=self.logits_soft_cap or 0.0,
            fa_version=self.flash_version,
            s_aux=None if self.sinks is None else self.sinks.to(q.dtype),
        )

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        q, k, v = q.transpose(0, 1), *(t.transpose(0, 1).repeat_interleave(group, dim=0) for t in (k, v))
        mask = None
        if k.shape[1] != q.shape[1] or (self.sliding_window or k.shape[1]) < k.shape[1]:
            position = torch.arange(k.shape[1], device=q.device)
            distance = position[-q.shape[1] :, None] - position  # from a new token back to a token
            mask = distance >= 0
            if self.sliding_window is not None:
                mask &= distance < self.sliding_window
        return scaled_dot_product_attention(q[None], k[None], v[None], mask, is_causal=mask is None, scale=self.sm_scale)[0].transpose(0, 1)

    def _token_by_token(self, q: Tensor, pages: Pages, piece: Piece) -> Tensor:
        """Each new token as a sequence of its own, which ends with it: slow, and what SDPA cannot do."""
        seq_lens = torch.arange(piece.context + 1, piece.context + 1 + len(q), dtype=torch.int32, device=q.device)
        tables = piece.block_table.expand(len(q), -1)
        return pages.decode(q, tables, seq_lens, self.sm_scale, **self.options)


@functools.lru_cache(maxsize=64)  # all the layers of a step ask for the same
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 `[len(lengths) + 1]`: where each begins, and the end."""
    return to_device([0, *itertools.accumulate(lengths)], device)


def to_device(numbers: list, device: torch.device) -> Tensor:
    """As int32, without waiting for what the device is at."""
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
