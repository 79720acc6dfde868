"""Rules that say which KV blocks are worth keeping. One file each; a rule is a class with a `score()`.

A policy looks at an `Observation` (the tables, what blocks were attended to, the cache itself) and returns a score for each place of
each sequence's block table, float32 `[num_seqs, max_blocks]`; `pagedkv.select_per_sequence` lets the lowest go:

    seen = Observation(block_tables, seq_lens, block_size, block_mass=mass)
    scores = policy("last_query_attention")(seen)
    block_tables, seq_lens, freed, num_freed = select_per_sequence(scores, block_tables, seq_lens, budget, block_size=block_size)

To add one, add a file to this folder with a frozen dataclass that derives from `Policy`: a `name`, what it `needs`, `score()`, and
`reference()`, the same rule in NumPy for one sequence. The registry and the tests find it by themselves. Say, the rule that an older
block is worth less the more tokens came since:

    @dataclasses.dataclass(frozen=True)
    class Age(Policy):
        \"\"\"Recency alone: `score = place`.\"\"\"

        name = "age"

        def score(self, seen):
            return seen.places.expand(seen.block_tables.shape).float()

        def reference(self, sequence):
            return np.arange(sequence.num_blocks, dtype=float)
"""

import importlib
import pkgutil

from pagedkv.policies.base import REGISTRY, Observation, Policy, Sequence, mass_at_places, policy

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY", "Observation", "Policy", "Sequence", "mass_at_places", "policy"]
