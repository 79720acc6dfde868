"""kvpress's eviction rules (github.com/NVIDIA/kvpress), as they are, on the prompt of an `Ensemble`.

Optional: `pip install 'pagedkv[peers]'`."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Rules that need neither training nor a second pass.
RULES = ("StreamingLLMPress", "SnapKVPress", "TOVAPress", "KeyDiffPress", "ExpectedAttentionPress", "KnormPress", "LagKVPress")
LEFT_OUT = {"ObservedAttentionPress": "needs the attention weights of the whole prompt, which only transformers' eager attention hands out"}
BY_RATIO = ("StreamingLLMPress",)  # whose scores depend on how much goes; the others are asked for theirs once, not at every fraction


def presses() -> dict:
    """Each rule with its defaults, by the name that kvpress gives it; none where kvpress is absent (`absence` says why)."""
    if absence() is not None:
        return {}
    import kvpress

    return {name: getattr(kvpress, name)() for name in RULES}


def absences() -> dict[str, str]:
    """Why there are no rows of kvpress, or none of a rule of it whose like this library has."""
    reason = absence()
    return {f"kvpress {name}": why for name, why in LEFT_OUT.items()} if reason is None else {"kvpress": reason}


def version() -> str | None:
    """Of the kvpress that is installed; None: it is not."""
    try:
        return importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        return None


def absence() -> str | None:
    if version() is None:
        return "kvpress is not installed: pip install 'pagedkv[peers]'"
    try:
        import kvpress  # noqa: F401
    except Exception as error:  # another version of transformers than it was written for raises this or that
        return f"kvpress cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


class PressCache:
    """A member of an `Ensemble`: what each rule keeps of the prompt at each fraction, dense and in the model's dtype, as kvpress leaves it.

    A rule's own `compress` is called after each attention module, with what kvpress's hook would pass. Variants are in the order of
    the rules, each with all fractions; of one fraction every rule keeps as many tokens, so that they attend together.
    """

    watch = 0

    def __init__(self, model, rules: dict, fractions: Sequence[float]):
        self.rules, self.fractions, self.positions, self.seqs = rules, fractions, 0, range(0)
        decoder = model.get_decoder()
        self._prompt: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept: list[list[_Growing]] = [[] for _ in decoder.layers]  # by layer and fraction, `[rules * batch, heads, tokens, head_dim]`
        self._hooks = []
        for rule in rules.values():
            rule.post_init_from_model(model)
        for layer in decoder.layers:
            layer.self_attn.rotary_emb = decoder.rotary_emb  # where kvpress puts it for its rules
            self._hooks.append(layer.self_attn.register_forward_hook(self._compress, with_kwargs=True))

    def store(self, layer: int, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        if self.positions == 0:
            self._prompt[layer] = key, value
            return
        for kept, new_key, new_value in zip(self._kept[layer], self._by_fraction(key), self._by_fraction(value), strict=True):
            kept.append(new_key, new_value)

    def attend(self, layer: int, query: Tensor, scaling: float | None, window: int | None) -> Tensor:
        if window is not None:
            raise NotImplementedError("PressCache: a sliding window")
        columns, parts = query.shape[2], []
        for q, kept in zip(self._by_fraction(query), self._kept[layer], strict=True):
            before = kept.tokens - columns  # all of those, and of the step's own tokens those up to itself
            mask = None if columns == 1 else torch.ones(columns, kept.tokens, dtype=torch.bool, device=q.device).tril(before)
            parts.append(scaled_dot_product_attention(q, kept.key, kept.value, attn_mask=mask, scale=scaling, enable_gqa=True))
        rules = len(self.rules)
        out = torch.stack([part.unflatten(0, (rules, -1)) for part in parts], 1)
        return out.flatten(0, 2).transpose(1, 2)

    def _by_fraction(self, x: Tensor) -> list[Tensor]:
        """`[rules * fractions * batch, ...]`, as the variants are ordered: for each fraction `[rules * batch, ...]`."""
        return [part.flatten(0, 1) for part in x.unflatten(0, (len(self.rules), len(self.fractions), -1)).unbind(1)]

    def finish(self, columns: int) -> None:
        self.positions += columns

    def _compress(self, module, args, kwargs, output) -> None:
        layer = module.layer_idx
        if layer not in self._prompt:
            return
        key, value = self._prompt.pop(layer)
        seen = (module, kwargs["hidden_states"], key, value, None, kwargs)
        kept: dict[float, list[tuple[Tensor, Tensor]]] = {fraction: [] for fraction in self.fractions}
        for name, original in self.rules.items():
            rule = copy.copy(original)
            if name not in BY_RATIO:
                scores = original.score(*seen)
                rule.score = lambda *_, scores=scores: scores
            for fraction in self.fractions:
                rule.compression_ratio = fraction
                kept[fraction].append(rule.compress(*seen))
        self._kept[layer] = [_Growing(pairs) for pairs in kept.values()]
        self.seqs = range(len(key) * len(self.rules) * len(self.fractions))
        if not self._prompt and layer == len(self._kept) - 1:
            for hook in self._hooks:
                hook.remove()


class _Growing:
    """K and V of some rows that have as many tokens each, with room for more: joining them anew at every step would copy all of them."""

    _ROOM = 32

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]]):
        self.tokens = parts[0][0].shape[2]
        self._buffers = tuple(self._with_room(*tensors) for tensors in zip(*parts, strict=True))

    @property
    def key(self) -> Tensor:
        return self._buffers[0][:, :, : self.tokens]

    @property
    def value(self) -> Tensor:
        return self._buffers[1][:, :, : self.tokens]

    def append(self, key: Tensor, value: Tensor) -> None:
        start, self.tokens = self.tokens, self.tokens + key.shape[2]
        if self.tokens > self._buffers[0].shape[2]:
            self._buffers = tuple(self._with_room(buffer[:, :, :start]) for buffer in self._buffers)
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            buffer[:, :, start : self.tokens] = new

    def _with_room(self, *parts: Tensor) -> Tensor:
        """`parts`, `[rows, heads, tokens, head_dim]` each, one after the other, in a tensor that has room behind `self.tokens`."""
        rows, heads, _, head_dim = parts[0].shape
        buffer = parts[0].new_empty(rows * len(parts), heads, self.tokens + self._ROOM, head_dim)
        for mine, part in zip(buffer.split(rows), parts, strict=True):
            mine[:, :, : part.shape[2]] = part
        return buffer
