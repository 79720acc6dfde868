from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pagedkv.ops.statistics import channel_statistics, token_moments
from pagedkv.policies.base import Observation, Policy, Sequence


@dataclasses.dataclass(frozen=True)
class LagKV(Policy):
    """A token is worth what it differs, channel by channel, from those that come next. LagKV (Liang et al., 2025, arXiv:2504.04704).

    After `sink_blocks`, the sequence falls into partitions of `lag_blocks`. With the lowest and the highest value of each channel in
    the next partition,

        x' = (x - low) / (high - low),  of_x = softmax over the partition's tokens of (std of x' over channels)
        score[token] = rank in its partition of (of_k + of_v) / 2, as a share of the partition's tokens
        score[block] = mean over tokens and KV heads

    Sinks, the last whole partition and what follows it score 1. Without two whole partitions, all but the sinks score by recency, from
    0 to 1. A channel that is constant over the next partition tells nothing (it counts as 0). Defaults: 128 tokens, as in the paper,
    with blocks of 16.
    """

    lag_blocks: int = 8
    sink_blocks: int = 1

    name = "lag_kv"
    needs = ("k_cache", "v_cache")
    blind_to = ("subtract_k_mean",)  # it looks at how each channel varies
    least: ClassVar[dict[str, int]] = {"lag_blocks": 1}
    tolerance = 1e-3  # a rank is a whole number: two tokens that nearly tie may swap theirs

    def score(self, seen: Observation) -> Tensor:
        lag = self.lag_blocks * seen.block_size
        sinks = min(self.sink_blocks, seen.block_tables.shape[1])
        rest = dataclasses.replace(
            seen, block_tables=seen.block_tables[:, sinks:], seq_lens=(seen.seq_lens - sinks * seen.block_size).clamp(min=0)
        )
        spread = sum(self._spread(rest, cache, scale) for cache, scale in ((seen.k_cache, seen.k_scale), (seen.v_cache, seen.v_scale)))
        rank = spread.argsort(dim=2, stable=True).argsort(dim=2) / lag
        ranks = rest.mean(rank.flatten(1, 2)[:, : rest.block_tables.shape[1] * seen.block_size].unflatten(1, (-1, seen.block_size)))

        length = rest.seq_lens[:, None]
        whole = length // lag
        position = rest.places * seen.block_size + (rest.num_tokens - 1) / 2  # the mean of the block's tokens
        scores = torch.where(rest.places // self.lag_blocks < whole - 1, ranks, 1.0)
        scores = torch.where(whole < 2, position / length.clamp(min=1), scores)
        return torch.cat([scores.new_ones((len(scores), sinks)), scores], 1)

    def _spread(self, rest: Observation, cache: Tensor, scale: Tensor | None) -> Tensor:
        """`of_x` for each token: `[num_seqs, partitions, tokens, num_kv_heads]`, the last partition filled up."""
        tokens = (cache, scale, rest.block_tables, rest.seq_lens)
        low, high, _ = channel_statistics(*tokens, blocks_per_group=self.lag_blocks)
        low, high = (torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1) for x in (low, high))  # of the next partition
        gain = torch.where(high > low, 1 / (high - low), 0.0)
        total, squares = token_moments(*tokens, blocks_per_group=self.lag_blocks, shift=low, gain=gain)
        channels = cache.shape[-1]
        std = ((squares - total.square() / channels) / (channels - 1)).clamp(min=0).sqrt()
        missing = low.shape[1] * self.lag_blocks - std.shape[1]
        std = torch.cat([std, std.new_zeros((len(std), missing, *std.shape[2:]))], 1)
        return std.unflatten(1, (low.shape[1], self.lag_blocks)).flatten(2, 3).softmax(2)

    def reference(self, sequence: Sequence) -> np.ndarray:
        lag, sinks = self.lag_blocks * sequence.block_size, min(sequence.length, self.sink_blocks * sequence.block_size)
        num_kv_heads = sequence.k.shape[1]
        scores = np.ones((sequence.length, num_kv_heads))
        length = sequence.length - sinks
        if length < 2 * lag:
            scores[sinks:] = (np.arange(length) / max(1, length))[:, None]
            return sequence.mean(scores)
        for p in range(length // lag - 1):
            here, after = slice(sinks + p * lag, sinks + (p + 1) * lag), slice(sinks + (p + 1) * lag, sinks + (p + 2) * lag)
            spread = 0
            for x in (sequence.k, sequence.v):
                low, high = x[after].min(0), x[after].max(0)
                std = ((x[here] - low) * np.divide(1, high - low, out=np.zeros_like(low), where=high > low)).std(-1, ddof=1)
                spread = spread + np.exp(std) / np.exp(std).sum(0)
            scores[here] = spread.argsort(0, kind="stable").argsort(0) / lag
        return sequence.mean(scores)
