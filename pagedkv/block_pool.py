"""Who owns which block of a paged cache: tables, lengths, reference counts and the free list, in plain Python ints.

Nothing here touches a tensor, so no call waits for a device. Every change is planned, or checked, before it is made: what raises
has changed nothing. `PagedKVCache` is the user's door and says what each operation means.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping

from pagedkv.ops import checks


class KVCacheFull(RuntimeError):
    """A call needs more blocks than are free. It has changed nothing: free or evict, and call again."""

    def __init__(self, needed: int, free: int):
        super().__init__(f"the KV cache is full: {needed} more blocks are needed, {free} are free")
        self.needed, self.free = needed, free


@dataclasses.dataclass(frozen=True)
class SequenceBlocks:
    """`blocks` in the order of the tokens; those past `ceil(length / block_size)` are reserved and unwritten."""

    blocks: tuple[int, ...] = ()
    length: int = 0


@dataclasses.dataclass(frozen=True)
class Append:
    """How room is made for more tokens: the sequences as they will be, `(shared block, its copy)` pairs, and the blocks taken."""

    sequences: dict[int, SequenceBlocks]
    copies: list[tuple[int, int]]
    taken: list[int]


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. A sequence is an int, and none is given twice."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._sequences: dict[int, SequenceBlocks] = {}
        self._next_sequence = 0
        self._free = list(reversed(range(num_blocks)))  # a stack: what was freed last is likeliest to be in a hardware cache
        self._references = [0] * num_blocks

    @property
    def sequences(self) -> list[int]:
        return list(self._sequences)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks, numbered on from the last; those that are free already are taken first."""
        self._free = [*reversed(range(self.num_blocks, self.num_blocks + num_blocks)), *self._free]
        self._references += [0] * num_blocks
        self.num_blocks += num_blocks

    def find(self, seq: int) -> SequenceBlocks:
        checks.integer("seq", seq)
        if seq not in self._sequences:
            raise ValueError(f"seq: expected a sequence of this cache, got {seq} (freed, or never allocated)")
        return self._sequences[seq]

    def written(self, seq: int) -> tuple[int, ...]:
        """The blocks that hold tokens of a sequence."""
        sequence = self.find(seq)
        return sequence.blocks[: self._blocks_for(sequence.length)]

    def allocate(self, num_tokens: int) -> int:
        checks.integer("num_tokens", num_tokens)
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected at least 0, got {num_tokens}")
        taken = self._next_free(self._blocks_for(num_tokens))
        self._hold(taken)
        return self._add(SequenceBlocks(tuple(taken)))

    def fork(self, seq: int) -> int:
        shared = self.written(seq)
        for block in shared:
            self._references[block] += 1
        return self._add(SequenceBlocks(shared, self.find(seq).length))

    def free(self, seq: int) -> None:
        blocks = self.find(seq).blocks
        del self._sequences[seq]
        self._release(blocks)

    def evict(self, seq: int, logical_blocks: Iterable[int]) -> None:
        sequence, given = self.find(seq), list(logical_blocks)
        for block in given:
            checks.integer("logical_blocks", block)
        gone, full = set(given), sequence.length // self.block_size
        if len(gone) != len(given):
            raise ValueError(f"logical_blocks: expected distinct blocks, got {given}")
        for block in given:
            if not 0 <= block < full:
                raise ValueError(f"logical_blocks: expected full blocks of sequence {seq}, of which it has {full} (from 0), got {block}")
        left = tuple(block for i, block in enumerate(sequence.blocks) if i not in gone)
        self._sequences[seq] = SequenceBlocks(left, sequence.length - len(given) * self.block_size)
        self._release(sequence.blocks[i] for i in given)

    def plan_append(self, counts: Mapping[int, int]) -> Append:
        """Make room for `counts[seq]` more tokens of each sequence; nothing changes before `commit`.

        A block that would be written and that others hold too is replaced by a copy. The last of them to need one keeps the original.
        """
        leaving: Counter[int] = Counter()
        shared, grown = {}, {}
        for seq, count in counts.items():
            sequence = self.find(seq)
            grown[seq] = max(0, self._blocks_for(sequence.length + count) - len(sequence.blocks))
            if sequence.length % self.block_size:
                place = sequence.length // self.block_size
                block = sequence.blocks[place]
                if self._references[block] - leaving[block] > 1:
                    leaving[block] += 1
                    shared[seq] = place
        taken = self._next_free(sum(grown.values()) + len(shared))
        unused = iter(taken)
        sequences, copies = {}, []
        for seq, count in counts.items():
            blocks = [*self._sequences[seq].blocks, *itertools.islice(unused, grown[seq])]
            if seq in shared:
                copies.append((blocks[shared[seq]], next(unused)))
                blocks[shared[seq]] = copies[-1][1]
            sequences[seq] = SequenceBlocks(tuple(blocks), self._sequences[seq].length + count)
        return Append(sequences, copies, taken)

    def commit(self, append: Append) -> None:
        """Carry out what `plan_append` returned, if nothing else has changed since."""
        self._hold(append.taken)
        for block, _ in append.copies:
            self._references[block] -= 1
        self._sequences.update(append.sequences)

    def state_dict(self) -> dict:
        """Plain ints in lists and dicts."""
        return {
            "sequences": {seq: {"blocks": list(s.blocks), "length": s.length} for seq, s in self._sequences.items()},
            "free": list(self._free),
            "next_sequence": self._next_sequence,
        }

    @classmethod
    def from_state_dict(cls, num_blocks: int, block_size: int, state: dict) -> BlockPool:
        """The pool that `state_dict` described. `ValueError` if it loses or doubles a block, or cannot be right otherwise."""
        pool = cls(num_blocks, block_size)
        for seq, saved in state["sequences"].items():
            blocks, length = tuple(saved["blocks"]), saved["length"]
            where = f"state['sequences'][{seq}]"
            if not 0 <= seq < state["next_sequence"]:
                raise ValueError(f"{where}: expected an id from 0 to {state['next_sequence'] - 1}")
            if len(set(blocks)) != len(blocks) or not all(0 <= block < num_blocks for block in blocks):
                raise ValueError(f"{where}: expected distinct blocks from 0 to {num_blocks - 1}, got {list(blocks)}")
            if not 0 <= length <= len(blocks) * block_size:
                raise ValueError(f"{where}: {len(blocks)} blocks of {block_size} do not hold {length} tokens")
            for block in blocks:
                pool._references[block] += 1
            pool._sequences[seq] = SequenceBlocks(blocks, length)
        for seq, sequence in pool._sequences.items():
            for block in sequence.blocks[pool._blocks_for(sequence.length) :]:
                if pool._references[block] > 1:  # two would write it
                    raise ValueError(f"state['sequences'][{seq}]: expected its unwritten blocks to be its own, others hold {block} too")
        if sorted(state["free"]) != [block for block, count in enumerate(pool._references) if count == 0]:
            raise ValueError("state['free']: expected exactly the blocks that no sequence holds, each once")
        pool._free, pool._next_sequence = list(state["free"]), state["next_sequence"]
        return pool

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _add(self, sequence: SequenceBlocks) -> int:
        seq = self._next_sequence
        self._next_sequence += 1
        self._sequences[seq] = sequence
        return seq

    def _next_free(self, count: int) -> list[int]:
        if count > len(self._free):
            raise KVCacheFull(count, len(self._free))
        return self._free[len(self._free) - count :][::-1]

    def _hold(self, taken: list[int]) -> None:
        """Take blocks that `_next_free` named."""
        del self._free[len(self._free) - len(taken) :]
        for block in taken:
            self._references[block] = 1

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
