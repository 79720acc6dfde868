"""Attention of a prompt, or of a piece of it, to itself and to what the cache holds of it already.

The new tokens' K and V come straight from the model, unquantised; only the tokens before them are read from the cache. FlashAttention where
vLLM brings it (CUDA, sm_80 up), prompts that begin here in one launch; else PyTorch's SDPA.
"""

from __future__ import annotations

import dataclasses
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
    row: int


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

    def __call__(self, q: Tensor, key: Tensor, value: Tensor, pages: Pages, block_tables: Tensor, pieces: list[Piece], out: Tensor) -> None:
        """q, out: `[num_tokens, num_heads, head_dim]`; key, value: `[num_tokens, num_kv_heads, head_dim]`; block_tables: int32."""
        for begins_here, group in itertools.groupby(pieces, lambda piece: piece.context == 0):
            group = list(group)
            if begins_here and self.flash_version:
                new = slice(group[0].begin, group[-1].end)
                starts = [piece.begin - new.start for piece in group] + [new.stop - new.start]
                self._flash(q[new], key[new], value[new], starts, starts, out[new])
                continue
            for piece in group:
                new = slice(piece.begin, piece.end)
                self._one(q[new], key[new], value[new], pages, block_tables[piece.row], piece.context, out[new])

    def _one(self, q: Tensor, k: Tensor, v: Tensor, pages: Pages, block_table: Tensor, context: int, out: Tensor) -> None:
        if self.flash_version is None and (self.logits_soft_cap is not None or self.sinks is not None):
            out.copy_(self._token_by_token(q, pages, block_table, context))
            return
        seen = context if self.sliding_window is None else min(context, self.sliding_window - 1)
        if seen:
            old_k, old_v = pages.tokens(block_table, context - seen, context, q.dtype)
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        if self.flash_version:
            self._flash(q, k, v, [0, len(q)], [0, len(k)], out)
        else:
            out.copy_(self._sdpa(q, k, v))

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, q_starts: list[int], k_starts: list[int], out: Tensor) -> None:
        """Several sequences, each causal and aligned to its last token; `..._starts` where each begins, and the end."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        starts = torch.tensor([q_starts, k_starts], dtype=torch.int32).to(q.device, non_blocking=True)
        flash_attn_varlen_func(
            q,
            k,
            v,
            out=out,
            max_seqlen_q=max(end - begin for begin, end in itertools.pairwise(q_starts)),
            cu_seqlens_q=starts[0],
            max_seqlen_k=max(end - begin for begin, end in itertools.pairwise(k_starts)),
            cu_seqlens_k=starts[1],
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

    def _token_by_token(self, q: Tensor, pages: Pages, block_table: Tensor, context: int) -> Tensor:
        """Each new token as a sequence of its own, which ends with it: slow, and what SDPA cannot do."""
        seq_lens = torch.arange(context + 1, context + 1 + len(q), dtype=torch.int32, device=q.device)
        tables = block_table.expand(len(q), -1)
        return pages.decode(q, tables, seq_lens, self.sm_scale, **self.options)
