"""The quantising cache write: what a block holds stays right whatever joins it, and nothing else moves."""

import math

import numpy as np
import pytest
import torch
from cases import FLOATS, LAYOUTS, QUANTISED, in_layout, interleaved, same_bits
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv import reference

STEP_SLACK = 1 + 1e-5  # a decoded value is itself rounded to float32


class Cache:
    """K and V pools with their scales; a fresh one holds garbage, as after torch.empty."""

    def __init__(self, device, granularity, num_blocks=6, block_size=4, kv_heads=2, head_dim=16, layout="contiguous", interleave=False):
        self.granularity, self.block_size, self.device = granularity, block_size, device
        rng = torch.Generator().manual_seed(99)
        k, v = (torch.randint(-127, 128, (num_blocks, block_size, kv_heads, head_dim), generator=rng, dtype=torch.int8) for _ in range(2))
        self.k, self.v = (x.to(device) for x in (k, v))
        self.k, self.v = interleaved(self.k, self.v) if interleave else (in_layout(self.k, layout), in_layout(self.v, layout))
        shape = (num_blocks, block_size, kv_heads) if granularity == "token_head" else (num_blocks, kv_heads)
        self.k_scale, self.v_scale = (in_layout(torch.rand(shape, generator=rng).to(device), layout) for _ in range(2))

    @property
    def tensors(self):
        return self.k, self.k_scale, self.v, self.v_scale

    def write(self, key, value, slots):
        pagedkv.reshape_and_cache(key.to(self.device), value.to(self.device), *self.tensors, self.slots(slots))

    def slots(self, slots):
        return torch.as_tensor(slots, dtype=torch.int64, device=self.device)

    def write_and_check(self, key, value, slots):
        """Write, and hold all four tensors against the reference, to the last bit but for quotients at a half on CUDA."""
        expected = reference.reshape_and_cache(key, value, *self.tensors, slots)
        self.write(key, value, slots)
        for name, got, want in zip(("k_cache", "k_scale", "v_cache", "v_scale"), self.tensors, expected, strict=True):
            if got.dtype == torch.float32 or self.device.type == "cpu":
                np.testing.assert_array_equal(got.cpu().numpy(), want, err_msg=name)
            else:
                difference = np.abs(got.cpu().numpy().astype(int) - want)
                assert difference.max(initial=0) <= 1 and np.sum(difference > 0) <= 2 + 0.01 * difference.size, name

    def decoded(self, slots):
        """K at the slots, float64 `[len(slots), kv_heads, head_dim]`."""
        return pagedkv.dequantize_kv(self.k, self.k_scale).flatten(0, 1)[self.slots(slots)].double().cpu()

    def clone(self):
        return [x.clone() for x in self.tensors]


def tokens(count, kv_heads=2, head_dim=16, dtype=torch.float32, seed=0, magnitude=1.0):
    rng = torch.Generator().manual_seed(seed)
    return tuple((torch.randn(count, kv_heads, head_dim, generator=rng) * magnitude).to(dtype) for _ in range(2))


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_reference(device, granularity, dtype, layout):
    cache = Cache(device, granularity, layout=layout, head_dim=24)
    key, value = tokens(12, head_dim=24, dtype=dtype)
    key, value = in_layout(key.to(device), layout), in_layout(value.to(device), layout)
    cache.write_and_check(key[:7], value[:7], [0, 1, 2, 9, 10, -1, 16])
    cache.write_and_check(key[7:] * 3, value[7:] / 3, [3, 11, 22, 17, 4])


@pytest.mark.parametrize("granularity", QUANTISED)
def test_k_and_v_interleaved_in_one_tensor(device, granularity):
    cache = Cache(device, granularity, interleave=True)
    cache.write_and_check(*tokens(9), [0, 1, 2, 3, 8, 9, 5, 6, 20])


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
def test_a_block_written_at_once_equals_quantize_kv(device, granularity, dtype):
    cache = Cache(device, granularity)
    key, value = tokens(8, dtype=dtype)
    cache.write(key, value, [8, 9, 10, 11, 4, 5, 6, 7])
    for x, q, scale in ((key, cache.k, cache.k_scale), (value, cache.v, cache.v_scale)):
        expected_q, expected_scale = pagedkv.quantize_kv(x.to(device).view(2, 4, 2, 16), granularity)
        assert same_bits(q[[2, 1]], expected_q) and same_bits(scale[[2, 1]], expected_scale)


@pytest.mark.parametrize("granularity", QUANTISED)
def test_a_long_prompt_in_any_order_equals_quantize_kv(device, granularity):
    """Enough tokens to be shared out among threads; those of one block come from all over the call."""
    cache = Cache(device, granularity, num_blocks=256, block_size=16, head_dim=64)
    key, value = tokens(4096, head_dim=64)
    slots = torch.randperm(4096, generator=torch.Generator().manual_seed(1))
    cache.write(key, value, slots)
    for x, q, scale in ((key, cache.k, cache.k_scale), (value, cache.v, cache.v_scale)):
        in_place = torch.empty_like(x).index_copy_(0, slots, x).view(256, 16, 2, 64)
        expected_q, expected_scale = pagedkv.quantize_kv(in_place.to(device), granularity)
        assert same_bits(q, expected_q) and same_bits(scale, expected_scale)


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
@pytest.mark.parametrize("block_size, head_dim", [(16, 128), (16, 64), (8, 32), (32, 64), (16, 24), (4, 16)])
def test_prompts_of_whole_blocks_and_what_disturbs_them(device, granularity, dtype, block_size, head_dim):
    """Runs that fill blocks, from anywhere in the call; padding within one; tokens rewritten later, a block of them by a larger one."""
    cache = Cache(device, granularity, num_blocks=700 // block_size + 4, block_size=block_size, head_dim=head_dim)
    blocks = torch.randperm(len(cache.k), generator=torch.Generator().manual_seed(2))
    places = torch.cat([torch.arange(300), torch.tensor([-1, -1, -1]), 300 + torch.arange(5, 350)])  # two prompts; the second goes on
    slots = torch.where(places < 0, -1, blocks[places // block_size] * block_size + places % block_size)
    slots[40] = -1
    slots = torch.cat([slots, slots[[3, 100, 101, 400]], slots[block_size * 12 : block_size * 13]])
    key, value = tokens(len(slots), head_dim=head_dim, dtype=dtype)
    key[3] *= 4  # not written, but its block's scale covers it
    value[-1] *= 4
    cache.write_and_check(key, value, slots)


@pytest.mark.parametrize("granularity", QUANTISED)
def test_slots_past_two_gigabytes(device, granularity):
    """Block 66,000 of 32 KiB starts past 2**31 bytes. Only the pages of two blocks are ever touched."""
    near, far = Cache(device, granularity, 3, 16, 8, 256), Cache(device, granularity, 0, 16, 8, 256)
    far.k, far.v = (torch.empty((66_002, 16, 8, 256), dtype=torch.int8, device=device) for _ in range(2))
    far.k_scale, far.v_scale = (torch.empty((66_002, *near.k_scale.shape[1:]), device=device) for _ in range(2))
    key, value = tokens(4, 8, 256)
    offsets = torch.tensor([0, 16, 1, 17])
    near.write(key, value, offsets)
    far.write(key, value, offsets + 66_000 * 16)
    rows = ([0, 0, 1, 1], [0, 1, 0, 1])  # the slots that were written
    assert same_bits(far.k[66_000:][rows], near.k[rows]) and same_bits(far.v[66_000:][rows], near.v[rows])
    scales = rows if granularity == "token_head" else slice(0, 2)
    assert same_bits(far.k_scale[66_000:][scales], near.k_scale[scales])


@pytest.mark.parametrize("granularity", QUANTISED)
def test_other_blocks_do_not_move(device, granularity):
    cache = Cache(device, granularity)
    before = cache.clone()
    cache.write(*tokens(5), [4, 5, 13, 14, -7])
    for old, new in zip(before, cache.tensors, strict=True):
        assert same_bits(new[[0, 2, 4, 5]], old[[0, 2, 4, 5]])
        assert not same_bits(new[[1, 3]], old[[1, 3]])


@pytest.mark.parametrize("granularity", QUANTISED)
def test_negative_slots_and_slots_past_the_pool_are_skipped(device, granularity):
    cache = Cache(device, granularity)
    before = cache.clone()
    int64 = torch.iinfo(torch.int64)
    cache.write(*tokens(6), [-1, -4, int64.min, 24, 1000, int64.max])
    assert all(same_bits(old, new) for old, new in zip(before, cache.tensors, strict=True))
    cache.write_and_check(*tokens(3), [-1, 2, 24])


@pytest.mark.parametrize("granularity", QUANTISED)
def test_no_tokens_and_no_blocks(device, granularity):
    cache = Cache(device, granularity)
    before = cache.clone()
    cache.write(*tokens(0), [])
    assert all(same_bits(old, new) for old, new in zip(before, cache.tensors, strict=True))
    Cache(device, granularity, num_blocks=0).write(*tokens(2), [0, -1])


@pytest.mark.parametrize("granularity", QUANTISED)
def test_of_two_tokens_for_one_slot_the_later_stays(device, granularity):
    cache = Cache(device, granularity)
    cache.write_and_check(*tokens(6), [0, 5, 0, 5, 5, 1])


# --------------------------------------------------------------------------------------------------------- scales that grow


def test_an_earlier_token_is_right_after_a_larger_one_joins_its_block(device):
    """The fault this op exists to avoid: the newcomer's scale replaces the block's, and the old values decode with it."""
    cache = Cache(device, "block_head")
    key, value = tokens(4)
    for i, growth in enumerate((1, 10, 0.1, 1000)):
        key[i] *= growth
        before = cache.decoded(range(i))
        cache.write(key[i : i + 1], value[i : i + 1], [i])
        step = cache.k_scale[0].double().cpu()[:, None]
        assert torch.all((cache.decoded(range(i)) - before).abs() <= step / 2 * STEP_SLACK), "more than one further rounding"
        assert torch.all((cache.decoded([i]) - key[i]).abs() <= step / 2 * STEP_SLACK)
    torch.testing.assert_close(cache.k_scale[0].cpu(), key.abs().amax((0, 2)) / 127, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 3, 1, 2], [0, 2, 3, 1]])
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1), (2, 2), (1, 3), (3, 1)])
def test_one_at_a_time_or_all_at_once(device, order, chunks):
    """Same scale, and values that differ by the further roundings of the writes in between."""
    key, value = tokens(4)
    key *= torch.tensor([1.0, 3.0, 0.2, 9.0])[:, None, None]
    at_once, stepwise = Cache(device, "block_head"), Cache(device, "block_head")
    at_once.write(key, value, range(4))
    start, allowed = 0, torch.zeros(2, 1, dtype=torch.float64)
    for size in chunks:
        part = order[start : start + size]
        stepwise.write(key[part], value[part], part)
        start += size
        allowed = allowed + stepwise.k_scale[0].double().cpu()[:, None] / 2
    assert same_bits(stepwise.k_scale[0], at_once.k_scale[0])
    assert torch.all((stepwise.decoded(range(4)) - key).abs() <= allowed * STEP_SLACK)


def test_the_order_of_tokens_in_a_call_does_not_matter(device):
    key, value = tokens(8)
    first, second = Cache(device, "block_head"), Cache(device, "block_head")
    slots = torch.tensor([0, 1, 2, 3, 13, 14, 9, 21])
    shuffle = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    first.write(key, value, slots)
    second.write(key[shuffle], value[shuffle], slots[shuffle])
    assert all(same_bits(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


def test_a_token_at_offset_zero_starts_the_block_afresh(device):
    """A recycled block: neither the scale nor the values of its former owner remain."""
    cache = Cache(device, "block_head")
    cache.write(*tokens(4, magnitude=1e6), [4, 5, 6, 7])
    key, value = tokens(2, magnitude=1e-3)
    cache.write(key, value, [5, 4])
    torch.testing.assert_close(cache.k_scale[1].cpu(), key.abs().amax((0, 2)) / 127, rtol=1e-6, atol=0)
    assert torch.all(cache.k[1, 2:] == 0) and torch.all(cache.v[1, 2:] == 0)


def test_zeros_do_not_hold_back_the_scale_of_what_follows(device):
    """An all-zero block has scale 1, which is no floor: tiny values that join it keep their precision."""
    cache = Cache(device, "block_head")
    nothing = torch.zeros(1, 2, 16)
    cache.write(nothing, nothing, [0])
    assert torch.all(cache.k_scale[0] == 1)
    key, value = tokens(1, magnitude=1e-6)
    cache.write_and_check(key, value, [1])
    torch.testing.assert_close(cache.k_scale[0].cpu(), key.abs().amax((0, 2)) / 127, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_its_block_and_head_until_a_fresh_start(device, bad):
    cache, twin = Cache(device, "block_head"), Cache(device, "block_head")
    key, value = tokens(6)
    twin.write(key, value, [0, 1, 4, 5, 8, 9])
    key[1, 1, 3] = bad
    cache.write_and_check(key, value, [0, 1, 4, 5, 8, 9])
    assert torch.isnan(cache.k_scale[0, 1]) and torch.all(cache.k[0, :, 1] == 0)
    assert torch.isnan(cache.k_scale).sum() == 1 and not torch.isnan(cache.v_scale).any()
    assert same_bits(cache.k[:, :, 0], twin.k[:, :, 0]) and same_bits(cache.k[1:], twin.k[1:])
    cache.write_and_check(*tokens(1, seed=1), [2])
    assert torch.isnan(cache.k_scale[0, 1])
    cache.write_and_check(*tokens(2, seed=2), [0, 1])
    assert torch.all(torch.isfinite(cache.k_scale[0]))


def test_a_token_with_its_own_scale_stands_alone(device):
    cache = Cache(device, "token_head")
    key, value = tokens(2)
    key[1, 0, 0] = math.nan
    before = cache.clone()
    cache.write_and_check(key, value, [5, 0])
    touched = torch.zeros(6, 4, dtype=torch.bool)
    touched[1, 1] = touched[0, 0] = True
    for old, new in zip(before, cache.tensors, strict=True):
        assert same_bits(new[~touched], old[~touched])
    assert torch.isnan(cache.k_scale).sum() == 1


@pytest.mark.parametrize("granularity", QUANTISED)
def test_repeats_are_equal_bit_for_bit(device, granularity):
    slots = torch.randint(0, 24, (40,), generator=torch.Generator().manual_seed(0))
    runs = []
    for _ in range(10):
        cache = Cache(device, granularity)
        cache.write(*tokens(40), slots)
        runs.append(cache.tensors)
    assert all(same_bits(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_check_mode_raises_for_a_slot_past_the_pool(device, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    cache = Cache(device, "block_head")
    cache.write(*tokens(2), [-5, 3])
    with pytest.raises(ValueError, match=r"slot_mapping\[1\].*24"):
        cache.write(*tokens(2), [3, 24])


@given(
    st.data(),
    st.sampled_from(QUANTISED),
    st.sampled_from(list(FLOATS.values())),
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_sequence_of_writes(device, data, granularity, dtype, layout, interleave, seed):
    num_blocks, block_size, kv_heads = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 3)))
    head_dim = 8 * data.draw(st.integers(1, 8))
    cache = Cache(device, granularity, num_blocks, block_size, kv_heads, head_dim, layout, interleave)
    for i in range(data.draw(st.integers(1, 4))):
        slots = data.draw(st.lists(st.integers(-2, num_blocks * block_size + 1), max_size=25))
        key, value = tokens(len(slots), kv_heads, head_dim, dtype, seed + i, magnitude=10.0 ** data.draw(st.integers(-3, 3)))
        cache.write_and_check(in_layout(key.to(device), layout), in_layout(value.to(device), layout), slots)
