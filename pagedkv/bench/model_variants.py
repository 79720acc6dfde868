"""One model, one text, many caches: what the model says when each of them holds the context. Teacher forcing through the decode path."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pagedkv.evidence.tables import cell
from pagedkv.integrations.transformers import PagedLayer
from pagedkv.kv_dump import ModelError
from pagedkv.quant_spec import KVQuantSpec

RESAMPLES = 2000
PROGRESS = 8  # steps between two lines


class Member(Protocol):
    """A part of an `Ensemble`: a `PagedCache`, or a peer's cache that offers the same."""

    seqs: Sequence
    positions: int
    watch: int

    def store(self, layer: int, key: Tensor, value: Tensor, mask: Tensor | None) -> None: ...

    def look(self, layer: int, query: Tensor, scaling: float | None, window: int | None) -> None: ...

    def attend(self, layer: int, query: Tensor, scaling: float | None, window: int | None) -> Tensor: ...

    def finish(self, columns: int) -> None: ...


class Ensemble(Cache):
    """Caches that see the same prompt once, and then a part of the batch each: as many rows as each has sequences by then.

    The model's weights are read once for all of them, and the prompt is run once.
    """

    def __init__(self, model, members: Sequence[Member]):
        self.members = list(members)
        super().__init__(layers=[_Layer(self, i) for i in range(model.config.get_text_config(decoder=True).num_hidden_layers)])

    @property
    def positions(self) -> int:
        return self.members[0].positions

    @property
    def rows(self) -> int:
        return sum(len(member.seqs) for member in self.members)

    def drop(self) -> None:
        """Give the memory back. A cache and its layers hold each other, so that it would stay until Python looks for such circles."""
        self.members.clear()
        gc.collect()


class _Layer(PagedLayer):
    def attention(self, module, query, key, value, mask, scaling, window, kwargs) -> Tensor:
        self.handed_out = False
        ensemble, last = self.cache, self.index == len(self.cache.layers) - 1
        columns = query.shape[2]
        if ensemble.positions == 0:
            for member in ensemble.members:
                member.store(self.index, key, value, mask)
                if member.watch:
                    member.look(self.index, query, scaling, window)
            out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
        else:
            parts, start = [], 0
            for member in ensemble.members:
                mine = slice(start, start + len(member.seqs))
                member.store(self.index, key[mine], value[mine], None if mask is None else mask[mine])
                parts.append(member.attend(self.index, query[mine], scaling, window))
                start = mine.stop
            out = torch.cat(parts)
        if last:
            for member in ensemble.members:
                member.finish(columns)
        return out


@dataclasses.dataclass(frozen=True)
class RoundedSpec(KVQuantSpec):
    """A peer's format, as the values that it can hold: K and V are rounded to it and kept in the cache's own dtype."""

    granularity: str | None = None
    rounding: Callable[[Tensor], Tensor] | None = None

    def prepare(self, key: Tensor, value: Tensor, k_mean: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.rounding(key), self.rounding(value)


# ----------------------------------------------------------------------------------------------------------------------- text


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of a text is measured: windows, tokens of each one's prompt, those scored after it, and windows in one batch."""

    windows: int
    context: int
    scored: int
    together: int

    def batches(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Prompts `[windows, context]` and what follows them `[windows, scored + 1]`, at most `together` windows at a time."""
        for batch in windows(ids, self.windows, self.context + self.scored + 1).split(self.together):
            yield batch[:, : self.context], batch[:, self.context :]


def windows(ids: Tensor, count: int, length: int) -> Tensor:
    """`count` windows of `length` tokens that do not overlap, spread evenly over `ids` `[tokens]`: int64 `[count, length]`.

    Raises:
        ModelError: the text is too short.
    """
    stride = len(ids) // count
    if stride < length:
        raise ModelError(f"the text has {len(ids)} tokens; {count} windows of {length} need {count * length}")
    return torch.stack([ids[i * stride : i * stride + length] for i in range(count)])


def text_tokens(tokenizer, text: str) -> Tensor:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]


# --------------------------------------------------------------------------------------------------------------- teacher forcing


@dataclasses.dataclass
class Scores:
    """Of each token that was predicted, float32 `[variants, windows, tokens]`; variant 0 is what the others are compared with.

    `nll`: minus the log-probability of the token that followed. `kl`: divergence of the next-token distribution from variant 0's,
    `sum p0 log(p0 / p)`. `same`: 1 where the likeliest token is variant 0's.
    """

    nll: Tensor
    kl: Tensor
    same: Tensor

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """Further windows of the same variants."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts], 1) for field in dataclasses.fields(cls)))


@torch.inference_mode()
def teacher_forced(model, cache: Cache, following: Tensor, variants: int, say: Callable[[str], None]) -> Scores:
    """Feed the text one token a step, to every variant at once, and score what each expects next.

    Args:
        cache: holds the prompt; its batch is `variants` times the windows, variant by variant.
        following: int64 `[windows, tokens + 1]`, what comes after the prompts; the first is fed and not scored.
        say: told how far it is.
    """
    steps = []
    for token, target in zip(following[:, :-1].split(1, 1), following[:, 1:].unbind(1), strict=True):
        steps.append(compare(model(token.repeat(variants, 1), past_key_values=cache).logits[:, -1], target, variants))
        if len(steps) % PROGRESS == 0:
            say(f"    {len(steps)} of {following.shape[1] - 1} tokens")
    return Scores(*(torch.stack(values, 2) for values in zip(*steps, strict=True)))


def compare(logits: Tensor, target: Tensor, variants: int) -> tuple[Tensor, Tensor, Tensor]:
    """`nll`, `kl` and `same` of one prediction, each `[variants, windows]` on the CPU. `logits: [variants * windows, vocabulary]`."""
    log_p = logits.float().log_softmax(-1).view(variants, len(target), -1)
    nll = -log_p.gather(2, target.expand(variants, -1)[..., None])[..., 0]
    p = log_p[0].exp()
    kl = torch.stack([(p * (log_p[0] - each)).sum(-1) for each in log_p])
    likeliest = log_p.argmax(-1)
    return nll.cpu(), kl.cpu(), (likeliest == likeliest[0]).float().cpu()


# ------------------------------------------------------------------------------------------------------------------- confidence


def mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def median(x: Tensor) -> Tensor:
    return x.quantile(0.5, -1)


def interval(by_window: Tensor, statistic: Callable[[Tensor], Tensor] = mean, seed: int = 0) -> tuple[float, float, float]:
    """A statistic over windows, and its 95 % bootstrap interval: `(value, low, high)`.

    Args:
        by_window: `[windows]`, each window's own mean; windows are drawn with replacement, since tokens of one are not independent.
        statistic: over the last dimension.
    """
    x = by_window.double()
    drawn = torch.randint(len(x), (RESAMPLES, len(x)), generator=torch.Generator().manual_seed(seed))
    low, high = torch.quantile(statistic(x[drawn]), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(statistic(x)), low, high


def with_interval(name: str, by_window: Tensor, statistic: Callable[[Tensor], Tensor] = mean) -> dict[str, float]:
    """Fields of a row: `name`, `name_low`, `name_high`."""
    value, low, high = interval(by_window, statistic)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def exp_mean(x: Tensor) -> Tensor:
    """Of the mean of logarithms: a perplexity, or a ratio of two."""
    return mean(x).exp()


def for_readers(rows: Sequence[Mapping], columns: Sequence[str]) -> list[dict]:
    """Rows of a table: a value that has an interval as `value (low to high)`, the others as they are."""

    def shown(row: Mapping, name: str) -> object:
        if row.get(f"{name}_low") is None:
            return row.get(name)
        return f"{cell(row[name])} ({cell(row[f'{name}_low'])} to {cell(row[f'{name}_high'])})"

    return [{name: shown(row, name) for name in columns} for row in rows]


def error_bars(rows: Sequence[Mapping], name: str) -> tuple[list[float], list[list[float]]]:
    """Of each row the value, and how far its interval reaches below and above it, as matplotlib's `errorbar` takes them."""
    below = [max(0.0, row[name] - row[f"{name}_low"]) for row in rows]  # of equal values the last bit may say otherwise
    above = [max(0.0, row[f"{name}_high"] - row[name]) for row in rows]
    return [row[name] for row in rows], [below, above]


def summaries(scores: Scores, names: Sequence[str]) -> Iterator[dict]:
    """A row for each variant: perplexity, its change against variant 0 in percent, KL and agreement, with intervals over windows.

    The change is paired: windows are drawn for both at once, so what makes a window hard for both does not widen it.
    """
    for i, name in enumerate(names):
        nll = scores.nll[i].mean(1)
        yield {
            "variant": name,
            "tokens": scores.nll[i].numel(),
            "windows": len(nll),
            **with_interval("perplexity", nll, exp_mean),
            **with_interval("delta_percent", nll - scores.nll[0].mean(1), lambda x: 100 * (exp_mean(x) - 1)),
            **with_interval("kl", scores.kl[i].mean(1)),
            **with_interval("agreement", scores.same[i].mean(1)),
        }
