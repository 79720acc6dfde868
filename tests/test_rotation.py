"""The Hadamard rotation: orthonormal, the same bits whoever applies it, and nothing that attention over K and V could see."""

import numpy as np
import pytest
import torch
from cases import CACHES, FLOATS, LAYOUTS, QUANTISED, decode, in_layout, same_bits

import pagedkv
from pagedkv import reference
from pagedkv.ops import registry
from pagedkv.ops.rotation import hadamard_transform
from pagedkv.reference.rotation import rotate

HEAD_DIMS = [8, 24, 64, 80, 96, 128, 200, 256]


def matrix(dim):
    """The block-diagonal Hadamard matrix by its definition: Sylvester's recursion, and Kronecker's product with the identity."""
    size = dim & -dim
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(dim // size), block / np.sqrt(size))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 24, 64, 80, 96, 112, 128, 200, 256])
def test_the_transform_is_its_matrix_and_the_matrix_is_orthonormal(dim):
    h = matrix(dim)
    np.testing.assert_allclose(h @ h.T, np.eye(dim), atol=1e-12)
    x = normal(5, 2, dim).double()
    np.testing.assert_allclose(hadamard_transform(x).numpy(), x.numpy() @ h.T, atol=1e-12)


def test_head_dim_80_is_five_blocks_of_16():
    unit = torch.zeros(80)
    unit[35] = 1
    rotated = hadamard_transform(unit)
    assert torch.all(rotated[32:48].abs() == 0.25) and rotated.count_nonzero() == 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_transform_is_its_own_inverse_and_keeps_lengths_and_products(dtype):
    x, y = normal(3, 4, 96).to(dtype), normal(3, 4, 96, seed=1).to(dtype)
    hx, hy = hadamard_transform(x), hadamard_transform(y)
    assert hx.dtype == torch.promote_types(dtype, torch.float32) and hx.is_contiguous()
    torch.testing.assert_close(hadamard_transform(hx), x.to(hx.dtype), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((hx * hy).sum(-1), (x.to(hx.dtype) * y.to(hx.dtype)).sum(-1), rtol=1e-5, atol=1e-4)


def test_the_transform_leaves_its_argument_alone_and_takes_any_strides_and_no_rows():
    x = normal(16, 6)[:, ::2].t()  # [3, 16], last dimension strided
    before = x.clone()
    assert same_bits(hadamard_transform(x), hadamard_transform(x.contiguous())) and same_bits(x, before)
    assert hadamard_transform(torch.empty(0, 4, 64)).shape == (0, 4, 64)


def test_the_largest_floats_do_not_overflow_on_the_way():
    x = torch.full((64,), 0.0)
    x[:2] = torch.finfo(torch.float32).max
    assert torch.all(torch.isfinite(hadamard_transform(x)))


def test_one_outlier_is_spread_over_its_head():
    """What the rotation is for: the step of the group falls by sqrt(head_dim)."""
    x = torch.zeros(1, 1, 1, 128)
    x[..., 17] = 127.0
    _, plain = pagedkv.quantize_kv(x)
    _, rotated = pagedkv.quantize_kv(x, rotated=True)
    torch.testing.assert_close(rotated, plain / 128**0.5)


def test_a_wrong_argument_is_named():
    with pytest.raises(TypeError, match=r"x: expected a floating dtype, got torch\.int8"):
        hadamard_transform(torch.zeros(8, dtype=torch.int8))
    with pytest.raises(ValueError, match="x: expected a last dimension"):
        hadamard_transform(torch.tensor(1.0))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_references_matrix_is_the_recursions(dim):
    np.testing.assert_allclose(rotate(np.eye(dim)), matrix(dim), atol=1e-15)


# ------------------------------------------------------------------------------------------------------------------ the write


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 16, 2, 64), (2, 5, 3, 80), (1, 1, 1, 8), (2, 48, 1, 256), (70, 2, 2, 24), (5, 16, 2, 128)], ids=str)
def test_rotating_as_one_quantises_or_before_is_the_same_to_the_last_bit(device, granularity, dtype, layout, shape):
    """Every backend takes the same float32 steps, so a cache has the same bits whoever writes it."""
    kv = normal(*shape).to(dtype)
    together = pagedkv.quantize_kv(in_layout(kv.to(device), layout), granularity, rotated=True)
    apart = pagedkv.quantize_kv(hadamard_transform(kv).to(device), granularity)
    assert all(same_bits(a, b) for a, b in zip(together, apart, strict=True))


@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotated_quantisation_matches_the_reference(device, granularity, head_dim):
    kv = normal(3, 5, 2, head_dim)
    (q, scale), (exact_q, exact_scale) = (
        quantize(x, granularity, rotated=True) for quantize, x in ((pagedkv.quantize_kv, kv.to(device)), (reference.quantize_kv, kv))
    )
    np.testing.assert_allclose(scale.cpu().numpy(), exact_scale, rtol=1e-6)
    difference = np.abs(q.cpu().numpy().astype(int) - exact_q)
    assert difference.max() <= 1 and np.mean(difference > 0) <= 0.01


@pytest.mark.parametrize("num_tokens", [12, 2000])  # on CUDA, one launch or several
@pytest.mark.parametrize("granularity", QUANTISED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [24, 128])
def test_rotating_as_one_writes_or_before_is_the_same_to_the_last_bit(device, num_tokens, granularity, layout, head_dim):
    """Blocks that are begun, filled up and written again, slots named twice, and skipped ones."""
    num_blocks, block_size = num_tokens // 3, 5
    key, value = normal(num_tokens, 2, head_dim), normal(num_tokens, 2, head_dim, seed=1) * 3
    slots = torch.randint(-3, num_blocks * block_size + 2, (num_tokens,), generator=torch.Generator().manual_seed(2))
    caches = []
    for rotated in (True, False):
        k, v = (torch.zeros(num_blocks, block_size, 2, head_dim, dtype=torch.int8, device=device) for _ in range(2))
        k_scale, v_scale = (
            torch.ones((num_blocks, block_size, 2) if granularity == "token_head" else (num_blocks, 2), device=device) for _ in range(2)
        )
        for part in (slice(0, num_tokens // 4), slice(num_tokens // 4, None)):
            new = [x[part] if rotated else hadamard_transform(x[part]) for x in (key, value)]
            new = [in_layout(x.to(device), layout) for x in new]
            pagedkv.reshape_and_cache(*new, k, k_scale, v, v_scale, slots[part].to(device), rotated=rotated)
        caches.append((k, k_scale, v, v_scale))
    assert all(same_bits(a, b) for a, b in zip(*caches, strict=True))


def test_the_write_agrees_with_its_reference(device):
    key, value = normal(7, 2, 24), normal(7, 2, 24, seed=1)
    cache = [torch.zeros(3, 4, 2, 24, dtype=torch.int8), torch.ones(3, 2)] * 2
    cache, slots = [x.clone() for x in cache], torch.tensor([0, 1, 9, 10, -1, 2, 11])
    expected = reference.reshape_and_cache(key, value, *cache, slots, rotated=True)
    there = [x.to(device) for x in cache]
    pagedkv.reshape_and_cache(key.to(device), value.to(device), *there, slots.to(device), rotated=True)
    for got, want in zip(there, expected, strict=True):
        got = got.cpu().numpy()
        if want.dtype == np.int8:
            difference = np.abs(got.astype(int) - want)
            assert difference.max() <= 1 and np.mean(difference > 0) <= 0.01
        else:
            np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("granularity", QUANTISED)
def test_what_is_not_finite_spoils_its_group_only(device, granularity):
    kv = normal(3, 4, 2, 48)
    kv[1, 2, 0, 5], kv[2, 0, 1, 40] = float("inf"), float("nan")
    _, scale = pagedkv.quantize_kv(kv.to(device), granularity, rotated=True)
    groups = [(1, 2, 0), (2, 0, 1)] if granularity == "token_head" else [(1, 0), (2, 1)]
    assert torch.isnan(scale).sum() == 2 and all(torch.isnan(scale[group]) for group in groups)


# -------------------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_attention_over_a_rotated_cache_with_every_query_dtype(device, cache, dtype):
    decode(device, cache=cache, dtype=dtype, rotated=True).check()


@pytest.mark.parametrize("cache", ["block_head", "token_head", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_at_any_head_dim(device, cache, head_dim):
    decode(device, cache=cache, head_dim=head_dim, dtype=torch.bfloat16, lengths=(33, 0, 7), rotated=True).check()


@pytest.mark.parametrize("cache", ["block_head", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_with_everything_at_once(device, cache, layout):
    decode(device, cache=cache, layout=layout, window=9, cap=5.0, sinks=True, block_size=12, head_dim=96, rotated=True).check()


@pytest.mark.parametrize("cache", ["block_head", "float16"])
def test_attention_over_sequences_long_enough_to_be_split(device, cache):
    decode(device, cache=cache, lengths=(1500, 3), heads=2, kv_heads=1, head_dim=128, dtype=torch.float16, rotated=True).check()


@pytest.mark.parametrize("granularity", QUANTISED)
def test_write_and_read_together_are_attention_over_the_original(device, granularity):
    """Outliers in one channel, which plain INT8 loses: rotated on both sides, attention is that over K and V themselves."""
    key, value, q = normal(2, 16, 2, 64), normal(2, 16, 2, 64, seed=1), normal(1, 4, 64, seed=2)
    key[..., 3] *= 30
    tables, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([32], dtype=torch.int32)
    exact = reference.paged_attention(q, key, value, tables, lengths, 0.125)
    errors = []
    for rotated in (False, True):
        k, v = (pagedkv.quantize_kv(x.to(device), granularity, rotated=rotated) for x in (key, value))
        out = pagedkv.quant_paged_attention(q.to(device), *k, *v, tables.to(device), lengths.to(device), 0.125, rotated=rotated)
        errors.append(np.abs(out.cpu().numpy() - exact).max())
    assert errors[1] < 0.05 and errors[1] < errors[0] / 2


def test_a_rotated_sequence_that_is_bad_is_nan_and_disturbs_no_other(device):
    case = decode(device, lengths=(20, 5, 0), rotated=True)
    good = case.run()
    case.block_tables[0, 1] = -1
    out = case.run()
    assert torch.all(torch.isnan(out[0])) and same_bits(out[1:], good[1:]) and torch.all(out[2] == 0)


@pytest.mark.parametrize("cache", ["token_head", "float32"])
def test_with_and_without_a_compiler_attention_agrees(device, cache):
    case = decode(device, cache=cache, rotated=True)
    compiled = case.run()
    with registry.plain_pytorch():
        torch.testing.assert_close(case.run(), compiled, rtol=1e-5, atol=1e-5)
