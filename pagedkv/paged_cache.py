"""The cache that a user holds: blocks of K and V of one layer, who owns them, and how they are encoded.

What belongs to whom is kept on the host, in plain Python ints (`pagedkv.block_pool`); the device holds the data and the scales.
So no call reads the device, and each is right however far the device lags behind; but bookkeeping is host work, and is not
part of a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pagedkv.block_pool import Append, BlockPool, KVCacheFull
from pagedkv.kv_planes import KVPlanes
from pagedkv.ops import checks
from pagedkv.ops.sequence_eviction import select_per_sequence
from pagedkv.policies.base import Observation
from pagedkv.quant_spec import KVQuantSpec

__all__ = ["KVCacheFull", "PagedKVCache"]

_STATE_VERSION = 1
_STATE_FORM = {  # as `_check_form` reads it; the planes are each cache's own
    "k_means": {int: Tensor},
    "sequences": {int: {"blocks": [int], "length": int}},
    "free": [int],
    "next_sequence": int,
}
_MOST_SEQUENCES = 1 << 62  # ids are given out one after another, and have to stay 64-bit ints
_NO_BLOCK = -1  # fills a row of block_tables past its sequence; never read


class PagedKVCache:
    """K and V of many sequences, in blocks of one pool.

    Args:
        num_blocks, block_size, num_kv_heads, head_dim: the pool, `[num_blocks, block_size, num_kv_heads, head_dim]` each for K and V;
            `block_size` 1 to 256, `head_dim` a multiple of 8 up to 256.
        spec: a `KVQuantSpec` or a name in `pagedkv.quant_spec.KV_SPECS`.
        dtype: of an unquantised cache: float16 (the default), bfloat16 or float32. None with a spec that quantises.
        device: cpu or a CUDA device.

    A sequence is an int that `allocate` or `fork` returns; it is not used again after `free`. Wherever several are taken, any
    iterable of them is; NumPy's integers pass for ints. A block may belong to several sequences after `fork`; it is written only by
    one that holds it alone. One thread at a time.

    Positions are the caller's: the cache stores K as given (say, after RoPE), and attention over it knows no order but that of a
    sliding window. After `evict` the tokens that remain keep the K they were written with, while their places in the table move up.

    Raises:
        TypeError, ValueError: in every method, an argument that names no sequence or has another type, dtype, shape or device than
            asked for. Nothing has changed then.
        RuntimeError: in the constructor, a CUDA device that this machine lacks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        spec: KVQuantSpec | str = "block_head",
        dtype: torch.dtype | None = None,
        device: torch.device | str | int = "cpu",
    ):
        device = torch.device(device)
        checks.present(device)
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        num_blocks, block_size, num_kv_heads, head_dim = (checks.integer(name, size) for name, size in sizes.items())
        self._planes = KVPlanes(num_blocks, block_size, num_kv_heads, head_dim, spec, dtype, device)
        self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim = num_blocks, block_size, num_kv_heads, head_dim
        self.spec, self.device, self.dtype = self._planes.spec, self._planes.device, self._planes.dtype
        self._pool = BlockPool(num_blocks, block_size)
        self._k_means: dict[int, Tensor] = {}  # of each sequence, float32 [num_kv_heads, head_dim]; empty if none is subtracted

    # ------------------------------------------------------------------------------------------------------------------- owning

    def allocate(self, num_tokens: int = 0, *, k_mean: Tensor | None = None) -> int:
        """A new, empty sequence.

        Args:
            num_tokens: reserve blocks for so many, so that appending them cannot find the cache full (after `fork`, the copy of a last
                block that is shared may).
            k_mean: floating `[num_kv_heads, head_dim]`, what the spec takes out of this sequence's K (the mean over its prompt, say;
                zeros take out nothing). Given exactly where the spec subtracts one. Copied.

        Raises:
            KVCacheFull: not enough blocks.
        """
        k_mean = self._checked_k_mean(k_mean)
        seq = self._pool.allocate(num_tokens)
        if k_mean is not None:
            self._k_means[seq] = k_mean
        return seq

    def fork(self, seq: int) -> int:
        """A new sequence with the tokens of `seq`, whose blocks they share. Costs no block until one of them appends.

        Blocks reserved for `seq` and not yet written stay its own.
        """
        seq = checks.integer("seq", seq)
        child = self._pool.fork(seq)
        if self.spec.subtract_k_mean:
            self._k_means[child] = self._k_means[seq]
        return child

    def free(self, seq: int) -> None:
        """Give up a sequence: the blocks that no other holds are free again."""
        seq = checks.integer("seq", seq)
        self._pool.free(seq)
        self._k_means.pop(seq, None)

    def evict(self, seq: int, logical_blocks: Iterable[int]) -> None:
        """Drop full blocks of a sequence; the later ones move up in its table, and its length shrinks by what they held.

        No data moves. A last block that is not full cannot go, because a table has no room for a gap: `free` the sequence. Other
        sequences that share a block keep it.

        Args:
            logical_blocks: distinct places in the sequence's row of `block_tables` (as in the columns of `block_mass`).
        """
        self._pool.evict(checks.integer("seq", seq), _integers("logical_blocks", logical_blocks))

    def evict_to_budget(
        self, seqs: Iterable[int], scores: Tensor, budget: int, protect_first: int = 1, protect_last: int = 1
    ) -> dict[int, list[int]]:
        """Bring sequences within a budget of blocks: `select_per_sequence`, carried out. Reads the device, once.

        Args:
            seqs: distinct sequences.
            scores: float32, of each place of `block_tables(seqs)` (a policy's, say), or of each block of the pool.
            budget, protect_first, protect_last: blocks; see `select_per_sequence`.

        Returns:
            For each sequence the logical blocks that went, ascending.
        """
        seqs = _integers("seqs", seqs)
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"seqs: expected distinct sequences, got {seqs}")
        tables, lengths = self.block_tables(seqs), self.seq_lens(seqs)
        checks.tensors(scores=scores)
        if scores.dim() == 1:  # of the pool: the op reads no further than the tables say, and takes a longer or shorter one
            checks.tensor("scores", scores, (torch.float32,), (self.num_blocks,), self.device)
        kept, *_ = select_per_sequence(scores, tables, lengths, budget, protect_first, protect_last, block_size=self.block_size)
        gone = {}
        for seq, row in zip(seqs, kept.tolist(), strict=True):
            left = set(row)
            gone[seq] = [place for place, block in enumerate(self._pool.written(seq)) if block not in left]
            self._pool.evict(seq, gone[seq])
        return gone

    # ------------------------------------------------------------------------------------------------------------------ writing

    def append(self, seqs: int | Iterable[int], key: Tensor, value: Tensor) -> None:
        """Write tokens at the ends of their sequences.

        A block that is about to be written and is shared is copied first, data and scales, and the copy takes its place.

        Args:
            seqs: the sequence of each token, in order, one or more tokens of one or more sequences in any mixture; or one int, for all.
            key, value: float16, bfloat16 or float32 `[num_tokens, num_kv_heads, head_dim]`, of one dtype.

        Raises:
            KVCacheFull: not enough blocks.
        """
        checks.tensors(key=key, value=value)
        checks.tensor("key", key, checks.FLOATS, ("num_tokens", self.num_kv_heads, self.head_dim), self.device)
        checks.tensor("value", value, (key.dtype,), key.shape, self.device)
        is_one = isinstance(seqs, numbers.Integral)
        named = _integers("seqs", [seqs] if is_one else seqs)
        owners = named * len(key) if is_one else named
        if len(owners) != len(key):
            raise ValueError(f"seqs: expected one for each of the {len(key)} tokens, got {len(owners)}")
        for seq in set(named):
            self._pool.find(seq)
        if not owners:
            return
        plan = self._pool.plan_append(Counter(owners))
        if plan.copies:
            self._planes.copy_blocks(*(torch.tensor(blocks, device=self.device) for blocks in zip(*plan.copies, strict=True)))
        self._write(key.detach(), value.detach(), owners, plan)
        self._pool.commit(plan)  # last, and cannot fail: a write that raised (out of memory, say) leaves tables and lengths as they were

    def _write(self, key: Tensor, value: Tensor, owners: list[int], plan: Append) -> None:
        positions = {seq: itertools.count(self._pool.find(seq).length) for seq in plan.sequences}
        slots = []
        for seq in owners:
            place, offset = divmod(next(positions[seq]), self.block_size)
            slots.append(plan.sequences[seq].blocks[place] * self.block_size + offset)
        slots = torch.tensor(slots, dtype=torch.int64, device=self.device)

        self._planes.write(key, value, slots, self._means(owners))

    # ------------------------------------------------------------------------------------------------------------------ reading

    def decode(
        self,
        q: Tensor,
        seqs: Iterable[int],
        sm_scale: float | None = None,
        *,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        return_block_mass: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Attention of one query token per sequence, as `pagedkv.quant_paged_attention` over the tokens that were appended.

        Args:
            q: float16, bfloat16 or float32 `[num_seqs, num_heads, head_dim]`, `num_heads` a multiple of `num_kv_heads`.
            seqs: the sequence of each row; one may come more than once.
            sm_scale: default `head_dim ** -0.5`.

        Other arguments and what is returned as there; `block_mass` has the columns of `block_tables(seqs)`. A sliding window counts
        the tokens that are left after `evict`. A soft cap is refused where the spec subtracts a K mean.
        """
        checks.tensors(q=q)
        seqs = _integers("seqs", seqs)
        checks.tensor("q", q, checks.FLOATS, (len(seqs), "num_heads", self.head_dim), self.device)
        return self._planes.attend(
            q,
            self.block_tables(seqs),
            self.seq_lens(seqs),
            self.head_dim**-0.5 if sm_scale is None else sm_scale,
            self._means(seqs),
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            return_lse=return_lse,
            return_block_mass=return_block_mass,
        )

    def observe(self, seqs: Iterable[int], *, block_mass: Tensor | None = None, total_mass: Tensor | None = None) -> Observation:
        """What a policy may look at: the sequences' tables, the blocks as they are encoded, and the masses given (see `Observation`)."""
        seqs = _integers("seqs", seqs)
        return Observation(
            self.block_tables(seqs),
            self.seq_lens(seqs),
            self.block_size,
            **self._planes.tensors(),
            spec=self.spec,
            block_mass=block_mass,
            total_mass=total_mass,
        )

    def block_tables(self, seqs: Iterable[int]) -> Tensor:
        """int32 `[num_seqs, max_blocks]` on the cache's device: the blocks that hold tokens, in order, then -1. At least one column."""
        rows = [self._pool.written(seq) for seq in _integers("seqs", seqs)]
        width = max([1, *map(len, rows)])
        rows = [[*row, *[_NO_BLOCK] * (width - len(row))] for row in rows]
        return torch.tensor(rows, dtype=torch.int32, device=self.device).view(len(rows), width)

    def seq_lens(self, seqs: Iterable[int]) -> Tensor:
        """int32 `[num_seqs]` on the cache's device: tokens that each sequence holds."""
        lengths = [self._pool.find(seq).length for seq in _integers("seqs", seqs)]
        return torch.tensor(lengths, dtype=torch.int32, device=self.device)

    @property
    def sequences(self) -> list[int]:
        """Every sequence that is allocated, oldest first."""
        return self._pool.sequences

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the pool on the device: K, V and their scales, whether in use or not. K means are not counted."""
        return sum(plane.nbytes for plane in self._planes.tensors().values())

    # ------------------------------------------------------------------------------------------------------------------- saving

    def state_dict(self) -> dict:
        """All there is to the cache: tensors, ints and strings in dicts and lists, fit for `torch.save` and a `weights_only` load.

        The tensors are the cache's own, as in `torch.nn.Module.state_dict`; the bookkeeping is a copy.
        """
        return {
            "version": _STATE_VERSION,
            **self._description(),
            "planes": self._planes.tensors(),
            "k_means": dict(self._k_means),
            **self._pool.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Become what `state_dict` described; the data are copied, from any device.

        Raises:
            ValueError: it is no such dict, is of a cache of another shape, spec or dtype, or loses or doubles a block. Nothing has
                changed then.
        """
        _check_form("state", state, {})
        wanted = {"version": _STATE_VERSION, **self._description()}
        for name, value in wanted.items():
            if state.get(name) != value:
                raise ValueError(f"state[{name!r}]: expected {value!r}, got {state.get(name)!r}")
        planes = self._planes.tensors()
        _check_form("state", state, {"planes": dict.fromkeys(planes, Tensor), **_STATE_FORM})
        for name, tensor in (state["planes"] | state["k_means"]).items():
            dtype = planes[name].dtype if name in planes else torch.float32
            if tensor.dtype != dtype:
                raise ValueError(f"state, {name!r}: expected dtype {dtype}, got {tensor.dtype}")
            if tensor.is_meta:
                raise ValueError(f"state, {name!r}: expected data, got a tensor on the meta device")
        for name, plane in planes.items():
            checks.tensor(f"state['planes'][{name!r}]", state["planes"][name], (plane.dtype,), plane.shape)
        if not 0 <= state["next_sequence"] < _MOST_SEQUENCES:
            raise ValueError(f"state['next_sequence']: expected 0 to {_MOST_SEQUENCES - 1}, got {state['next_sequence']}")
        pool = BlockPool.from_state_dict(self.num_blocks, self.block_size, state)
        k_means = {seq: self._checked_k_mean(k_mean.to(self.device)) for seq, k_mean in state["k_means"].items()}
        if sorted(k_means) != (sorted(pool.sequences) if self.spec.subtract_k_mean else []):
            raise ValueError(
                f"state['k_means']: expected one for {'each' if self.spec.subtract_k_mean else 'no'} sequence, got {list(k_means)}"
            )
        for name, plane in planes.items():
            plane.copy_(state["planes"][name])
        self._pool, self._k_means = pool, k_means

    # ------------------------------------------------------------------------------------------------------------------- parts

    def _means(self, seqs: Sequence[int]) -> Tensor | None:
        """What is taken out of the K of each, float32 `[len(seqs), num_kv_heads, head_dim]`."""
        if not self.spec.subtract_k_mean:
            return None
        distinct = {seq: i for i, seq in enumerate(dict.fromkeys(seqs))}
        means = torch.stack(
            [torch.zeros((self.num_kv_heads, self.head_dim), device=self.device), *(self._k_means[seq] for seq in distinct)]
        )
        return means[torch.tensor([1 + distinct[seq] for seq in seqs], dtype=torch.int64, device=self.device)]

    def _description(self) -> dict:
        shape = [self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim]
        return {"spec": dataclasses.asdict(self.spec), "dtype": str(self.dtype), "shape": shape}

    def _checked_k_mean(self, k_mean: Tensor | None) -> Tensor | None:
        """A float32 copy, if it is what the spec asks for."""
        if (k_mean is not None) != self.spec.subtract_k_mean:
            wanted = "a tensor" if self.spec.subtract_k_mean else "None"
            raise ValueError(f"k_mean: expected {wanted} with {self.spec}, got {'None' if k_mean is None else type(k_mean).__name__}")
        if k_mean is None:
            return None
        checks.tensors(k_mean=k_mean)
        checks.tensor("k_mean", k_mean, checks.FLOATS, (self.num_kv_heads, self.head_dim), self.device)
        return k_mean.detach().to(torch.float32, copy=True)


def _integers(name: str, values: Iterable[int]) -> list[int]:
    try:
        values = iter(values)
    except TypeError:
        raise TypeError(f"{name}: expected several ints, got {type(values).__name__}") from None
    return [checks.integer(name, value) for value in values]


def _check_form(where: str, value: object, form: type | list | dict) -> None:
    """Raises `ValueError` that names the first place where `value` departs from `form`.

    Args:
        form: a type; `[form]`, a list of such; `{type: form}`, a dict of such keys; `{name: form}`, a dict that has these keys.
    """
    kind = form if isinstance(form, type) else type(form)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")
    if kind is list:
        for i, item in enumerate(value):
            _check_form(f"{where}[{i}]", item, form[0])
    if kind is dict:
        for name, inner in form.items():
            if isinstance(name, type):
                for key, item in value.items():
                    _check_form(f"{where}: its key {key!r}", key, name)
                    _check_form(f"{where}[{key!r}]", item, inner)
            elif name not in value:
                raise ValueError(f"{where}: it lacks {name!r}")
            else:
                _check_form(f"{where}[{name!r}]", value[name], inner)
