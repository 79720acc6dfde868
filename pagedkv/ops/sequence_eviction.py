"""Eviction for each sequence: what its blocks were attended to, and which of them go when it is over its budget."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.ops import checks, eager, registry

MASS_UNIT = 2.0**-36  # of what `accumulate_block_mass` counts in


def accumulate_block_mass(block_mass: Tensor, block_tables: Tensor, total: Tensor, decay: float = 1.0) -> None:
    """Add a decode call's softmax mass to the statistics of the pool, in place.

    `total[b] = decay * total[b] + sum of block_mass[s, j] over all places (s, j) that hold block b`: a running sum with decay 1, an
    exponential average below. A block that several sequences share gets the sum over them.

    Counted in integers, in units of `pagedkv.MASS_UNIT` (2^-36), so sums are exact, and equal to the last bit whatever order they
    were made in; 2^27 (134 million) steps of full mass fit. As floats: `total * MASS_UNIT`.

    Args:
        block_mass: float32 `[num_seqs, max_blocks]` of `quant_paged_attention`. A place with mass 0, or NaN (a sequence that could
            not be answered), adds nothing; what is above 1 counts as 1.
        block_tables: int32 `[num_seqs, max_blocks]` of the same call. A place with an id outside the pool adds nothing.
        total: int64 `[num_blocks]`, updated. When a block gets another owner, its entry is the caller's to reset.
        decay: 0 to 1; the product is rounded half to even.

    Raises:
        TypeError, ValueError: a type, dtype, shape, device or stride other than the above, or a decay out of range; with
            `PAGEDKV_CHECK=1` also an id outside the pool at a place that has mass.
    """
    checks.tensors(block_mass=block_mass, block_tables=block_tables, total=total)
    decay = checks.number("decay", decay)
    torch.ops.pagedkv.accumulate_block_mass(block_mass, block_tables, total, decay)


def select_per_sequence(
    scores: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    budget: int | Tensor,
    protect_first: int = 1,
    protect_last: int = 1,
    *,
    block_size: int,
    references: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bring each sequence within its budget of blocks: the lowest scores go, the rest move up in the table.

    No data moves. Scores compare as in `select_eviction_candidates` (NaN goes last); ties go from the lower place. Only full blocks
    go: a last one that is partly filled always stays. Where the protected blocks alone are over the budget, they stay.

    Args:
        scores: float32 `[num_blocks]`, one for each block of the pool, or `[num_seqs, max_blocks]`, one for each place of the tables.
        block_tables: int32 `[num_seqs, max_blocks]`. Entries past the last block of a sequence are not read.
        seq_lens: int32 `[num_seqs]`, tokens.
        budget: blocks that a sequence may keep, the partly filled one counted: an int, or int32 `[num_seqs]`.
        protect_first, protect_last: so many blocks at either end of each sequence never go: attention sinks and the recent past.
        block_size: tokens of a block, 1 to 256.
        references: int32 `[num_blocks]`, how many of the pool's sequences hold each block (also those that are not in this call);
            lowered in place. None: no block is shared.

    Returns:
        `(block_tables, seq_lens, freed, num_freed)`: int32 `[num_seqs, max_blocks]`, the blocks kept, in order, then -1;
        int32 `[num_seqs]`, shorter by `block_size` for each block that went; int32 `[num_seqs * max_blocks]`, blocks that no sequence
        holds any more, in the order of the places (sequence, then position) at which they were first let go, each once, then -1;
        int32 `[1]`, how many those are.
        A sequence whose length is negative or past its table comes back as it was. An id outside the pool has score NaN, and is
        never among `freed`.

    Raises:
        TypeError, ValueError: a type, dtype, shape, device or stride other than the above, or a number out of its range; with
            `PAGEDKV_CHECK=1` also a bad block id or length.
    """
    checks.tensors(scores=scores, block_tables=block_tables, seq_lens=seq_lens)
    budgets = budget if isinstance(budget, Tensor) else None
    budget = checks.integer("budget", budget) if budgets is None else 0
    protect_first = checks.integer("protect_first", protect_first)
    protect_last = checks.integer("protect_last", protect_last)
    block_size = checks.integer("block_size", block_size)
    if references is not None:
        checks.tensors(references=references)
    return torch.ops.pagedkv.select_per_sequence(
        scores, block_tables, seq_lens, budget, protect_first, protect_last, block_size=block_size, references=references, budgets=budgets
    )


def _fake_select(scores: Tensor, block_tables: Tensor, seq_lens: Tensor, *_) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        block_tables.new_empty(block_tables.shape),
        seq_lens.new_empty(seq_lens.shape),
        block_tables.new_empty((block_tables.shape[0] * block_tables.shape[1],)),
        block_tables.new_empty((1,)),
    )


registry.define(
    "accumulate_block_mass(Tensor block_mass, Tensor block_tables, Tensor(a!) total, float decay=1.0) -> ()",
    check=checks.accumulate_block_mass,
    check_values=checks.accumulate_block_mass_values,
    fake=lambda *_: None,
    eager=eager.accumulate_block_mass,
)
registry.define(
    "select_per_sequence(Tensor scores, Tensor block_tables, Tensor seq_lens, SymInt budget, SymInt protect_first=1,"
    " SymInt protect_last=1, *, SymInt block_size, Tensor(a!)? references=None, Tensor? budgets=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    check=checks.select_per_sequence,
    check_values=checks.select_per_sequence_values,
    fake=_fake_select,
    eager=eager.select_per_sequence,
)
