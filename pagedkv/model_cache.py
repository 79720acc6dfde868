"""The KV cache of a whole model: many layers of blocks, and one block table for all of them.

A token sits at the same place in every layer, so who owns which block is worked out once a step and not once a layer. As in
`PagedKVCache`, that is kept on the host, and no call reads the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pagedkv.block_pool import Append, BlockPool, KVCacheFull
from pagedkv.kv_planes import KVPlanes
from pagedkv.ops import checks
from pagedkv.quant_spec import KVQuantSpec

_NO_BLOCK = -1  # fills a row of a block table past its sequence; never read


class ModelKVCache:
    """K and V of many sequences, in every layer of a model.

    Args:
        num_layers: layers of one shape; `num_kv_heads`, `head_dim`, `block_size`, `spec`, `dtype` and `device` as in `PagedKVCache`.
        num_blocks: blocks of each layer. None: as many as it takes; the pool grows by half when it is full, which copies it.
        evict_by_layer: each layer has tables of its own, so that another choice of blocks can be evicted in each. Bookkeeping then costs
            as many times as much as there are layers.

    A sequence is an int that `allocate` or `fork` returns. Tokens are added in steps:

        step = cache.begin(seqs, counts)
        for layer in range(num_layers):
            step.write(layer, key, value)
            out = step.attend(layer, q)
        step.commit()

    A step that is not committed leaves tables, lengths and K means as they were. One step at a time, one thread at a time.
    """

    def __init__(
        self,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_blocks: int | None = None,
        spec: KVQuantSpec | str = "block_head",
        dtype: torch.dtype | None = None,
        device: torch.device | str | int = "cpu",
        evict_by_layer: bool = False,
    ):
        self._grows = num_blocks is None
        num_blocks = 1 if num_blocks is None else num_blocks
        self.planes = [KVPlanes(num_blocks, block_size, num_kv_heads, head_dim, spec, dtype, device) for _ in range(num_layers)]
        self.pools = [BlockPool(num_blocks, block_size) for _ in range(num_layers if evict_by_layer else 1)]
        self.block_size, self.evict_by_layer = block_size, evict_by_layer
        self.spec, self.device, self.dtype = self.planes[0].spec, self.planes[0].device, self.planes[0].dtype
        self._k_means: list[dict[int, Tensor]] = [{} for _ in range(num_layers)]  # by layer and sequence, float32 [num_kv_heads, head_dim]

    def allocate(self) -> int:
        """A new, empty sequence. Where the spec takes a mean out of K, it is that of the tokens of its first step."""
        (seq,) = {pool.allocate(0) for pool in self.pools}  # every pool sees the same calls, so it gives the same number
        return seq

    def fork(self, seq: int) -> int:
        """A new sequence with the tokens of `seq`, whose blocks they share until one of them writes."""
        (child,) = {pool.fork(seq) for pool in self.pools}
        for means in self._k_means:
            if seq in means:
                means[child] = means[seq]
        return child

    def free(self, seq: int) -> None:
        for pool in self.pools:
            pool.free(seq)
        for means in self._k_means:
            means.pop(seq, None)

    def evict(self, seq: int, logical_blocks: Iterable[int], layer: int | None = None) -> None:
        """Drop full blocks of a sequence; later ones move up. `layer`: in that layer alone, given exactly with `evict_by_layer`."""
        if (layer is not None) != self.evict_by_layer:
            raise ValueError(f"layer: expected {'a layer' if self.evict_by_layer else 'None, tables are shared'}, got {layer}")
        self.pools[layer or 0].evict(seq, logical_blocks)

    def length(self, seq: int, layer: int = 0) -> int:
        """Tokens that a sequence holds in a layer."""
        return self.pool(layer).find(seq).length

    def tables(self, seqs: Sequence[int], layer: int = 0) -> tuple[Tensor, Tensor]:
        """int32 block tables `[num_seqs, max_blocks]` in a layer, -1 past each sequence's end, and lengths `[num_seqs]`."""
        held = [self.pool(layer).find(seq) for seq in seqs]
        return _table([sequence.blocks for sequence in held], self.device), torch.tensor(
            [sequence.length for sequence in held], dtype=torch.int32, device=self.device
        )

    def pool(self, layer: int) -> BlockPool:
        return self.pools[layer if self.evict_by_layer else 0]

    @property
    def sequences(self) -> list[int]:
        return self.pools[0].sequences

    @property
    def nbytes(self) -> int:
        """Bytes of the pools on the device, whether in use or not."""
        return sum(tensor.nbytes for planes in self.planes for tensor in planes.tensors().values())

    def bytes_in_use(self) -> int:
        """Bytes of the blocks that some sequence holds."""
        per_block = [sum(t.nbytes for t in planes.tensors().values()) // self.pool(i).num_blocks for i, planes in enumerate(self.planes)]
        return sum(n * (self.pool(i).num_blocks - self.pool(i).num_free_blocks) for i, n in enumerate(per_block))

    def begin(self, seqs: Sequence[int], counts: Sequence[int]) -> Step:
        """Make room for `counts[i]` more tokens of `seqs[i]`, which are distinct.

        Raises:
            KVCacheFull: not enough blocks, and `num_blocks` was given. Nothing has changed then.
        """
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"seqs: expected distinct sequences, got {list(seqs)}")
        wanted = dict(zip(seqs, counts, strict=True))
        return Step(self, [self._plan(i, wanted) for i in range(len(self.pools))], wanted)

    def _plan(self, index: int, wanted: dict[int, int]) -> Append:
        pool = self.pools[index]
        layers = self.planes[index : index + 1] if self.evict_by_layer else self.planes
        try:
            plan = pool.plan_append(wanted)
        except KVCacheFull as full:
            if not self._grows:
                raise
            more = max(full.needed - full.free, pool.num_blocks // 2)
            for planes in layers:
                planes.grow(more)
            pool.grow(more)
            plan = pool.plan_append(wanted)
        if plan.copies:
            source, target = (torch.tensor(blocks, device=self.device) for blocks in zip(*plan.copies, strict=True))
            for planes in layers:
                planes.copy_blocks(source, target)
        return plan


class Step:
    """Tokens that join their sequences, the same in every layer. `ModelKVCache.begin` makes one.

    The step's tokens are in the order of its sequences, all of the first, then all of the second.
    """

    def __init__(self, cache: ModelKVCache, plans: list[Append], counts: dict[int, int]):
        self.cache, self.seqs, self._plans = cache, list(counts), plans
        self._tokens_each = list(counts.values())
        rows = [row for row, count in enumerate(self._tokens_each) for _ in range(count)]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=cache.device)  # of each token: which of the step's sequences it belongs to
        self._slots = [self._slots_of(plan) for plan in plans]
        self._reads: list[tuple[Tensor, Tensor] | None] = [None] * len(plans)
        self._new_means: list[dict[int, Tensor]] = [{} for _ in cache.planes]  # of sequences whose first tokens these are

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """`key, value`: floating `[num_tokens, num_kv_heads, head_dim]`. No gradient goes through the cache."""
        checks.tensors(key=key, value=value)
        key, value = key.detach(), value.detach()
        table = layer if self.cache.evict_by_layer else 0
        self.cache.planes[layer].write(key, value, self._slots[table], self._means(layer, key))

    def attend(
        self, layer: int, q: Tensor, sm_scale: float | None = None, *, last: int | None = None, **options
    ) -> Tensor | tuple[Tensor, ...]:
        """Causal attention of the step's tokens: each over what its sequence holds, up to itself. After `write`.

        Args:
            q: floating `[num_tokens, num_heads, head_dim]`, one query for each token.
            last: `q` holds the last so many tokens of each sequence only (all, where it has fewer).
            options: those of `pagedkv.quant_paged_attention`.

        Returns:
            As there, a row for each query.
        """
        table = layer if self.cache.evict_by_layer else 0
        if self._reads[table] is None:
            self._reads[table] = self._reads_of(self._plans[table])
        tables, lengths = self._reads[table]
        rows = self.rows
        if last is not None:
            chosen = self.last(last)
            tables, lengths, rows = tables[chosen], lengths[chosen], rows[chosen]
        means = None
        if self.cache.spec.subtract_k_mean:
            means = self._means_of(layer)[rows]
        sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        return self.cache.planes[layer].attend(q, tables, lengths, sm_scale, means, **options)

    def width(self, layer: int) -> int:
        """Columns of the block tables in a layer, and of the `block_mass` that `attend` returns."""
        plan = self._plans[layer if self.cache.evict_by_layer else 0]
        return max([1, *(len(sequence.blocks) for sequence in plan.sequences.values())])

    def last(self, count: int) -> Tensor:
        """Which of the step's tokens are among the last `count` of their sequences, int64."""
        chosen, start = [], 0
        for tokens in self._tokens_each:
            chosen += range(start + max(0, tokens - count), start + tokens)
            start += tokens
        return torch.tensor(chosen, dtype=torch.int64, device=self.cache.device)

    def commit(self) -> None:
        """From now on the tokens count as held."""
        for pool, plan in zip(self.cache.pools, self._plans, strict=True):
            pool.commit(plan)
        for means, new in zip(self.cache._k_means, self._new_means, strict=True):
            means.update(new)

    def _slots_of(self, plan: Append) -> Tensor:
        size, slots = self.cache.block_size, []
        for seq, count in zip(self.seqs, self._tokens_each, strict=True):
            blocks, end = plan.sequences[seq].blocks, plan.sequences[seq].length
            slots += [blocks[at // size] * size + at % size for at in range(end - count, end)]
        return torch.tensor(slots, dtype=torch.int64, device=self.cache.device)

    def _reads_of(self, plan: Append) -> tuple[Tensor, Tensor]:
        """The block table and the length of each token's own attention."""
        tables = _table([plan.sequences[seq].blocks for seq in self.seqs], self.cache.device)  # no block is held before it is written
        lengths = [
            plan.sequences[seq].length - count + 1 + i
            for seq, count in zip(self.seqs, self._tokens_each, strict=True)
            for i in range(count)
        ]
        one_each = len(lengths) == len(self.seqs) and all(count == 1 for count in self._tokens_each)
        return tables if one_each else tables[self.rows], torch.tensor(lengths, dtype=torch.int32, device=self.cache.device)

    def _means(self, layer: int, key: Tensor) -> Tensor | None:
        """What is taken out of the K of each token; made here for a sequence that has none yet."""
        if not self.cache.spec.subtract_k_mean:
            return None
        for seq, tokens in zip(self.seqs, key.split(self._tokens_each), strict=True):
            if len(tokens) and seq not in self.cache._k_means[layer]:
                self._new_means[layer][seq] = tokens.float().mean(0)
        return self._means_of(layer)[self.rows]

    def _means_of(self, layer: int) -> Tensor:
        means, planes = self.cache._k_means[layer] | self._new_means[layer], self.cache.planes[layer]
        nothing = torch.zeros(planes.tensors()["k_cache"].shape[2:], device=self.cache.device)
        return torch.stack([means.get(seq, nothing) for seq in self.seqs])


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max([1, *map(len, rows)])
    return torch.tensor([[*row, *[_NO_BLOCK] * (width - len(row))] for row in rows], dtype=torch.int32, device=device)
