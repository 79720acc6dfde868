"""Eviction for each sequence: mass is summed exactly, and a selection keeps every promise it makes, to the last bit."""

import math

import numpy as np
import pytest
import torch
from cases import GARBAGE_IDS, LAYOUTS, decode, in_layout, same_bits
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv import reference

# --------------------------------------------------------------------------------------------------------------- accumulation


def check_accumulation(device, mass, tables, total, decay=1.0):
    want = reference.accumulate_block_mass(mass, tables, total, decay)
    got = total.clone().to(device)
    pagedkv.accumulate_block_mass(mass.to(device), tables.to(device), got, decay)
    np.testing.assert_array_equal(got.cpu().numpy(), want)


def a_decode_call(num_seqs=5, max_blocks=9, num_blocks=20, seed=0, layout="contiguous"):
    """Masses that sum to 1, over blocks of which many are shared; garbage where there is no mass."""
    rng = torch.Generator().manual_seed(seed)
    mass = torch.softmax(4 * torch.randn(num_seqs, max_blocks, generator=rng), -1)
    tables = torch.randint(0, num_blocks, (num_seqs, max_blocks), generator=rng, dtype=torch.int32)
    unused = torch.rand(num_seqs, max_blocks, generator=rng) < 0.2
    mass[unused] = 0
    tables[unused] = torch.tensor(GARBAGE_IDS, dtype=torch.int32).repeat(num_seqs * max_blocks)[: unused.sum()]
    total = torch.randint(0, 2**40, (num_blocks,), generator=rng)
    return in_layout(mass, layout), in_layout(tables, layout), total


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5, 1e-3, 0.0])
@pytest.mark.parametrize("layout", ["contiguous", "sliced", "unaligned"])
def test_mass_is_summed_over_the_sequences_that_hold_a_block(device, decay, layout):
    check_accumulation(device, *a_decode_call(layout=layout), decay)


@pytest.mark.parametrize(
    "num_seqs, max_blocks, num_blocks", [(0, 4, 8), (3, 0, 8), (1, 1, 1), (3, 4, 0), (64, 300, 5000), (2, 5, 1), (1500, 7, 90)]
)
def test_mass_of_calls_of_any_size(device, num_seqs, max_blocks, num_blocks):
    mass, tables, total = a_decode_call(num_seqs, max_blocks, max(1, num_blocks))
    check_accumulation(device, mass, tables, total[:num_blocks], 0.75)


def test_several_steps_of_the_same_tables_in_one_call(device):
    mass, tables, total = a_decode_call(num_seqs=70 * 16, max_blocks=33, num_blocks=500)
    check_accumulation(device, mass, tables[:70].repeat_interleave(16, 0), total)


def test_a_bad_row_adds_nothing(device):
    mass, tables, total = a_decode_call()
    mass[1], mass[2, 3], mass[3, 0] = math.nan, math.inf, -1.0
    tables[4, :3] = torch.tensor([-1, len(total), 2**31 - 1], dtype=torch.int32)
    mass[4, :3] = 0.25
    check_accumulation(device, mass, tables, total)


def test_a_thousand_steps_add_up_to_a_thousand(device):
    """Of a row that sums to 1 up to float32's rounding; a float32 sum of the sums would lose more."""
    mass, tables, _ = a_decode_call()
    mass /= mass.sum(1, keepdim=True)
    tables[tables < 0] = 0
    tables.clamp_(max=19)
    total = torch.zeros(20, dtype=torch.int64, device=device)
    for _ in range(1000):
        pagedkv.accumulate_block_mass(mass.to(device), tables.to(device), total)
    assert float(total.sum()) * pagedkv.MASS_UNIT == pytest.approx(1000 * len(mass), rel=1e-6)
    once = torch.zeros_like(total)
    pagedkv.accumulate_block_mass(mass.to(device), tables.to(device), once)
    assert torch.equal(total, 1000 * once)


def test_what_attention_emits_is_what_accumulates(device):
    """Garbage past the end of a table has no mass, so it is not even looked at."""
    case = decode(device, lengths=(37, 0, 1, 16, 64))
    mass = case.run(return_block_mass=True)[1]
    total = torch.zeros(len(case.k_cache), dtype=torch.int64, device=device)
    pagedkv.accumulate_block_mass(mass, case.block_tables, total)
    assert float(total.sum()) * pagedkv.MASS_UNIT == pytest.approx(4, rel=1e-6)  # one of the five is empty


def test_accumulation_repeats_to_the_last_bit(device):
    mass, tables, total = (x.to(device) for x in a_decode_call(64, 200, 50))
    sums = [total.clone() for _ in range(5)]
    for x in sums:
        pagedkv.accumulate_block_mass(mass, tables, x, 0.9)
    assert all(torch.equal(x, sums[0]) for x in sums)


@given(st.data())
def test_any_accumulation(device, data):
    num_seqs, max_blocks, num_blocks = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(0, 6)))

    def table(numbers, dtype):
        count = num_seqs * max_blocks
        return torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)), dtype=dtype).view(num_seqs, max_blocks)

    half_a_unit = pagedkv.MASS_UNIT / 2
    masses = st.one_of(st.floats(0, 1, width=32), st.floats(width=32), st.sampled_from([half_a_unit, 3 * half_a_unit]))
    blocks = st.one_of(st.integers(-1, num_blocks), st.sampled_from(GARBAGE_IDS))
    total = data.draw(st.lists(st.integers(0, 2**62), min_size=num_blocks, max_size=num_blocks))
    check_accumulation(
        device,
        in_layout(table(masses, torch.float32), data.draw(st.sampled_from(LAYOUTS))),
        table(blocks, torch.int32),
        torch.tensor(total, dtype=torch.int64),
        data.draw(st.one_of(st.floats(0, 1), st.just(1.0))),
    )


def test_checked_mass_needs_blocks_of_the_pool(device, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    mass, tables, total = (x.to(device) for x in a_decode_call())
    pagedkv.accumulate_block_mass(mass, tables, total)
    mass[2, 1], tables[2, 1] = 0.5, 20
    with pytest.raises(ValueError, match=r"^block_tables\[2, 1\]: expected a block id from 0 to 19"):
        pagedkv.accumulate_block_mass(mass, tables, total)


# ------------------------------------------------------------------------------------------------------------------ selection


def check_selection(device, scores, tables, lens, budget, first=1, last=1, *, block_size, references=None):
    """Equal to the reference, bit for bit; returns what the op did."""

    def there(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    want = reference.select_per_sequence(scores, tables, lens, budget, first, last, block_size=block_size, references=references)
    counts = None if references is None else references.clone().to(device)
    got = pagedkv.select_per_sequence(
        there(scores), there(tables), there(lens), there(budget), first, last, block_size=block_size, references=counts
    )
    for name, a, b in zip(("block_tables", "seq_lens", "freed", "num_freed"), got, want, strict=False):
        assert a.dtype == torch.int32
        np.testing.assert_array_equal(a.cpu().numpy(), b, err_msg=name)
    if references is not None:
        np.testing.assert_array_equal(counts.cpu().numpy(), want[4], err_msg="references")
    return got


def some_sequences(lengths, block_size=16, shared=0, seed=0):
    """Tables over a pool, the first `shared` places of each the same; garbage behind; how often each block is held."""
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    max_blocks = max([*counts, 0]) + 2
    num_blocks = shared + sum(counts) + 3
    own = iter(torch.randperm(num_blocks, generator=rng).tolist())
    prefix = [next(own) for _ in range(shared)]
    tables = torch.tensor(GARBAGE_IDS).repeat(len(lengths) * max_blocks)[: len(lengths) * max_blocks].view(len(lengths), max_blocks)
    references = torch.zeros(num_blocks, dtype=torch.int32)
    for s, count in enumerate(counts):
        for j in range(count):
            tables[s, j] = prefix[j] if j < shared else next(own)
            references[tables[s, j]] += 1
    scores = torch.rand(num_blocks, generator=rng)
    return scores, tables.to(torch.int32), torch.tensor(lengths, dtype=torch.int32), references


def test_by_hand(device):
    """Five blocks of four tokens, the last with one; the sink and the last stay, of the rest the two lowest go."""
    scores = torch.tensor([0.0, 0.3, 0.1, 0.2, 0.0])
    tables = torch.tensor([[4, 3, 2, 1, 0, 7, 7]], dtype=torch.int32)
    tables, lens, freed, num_freed = check_selection(device, scores, tables, torch.tensor([17], dtype=torch.int32), 3, block_size=4)
    assert tables.tolist() == [[4, 1, 0, -1, -1, -1, -1]]
    assert (lens.tolist(), freed.tolist(), num_freed.tolist()) == ([9], [3, 2, -1, -1, -1, -1, -1], [2])


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (16,), (37, 0, 1, 16, 64), (160, 1600, 16000, 48, 33)])
@pytest.mark.parametrize("budget", [0, 1, 3, 50, 2**63 - 1])
@pytest.mark.parametrize("first, last", [(0, 0), (1, 1), (4, 2), (2**63 - 1, 2**63 - 1)])
def test_each_sequence_is_brought_within_its_budget(device, lengths, budget, first, last):
    scores, tables, lens, references = some_sequences(lengths)
    for counts in (None, references):
        check_selection(device, scores, tables, lens, budget, first, last, block_size=16, references=counts)


def test_a_budget_for_each(device):
    scores, tables, lens, _ = some_sequences((160, 160, 160, 160, 40))
    budget = torch.tensor([10, 4, 0, -7, 2], dtype=torch.int32)
    new = check_selection(device, scores, tables, lens, budget, 1, 1, block_size=16)
    assert [sum(b >= 0 for b in row) for row in new[0].tolist()] == [10, 4, 2, 2, 2]


def test_a_block_that_is_partly_filled_stays(device):
    scores, tables, lens, _ = some_sequences((33, 32))
    scores[tables[0, 2].item()] = scores[tables[1, 1].item()] = -math.inf
    new = check_selection(device, scores, tables, lens, 1, 0, 0, block_size=16)
    assert new[0][:, 0].tolist() == [tables[0, 2].item(), tables[1, 0].item()] and new[1].tolist() == [1, 16]


SCORES = {
    "all equal": lambda n, rng: torch.zeros(n),
    "both zeros": lambda n, rng: torch.where(torch.rand(n, generator=rng) < 0.5, 0.0, -0.0),
    "few values": lambda n, rng: torch.randint(-2, 3, (n,), generator=rng).float(),
    "denormal": lambda n, rng: torch.randint(-2, 3, (n,), generator=rng).float() * 2.0**-149,
    "special": lambda n, rng: torch.tensor([math.inf, -math.inf, math.nan, 0.0, -1.0])[torch.randint(0, 5, (n,), generator=rng)],
    "all NaN": lambda n, rng: torch.full((n,), math.nan),
    "negative NaN": lambda n, rng: torch.where(torch.rand(n, generator=rng) < 0.5, -torch.full((n,), math.nan), 1.0),
    "one bit apart": lambda n, rng: torch.nextafter(torch.ones(n), torch.randint(0, 3, (n,), generator=rng).float()),
    "all magnitudes": lambda n, rng: torch.randn(n, generator=rng) * 10.0 ** torch.randint(-38, 38, (n,), generator=rng),
}


@pytest.mark.parametrize("name", SCORES)
def test_whatever_the_scores(device, name):
    _, tables, lens, references = some_sequences((1600, 37, 800, 0, 5, 320))
    scores = SCORES[name](len(references), torch.Generator().manual_seed(0))
    for budget in (1, 7, 40, 99):
        check_selection(device, scores, tables, lens, budget, block_size=16, references=references)


def test_scores_of_places(device):
    """A block may be worth different things to the sequences that share it."""
    _, tables, lens, references = some_sequences((160, 160, 320), shared=8)
    scores = torch.rand(tables.shape, generator=torch.Generator().manual_seed(1))
    for counts in (None, references):
        check_selection(device, scores, tables, lens, 4, 1, 1, block_size=16, references=counts)
    check_selection(device, in_layout(scores, "sliced"), in_layout(tables, "unaligned"), lens, 4, block_size=16)


@pytest.mark.parametrize("blocks", [8191, 8192, 8193, 8194, 8195, 20_000])
def test_a_table_longer_than_what_a_kernel_holds(device, blocks):
    scores, tables, lens, _ = some_sequences((blocks * 2, 6), block_size=2)
    for few in (blocks - 1, blocks - 3, blocks // 2, 5):
        check_selection(device, scores, tables, lens, few, 1, 1, block_size=2)
        check_selection(device, (scores * 4).floor(), tables, lens, few, 1, 1, block_size=2)


@pytest.mark.parametrize("kind", ["one holder stays", "all let go", "held elsewhere", "of one call in turns"])
def test_a_shared_block_is_freed_when_its_last_holder_lets_go(device, kind):
    lengths = (96,) * 4 if kind != "one holder stays" else (96, 96, 96, 32)
    scores, tables, lens, references = some_sequences(lengths, shared=2)
    shared = tables[0, 1].item()
    scores[shared] = -1
    references[shared] += kind == "held elsewhere"
    if kind == "of one call in turns":
        for s in range(4):
            one = slice(s, s + 1)
            counts = references.to(device)
            freed = pagedkv.select_per_sequence(
                scores.to(device), tables[one].to(device), lens[one].to(device), 5, block_size=16, references=counts
            )[2]
            assert (shared in freed.tolist()) == (s == 3)
            references = counts.cpu()
        return
    freed = check_selection(device, scores, tables, lens, 5, block_size=16, references=references)[2].tolist()
    assert freed.count(shared) == (1 if kind == "all let go" else 0)


def test_more_sequences_than_a_device_holds_at_once(device):
    scores, tables, lens, references = some_sequences(tuple(range(0, 1200)), block_size=64, shared=3)
    check_selection(device, scores, tables, lens, 5, block_size=64, references=references)


def test_bad_sequences_come_back_as_they_were(device):
    scores, tables, lens, references = some_sequences((160, 160, 160, 160))
    lens[1], lens[2] = -5, tables.shape[1] * 16 + 1
    tables[0, 3], tables[3, 2] = len(scores), -9
    for counts in (None, references):
        new = check_selection(device, scores, tables, lens, 4, block_size=16, references=counts)
        assert torch.equal(new[0][1:3].cpu(), tables[1:3]) and torch.equal(new[1][1:3].cpu(), lens[1:3])
    check_selection(device, scores, tables, lens, 0, 0, 0, block_size=16, references=references)


def test_nothing_to_select_from(device):
    for num_seqs, max_blocks in ((0, 3), (3, 0), (0, 0)):
        tables, lens = torch.zeros(num_seqs, max_blocks, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
        check_selection(device, torch.zeros(0), tables, lens, 2, block_size=16, references=torch.zeros(0, dtype=torch.int32))


def test_selection_repeats_to_the_last_bit(device):
    scores, tables, lens, references = some_sequences((1600,) * 40, shared=50)
    scores = (scores * 8).floor()
    first = None
    for _ in range(5):
        counts = references.clone().to(device)
        got = (
            *pagedkv.select_per_sequence(scores.to(device), tables.to(device), lens.to(device), 30, block_size=16, references=counts),
            counts,
        )
        first = first or got
        assert all(same_bits(a, b) for a, b in zip(got, first, strict=True))


def test_checked_selection_needs_blocks_of_the_pool(device, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    scores, tables, lens, _ = some_sequences((160, 160))
    check_selection(device, scores, tables, lens, 4, block_size=16)
    tables[1, 3] = len(scores)
    with pytest.raises(ValueError, match=r"^block_tables\[1, 3\]: expected a block id"):
        check_selection(device, scores, tables, lens, 4, block_size=16)


@given(st.data())
def test_any_selection(device, data):
    block_size = data.draw(st.sampled_from([1, 3, 16, 64]))
    lengths = data.draw(st.lists(st.integers(0, 20 * block_size), max_size=6))
    shared = data.draw(st.integers(0, 12))
    _, tables, lens, references = some_sequences(lengths, block_size, shared, data.draw(st.integers(0, 2**32)))
    numbers = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, math.inf, math.nan]))
    by_place = data.draw(st.booleans())
    count = tables.numel() if by_place else len(references)
    scores = torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)), dtype=torch.float32)
    references = references + torch.tensor(data.draw(st.sampled_from([0, 1])), dtype=torch.int32)
    budget = data.draw(st.one_of(st.integers(0, 25), st.lists(st.integers(-1, 25), min_size=len(lengths), max_size=len(lengths))))
    check_selection(
        device,
        scores.view(tables.shape) if by_place else scores,
        tables,
        lens,
        torch.tensor(budget, dtype=torch.int32) if isinstance(budget, list) else budget,
        data.draw(st.integers(0, 4)),
        data.draw(st.integers(0, 4)),
        block_size=block_size,
        references=data.draw(st.sampled_from([None, references])),
    )
