"""The cache that a user holds: whatever is allocated, appended, forked, evicted and freed, each sequence decodes to its own tokens."""

import copy
import io
import math
import unittest.mock

import numpy as np
import pytest
import torch
from cases import same_bits
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import pagedkv
from pagedkv import KVCacheFull, KVQuantSpec, PagedKVCache
from pagedkv.ops.rotation import hadamard_transform
from pagedkv.quant_spec import KV_SPECS

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM = 10, 3, 2, 4, 8
QUANTISED = [name for name, spec in KV_SPECS.items() if spec.quantised]


def make(device="cpu", spec="block_head", **changes):
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM} | changes
    dtype = torch.float32 if spec in KV_SPECS and not KV_SPECS[spec].quantised else None
    return PagedKVCache(**{"dtype": dtype, **sizes}, spec=spec, device=device)


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def tokens(count, seed=0, device="cpu"):
    return tuple(uniform(count, KV_HEADS, HEAD_DIM, seed=2 * seed + i).to(device) for i in range(2))


def start(cache, count, seed=0, factor=1.0):
    """A sequence of `count` tokens."""
    seq = cache.allocate(k_mean=torch.zeros(KV_HEADS, HEAD_DIM, device=cache.device) if cache.spec.subtract_k_mean else None)
    cache.append(seq, *(x * factor for x in tokens(count, seed, cache.device)))
    return seq


def ask(cache, *seqs, **options):
    return cache.decode(uniform(1, HEADS, HEAD_DIM, seed=99).expand(len(seqs), -1, -1).to(cache.device), seqs, **options)


def dense(q, key, value, sm_scale, window=None, sinks=None):
    """`(out, lse, weights)` of one query `[heads, head_dim]` over tokens `[n, kv_heads, head_dim]`, in float64."""
    first = 0 if window is None else max(0, len(key) - window)
    k, v = (x[first:].double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    logits = torch.einsum("hd,thd->ht", q.double(), k) * sm_scale
    lse = torch.logsumexp(logits if sinks is None else torch.cat([logits, sinks.double()[:, None]], 1), 1)
    return torch.einsum("ht,thd->hd", torch.exp(logits - lse[:, None]), v), lse, logits.softmax(1)


def bookkeeping(cache):
    state = cache.state_dict()
    return copy.deepcopy({name: state[name] for name in ("sequences", "free", "next_sequence")})


# ---------------------------------------------------------------------------------------------------- any order of calls at all


class Block:
    """What the model knows of a block: its tokens, and in how many calls they came (each may have re-quantised the others)."""

    def __init__(self, tokens=(), writes=0):
        self.tokens, self.writes = list(tokens), writes


class Modelled:
    """A sequence as a list of blocks; one that is shared is the same object in several lists."""

    def __init__(self, blocks, reserved, mean):
        self.blocks, self.reserved, self.mean = blocks, reserved, mean

    @property
    def tokens(self):
        return [token for block in self.blocks for token in block.tokens]

    @property
    def open_block(self):
        return self.blocks[-1] if self.blocks and len(self.blocks[-1].tokens) < BLOCK_SIZE else None


class Machine(RuleBasedStateMachine):
    """The cache against a dictionary of token lists."""

    some = st.integers(0, 99)  # which sequence, modulo how many there are
    seeds = st.integers(0, 2**16)

    def __init__(self, device, name):
        super().__init__()
        self.device, self.name, self.spec = device, name, KV_SPECS[name]
        self.cache, self.model = make(device, name), {}

    def pick(self, i):
        return sorted(self.model)[i % len(self.model)]

    def holders(self, block):
        return sum(block in sequence.blocks for sequence in self.model.values())

    def full_blocks(self, seq):
        return len(self.model[seq].tokens) // BLOCK_SIZE

    @property
    def free_blocks(self):
        distinct = {id(block) for sequence in self.model.values() for block in sequence.blocks}
        return NUM_BLOCKS - len(distinct) - sum(sequence.reserved for sequence in self.model.values())

    @initialize(counts=st.lists(st.integers(0, 8), min_size=2, max_size=3), reserve=st.integers(0, 7), seed=seeds)
    def begin(self, counts, reserve, seed):
        for i, count in enumerate(counts):
            self.allocate(reserve if i == 0 else 0, seed + i)
            if count:
                self.append([i] * count, seed + i)
        self.fork(0)

    @rule(reserve=st.integers(0, 7), seed=seeds)
    def allocate(self, reserve, seed):
        mean = uniform(KV_HEADS, HEAD_DIM, seed=seed) * 5 if self.spec.subtract_k_mean else None
        blocks = math.ceil(reserve / BLOCK_SIZE)
        arguments = {"num_tokens": reserve, "k_mean": None if mean is None else mean.to(self.device)}
        if blocks > self.free_blocks:
            with pytest.raises(KVCacheFull):
                self.cache.allocate(**arguments)
        else:
            seq = self.cache.allocate(**arguments)
            assert seq not in self.model
            self.model[seq] = Modelled([], blocks, mean)

    @precondition(lambda self: self.model)
    @rule(picks=st.lists(some, min_size=1, max_size=7), seed=seeds)
    def append(self, picks, seed):
        owners = [self.pick(i) for i in picks]
        key, value = tokens(len(owners), seed)
        if self.spec.subtract_k_mean:
            key = key + torch.stack([self.model[seq].mean for seq in owners])

        grown = {}
        for seq in set(owners):
            sequence = self.model[seq]
            blocks = math.ceil((len(sequence.tokens) + owners.count(seq)) / BLOCK_SIZE) - len(sequence.blocks)
            grown[seq] = max(0, blocks - sequence.reserved)
        opened = [self.model[seq].open_block for seq in set(owners) if self.model[seq].open_block]
        copies = sum(min(opened.count(block), self.holders(block) - 1) for block in set(opened))
        needed, before = sum(grown.values()) + copies, bookkeeping(self.cache)
        arguments = owners, key.to(self.device), value.to(self.device)
        if needed > self.free_blocks:
            with pytest.raises(KVCacheFull) as full:
                self.cache.append(*arguments)
            assert (full.value.needed, full.value.free) == (needed, self.free_blocks)
            assert bookkeeping(self.cache) == before
            return
        self.cache.append(*arguments)

        written = set()
        for seq, token in zip(owners, zip(key, value, strict=True), strict=True):
            sequence = self.model[seq]
            if sequence.open_block is None:
                sequence.blocks.append(Block())
                sequence.reserved = max(0, sequence.reserved - 1)
            elif self.holders(sequence.open_block) > 1:
                sequence.blocks[-1] = Block(sequence.open_block.tokens, sequence.open_block.writes)
            sequence.blocks[-1].tokens.append(token)
            written.add(sequence.blocks[-1])
        for block in written:
            block.writes += 1

    @precondition(lambda self: self.model)
    @rule(pick=some)
    def fork(self, pick):
        parent = self.model[self.pick(pick)]
        child = self.cache.fork(self.pick(pick))
        assert child not in self.model
        self.model[child] = Modelled(list(parent.blocks), 0, parent.mean)

    @precondition(lambda self: any(map(self.full_blocks, self.model)))
    @rule(pick=some, chosen=st.sets(some, min_size=1, max_size=3))
    def evict(self, pick, chosen):
        seqs = [seq for seq in sorted(self.model) if self.full_blocks(seq)]
        seq = seqs[pick % len(seqs)]
        chosen = {block % self.full_blocks(seq) for block in chosen}
        self.cache.evict(seq, chosen)
        self.model[seq].blocks = [block for i, block in enumerate(self.model[seq].blocks) if i not in chosen]

    @precondition(lambda self: self.model)
    @rule(picks=st.sets(some, min_size=1, max_size=3), budget=st.integers(1, 4), seed=seeds)
    def evict_to_budget(self, picks, budget, seed):
        """The lowest go, by a score for each block of the pool, but for the first and the last."""
        seqs, scores = sorted({self.pick(i) for i in picks}), uniform(NUM_BLOCKS, seed=seed)
        rows = self.cache.block_tables(seqs).tolist()
        gone = self.cache.evict_to_budget(seqs, scores.to(self.device), budget)
        for seq, row in zip(seqs, rows, strict=True):
            blocks = self.model[seq].blocks
            lowest = sorted(range(1, len(blocks) - 1), key=lambda place, row=row: scores[row[place]].item())
            assert gone[seq] == sorted(lowest[: max(0, len(blocks) - budget)])
            self.model[seq].blocks = [block for place, block in enumerate(blocks) if place not in gone[seq]]

    @precondition(lambda self: self.model)
    @rule(pick=some)
    def free(self, pick):
        seq = self.pick(pick)
        self.cache.free(seq)
        del self.model[seq]

    @rule()
    def save_and_load(self):
        state = copy.deepcopy(self.cache.state_dict())
        self.cache = make(self.device, self.name)
        self.cache.load_state_dict(state)

    @precondition(lambda self: self.model)
    @rule(picks=st.lists(some, min_size=1, max_size=4), window=st.none() | st.integers(1, 9), with_sinks=st.booleans(), seed=seeds)
    def decode(self, picks, window, with_sinks, seed):
        self.compare([self.pick(i) for i in picks], seed, window, with_sinks)

    @invariant()
    def every_sequence_decodes_to_its_own_tokens(self):
        self.compare(sorted(self.model), seed=1)

    def compare(self, seqs, seed, window=None, with_sinks=False):
        sm_scale = 0.4
        q = uniform(len(seqs), HEADS, HEAD_DIM, seed=seed)
        sinks = uniform(HEADS, seed=seed + 1) if with_sinks else None
        options = {"sliding_window": window, "sinks": None if sinks is None else sinks.to(self.device)}
        results = self.cache.decode(q.to(self.device), seqs, sm_scale, **options, return_lse=True, return_block_mass=True)
        for seq, query, out, lse, mass in zip(seqs, q, *(x.cpu() for x in results), strict=True):
            sequence = self.model[seq]
            if not sequence.tokens:
                assert torch.all(out == 0) and torch.all(lse == -math.inf) and torch.all(mass == 0)
                continue
            key, value = (torch.stack(x) for x in zip(*sequence.tokens, strict=True))
            k_error, v_error = self.errors(sequence)
            logit_error = sm_scale * float(query.norm(dim=-1).max()) * k_error
            weight_error = math.exp(2 * logit_error) - 1
            expected, expected_lse, weights = dense(query, key, value, sm_scale, window, sinks)
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=weight_error * float(value.abs().max()) + v_error + 2e-6)
            torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=logit_error + 2e-6)
            owner = torch.arange(len(key) - weights.shape[1], len(key)) // BLOCK_SIZE
            expected_mass = torch.zeros(len(mass), dtype=torch.float64).index_add(0, owner, weights.mean(0))
            torch.testing.assert_close(mass.double(), expected_mass, rtol=0, atol=weight_error + 2e-6)

    def errors(self, sequence):
        """How far a decoded K may be off (its length) and a decoded V (an element): half a step for each write into the block."""
        if not self.spec.quantised:
            return 0.0, 0.0
        bounds = [0.0, 0.0]
        for block in sequence.blocks:
            key, value = (torch.stack(x) for x in zip(*block.tokens, strict=True))
            encoded = (key - sequence.mean if self.spec.subtract_k_mean else key), value
            if self.spec.rotate:
                encoded = map(hadamard_transform, encoded)
            roundings = block.writes if self.spec.granularity == "block_head" else 1
            for i, x in enumerate(encoded):
                bounds[i] = max(bounds[i], roundings * float(x.abs().max()) / 127 / 2 * 1.0001)
        return bounds[0] * HEAD_DIM**0.5, bounds[1] * (HEAD_DIM**0.5 if self.spec.rotate else 1)

    @invariant()
    def no_block_is_lost_or_doubled(self):
        assert self.cache.num_free_blocks == self.free_blocks
        assert self.cache.sequences == sorted(self.model)
        seqs = sorted(self.model)
        assert self.cache.seq_lens(seqs).tolist() == [len(self.model[seq].tokens) for seq in seqs]
        pairs = set()  # a block of the pool and the model's: one for one
        for seq, row in zip(seqs, self.cache.block_tables(seqs).tolist(), strict=True):
            blocks = self.model[seq].blocks
            assert row[len(blocks) :] == [-1] * (len(row) - len(blocks))
            pairs |= set(zip(row, map(id, blocks), strict=False))
        assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)
        state = bookkeeping(self.cache)
        held = {block for sequence in state["sequences"].values() for block in sequence["blocks"]}
        assert sorted([*held, *state["free"]]) == list(range(NUM_BLOCKS))

    def teardown(self):
        for seq in list(self.model):
            self.cache.free(seq)
        assert self.cache.num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("name", KV_SPECS)
def test_any_sequence_of_calls_agrees_with_a_dictionary_of_tokens(backend, device, name, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CHECK", "1")  # no table ever names a block outside the pool
    examples = settings.default.max_examples // (
        20 if backend.endswith("pytorch") else 5
    )  # the bookkeeping is one, the ops have their tests
    run_state_machine_as_test(lambda: Machine(device, name), settings=settings(max_examples=examples, stateful_step_count=30))


# --------------------------------------------------------------------------------------------------------------------- appending


@pytest.mark.parametrize("name", KV_SPECS)
def test_tokens_of_many_sequences_in_any_mixture(device, name):
    """Each sequence as if it had been alone, bit for bit."""
    together, alone = make(device, name), make(device, name)
    seqs = [start(together, count, seed) for seed, count in enumerate((2, 0, 4))]
    key, value = tokens(7, 5, device)
    order = [seqs[i] for i in (0, 2, 1, 0, 1, 2, 0)]
    together.append(order, key, value)
    for seed, (seq, count) in enumerate(zip(seqs, (2, 0, 4), strict=True)):
        twin = start(alone, count, seed)
        mine = torch.tensor([owner == seq for owner in order], device=device)
        alone.append([twin] * int(mine.sum()), key[mine], value[mine])
        assert same_bits(ask(together, seq), ask(alone, twin))
    assert together.num_free_blocks == alone.num_free_blocks


@pytest.mark.parametrize("name", KV_SPECS)
def test_one_token_at_a_time_or_all_at_once(device, name):
    cache = make(device, name)
    at_once, stepwise = start(cache, 8), start(cache, 0)
    for key, value in zip(*(x.split(1) for x in tokens(8, 0, device)), strict=True):
        cache.append([stepwise], key, value)
    if cache.spec.granularity == "block_head":
        torch.testing.assert_close(ask(cache, stepwise), ask(cache, at_once), rtol=0, atol=0.02)  # further roundings
    else:
        assert same_bits(ask(cache, stepwise), ask(cache, at_once))


@pytest.mark.parametrize("name", QUANTISED)
def test_a_recycled_block_remembers_nothing(device, name):
    cache, fresh = make(device, name, num_blocks=2), make(device, name, num_blocks=2)
    cache.free(start(cache, 6, seed=1, factor=math.nan))
    cache.free(start(cache, 6, seed=1, factor=1e6))
    assert same_bits(ask(cache, start(cache, 4)), ask(fresh, start(fresh, 4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", KV_SPECS)
def test_every_dtype_of_k_v_and_q(device, name, dtype):
    cache = make(device, name) if KV_SPECS[name].quantised else make(device, name, dtype=dtype)
    mean = torch.ones(KV_HEADS, HEAD_DIM, dtype=dtype, device=device) if cache.spec.subtract_k_mean else None
    seq, (key, value) = cache.allocate(k_mean=mean), (x.to(dtype) for x in tokens(5, 0, device))
    cache.append(seq, key, value)
    q = uniform(1, HEADS, HEAD_DIM).to(dtype)
    out = cache.decode(q.to(device), [seq])
    assert out.dtype == dtype
    torch.testing.assert_close(out[0].cpu().double(), dense(q[0], key.cpu(), value.cpu(), HEAD_DIM**-0.5)[0], rtol=0, atol=0.03)


def test_writing_builds_no_graph(device):
    for name in KV_SPECS:
        cache = make(device, name)
        seq = start(cache, 0)
        cache.append(seq, *(x.requires_grad_() for x in tokens(2, 0, device)))
        assert not any(plane.requires_grad for plane in cache.state_dict()["planes"].values())


# --------------------------------------------------------------------------------------------------------------- forks and copies


@pytest.mark.parametrize("name", KV_SPECS)
def test_a_fork_costs_no_block_until_it_writes_and_its_parent_never_notices(device, name):
    cache = make(device, name)
    parent = start(cache, 5)
    before, used = ask(cache, parent), cache.num_free_blocks
    child = cache.fork(parent)
    assert cache.num_free_blocks == used and same_bits(ask(cache, child), before)
    cache.append(child, *(x * 1000 for x in tokens(1, 7, device)))  # would re-quantise the whole shared block
    assert cache.num_free_blocks == used - 1
    assert same_bits(ask(cache, parent), before) and not same_bits(ask(cache, child), before)


@pytest.mark.parametrize("name", KV_SPECS)
def test_a_parent_that_writes_leaves_its_fork_alone(device, name):
    cache = make(device, name)
    parent = start(cache, 5)
    child, before = cache.fork(parent), ask(cache, parent)
    cache.append(parent, *(x * 1000 for x in tokens(1, 7, device)))
    assert same_bits(ask(cache, child), before)


def test_the_last_owner_of_a_block_writes_in_place():
    cache = make()
    parent = start(cache, 4)
    family = [parent, cache.fork(parent), cache.fork(parent)]
    used = cache.num_free_blocks
    cache.append(family, *tokens(3))
    assert used - cache.num_free_blocks == 2  # two copies, one original
    lasts = cache.block_tables(family)[:, 1].tolist()
    assert len(set(lasts)) == 3 and set(cache.block_tables(family)[:, 0].tolist()) == {cache.block_tables([parent])[0, 0].item()}


def test_full_shared_blocks_are_never_copied():
    cache = make()
    parent = start(cache, 6)
    child = cache.fork(parent)
    used = cache.num_free_blocks
    cache.append([parent, child], *tokens(2))
    assert used - cache.num_free_blocks == 2  # a new block each
    assert cache.block_tables([parent])[0, :2].tolist() == cache.block_tables([child])[0, :2].tolist()


def test_reserved_blocks_stay_with_the_parent():
    cache = make()
    parent = cache.allocate(9)
    cache.append(parent, *tokens(1))
    child = cache.fork(parent)
    cache.free(parent)
    assert cache.num_free_blocks == NUM_BLOCKS - 1 and cache.seq_lens([child]).tolist() == [1]


# ---------------------------------------------------------------------------------------------------------------------- evicting


@pytest.mark.parametrize("name", KV_SPECS)
def test_after_eviction_the_others_decode_as_if_they_had_been_alone(device, name):
    cache = make(device, name)
    seq, rest = start(cache, 11), start(cache, 0)
    used = cache.num_free_blocks
    cache.evict(seq, [2, 0])
    assert cache.num_free_blocks == used + 2 and cache.seq_lens([seq]).tolist() == [5]
    key, value = tokens(11, 0, device)
    kept = [3, 4, 5, 9, 10]
    cache.append(rest, key[kept[:3]], value[kept[:3]])
    cache.append(rest, key[kept[3:]], value[kept[3:]])
    assert same_bits(ask(cache, seq), ask(cache, rest))
    for twin in (seq, rest):
        cache.append(twin, *tokens(2, 8, device))  # the open block goes on
    assert same_bits(ask(cache, seq), ask(cache, rest))


def test_block_mass_says_what_to_evict():
    """Its columns are the blocks that `evict` means; what a block held is shared among those that stay (one head, so exactly)."""
    cache = make(spec="unquantised", num_kv_heads=1)
    seq, q = cache.allocate(), uniform(1, 1, HEAD_DIM, seed=99)
    cache.append(seq, *(x[:, :1] for x in tokens(8)))
    _, mass = cache.decode(q, [seq], 2.0, return_block_mass=True)
    assert mass.shape == cache.block_tables([seq]).shape == (1, 3)
    least = int(mass[0, :2].argmin())
    cache.evict(seq, [least])
    _, left = cache.decode(q, [seq], 2.0, return_block_mass=True)
    kept = [block for block in range(3) if block != least]
    torch.testing.assert_close(left[0], mass[0, kept] / mass[0, kept].sum())


@pytest.mark.parametrize("name", ["block_head", "unquantised"])
def test_all_sequences_are_brought_within_a_budget(device, name):
    """By a policy: those of least attention go, the first and the last stay, and what is shared stays with the others."""
    cache = make(device, name, num_blocks=20)
    long, short = start(cache, 6 * BLOCK_SIZE + 1), start(cache, 2 * BLOCK_SIZE, seed=1)
    child = cache.fork(long)
    _, mass = ask(cache, long, short, return_block_mass=True)
    tables = cache.block_tables([long, short]).tolist()
    scores = pagedkv.policies.policy("last_query_attention")(cache.observe([long, short], block_mass=mass))
    gone = cache.evict_to_budget([long, short], scores, 4)
    assert gone == {long: sorted(sorted(range(1, 6), key=lambda j: scores[0, j].item())[:3]), short: []}
    kept = [block for place, block in enumerate(tables[0]) if place not in gone[long]]
    assert cache.block_tables([long]).tolist() == [kept] and cache.seq_lens([long, child]).tolist() == [
        3 * BLOCK_SIZE + 1,
        6 * BLOCK_SIZE + 1,
    ]
    assert cache.block_tables([child]).tolist() == [tables[0]]
    free = cache.num_free_blocks
    assert set(cache.evict_to_budget([child], torch.zeros(20, device=device), 4)) == {child}
    assert cache.num_free_blocks >= free
    with pytest.raises(ValueError, match=r"^seqs: expected distinct sequences"):
        cache.evict_to_budget([long, long], scores, 4)
    with pytest.raises(ValueError, match=r"^scores: expected shape \[20\]"):  # not what the pool holds
        cache.evict_to_budget([child], torch.zeros(19, device=device), 4)


def test_a_long_sequence_is_brought_within_a_budget_in_linear_time():
    """Sets of the kept blocks are built once a sequence: for each of its blocks anew, this took seconds."""
    cache = pagedkv.PagedKVCache(4096, 1, 1, 8)
    seq, kv = cache.allocate(), torch.ones(4096, 1, 8)
    cache.append(seq, kv, kv)
    made = []
    with unittest.mock.patch("pagedkv.paged_cache.set", lambda *row: made.append(row) or set(*row), create=True):
        gone = cache.evict_to_budget([seq], torch.rand(4096), 4000)
    assert len(gone[seq]) == 96 and len(made) <= 3


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        ([2], ValueError, "logical_blocks: expected full blocks of sequence 0, of which it has 2"),
        ([0, -1], ValueError, "got -1"),
        ([1, 1], ValueError, "logical_blocks: expected distinct"),
        ([0.0], TypeError, "logical_blocks: expected an int"),
    ],
)
def test_what_cannot_be_evicted(blocks, error, message):
    """Above all the last block, while it is not full: its place would stay open in the middle of the next tokens."""
    cache = make()
    seq = start(cache, 8)
    before = bookkeeping(cache)
    with pytest.raises(error, match=message):
        cache.evict(seq, blocks)
    assert bookkeeping(cache) == before


def test_a_shared_block_outlives_its_eviction_elsewhere():
    cache = make()
    seq = start(cache, 6)
    child, before = cache.fork(seq), ask(cache, seq)
    cache.evict(seq, [0, 1])
    assert cache.num_free_blocks == NUM_BLOCKS - 2 and same_bits(ask(cache, child), before)
    assert torch.all(ask(cache, seq) == 0)
    cache.evict(child, [0, 1])
    assert cache.num_free_blocks == NUM_BLOCKS


# --------------------------------------------------------------------------------------------------------------------- full pool


@pytest.mark.parametrize("name", KV_SPECS)
def test_a_full_cache_refuses_the_whole_call_and_changes_nothing(device, name):
    cache = make(device, name, num_blocks=4)
    first, second = start(cache, 6), start(cache, 5, seed=1)
    state = copy.deepcopy(cache.state_dict())
    with pytest.raises(KVCacheFull, match="1 more blocks are needed, 0 are free"):
        cache.append([second, first], *tokens(2, 3, device))  # the second's token alone would fit
    after = cache.state_dict()
    assert bookkeeping(cache) == {key: state[key] for key in ("sequences", "free", "next_sequence")}
    assert all(same_bits(after["planes"][key], plane) for key, plane in state["planes"].items())
    with pytest.raises(KVCacheFull):
        start(cache, 1)
    cache.append(second, *tokens(1, 3, device))
    cache.free(first)
    cache.append(second, *tokens(6, 3, device))
    assert cache.num_free_blocks == 0


def test_a_copy_needs_room_too():
    cache = make(num_blocks=2)
    parent = start(cache, 5)
    child = cache.fork(parent)
    with pytest.raises(KVCacheFull):
        cache.append(child, *tokens(1))
    cache.free(parent)
    cache.append(child, *tokens(1))


def test_a_reservation_is_kept():
    cache = make(num_blocks=3)
    seq = cache.allocate(7)
    assert cache.num_free_blocks == 0 and cache.seq_lens([seq]).tolist() == [0]
    with pytest.raises(KVCacheFull):
        cache.allocate(1)
    cache.append([seq] * 9, *tokens(9))
    with pytest.raises(KVCacheFull):
        cache.append([seq], *tokens(1))


# ----------------------------------------------------------------------------------------------------------- what decode returns


@pytest.mark.parametrize("name", ["block_head", "token_head", "unquantised"])
def test_decode_is_the_op_over_the_cache(device, name):
    cache = make(device, name)
    seqs = [start(cache, 7), start(cache, 2, seed=1)]
    options = {"sliding_window": 4, "logits_soft_cap": 2.0, "sinks": torch.zeros(HEADS, device=device), "return_lse": True}
    q = uniform(2, HEADS, HEAD_DIM).to(device)
    op = pagedkv.quant_paged_attention if cache.spec.quantised else pagedkv.paged_attention
    expected = op(q, *cache.state_dict()["planes"].values(), cache.block_tables(seqs), cache.seq_lens(seqs), 0.3, **options)
    assert all(same_bits(a, b) for a, b in zip(cache.decode(q, seqs, 0.3, **options), expected, strict=True))


@pytest.mark.parametrize("name", KV_SPECS)
def test_it_returns_what_was_asked_for(device, name):
    cache = make(device, name)
    seq, sinks = start(cache, 4), torch.full((HEADS,), 1.5, device=device)
    out, lse, mass = ask(cache, seq, sinks=sinks, return_lse=True, return_block_mass=True)
    assert lse.shape == (1, HEADS) and mass.shape == (1, 2)
    assert same_bits(ask(cache, seq, sinks=sinks), out)
    assert same_bits(ask(cache, seq, sinks=sinks, return_lse=True)[1], lse)
    assert same_bits(ask(cache, seq, sinks=sinks, return_block_mass=True)[1], mass)


@pytest.mark.parametrize("name", KV_SPECS)
def test_an_empty_sequence_and_no_sequence(device, name):
    cache = make(device, name)
    empty = start(cache, 0)
    for sinks in (None, torch.zeros(HEADS, device=device), torch.full((HEADS,), -math.inf, device=device)):
        out, lse = ask(cache, empty, sinks=sinks, return_lse=True)
        assert torch.all(out == 0) and torch.all(lse == -math.inf)
        out, lse = ask(cache, sinks=sinks, return_lse=True)
        assert out.shape == (0, HEADS, HEAD_DIM) and lse.shape == (0, HEADS)


def rms_error(name, key, mean=None):
    """Of attention over `key` in a cache of head_dim 64, against dense attention."""
    cache = make(spec=name, head_dim=64, block_size=16)
    seq, value, q = cache.allocate(k_mean=mean), uniform(48, KV_HEADS, 64, seed=8), uniform(1, HEADS, 64, seed=9)
    cache.append(seq, key, value)
    return float((cache.decode(q, [seq], 1.0)[0] - dense(q[0], key, value, 1.0)[0]).square().mean().sqrt())


def test_a_part_of_k_that_all_tokens_share_costs_no_precision():
    mean = uniform(KV_HEADS, 64, seed=3) * 20
    key = uniform(48, KV_HEADS, 64) + mean
    assert rms_error("k_mean_block_head", key, mean) < rms_error("block_head", key) / 4


def test_an_outlier_channel_costs_little_once_rotated():
    key = uniform(48, KV_HEADS, 64)
    key[:, :, 5] *= 50
    assert rms_error("rotated_block_head", key) < rms_error("block_head", key) / 2


@pytest.mark.parametrize("name", KV_SPECS)
def test_no_call_reads_the_device(name):
    """On the meta device there is nothing to read, and reading raises."""
    cache = make("meta", name)
    seq = start(cache, 5)
    child = cache.fork(seq)
    cache.append([seq, child], *tokens(2, 0, "meta"))
    out, lse, mass = ask(cache, seq, child, sinks=torch.empty(HEADS, device="meta"), return_lse=True, return_block_mass=True)
    assert (out.shape, lse.shape, mass.shape) == ((2, HEADS, HEAD_DIM), (2, HEADS), (2, 2))
    cache.evict(seq, [0])
    cache.free(child)
    assert cache.num_free_blocks == NUM_BLOCKS - 1


# ------------------------------------------------------------------------------------------------------------ saving and loading


@pytest.mark.parametrize("name", KV_SPECS)
def test_a_saved_cache_goes_on_where_it_was(device, name):
    cache, loaded = make(device, name), make(device, name)
    seq = start(cache, 5)
    child = cache.fork(seq)
    cache.allocate(4, k_mean=torch.ones(KV_HEADS, HEAD_DIM, device=device) if cache.spec.subtract_k_mean else None)
    start(loaded, 7, seed=9)  # what the other held before is gone
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for each in (cache, loaded):
        each.append([seq, child, child], *tokens(3, 4, device))
    assert loaded.num_free_blocks == cache.num_free_blocks and loaded.sequences == cache.sequences
    assert same_bits(ask(loaded, seq, child), ask(cache, seq, child))
    assert start(loaded, 1) == start(cache, 1)


def test_loading_copies():
    cache, loaded = make(), make()
    seq = start(cache, 5)
    loaded.load_state_dict(cache.state_dict())
    before = ask(loaded, seq)
    cache.append(seq, *(x * 100 for x in tokens(1)))
    cache.free(seq)
    assert same_bits(ask(loaded, seq), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(version=0), r"state\['version'\]"),
        (lambda s: s["spec"].update(rotate=True), r"state\['spec'\]"),
        (lambda s: s.update(shape=[1, 2, 3, 4]), r"state\['shape'\]"),
        (lambda s: s["planes"].update(k_scale=torch.zeros(1)), r"k_scale.*expected shape"),
        (lambda s: s["free"].pop(), "exactly the blocks that no sequence holds"),
        (lambda s: s["free"].append(s["free"][0]), "exactly the blocks that no sequence holds"),
        (lambda s: s["free"].append(s["sequences"][0]["blocks"][0]), "exactly the blocks that no sequence holds"),
        (lambda s: s["sequences"][0].update(blocks=[0, 0]), "expected distinct blocks"),
        (lambda s: s["sequences"][0].update(blocks=[0, NUM_BLOCKS]), "expected distinct blocks from 0 to 9"),
        (lambda s: s["sequences"][0].update(length=7), "2 blocks of 3 do not hold 7 tokens"),
        (lambda s: s.update(next_sequence=0), "expected an id"),
        (lambda s: s["k_means"].update({0: torch.zeros(KV_HEADS, HEAD_DIM)}), "k_mean"),
        *((lambda s, name=name: s.pop(name), f"state: it lacks '{name}'") for name in ("planes", "k_means", "sequences", "free")),
        (lambda s: s.pop("next_sequence"), "state: it lacks 'next_sequence'"),
        (lambda s: s["planes"].pop("k_scale"), r"state\['planes'\]: it lacks 'k_scale'"),
        (lambda s: s["sequences"][0].pop("length"), r"state\['sequences'\]\[0\]: it lacks 'length'"),
        (lambda s: s.update(free=[float(block) for block in s["free"]]), r"state\['free'\]\[0\]: expected int, got float"),
        (lambda s: s.update(free=None), r"state\['free'\]: expected list, got NoneType"),
        (lambda s: s.update(next_sequence=1.0), r"state\['next_sequence'\]: expected int, got float"),
        (lambda s: s["sequences"][0].update(length=True), r"\['length'\]: expected int, got bool"),
        (lambda s: s.update(sequences={"0": s["sequences"][0]}), r"state\['sequences'\]: its key '0': expected int, got str"),
        (lambda s: s["k_means"].update({0: [0.0]}), r"state\['k_means'\]\[0\]: expected Tensor, got list"),
        (lambda s: s["planes"].update(v_scale=s["planes"]["v_scale"].to("meta")), "'v_scale': expected data, got a tensor on the meta"),
        (lambda s: s["planes"].update(k_cache=s["planes"]["k_cache"].float()), r"'k_cache': expected dtype torch.int8, got torch.float32"),
        (lambda s: s["k_means"].update({0: torch.zeros(KV_HEADS, HEAD_DIM, dtype=torch.int32)}), "0: expected dtype torch.float32, got"),
        (lambda s: s.update(next_sequence=2**70), r"state\['next_sequence'\]: expected 0 to"),
        (
            lambda s: s.update(
                sequences={i: {"blocks": [0], "length": 0} for i in range(2)}, free=[*range(1, NUM_BLOCKS)], next_sequence=2
            ),
            "unwritten blocks",
        ),
    ],
)
def test_a_state_that_cannot_be_right_is_refused_whole(change, message):
    cache, other = make(), make()
    start(other, 5)
    seq = start(cache, 4, seed=1)
    state, before, books = copy.deepcopy(other.state_dict()), ask(cache, seq), bookkeeping(cache)
    change(state)
    with pytest.raises(ValueError, match=message):
        cache.load_state_dict(state)
    assert bookkeeping(cache) == books and same_bits(ask(cache, seq), before)


@pytest.mark.parametrize("state", [None, [], 3])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="state: expected dict, got"):
        make().load_state_dict(state)


# ----------------------------------------------------------------------------------------------------------- sizes, names, errors


@pytest.mark.parametrize("name", KV_SPECS)
def test_nbytes(name):
    cache = make(spec=name)
    expected = NUM_BLOCKS * cache.spec.bytes_per_block(BLOCK_SIZE, KV_HEADS, HEAD_DIM, cache.dtype)
    assert cache.nbytes == sum(plane.nbytes for plane in cache.state_dict()["planes"].values()) == expected


def test_a_spec_of_ones_own_needs_no_name():
    cache = PagedKVCache(4, 2, 1, 16, spec=KVQuantSpec(None, rotate=True, subtract_k_mean=True))
    assert cache.dtype == torch.float16
    seq = cache.allocate(k_mean=torch.zeros(1, 16))
    cache.append(seq, torch.ones(1, 1, 16), torch.ones(1, 1, 16))
    torch.testing.assert_close(cache.decode(torch.ones(1, 1, 16), [seq]), torch.ones(1, 1, 16), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks: expected at least 1, got 0"),
        ({"block_size": 257}, ValueError, "block_size: expected 1 to 256, got 257"),
        ({"num_kv_heads": 1.0}, TypeError, "num_kv_heads: expected an int"),
        ({"head_dim": 12}, ValueError, "head_dim: expected a multiple of 8 from 8 to 256, got 12"),
        ({"spec": "int4"}, ValueError, "spec: expected one of"),
        ({"dtype": torch.float16}, ValueError, "dtype: expected None"),
        ({"spec": "unquantised", "dtype": torch.int8}, TypeError, "dtype: expected torch.float16 or"),
    ],
)
def test_a_pool_that_cannot_be(changes, error, message):
    with pytest.raises(error, match=message):
        make(**changes)


def test_a_device_that_is_not_there_or_is_none():
    with pytest.raises(RuntimeError, match="device: cuda:99 was asked for, but"):
        make("cuda:99")
    with pytest.raises(TypeError, match="device"):
        make(None)


def test_any_iterable_of_any_integers_names_sequences():
    cache = make()
    first, second = np.int64(start(cache, 4)), np.int32(start(cache, 7, seed=1))
    cache.append(first, *tokens(2))
    cache.append((seq for seq in (first, second)), *tokens(2))
    assert cache.seq_lens(seq for seq in (first, second)).tolist() == [7, 8]
    assert cache.block_tables(np.array([first, second])).shape == (2, 3)
    assert cache.observe(iter([first, second])).block_tables.shape == (2, 3)
    assert same_bits(cache.decode(torch.ones(1, HEADS, HEAD_DIM), iter([first])), cache.decode(torch.ones(1, HEADS, HEAD_DIM), [0]))
    cache.evict(first, np.array([0]))
    assert cache.evict_to_budget(iter([second]), torch.zeros(NUM_BLOCKS), 2) == {1: [1]}
    cache.free(cache.fork(first))
    assert [type(seq) for seq in cache.sequences] == [int, int]


def append(seqs, key=(1, KV_HEADS, HEAD_DIM), dtype=torch.float32):
    return lambda cache: cache.append(seqs, torch.zeros(key, dtype=dtype), torch.zeros(1, KV_HEADS, HEAD_DIM))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (append([7]), ValueError, "seq: expected a sequence of this cache, got 7"),
        (append(1), ValueError, "got 1 .freed"),
        (append([0, 0]), ValueError, "seqs: expected one for each of the 1 tokens, got 2"),
        (append([0.5]), TypeError, "seqs: expected an int, got float"),
        (append(True), TypeError, "seqs: expected an int, got bool"),
        (append(0.5), TypeError, "seqs: expected several ints, got float"),
        (lambda cache: cache.block_tables(0), TypeError, "seqs: expected several ints, got int"),
        (lambda cache: cache.seq_lens(0), TypeError, "seqs: expected several ints, got int"),
        (lambda cache: cache.observe(0), TypeError, "seqs: expected several ints, got int"),
        (lambda cache: cache.evict_to_budget(0, torch.zeros(NUM_BLOCKS), 1), TypeError, "seqs: expected several ints, got int"),
        (lambda cache: cache.decode(torch.zeros(1, HEADS, HEAD_DIM), 0), TypeError, "seqs: expected several ints, got int"),
        (lambda cache: cache.evict(0, 0), TypeError, "logical_blocks: expected several ints, got int"),
        (lambda cache: cache.evict(0, ["0"]), TypeError, "logical_blocks: expected an int, got str"),
        (lambda cache: cache.free("0"), TypeError, "seq: expected an int, got str"),
        (append(0, key=(1, KV_HEADS, 16)), ValueError, r"key: expected shape \[num_tokens, 2, 8\]"),
        (append(0, dtype=torch.float16), TypeError, "value: expected dtype torch.float16"),
        (append(0, dtype=torch.int8), TypeError, "key: expected dtype"),
        (lambda cache: cache.allocate(-1), ValueError, "num_tokens: expected at least 0"),
        (lambda cache: cache.allocate(k_mean=torch.zeros(KV_HEADS, HEAD_DIM)), ValueError, "k_mean: expected None"),
        (lambda cache: cache.fork(1), ValueError, "seq"),
        (lambda cache: cache.free(1), ValueError, "seq"),
        (lambda cache: cache.evict(1, []), ValueError, "seq"),
        (lambda cache: ask(cache, 0, 1), ValueError, "seq"),
        (lambda cache: cache.decode(torch.zeros(2, HEADS, HEAD_DIM), [0]), ValueError, r"q: expected shape \[1, num_heads, 8\]"),
        (lambda cache: cache.decode(torch.zeros(1, 3, HEAD_DIM), [0]), ValueError, "q: expected num_heads to be a multiple"),
        (lambda cache: ask(cache, 0, sinks=torch.zeros(1)), ValueError, "sinks"),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(call, error, message):
    cache = make()
    start(cache, 2)
    cache.free(start(cache, 4))
    before = bookkeeping(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert bookkeeping(cache) == before


def test_k_means_are_asked_for_and_soft_caps_refused():
    cache = make(spec="k_mean_block_head")
    with pytest.raises(ValueError, match="k_mean: expected a tensor"):
        cache.allocate()
    with pytest.raises(ValueError, match=r"k_mean: expected shape \[2, 8\]"):
        cache.allocate(k_mean=torch.zeros(HEAD_DIM))
    with pytest.raises(ValueError, match="logits_soft_cap: expected None"):
        ask(cache, start(cache, 1), logits_soft_cap=5.0)
    assert cache.sequences == [0]
