"""Statistics of K and V against the reference: every encoding, shape and layout, and nothing past the end of a sequence."""

import math

import numpy as np
import pytest
import torch
from cases import CACHES, QUANTISED, decode
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv import reference


def parameters(case, blocks_per_group):
    groups = -(-case.block_tables.shape[1] // blocks_per_group)
    sizes = (*case.seq_lens.shape, groups, *case.k_cache.shape[2:])
    rng = torch.Generator().manual_seed(1)
    return [x.to(case.k_cache.device) for x in (torch.randn(sizes, generator=rng), 1 + torch.rand(sizes, generator=rng))]


def check(case, blocks_per_group):
    """Both ops over K and V; what is not of a sequence is poison in `decode`'s caches."""
    tables = (case.block_tables, case.seq_lens)
    for cache, scale in ((case.k_cache, case.k_scale), (case.v_cache, case.v_scale)):
        shift, gain = parameters(case, blocks_per_group)
        for options in ({}, {"shift": shift, "gain": gain}):
            got = pagedkv.token_moments(cache, scale, *tables, blocks_per_group=blocks_per_group, **options)
            want = reference.token_moments(cache, scale, *tables, blocks_per_group=blocks_per_group, **options)
            head_dim = cache.shape[-1]
            for a, b, magnitude in zip(got, want, (np.sqrt(np.abs(want[1]) * head_dim), np.abs(want[1])), strict=True):
                close(a, b, magnitude)
        got = pagedkv.channel_statistics(cache, scale, *tables, blocks_per_group=blocks_per_group)
        want = reference.channel_statistics(cache, scale, *tables, blocks_per_group=blocks_per_group)
        for a, b in zip(got[:2], want[:2], strict=True):
            np.testing.assert_array_equal(a.cpu().double().numpy(), b.astype(np.float32))
        close(got[2], want[2], float(max([1, *case.seq_lens.tolist()])))


def close(got, want, magnitude):
    """float32 against float64: `magnitude` bounds the sum of the terms' absolute values."""
    got = got.cpu().double().numpy()
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    good = ~np.isnan(want)
    assert np.all((np.abs(got - want) <= 2e-6 * (magnitude + 1e-3))[good])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("blocks_per_group", [1, 2, 100, 2**63 - 1])
def test_statistics_match_the_reference(device, cache, blocks_per_group):
    check(decode(device, cache=cache), blocks_per_group)


@pytest.mark.parametrize("cache", ["block_head", "token_head", "float16"])
@pytest.mark.parametrize("head_dim", [8, 24, 80, 112, 128, 256])
def test_any_head_dim(device, cache, head_dim):
    check(decode(device, cache=cache, head_dim=head_dim, kv_heads=3, heads=3), 2)


@pytest.mark.parametrize("block_size", [1, 5, 48, 256])
def test_any_block_size(device, block_size):
    check(decode(device, block_size=block_size, lengths=(300, 0, 7)), 3)


@pytest.mark.parametrize("layout", ["sliced", "unaligned", "heads_first"])
@pytest.mark.parametrize("cache", ["block_head", "token_head", "bfloat16"])
def test_any_layout(device, layout, cache):
    check(decode(device, cache=cache, layout=layout), 2)
    check(decode(device, cache=cache, interleave=True), 2)


def test_norms_and_standard_deviations(device):
    """What the moments are for."""
    case = decode(device, cache="float32", lengths=(32,), layout="contiguous")
    k = case.k_cache[case.block_tables[0, :2].long()]
    total, squares = (x[0, :2] for x in pagedkv.token_moments(case.k_cache, None, case.block_tables, case.seq_lens))
    torch.testing.assert_close(squares.sqrt(), k.norm(dim=-1))
    n = k.shape[-1]
    torch.testing.assert_close(((squares - total**2 / n) / (n - 1)).sqrt(), k.std(dim=-1))


@pytest.mark.parametrize("cache", ["block_head", "float32"])
def test_a_bad_sequence_is_nan_and_disturbs_no_other(device, cache):
    case = decode(device, cache=cache, lengths=(64, 40, 64, 64, 20))
    case.seq_lens[1], case.seq_lens[2] = -3, case.block_tables.shape[1] * 16 + 1
    case.block_tables[0, 2], case.block_tables[3, 0] = len(case.k_cache), -1
    check(case, 2)
    total, _ = pagedkv.token_moments(case.k_cache, case.k_scale, case.block_tables, case.seq_lens)
    bad = total.isnan().flatten(2).any(-1)
    assert bad[1].all() and bad[2].all() and bad[0].nonzero().tolist() == [[2]] and bad[3].nonzero().tolist() == [[0]]
    assert not bad[4].any()


def test_a_nan_token_stays_where_it_is(device):
    case = decode(device, cache="float32", lengths=(40, 40))
    case.k_cache[case.block_tables[0, 1], 3, 0, 5] = math.nan
    check(case, 1)
    low, high, direction = pagedkv.channel_statistics(case.k_cache, None, case.block_tables, case.seq_lens, blocks_per_group=1)
    assert not low.isnan().any() and not high.isnan().any() and direction.isnan().sum() == case.k_cache.shape[-1]


def test_a_zero_vector_has_no_direction(device):
    case = decode(device, cache="float32", lengths=(16,))
    case.k_cache[case.block_tables[0, 0]] = 0
    check(case, 1)


def test_statistics_of_nothing(device):
    for lengths in ((), (0,), (0, 0)):
        check(decode(device, lengths=lengths), 1)
    case = decode(device, lengths=(20, 5))
    case.block_tables = case.block_tables[:, :0]
    case.seq_lens.zero_()
    check(case, 3)


def test_statistics_repeat_to_the_last_bit(device):
    case = decode(device, lengths=(1500, 700), cache="token_head")
    arguments = (case.k_cache, case.k_scale, case.block_tables, case.seq_lens)
    first = [*pagedkv.token_moments(*arguments), *pagedkv.channel_statistics(*arguments, blocks_per_group=1000)]
    for _ in range(3):
        again = [*pagedkv.token_moments(*arguments), *pagedkv.channel_statistics(*arguments, blocks_per_group=1000)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@given(st.data())
def test_any_call_within_the_contract(device, data):
    lengths = tuple(data.draw(st.lists(st.integers(0, 60), max_size=4)))
    case = decode(
        device,
        lengths=lengths,
        kv_heads=(kv_heads := data.draw(st.integers(1, 3))),
        heads=kv_heads,
        head_dim=8 * data.draw(st.integers(1, 8)),
        block_size=data.draw(st.integers(1, 20)),
        cache=data.draw(st.sampled_from([*QUANTISED, "float32"])),
        layout=data.draw(st.sampled_from(["contiguous", "sliced", "unaligned"])),
        seed=data.draw(st.integers(0, 2**32)),
    )
    check(case, data.draw(st.integers(1, 6)))
