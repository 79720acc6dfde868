"""How a cache is encoded: every scheme has its name and its price."""

import dataclasses

import pytest
import torch

import pagedkv
from pagedkv.quant_spec import KV_SPECS, KVQuantSpec, kv_spec, logit_shift


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------------ what a spec does


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
