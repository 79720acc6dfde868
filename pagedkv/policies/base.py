"""What a policy is, what it may look at, and the registry of all of them."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pagedkv.ops import checks
from pagedkv.ops.sequence_eviction import MASS_UNIT
from pagedkv.ops.statistics import token_moments
from pagedkv.quant_spec import KVQuantSpec

REGISTRY: dict[str, type[Policy]] = {}


@dataclasses.dataclass(frozen=True)
class Observation:
    """What is known of some sequences when their blocks are scored. All tensors live on one device.

    Args:
        block_tables: int32 `[num_seqs, max_blocks]`.
        seq_lens: int32 `[num_seqs]`, tokens.
        block_size: tokens of a block.
        k_cache, v_cache: as attention takes them, `[num_blocks, block_size, num_kv_heads, head_dim]`.
        k_scale, v_scale: of an int8 cache.
        spec: how K and V are encoded. What it rotates keeps its norms and angles, not its channels; a K without its mean keeps what
            differs between tokens, channel by channel. None: neither is done.
        block_mass: float32 `[num_seqs, max_blocks]`, what the last query attended to: see `quant_paged_attention`.
        total_mass: float32 `[num_seqs, max_blocks]`, what all queries attended to: see `mass_at_places`.
    """

    block_tables: Tensor
    seq_lens: Tensor
    block_size: int
    k_cache: Tensor | None = None
    k_scale: Tensor | None = None
    v_cache: Tensor | None = None
    v_scale: Tensor | None = None
    spec: KVQuantSpec | None = None
    block_mass: Tensor | None = None
    total_mass: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """int64 `[max_blocks]`: 0, 1, ..., the columns of the tables."""
        return torch.arange(self.block_tables.shape[1], device=self.block_tables.device)

    @property
    def num_blocks(self) -> Tensor:
        """int32 `[num_seqs, 1]`: blocks that each sequence holds."""
        return (self.seq_lens[:, None] + self.block_size - 1) // self.block_size

    @property
    def num_tokens(self) -> Tensor:
        """`[num_seqs, max_blocks]`: tokens at each place; 0 past the end."""
        return (self.seq_lens[:, None] - self.places * self.block_size).clamp(0, self.block_size)

    def mean(self, x: Tensor) -> Tensor:
        """`[num_seqs, max_blocks, block_size, num_kv_heads]` averaged over heads and the tokens there are: `[num_seqs, max_blocks]`."""
        held = torch.arange(self.block_size, device=x.device) < self.num_tokens[..., None]
        total = torch.where(held, x.mean(-1), 0.0).sum(-1)
        return total / self.num_tokens.clamp(min=1)

    def norms(self, which: str) -> Tensor:
        """L2 norm of each head of each token, which is "k" or "v": float32 `[num_seqs, max_blocks, block_size, num_kv_heads]`."""
        cache, scale = getattr(self, f"{which}_cache"), getattr(self, f"{which}_scale")
        return token_moments(cache, scale, self.block_tables, self.seq_lens)[1].sqrt()

    def sequences(self) -> Iterator[Sequence]:
        """Each sequence by itself, in NumPy float64, for `Policy.reference`."""
        from pagedkv.reference.statistics import paged_tokens

        def tokens(cache, scale):
            return [None] * len(self.seq_lens) if cache is None else paged_tokens(cache, scale, self.block_tables, self.seq_lens)

        k, v = tokens(self.k_cache, self.k_scale), tokens(self.v_cache, self.v_scale)
        for s, (k_s, v_s) in enumerate(zip(k, v, strict=True)):
            masses = [
                None if m is None else m[s, : int(self.num_blocks[s])].double().cpu().numpy() for m in (self.block_mass, self.total_mass)
            ]
            yield Sequence(int(self.seq_lens[s]), self.block_size, k_s, v_s, *masses)


def mass_at_places(total: Tensor, block_tables: Tensor) -> Tensor:
    """The pool's int64 `[num_blocks]` statistic (see `accumulate_block_mass`) at each place: float32 `[num_seqs, max_blocks]`.

    Past the end of a sequence: anything.
    """
    if len(total) == 0:
        return torch.zeros(block_tables.shape, device=block_tables.device)
    return (total[block_tables.clamp(0, len(total) - 1).long()].double() * MASS_UNIT).float()


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One sequence as arrays: `k, v` float64 `[length, num_kv_heads, head_dim]`, `block_mass, total_mass` float64 `[num_blocks]`."""

    length: int
    block_size: int
    k: np.ndarray | None = None
    v: np.ndarray | None = None
    block_mass: np.ndarray | None = None
    total_mass: np.ndarray | None = None

    @property
    def num_blocks(self) -> int:
        return -(-self.length // self.block_size)

    @functools.cached_property
    def num_tokens(self) -> np.ndarray:
        """`[num_blocks]`: tokens of each block."""
        return np.minimum(self.block_size, self.length - self.block_size * np.arange(self.num_blocks))

    def mean(self, of_tokens: np.ndarray) -> np.ndarray:
        """Averages `[length]` or `[length, num_kv_heads]` over heads and the tokens of each block: `[num_blocks]`."""
        of_tokens = of_tokens.reshape(self.length, -1).mean(1)
        return np.array([of_tokens[j * self.block_size :][: self.block_size].mean() for j in range(self.num_blocks)])


class Policy(abc.ABC):
    """A rule. Call it with an `Observation` to get the scores: higher is worth more, and the lowest goes first.

    Subclasses are frozen dataclasses whose fields are the rule's parameters. They write `score` and `reference` and nothing else, and
    read nothing on the host, so that a CUDA graph can hold them.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # fields of the observation without which there is no score
    blind_to: ClassVar[tuple[str, ...]] = ("rotate",)  # fields of a `KVQuantSpec` that change nothing of what it sees in K and V
    least: ClassVar[dict[str, int]] = {}  # that a parameter may be, where it is not 0
    tolerance: ClassVar[float] = 1e-5  # of `score` in float32 against `reference`, relative to the largest score

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        if REGISTRY.setdefault(cls.name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"name: expected one that no policy has, got {cls.name!r}")
        REGISTRY[cls.name] = cls

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int"):
                checks.integer(field.name, value)
                least = self.least.get(field.name, 0)
                if value < least:
                    raise ValueError(f"{field.name}: expected at least {least} with policy {self.name!r}, got {value}")

    def __call__(self, seen: Observation) -> Tensor:
        """float32 `[num_seqs, max_blocks]`; what stands past the end of a sequence has no meaning.

        Raises:
            ValueError: the observation lacks what the rule needs, has a mass for other places than those of its tables, or is of a cache
                whose spec changes what the rule sees.
        """
        missing = [name for name in self.needs if getattr(seen, name) is None]
        if missing:
            raise ValueError(f"seen: expected an observation with {' and '.join(missing)} for {self.name!r}")
        if seen.spec is not None:
            self.check_spec(seen.spec)
        for name in ("block_mass", "total_mass"):
            if (mass := getattr(seen, name)) is not None and mass.shape != seen.block_tables.shape:
                raise ValueError(f"{name}: expected shape {list(seen.block_tables.shape)}, as of block_tables, got {list(mass.shape)}")
        return self.score(seen)

    def obstacle(self, spec: KVQuantSpec) -> str | None:
        """The field of a spec because of which the rule would see another K or V than it is about; None: there is none."""
        touched = {"rotate": {"k_cache", "v_cache"}, "subtract_k_mean": {"k_cache"}}
        seen = (name for name, caches in touched.items() if getattr(spec, name) and name not in self.blind_to and caches & set(self.needs))
        return next(seen, None)

    def check_spec(self, spec: KVQuantSpec) -> None:
        """Raises `ValueError` where there is an `obstacle`."""
        if (name := self.obstacle(spec)) is not None:
            raise ValueError(f"spec: expected one without {name} for policy {self.name!r}, which would see it in the cache, got {spec}")

    @abc.abstractmethod
    def score(self, seen: Observation) -> Tensor:
        """The rule in PyTorch and this library's ops."""

    @abc.abstractmethod
    def reference(self, sequence: Sequence) -> np.ndarray:
        """The rule in NumPy, for the blocks of one sequence that is not empty: float64 `[num_blocks]`."""


def policy(name: str | Policy, **parameters) -> Policy:
    """The policy of a name, or a policy itself, with the given parameters.

    Raises:
        TypeError, ValueError: no policy has that name; a parameter is none of its, or out of range.
    """
    if isinstance(name, Policy):
        return dataclasses.replace(name, **parameters) if parameters else name
    if not isinstance(name, str):
        raise TypeError(f"policy: expected a name or a Policy, got {type(name).__name__}")
    if name not in REGISTRY:
        raise ValueError(f"policy: expected one of {', '.join(sorted(REGISTRY))}, got {name!r}")
    return REGISTRY[name](**parameters)
