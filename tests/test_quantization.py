"""INT8 encoding: exact to the scale, within half a step for every finite input, and a bad value stays in its group."""

import math

import numpy as np
import pytest
import torch
from cases import FLOATS, LAYOUTS, QUANTISED, in_layout, same_bits
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv import reference

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = torch.finfo(torch.float32).tiny  # the smallest normal number
DENORM_MIN = 2.0**-149


def groups_of(values: torch.Tensor, granularity: str) -> torch.Tensor:
    """`[..., elements]`: what shares a scale, in the order of the scale."""
    return values.transpose(1, 2).flatten(2) if granularity == "block_head" else values


def check_against_reference(kv: torch.Tensor, granularity: str) -> None:
    q, scale = pagedkv.quantize_kv(kv, granularity)
    assert q.dtype == torch.int8 and scale.dtype == torch.float32 and q.is_contiguous() and scale.is_contiguous()
    exact_q, exact_scale = reference.quantize_kv(kv, granularity)
    np.testing.assert_array_equal(scale.cpu().numpy(), exact_scale)
    # On CUDA the quotient is rounded to float32 before it is rounded to an integer: only one at a half can go either way.
    step = groups_of(torch.ones_like(q, dtype=torch.float64), granularity) * torch.from_numpy(exact_scale).double().to(kv.device)[..., None]
    quotient = groups_of(kv.double(), granularity) / step
    differ = groups_of(q, granularity) != groups_of(torch.from_numpy(exact_q).to(kv.device), granularity)
    near_a_half = (quotient - quotient.floor() - 0.5).abs() < 127 * 2.0**-24
    assert torch.all(near_a_half[differ]) if kv.device.type == "cuda" else not differ.any()
    assert int(q.abs().amax()) <= 127 if q.numel() else True

    finite = torch.isfinite(scale)[..., None]
    decoded = groups_of(pagedkv.dequantize_kv(q, scale).double(), granularity)
    error = (groups_of(kv.double(), granularity) - decoded).abs()
    one_rounding = torch.maximum(groups_of(kv.double(), granularity).abs() * 2.0**-22, torch.tensor(DENORM_MIN, dtype=torch.float64))
    assert torch.all((error <= step / 2 + one_rounding)[finite.expand_as(error)])


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 16, 2, 64), (2, 5, 3, 80), (1, 1, 1, 8), (2, 48, 1, 256), (4, 256, 1, 8), (70, 2, 2, 8)], ids=str)
def test_matches_the_reference(device, granularity, dtype, layout, shape):
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    check_against_reference(in_layout(kv, layout), granularity)


@pytest.mark.parametrize("granularity", QUANTISED)
def test_slices_of_an_interleaved_cache(device, granularity):
    both = torch.randn(4, 2, 16, 2, 32, generator=torch.Generator().manual_seed(0)).to(device)
    check_against_reference(both[:, 1], granularity)


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize(
    "largest",
    [
        DENORM_MIN,
        2 * DENORM_MIN,
        100 * DENORM_MIN,
        127 * DENORM_MIN,
        190 * DENORM_MIN,
        FLT_MIN,
        127 * FLT_MIN,
        1e-30,
        3e-5,
        1.0,
        1e30,
        FLT_MAX,
    ],
)
def test_every_finite_magnitude_keeps_half_a_step(device, granularity, largest):
    """No floor under the scale, no overflow, and no loss where the scale itself is subnormal."""
    kv = torch.linspace(-1, 1, 2 * 4 * 2 * 16, dtype=torch.float64).mul(largest).float().view(2, 4, 2, 16)
    kv[..., 0] = largest
    kv[..., 1] = -largest
    check_against_reference(kv.to(device), granularity)


def test_halves_round_to_even(device):
    kv = torch.zeros(1, 1, 1, 8)
    kv[0, 0, 0] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    q, scale = pagedkv.quantize_kv(kv.to(device))
    assert scale.item() == 1.0
    assert q.flatten().tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def near_ties(groups: int, exponent: int = 0) -> torch.Tensor:
    """`[groups, 256]`: each row its largest value, then float32s next to a half of its scale: the nearest and those on either side."""
    rng = np.random.default_rng(exponent + 200)
    largest = (rng.uniform(1, 2, groups) * 2.0**exponent).astype(np.float32)
    scale = np.array([reference.quantization.scale_of(x) for x in largest], np.float64)
    halves = rng.integers(-127, 127, (groups, 85)) + 0.5
    nearest = (halves * scale[:, None]).astype(np.float32)
    rows = np.concatenate([largest[:, None], nearest, *(np.nextafter(nearest, np.float32(d)) for d in (-np.inf, np.inf))], axis=1)
    return torch.from_numpy(np.clip(rows, -largest[:, None], largest[:, None]))


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("exponent", [-149, -140, -120, -20, 0, 20, 126])
def test_a_quotient_next_to_a_half_goes_to_its_own_side(device, granularity, exponent):
    check_against_reference(near_ties(64, exponent).view(64, 1, 1, 256).to(device), granularity)


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_an_all_zero_group_has_scale_one(device, granularity, zero):
    kv = torch.randn(3, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    kv[1, :, 1] = zero
    q, scale = pagedkv.quantize_kv(kv.to(device), granularity)
    assert torch.all(scale[1, ..., 1] == 1) and torch.all(q[1, :, 1] == 0)
    assert torch.sum(scale == 1) == scale[1, ..., 1].numel()


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("element", [0, 7, 39])
def test_a_value_that_is_not_finite_spoils_its_group_only(device, granularity, dtype, bad, element):
    kv = torch.randn(3, 4, 2, 40, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    good_q, good_scale = pagedkv.quantize_kv(kv, granularity)
    kv[1, 2, 0, element] = bad
    q, scale = pagedkv.quantize_kv(kv, granularity)
    group = (1, 2, 0) if granularity == "token_head" else (1, 0)
    assert torch.isnan(scale[group])
    assert torch.all((q[1, 2, 0] if granularity == "token_head" else q[1, :, 0]) == 0)
    assert torch.all(torch.isnan(pagedkv.dequantize_kv(q, scale)[1, 2, 0]))
    scale[group] = good_scale[group]
    q[1, :, 0] = good_q[1, :, 0] if granularity == "block_head" else q[1, :, 0]
    q[1, 2, 0] = good_q[1, 2, 0]
    assert same_bits(q, good_q) and same_bits(scale, good_scale)


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoding_is_one_float32_product(device, granularity, layout):
    rng = torch.Generator().manual_seed(0)
    q = torch.randint(-127, 128, (3, 5, 2, 24), generator=rng, dtype=torch.int8)
    scale = torch.rand((3, 5, 2) if granularity == "token_head" else (3, 2), generator=rng)
    kv = pagedkv.dequantize_kv(in_layout(q.to(device), layout), in_layout(scale.to(device), layout))
    assert kv.dtype == torch.float32 and kv.is_contiguous()
    np.testing.assert_array_equal(kv.cpu().numpy(), reference.dequantize_kv(q, scale).astype(np.float32))


@pytest.mark.parametrize("granularity", QUANTISED)
def test_no_blocks(device, granularity):
    q, scale = pagedkv.quantize_kv(torch.empty(0, 16, 2, 64, device=device), granularity)
    assert q.shape == (0, 16, 2, 64) and scale.shape == ((0, 16, 2) if granularity == "token_head" else (0, 2))
    assert pagedkv.dequantize_kv(q, scale).shape == (0, 16, 2, 64)


@pytest.mark.parametrize("granularity", QUANTISED)
def test_repeats_are_equal_bit_for_bit(device, granularity):
    kv = torch.randn(64, 16, 4, 64, generator=torch.Generator().manual_seed(0)).to(device)
    first = pagedkv.quantize_kv(kv, granularity)
    for _ in range(10):
        assert all(same_bits(a, b) for a, b in zip(pagedkv.quantize_kv(kv, granularity), first, strict=True))


@given(
    st.sampled_from(QUANTISED),
    st.sampled_from(list(FLOATS.values())),
    st.sampled_from(LAYOUTS),
    st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 3), st.integers(1, 20)),
    st.lists(st.floats(allow_nan=True, width=32, allow_subnormal=True), max_size=30),
    st.integers(-140, 120),
    st.integers(0, 2**32),
)
def test_any_call_within_the_contract(device, granularity, dtype, layout, shape, values, exponent, seed):
    """Random data of any magnitude, with arbitrary floats (subnormal, huge, NaN, inf) strewn in."""
    rng = torch.Generator().manual_seed(seed)
    blocks, block_size, kv_heads, eighths = shape
    kv = torch.randn((blocks, block_size, kv_heads, 8 * eighths), generator=rng, dtype=torch.float64) * 2.0**exponent
    kv.view(-1)[torch.randint(kv.numel(), (len(values),), generator=rng)] = torch.tensor(values, dtype=torch.float64)
    check_against_reference(in_layout(kv.to(device, dtype), layout), granularity)


@given(
    st.sampled_from(QUANTISED),
    st.sampled_from(LAYOUTS),
    st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 3), st.integers(1, 20)),
    st.lists(st.floats(allow_nan=True, width=32, allow_subnormal=True), max_size=9),
    st.integers(0, 2**32),
)
def test_any_decoding_within_the_contract(device, granularity, layout, shape, scales, seed):
    """Any int8 data, -128 included, and arbitrary scales among random ones."""
    rng = torch.Generator().manual_seed(seed)
    blocks, block_size, kv_heads, eighths = shape
    q = torch.randint(-128, 128, (blocks, block_size, kv_heads, 8 * eighths), generator=rng, dtype=torch.int8)
    scale = torch.rand((blocks, block_size, kv_heads) if granularity == "token_head" else (blocks, kv_heads), generator=rng)
    scale.view(-1)[torch.randint(scale.numel(), (len(scales),), generator=rng)] = torch.tensor(scales, dtype=torch.float32)
    kv = pagedkv.dequantize_kv(in_layout(q.to(device), layout), in_layout(scale.to(device), layout))
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(kv.cpu().numpy(), reference.dequantize_kv(q, scale).astype(np.float32))
