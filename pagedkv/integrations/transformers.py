"""`model.generate` of Hugging Face transformers on a paged KV cache. For decoders of the Llama and Qwen kind; transformers 4.57 to 5.x.

    from pagedkv.integrations.transformers import PagedCache

    cache = PagedCache(model, spec="block_head")
    model.generate(**inputs, past_key_values=cache)

The prompt attends to its own K and V as they are, through PyTorch's SDPA; then they are encoded into the cache, and every later token reads
them there, through `pagedkv.quant_paged_attention`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pagedkv.block_mass import BlockMass
from pagedkv.model_cache import ModelKVCache, Step
from pagedkv.ops import checks
from pagedkv.ops.eviction import select_eviction_candidates
from pagedkv.policies import Observation, Policy
from pagedkv.policies import policy as find_policy
from pagedkv.quant_spec import KVQuantSpec, kv_spec

ATTENTION = "pagedkv"  # the name of the attention in transformers
_WATCH = 32  # queries of the prompt that say what it attends to, as many as SnapKV's window (Li et al., 2024)
_HOLDER = "pagedkv_layer"  # attribute of the K that a layer hands to the attention function: the layer itself


class PagedCache(Cache):
    """A cache for one batch: pass it as `past_key_values`, to `generate` or to the model itself.

    Args:
        model: its attention is set to this module's (`model.set_attn_implementation("pagedkv")`), which does what SDPA does wherever no
            `PagedCache` is given.
        spec: how K and V are encoded: a `KVQuantSpec` or a name in `pagedkv.quant_spec.KV_SPECS`; `"unquantised"` keeps the model's dtype.
        block_size: tokens of a block, 1 to 256.
        num_blocks: of the pool, in each layer. None: it grows.
        policy: of `pagedkv.policies`, or its name: what scores blocks. The lowest goes first. With `budget`.
        budget: tokens that a sequence may keep, 1 or more. One that holds more loses full blocks after each step, never its first nor last:
            these two stay whatever the budget. The prompt is read whole.
        watch: the last so many tokens of the prompt, and every later token, add to `mass` what the decode kernel says they attended to. 0:
            nothing is watched. Default: 32 with a policy that needs it, else 0.
        evict_by_layer: choose blocks in each layer for itself; see `ModelKVCache`. Then a table is a layer's; otherwise there is one, 0.

    Padding, left or right, is not stored: it is read from the attention mask's diagonal, and nothing else is read from a mask once the
    prompt is through. Beams share blocks, copied when they part. Layers with a sliding window keep every token and read the last ones; a
    window counts tokens, where stock transformers counts columns, right padding among them. It counts those that are left after `evict`, so
    older ones would come back into it: a policy is refused there.
    A prompt in several parts, or a further turn, attends to earlier parts as they are encoded.

    Raises:
        NotImplementedError: a model whose attention is not that of Llama and Qwen (see `_refuse`); a policy over sliding-window layers;
            soft-capped logits and attention sinks (in the prompt, SDPA has neither), and taking tokens back (`crop`, which assisted
            generation needs).
        TypeError, ValueError: a number is not as above, a policy needs `mass` and `watch` is 0, or it would see in K or V what `spec` does
            to them (see `Policy.obstacle`).
        ValueError: another batch size than that of the prompt, a mask of neither that many rows nor one, or another model than the one that
            it was made for.
        KVCacheFull: `num_blocks` do not suffice.
        RuntimeError: the model's attention was set to another, so that K and V were not stored.
    """

    def __init__(
        self,
        model,
        spec: KVQuantSpec | str = "block_head",
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        policy: Policy | str | None = None,
        budget: int | None = None,
        watch: int | None = None,
        evict_by_layer: bool = False,
    ):
        if (policy is None) != (budget is None):
            raise ValueError(f"budget: expected {'None without' if policy is None else 'a number of tokens with'} a policy, got {budget}")
        numbers = {"budget": (budget, 1), "watch": (watch, 0), "block_size": (block_size, 1), "num_blocks": (num_blocks, 1)}
        for name, (value, least) in numbers.items():
            if value is not None:
                checks.integer(name, value)
                if value < least:
                    raise ValueError(f"{name}: expected at least {least}, got {value}")
        if not hasattr(model, "set_attn_implementation"):
            raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
        config = model.config.get_text_config(decoder=True)
        _refuse(model, config)
        spec, policy = kv_spec(spec), None if policy is None else find_policy(policy)
        if policy is not None:
            policy.check_spec(spec)
            if _has_window(config):
                raise NotImplementedError("PagedCache: a policy over sliding-window layers")
        super().__init__(layers=[PagedLayer(self, i) for i in range(config.num_hidden_layers)])
        self.spec, self.block_size, self.num_blocks = spec, block_size, num_blocks
        self.seqs: list[int] = []  # of each row of the batch
        self.positions = 0  # columns of the batch so far, padding included: what transformers takes for the cache's length
        self.policy, self.budget, self.evict_by_layer = policy, budget, evict_by_layer
        needs_mass = self.policy is not None and not {"block_mass", "total_mass"}.isdisjoint(self.policy.needs)
        if needs_mass and watch == 0:
            raise ValueError(f"watch: expected at least 1 with policy {self.policy.name!r}, which needs attention mass, got 0")
        self.watch = (_WATCH if needs_mass else 0) if watch is None else watch
        self.mass = [BlockMass() for _ in range(len(self.layers) if evict_by_layer else 1)]  # of each table
        self._kv: ModelKVCache | None = None
        self._step: Step | None = None
        self._valid: Tensor | None = None  # bool [batch, columns of the step]; None: no padding
        model.set_attn_implementation(ATTENTION)

    @property
    def kv(self) -> ModelKVCache:
        """The cache itself, made when the first K arrives and its shape is known."""
        if self._kv is None:
            raise RuntimeError("nothing has been stored yet")
        return self._kv

    # ------------------------------------------------------------------------------------------------- what a layer does in a step

    def store(self, layer: int, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Write the step's K and V of a layer, `[batch, num_kv_heads, columns, head_dim]`; the first layer begins the step."""
        if key.shape != value.shape:
            raise NotImplementedError(f"PagedCache: K and V of unlike shape, {list(key.shape)} and {list(value.shape)}")
        if layer == 0:
            self._begin(key, mask)
        self._step.write(layer, self._tokens(key), self._tokens(value))

    def attend(self, layer: int, query: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Attention of the step's tokens over the cache: `[batch, columns, num_heads, head_dim]`, zero for padding."""
        q = self._tokens(query)
        if not self.watch:
            out = self._step.attend(layer, q, scaling, sliding_window=window)
        else:
            out, mass = self._step.attend(layer, q, scaling, sliding_window=window, return_block_mass=True)
            self._watched(layer).add(mass, self._step.rows)
        batch, heads, columns, head_dim = query.shape
        if self._valid is None:
            return out.view(batch, columns, heads, head_dim)
        padded = out.new_zeros(batch, columns, heads, head_dim)
        padded[self._valid] = out
        return padded

    def look(self, layer: int, query: Tensor, scaling: float | None, window: int | None) -> None:
        """What the prompt's last tokens attend to in the cache; the output is not used."""
        last = self._step.last(self.watch)
        if len(last) > 0:
            q = self._tokens(query)[last]
            _, mass = self._step.attend(layer, q, scaling, last=self.watch, sliding_window=window, return_block_mass=True)
            self._watched(layer).add(mass, self._step.rows[last])

    def finish(self, columns: int) -> None:
        """After the last layer."""
        self._step.commit()
        self._step = None
        if self.watch:
            for mass in self.mass:
                mass.commit()
        self.positions += columns
        if self.policy is not None:
            for table in range(len(self.mass)):
                self._keep_to_budget(table)

    def evict(self, row: int, logical_blocks: Sequence[int], table: int = 0) -> None:
        """Drop full blocks of a row of the batch, and what was watched of them."""
        self.kv.evict(self.seqs[row], logical_blocks, table if self.evict_by_layer else None)
        if self.watch:
            self.mass[table].evict(row, logical_blocks)

    def scores(self, policy: Policy, table: int = 0) -> Tensor:
        """What a policy says of each block of each row: float32 `[batch, blocks]`, where one table serves all layers their mean."""
        layers = [table] if self.evict_by_layer else range(len(self.layers))
        tables, lengths = self.kv.tables(self.seqs, table)
        total, last = (
            _columns(x / len(layers), tables.shape[1]) if self.watch else None for x in (self.mass[table].total, self.mass[table].last)
        )
        seen = Observation(tables, lengths, self.block_size, spec=self.spec, block_mass=last, total_mass=total)
        if not {"k_cache", "v_cache"} & set(policy.needs):
            return policy(seen)  # the same in every layer
        each = [policy(dataclasses.replace(seen, **self.kv.planes[layer].tensors())) for layer in layers]
        return torch.stack(each).mean(0)

    def _keep_to_budget(self, table: int) -> None:
        over = {row: self.kv.length(seq, table) - self.budget for row, seq in enumerate(self.seqs)}
        if all(excess <= 0 for excess in over.values()):
            return
        scores = self.scores(self.policy, table)
        for row, excess in over.items():
            wanted = -(-excess // self.block_size)
            evictable = range(1, (self.kv.length(self.seqs[row], table) - 1) // self.block_size)  # not the first, not the last
            if excess > 0 and len(evictable) > 0:
                worth = scores[row, evictable.start : evictable.stop]
                lowest = select_eviction_candidates(worth.contiguous(), min(wanted, len(worth)))
                self.evict(row, (lowest + evictable.start).tolist(), table)

    def _watched(self, layer: int) -> BlockMass:
        """Where a layer's mass belongs; the first layer of a table begins its step."""
        mass = self.mass[layer if self.evict_by_layer else 0]
        if layer == 0 or self.evict_by_layer:
            mass.begin(len(self.seqs), self._step.width(layer), self.kv.device)
        return mass

    def _begin(self, key: Tensor, mask: Tensor | None) -> None:
        batch, heads, columns, head_dim = key.shape
        if self.seqs and len(self.seqs) != batch:
            raise ValueError(f"batch: expected {len(self.seqs)} rows, as in the prompt, got {batch}")
        self._valid = _valid(mask, batch, columns)
        if self._kv is None:
            dtype = None if self.spec.quantised else key.dtype
            self._kv = ModelKVCache(
                len(self.layers),
                self.block_size,
                heads,
                head_dim,
                num_blocks=self.num_blocks,
                spec=self.spec,
                dtype=dtype,
                device=key.device,
                evict_by_layer=self.evict_by_layer,
            )
        if not self.seqs:
            self.seqs = [self._kv.allocate() for _ in range(batch)]
        counts = [columns] * batch if self._valid is None else self._valid.sum(1).tolist()
        self._step = self._kv.begin(self.seqs, counts)

    def _tokens(self, x: Tensor) -> Tensor:
        """`[batch, heads, columns, head_dim]` -> `[num_tokens, heads, head_dim]`, without padding, row by row of the batch."""
        x = x.transpose(1, 2)
        return x.flatten(0, 1) if self._valid is None else x[self._valid]

    # --------------------------------------------------------------------------------------------------- what `generate` asks for

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.choose(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self.choose(torch.arange(len(self.seqs), device=indices.device)[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.choose([row for row in range(len(self.seqs)) for _ in range(repeats)])

    def choose(self, rows: Sequence[int]) -> None:
        """The batch becomes these rows of itself; one that comes twice is forked."""
        before, self.seqs = self.seqs, [self.kv.fork(self.seqs[row]) for row in rows]
        for seq in before:
            self.kv.free(seq)
        if self.watch:
            for mass in self.mass:
                mass.choose(rows)

    def reset(self) -> None:
        for seq in self.seqs:
            self.kv.free(seq)
        self.seqs, self.positions, self._step = [], 0, None
        for layer in self.layers:
            layer.handed_out = False
        self.mass = [BlockMass() for _ in self.mass]

    def crop(self, *_) -> None:
        raise NotImplementedError("PagedCache keeps what it was given: it cannot take tokens back, which assisted generation asks for")


class PagedLayer(CacheLayerMixin):
    """What transformers holds for each layer. K and V pass through: they are stored once the attention function knows the padding."""

    is_compileable = False
    is_sliding = False  # every layer keeps every token
    max_cache_len = -1  # it grows

    def __init__(self, cache: PagedCache, index: int):
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = True
        self.handed_out = False  # K and V have yet to reach the attention function

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        before = self.cache.layers[self.index - 1]  # a model's only layer: itself, in the forward before
        if before.handed_out:
            before.handed_out = False
            raise RuntimeError(
                f"K and V of layer {before.index} were not stored: the model's attention is no longer {ATTENTION!r}; "
                f"call model.set_attn_implementation({ATTENTION!r}) and repeat the forward that lost them"
            )
        self.handed_out = True
        setattr(key_states, _HOLDER, self)
        return key_states, value_states

    def attention(self, module, query, key, value, mask, scaling, window, kwargs) -> Tensor:
        self.handed_out = False
        for name in ("softcap", "s_aux"):
            if kwargs.get(name) is not None:
                raise NotImplementedError(f"PagedCache: attention with {name}")
        layers = getattr(getattr(module, "config", None), "num_hidden_layers", len(self.cache.layers))
        if layers != len(self.cache.layers):
            made_for = len(self.cache.layers)
            raise ValueError(f"past_key_values: expected a PagedCache of {layers} layers, got one that was made for {made_for}")
        prompt = self.cache.positions == 0
        if prompt and not _only_hides(mask):
            raise NotImplementedError("PagedCache: an attention mask that adds to logits, where one that only hides tokens was expected")
        self.cache.store(self.index, key, value, mask)
        if prompt:
            out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
            if self.cache.watch:
                self.cache.look(self.index, query, scaling, window)
        else:
            out = self.cache.attend(self.index, query, scaling, window)
        if self.index == len(self.cache.layers) - 1:
            self.cache.finish(query.shape[2])
        return out

    @property
    def max_batch_size(self) -> int:
        """That of the prompt; -1 before there is one: any."""
        return len(self.cache.seqs) or -1

    def get_seq_length(self) -> int:
        return self.cache.positions

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        columns = len(query_length) if isinstance(query_length, Tensor) else query_length  # transformers 4 passes positions
        return self.cache.positions + columns, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    def lazy_initialization(self, *_) -> None:
        pass


def paged_attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **kwargs
) -> tuple[Tensor, None]:
    """The attention function: over the `PagedCache` that K comes from; SDPA where it comes from none."""
    layer = getattr(key, _HOLDER, None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if module.training:
        raise NotImplementedError("PagedCache: training; it has no gradient")
    return layer.attention(module, query, key, value, attention_mask, scaling, sliding_window, kwargs), None


def _refuse(model, config) -> None:
    """Name what a token would read in the cache otherwise than it should, or never find there."""
    if not getattr(model, "_supports_attention_backend", False):
        name = type(model).__name__
        raise NotImplementedError(f"PagedCache: {name}, whose attention does not go through transformers' AttentionInterface")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise NotImplementedError(f"PagedCache: layers of {', '.join(sorted(map(str, kinds)))}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise NotImplementedError("PagedCache: layers that share the K and V of others (num_kv_shared_layers)")


def _has_window(config) -> bool:
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None if kinds is None else "sliding_attention" in kinds


def _only_hides(mask: Tensor | None) -> bool:
    if mask is None or mask.dtype == torch.bool:
        return True
    return bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all())


def _valid(mask: Tensor | None, batch: int, columns: int) -> Tensor | None:
    """Which of the last columns are tokens and which padding: a token attends to itself. bool `[batch, columns]`; None: all are tokens."""
    if mask is None:
        return None
    if len(mask) not in (1, batch):  # a mask of one row is every row's, as SDPA takes it
        raise ValueError(f"attention_mask: expected {batch} rows, as in the batch, or 1, got {len(mask)}")
    own = mask[:, 0].diagonal(mask.shape[-1] - columns, 1, 2)
    valid = own if own.dtype == torch.bool else own == 0
    return None if bool(valid.all()) else valid.expand(batch, -1)


def _columns(x: Tensor, count: int) -> Tensor:
    """`x` `[batch, columns]` with so many columns: cut off, or zeros added."""
    return torch.nn.functional.pad(x, (0, count - x.shape[1])).contiguous()


AttentionInterface.register(ATTENTION, paged_attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
