"""How a cache is encoded: the rotation is orthonormal, attention does not see it, and every scheme has its name and its price."""

import dataclasses

import numpy as np
import pytest
import torch
from cases import same_bits

import pagedkv
from pagedkv.quant_spec import KV_SPECS, KVQuantSpec, hadamard_transform, kv_spec, logit_shift


def matrix(dim):
    """The block-diagonal Hadamard matrix by its definition: Sylvester's recursion, and Kronecker's product with the identity."""
    size = dim & -dim
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(dim // size), block / np.sqrt(size))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------------------- the rotation


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
    _, rotated = pagedkv.quantize_kv(hadamard_transform(x))
    torch.testing.assert_close(rotated, plain / 128**0.5)


# ------------------------------------------------------------------------------------------------------------ what a spec does


@pytest.mark.parametrize("name", KV_SPECS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention_over_what_is_encoded_is_attention(name, head_dim):
    """Before any quantisation: the two identities, for every scheme."""
    spec, sm_scale = KV_SPECS[name], head_dim**-0.5
    q, key, value, mean = (
        normal(1, 2, head_dim),
        normal(9, 2, head_dim, seed=1),
        normal(9, 2, head_dim, seed=2),
        normal(2, head_dim, seed=3),
    )
    k = spec.encode_key(key, mean if spec.subtract_k_mean else None)
    v = spec.encode_value(value)
    logits = torch.einsum("hd,thd->ht", spec.transform_query(q)[0], k) * sm_scale
    out = spec.restore_output(torch.einsum("ht,thd->hd", logits.softmax(-1), v))
    exact = torch.einsum("hd,thd->ht", q[0], key) * sm_scale
    torch.testing.assert_close(out, torch.einsum("ht,thd->hd", exact.softmax(-1), value), rtol=1e-4, atol=1e-5)
    shift = logit_shift(q, mean[None], sm_scale)[0, :, None] if spec.subtract_k_mean else 0
    torch.testing.assert_close(logits + shift, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", KV_SPECS)
def test_dtypes(name, dtype):
    """K and V in float32 once changed, so that the encoding rounds once; q and the output in their own."""
    spec, x = KV_SPECS[name], normal(3, 2, 16).to(dtype)
    key = spec.encode_key(x, torch.zeros(2, 16) if spec.subtract_k_mean else None)
    assert key.dtype == (torch.float32 if spec.rotate or spec.subtract_k_mean else dtype)
    assert spec.encode_value(x).dtype == (torch.float32 if spec.rotate else dtype)
    assert spec.transform_query(x).dtype == spec.restore_output(x).dtype == dtype


def test_a_spec_that_changes_nothing_copies_nothing():
    x = normal(3, 2, 16)
    spec = KVQuantSpec("block_head")
    assert all(step(x) is x for step in (spec.encode_key, spec.encode_value, spec.transform_query, spec.restore_output))


def test_the_mean_of_grouped_queries_is_that_of_their_kv_head():
    q, mean = normal(3, 6, 16), normal(3, 2, 16, seed=1)
    shift = logit_shift(q, mean, 0.5)
    assert shift.shape == (3, 6)
    torch.testing.assert_close(shift[1, 4], 0.5 * q[1, 4] @ mean[1, 1])


@pytest.mark.parametrize("name", KV_SPECS)
def test_bytes_are_those_of_the_tensors(name):
    spec, shape = KV_SPECS[name], (1, 16, 8, 128)
    kv = torch.zeros(shape, dtype=torch.float16)
    tensors = pagedkv.quantize_kv(kv, spec.granularity) if spec.quantised else (kv,)
    expected = 2 * sum(x.nbytes for x in tensors)
    assert spec.bytes_per_block(*shape[1:]) == expected and spec.bytes_per_token(*shape[1:]) == expected / 16


def test_bytes_of_an_unquantised_cache_follow_its_dtype():
    spec = KVQuantSpec(None)
    assert spec.bytes_per_token(16, 8, 128, torch.float32) == 2 * spec.bytes_per_token(16, 8, 128) == 8192


# ------------------------------------------------------------------------------------------------------------ names and errors


def test_the_registry_names_each_spec_once():
    assert len(set(KV_SPECS.values())) == len(KV_SPECS)
    assert {"block_head", "token_head", "rotated_block_head", "rotated_token_head", "unquantised"} <= set(KV_SPECS)
    for name, spec in KV_SPECS.items():
        assert kv_spec(name) is spec and kv_spec(spec) is spec


def test_a_spec_is_a_value():
    spec = KVQuantSpec("token_head", rotate=True)
    assert spec == KV_SPECS["rotated_token_head"] and KVQuantSpec(**dataclasses.asdict(spec)) == spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.rotate = False


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"granularity": "head"}, ValueError, "granularity: expected 'block_head', 'token_head' or None, got 'head'"),
        ({"granularity": 4}, TypeError, "granularity: expected a str or None, got int"),
        ({"rotate": 1}, TypeError, "rotate: expected a bool, got int"),
        ({"subtract_k_mean": None}, TypeError, "subtract_k_mean: expected a bool"),
    ],
)
def test_a_wrong_field_is_named(fields, error, message):
    with pytest.raises(error, match=message):
        KVQuantSpec(**fields)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"spec: expected one of .*block_head.*, got 'fp4'"):
        kv_spec("fp4")
    with pytest.raises(TypeError, match="spec: expected a KVQuantSpec or a name, got int"):
        kv_spec(8)
    with pytest.raises(TypeError, match=r"x: expected a floating dtype, got torch\.int8"):
        hadamard_transform(torch.zeros(8, dtype=torch.int8))
    with pytest.raises(ValueError, match="x: expected a last dimension"):
        hadamard_transform(torch.tensor(1.0))
    with pytest.raises(ValueError, match="k_mean: expected None"):
        KVQuantSpec().encode_key(torch.zeros(1, 1, 8), torch.zeros(1, 8))
    with pytest.raises(ValueError, match="k_mean: expected a tensor"):
        KVQuantSpec(subtract_k_mean=True).encode_key(torch.zeros(1, 1, 8))
