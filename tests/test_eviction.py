"""Scoring and selecting blocks: exact, deterministic, and in the order of numbers, not of bits."""

import math

import numpy as np
import pytest
import torch
from cases import in_layout, same_bits
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv import reference

DENORMAL = 2.0**-149


def statistics(device, num_blocks, block_size, seed=0, layout="contiguous"):
    """Recency, frequency, mass and mask; what the mask leaves out is poison, and the first blocks hold nothing valid."""
    rng = torch.Generator().manual_seed(seed)
    recency, frequency = (torch.rand(num_blocks, generator=rng) for _ in range(2))
    mask = torch.rand(num_blocks, block_size, generator=rng) < 0.7
    mask[:2] = False
    mass = torch.rand(num_blocks, block_size, generator=rng)
    mass[~mask] = math.nan
    return recency.to(device), frequency.to(device), in_layout(mass.to(device), layout), in_layout(mask.to(device), layout)


def check_scores(arguments, weights=()):
    scores = pagedkv.eviction_scores(*arguments, *weights)
    assert scores.dtype == torch.float32
    exact = reference.eviction_scores(*arguments, *weights)
    terms = [abs(w) for w in (weights or (0.4, 0.3, 0.3))]
    np.testing.assert_allclose(scores.cpu().double().numpy(), exact, rtol=1e-6, atol=1e-6 * sum(terms))
    return scores


# --------------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("block_size", [1, 5, 12, 16, 48, 256])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 1000])
def test_scores_match_the_reference(device, num_blocks, block_size):
    check_scores(statistics(device, num_blocks, block_size))


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "unaligned"])
@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (-2.0, 0.5, 100.0)])
def test_scores_with_any_weights_and_strides(device, layout, weights):
    check_scores(statistics(device, 37, 16, layout=layout), weights)


def test_a_block_without_valid_tokens_has_no_attention_term(device):
    recency, frequency, mass, mask = statistics(device, 4, 16)
    scores = pagedkv.eviction_scores(recency, frequency, mass, mask)
    torch.testing.assert_close(scores[:2], 0.4 * recency[:2] + 0.3 * frequency[:2])
    assert torch.all(torch.isfinite(scores)), "what the mask leaves out was read"


def test_a_nan_among_valid_tokens_reaches_its_block_only(device):
    recency, frequency, mass, mask = statistics(device, 8, 16)
    good = pagedkv.eviction_scores(recency, frequency, mass, mask)
    mass[5, 3], mask[5, 3] = math.nan, True
    scores = pagedkv.eviction_scores(recency, frequency, mass, mask)
    assert torch.isnan(scores[5])
    scores[5] = good[5]
    assert same_bits(scores, good)


# ------------------------------------------------------------------------------------------------------------------ selection


HOSTILE = {
    "uniform": lambda n, rng: torch.rand(n, generator=rng),
    "all equal": lambda n, rng: torch.full((n,), 0.25),
    "ties": lambda n, rng: torch.randint(0, 4, (n,), generator=rng).float(),
    "one bit apart": lambda n, rng: torch.nextafter(torch.ones(n), torch.randint(0, 3, (n,), generator=rng).float()),
    "both zeros": lambda n, rng: torch.where(torch.rand(n, generator=rng) < 0.5, 0.0, -0.0),
    "zeros among denormals": lambda n, rng: torch.randint(-2, 3, (n,), generator=rng).float() * DENORMAL * torch.tensor(1.0),
    "infinities and NaN": lambda n, rng: torch.tensor([math.inf, -math.inf, math.nan, 0.0, -1.0])[torch.randint(0, 5, (n,), generator=rng)],
    "all NaN": lambda n, rng: torch.full((n,), math.nan),
    "negative NaN": lambda n, rng: torch.where(torch.rand(n, generator=rng) < 0.5, -torch.full((n,), math.nan), torch.zeros(n)),
    "sorted": lambda n, rng: torch.arange(n).float(),
    "reversed": lambda n, rng: -torch.arange(n).float(),
    "two clusters": lambda n, rng: torch.rand(n, generator=rng) * 1e-6 + torch.randint(0, 2, (n,), generator=rng),
    "all magnitudes": lambda n, rng: torch.randn(n, generator=rng) * 10.0 ** torch.randint(-38, 38, (n,), generator=rng),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("n", [1, 2, 31, 1000, 70_000])
def test_selection_is_exact_whatever_the_scores(device, name, n):
    scores = HOSTILE[name](n, torch.Generator().manual_seed(n))
    order = reference.select_eviction_candidates(scores, n)
    for k in sorted({0, 1, n // 7, n // 2, n - 1, n}):
        ids = pagedkv.select_eviction_candidates(scores.to(device), k)
        assert ids.dtype == torch.int64 and ids.shape == (k,)
        np.testing.assert_array_equal(ids.cpu().numpy(), order[:k], err_msg=f"k={k}")


def test_order_of_special_values(device):
    scores = torch.tensor([math.nan, 1.0, -0.0, math.inf, 0.0, -math.inf, DENORMAL, -DENORMAL, math.nan, -math.inf], device=device)
    assert pagedkv.select_eviction_candidates(scores, 10).tolist() == [5, 9, 7, 2, 4, 6, 1, 3, 0, 8]


def test_selection_from_nothing(device):
    assert pagedkv.select_eviction_candidates(torch.empty(0, device=device), 0).shape == (0,)
    ids, scores = pagedkv.evict_blocks(*(x[:0] for x in statistics(device, 4, 16)), 0)
    assert ids.shape == (0,) and scores.shape == (0,)


def test_ids_in_a_pool_of_134_million_blocks(backend, device):
    """Where an id is no float32 and a product of two counts no int32."""
    if backend.endswith("pytorch"):
        pytest.skip("plain PyTorch sorts them all, for half a minute")
    n = 2**27
    ids = torch.tensor([n - 1, 7, n // 2 + 3, n // 2, n // 2 - 1, 2**24 + 1], device=device)
    scores = torch.ones(n, device=device)
    scores[ids] = torch.arange(-3.0, 3.0, device=device) / 4
    assert torch.equal(pagedkv.select_eviction_candidates(scores, len(ids)), ids)


def test_a_seventh_of_134_million_blocks(backend, device):
    """Sixteen of each score, the lowest last: what comes out needs no sort to be known."""
    if backend.endswith("pytorch"):
        pytest.skip("plain PyTorch sorts them all, for half a minute")
    n, k = 2**27, 16 * (2**27 // 7 // 16)
    scores = (torch.arange(n - 1, -1, -1, device=device) >> 4).float()
    want = (torch.arange(n - 16, n - k - 1, -16, device=device)[:, None] + torch.arange(16, device=device)).flatten()
    assert torch.equal(pagedkv.select_eviction_candidates(scores, k), want)


@given(st.lists(st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, math.inf, math.nan])), max_size=80), st.data())
def test_any_scores(device, values, data):
    k = data.draw(st.integers(0, len(values)))
    scores = torch.tensor(values, dtype=torch.float32)
    ids = pagedkv.select_eviction_candidates(scores.to(device), k)
    np.testing.assert_array_equal(ids.cpu().numpy(), reference.select_eviction_candidates(scores, k))


# ---------------------------------------------------------------------------------------------------------------------- fused


@pytest.mark.parametrize("num_blocks", [2, 257, 5000])
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("fraction", [0, 0.15, 0.5, 1])
def test_fused_equals_the_two_steps_bit_for_bit(device, num_blocks, block_size, fraction):
    arguments = statistics(device, num_blocks, block_size)
    k = int(num_blocks * fraction)
    ids, scores = pagedkv.evict_blocks(*arguments, k)
    assert same_bits(scores, pagedkv.eviction_scores(*arguments))
    assert same_bits(ids, pagedkv.select_eviction_candidates(scores, k))


@given(
    st.integers(2, 300),
    st.integers(1, 40),
    st.tuples(*[st.floats(-10, 10, width=32)] * 3),
    st.sampled_from(["contiguous", "sliced", "unaligned"]),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_any_call_within_the_contract(device, num_blocks, block_size, weights, layout, fraction, seed):
    arguments = statistics(device, num_blocks, block_size, seed, layout)
    scores = check_scores(arguments, weights)
    k = int(fraction * num_blocks)
    ids, fused = pagedkv.evict_blocks(*arguments, k, *weights)
    assert same_bits(fused, scores)
    np.testing.assert_array_equal(ids.cpu().numpy(), reference.select_eviction_candidates(scores, k))


def test_repeats_are_equal_bit_for_bit(device):
    arguments = statistics(device, 20_000, 16)
    first = pagedkv.evict_blocks(*arguments, 3000)
    for _ in range(10):
        assert all(same_bits(a, b) for a, b in zip(pagedkv.evict_blocks(*arguments, 3000), first, strict=True))
