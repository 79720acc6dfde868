"""The queries, keys and values of every layer of a transformers model over a text, and the file they are kept in."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor


class ModelError(RuntimeError):
    """A model, text or dump that cannot be had; the message is one line, made to be shown as it is."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@dataclasses.dataclass(frozen=True)
class Dump:
    """What one forward pass held, layer by layer, batch dimension dropped.

    `k, v, k_before_rope`: `[layers, tokens, num_kv_heads, head_dim]`; `k` is as the cache holds it, after the
    rotary embedding. `k_before_rope` is None where the model has no `k_proj` to hook. `q`: `[layers, queries,
    num_heads, head_dim]`, of the last `queries` positions, after the rotary embedding: `q[:, i]` sits at position
    `tokens - queries + i` and attends to all positions up to its own.
    """

    FORMAT: ClassVar[int] = 1  # of the file; raise it with any change to `save`, and old dumps are made again

    q: Tensor
    k: Tensor
    v: Tensor
    k_before_rope: Tensor | None
    sm_scale: float
    metadata: dict = dataclasses.field(default_factory=dict)  # JSON values: what was asked for, by name and hash

    @property
    def num_layers(self) -> int:
        return self.k.shape[0]

    def save(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        """One `.npz` file, whole or not at all, the same bytes for the same dump. `dtype` is what it is stored in."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, "k_before_rope": self.k_before_rope}
        arrays = {name: t.to("cpu", dtype).numpy() for name, t in tensors.items() if t is not None}
        description = json.dumps({"sm_scale": self.sm_scale, **self.metadata}, sort_keys=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(scratch, "wb") as file:
                np.savez(file, description=np.array(description), **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except OSError as error:
            raise ModelError(f"cannot write {path}: {error.strerror or error}") from error
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Dump:
        """In float32. Raises `ModelError` where the file is missing, damaged or something else."""
        try:
            with np.load(path, allow_pickle=False) as file:
                metadata = json.loads(str(file["description"]))
                tensors = {name: torch.from_numpy(file[name]).float() for name in file.files if name != "description"}
            before = tensors.get("k_before_rope")
            return cls(tensors["q"], tensors["k"], tensors["v"], before, metadata.pop("sm_scale"), metadata)
        except Exception as error:  # a damaged archive raises whatever its reader stumbles on
            raise ModelError(f"cannot read the KV dump {path}: {type(error).__name__}: {one_line(error)}") from error


@torch.inference_mode()
def dump_kv(model, tokenizer, text: str, tokens: int = 2048, queries: int = 64, layers: int | None = None) -> Dump:
    """The KV cache of `model` over the first `tokens` tokens of `text`; `layers` stops after that many.

    Works for decoders of transformers that look up their attention function by name (Llama, Qwen, Mistral, ...).

    Raises:
        ModelError: the text is too short, or the model never called the attention function it was given.
    """
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, truncation=True, max_length=tokens).input_ids
    if ids.shape[1] < tokens:
        raise ModelError(f"the text has {ids.shape[1]} tokens, {tokens} were asked for")
    if not 1 <= queries <= tokens:
        raise ModelError(f"queries: expected 1 <= queries <= {tokens}, got {queries}")
    decoder = model.get_decoder()
    whole = decoder.layers
    try:
        decoder.layers = whole[:layers]
        wanted = list(range(len(decoder.layers)))
        with _captured(model, decoder, queries) as seen:
            decoder(ids.to(model.device), use_cache=False)
    finally:
        decoder.layers = whole
    if sorted(seen.q) != wanted:
        raise ModelError(f"{type(model).__name__} did not show its attention: layers seen {sorted(seen.q)} of {len(wanted)}")

    def stack(by_layer: dict[int, Tensor]) -> Tensor:
        return torch.stack([by_layer[i] for i in sorted(by_layer)])

    k = stack(seen.k)
    before = None
    if len(seen.k_before_rope) == len(seen.k):
        before = stack(seen.k_before_rope).reshape(k.shape)
    return Dump(stack(seen.q), k, stack(seen.v), before, seen.sm_scale)


@dataclasses.dataclass
class _Seen:
    queries: int
    q: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    k: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    v: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    k_before_rope: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    sm_scale: float = 0.0

    def attention(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]
        self.q[module.layer_idx] = query[0, :, -self.queries :].transpose(0, 1).clone()
        self.k[module.layer_idx] = key[0].transpose(0, 1).clone()
        self.v[module.layer_idx] = value[0].transpose(0, 1).clone()
        self.sm_scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


class _captured:
    """Routes the model's attention through `_Seen.attention`, and undoes that on leaving."""

    def __init__(self, model, decoder, queries: int):
        self.model, self.decoder, self.seen, self.hooks = model, decoder, _Seen(queries), []

    def __enter__(self) -> _Seen:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register("pagedkv_dump", self.seen.attention)
        AttentionMaskInterface.register("pagedkv_dump", sdpa_mask)
        self.before = self.model.config._attn_implementation
        self.model.set_attn_implementation("pagedkv_dump")
        for index, layer in enumerate(self.decoder.layers):
            module = getattr(layer, "self_attn", None)
            # Qwen3 normalises the keys between the projection and the rotary embedding.
            last_before_rope = getattr(module, "k_norm", None) or getattr(module, "k_proj", None)
            if last_before_rope is not None:
                self.hooks.append(last_before_rope.register_forward_hook(self._keep(index)))
        return self.seen

    def _keep(self, index: int):
        def hook(module, args, output):
            self.seen.k_before_rope[index] = output[0].clone()

        return hook

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()
        self.model.set_attn_implementation(self.before)
