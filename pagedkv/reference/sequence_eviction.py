"""Eviction for each sequence, in plain Python: sums and selections are exact, so results equal the ops' to the last bit."""

from __future__ import annotations

import math

import numpy as np

from pagedkv.reference.arrays import exact


def accumulate_block_mass(block_mass, block_tables, total, decay=1.0):
    """See `pagedkv.accumulate_block_mass`. Returns the new `total`."""
    block_mass, block_tables, total = exact(block_mass), exact(block_tables), exact(total).copy()
    if decay != 1:
        total = np.rint(total.astype(np.float64) * decay).astype(np.int64)
    for masses, blocks in zip(block_mass, block_tables, strict=True):
        for mass, block in zip(masses, blocks, strict=True):
            if mass > 0 and 0 <= block < len(total):
                total[block] += int(np.rint(min(mass, 1.0) * 2**36))
    return total


def select_per_sequence(scores, block_tables, seq_lens, budget, protect_first=1, protect_last=1, *, block_size, references=None):
    """See `pagedkv.select_per_sequence`. Returns what it returns, and the new `references` (None where none were given)."""
    scores, block_tables, seq_lens = exact(scores), exact(block_tables), exact(seq_lens)
    references = None if references is None else exact(references).copy()
    pool = scores if scores.ndim == 1 else references
    num_blocks = 2**31 - 1 if pool is None else len(pool)
    num_seqs, max_blocks = block_tables.shape
    budgets = np.broadcast_to(exact(budget), (num_seqs,))
    tables, lens = block_tables.copy(), seq_lens.copy()

    let_go = []
    for s, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= max_blocks * block_size:
            continue
        blocks = block_tables[s, : -(-length // block_size)].tolist()

        def rank(j, s=s, blocks=blocks):
            known = scores.ndim == 2 or 0 <= blocks[j] < num_blocks
            score = scores[(s, j) if scores.ndim == 2 else blocks[j]] if known else math.nan
            return (math.isnan(score), 0 if math.isnan(score) else score, j)

        last = max(protect_last, int(length % block_size != 0))
        candidates = sorted(range(protect_first, len(blocks) - last), key=rank)
        goes = set(candidates[: max(0, len(blocks) - max(0, int(budgets[s])))])
        kept = [block for j, block in enumerate(blocks) if j not in goes]
        tables[s] = kept + [-1] * (max_blocks - len(kept))
        lens[s] = length - len(goes) * block_size
        let_go += [block for j, block in enumerate(blocks) if j in goes and 0 <= block < num_blocks]

    if references is not None:
        for block in let_go:
            references[block] -= 1
        let_go = [block for block in dict.fromkeys(let_go) if references[block] == 0]
    freed = np.full(num_seqs * max_blocks, -1, np.int32)
    freed[: len(let_go)] = let_go
    return tables, lens, freed, np.array([len(let_go)], np.int32), references
