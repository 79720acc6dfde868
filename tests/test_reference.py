"""The ground truth itself: against values worked out by hand, and against textbook formulas written another way."""

import math

import numpy as np
import pytest
import torch
from cases import CACHES, decode

import pagedkv
from pagedkv import reference


def test_two_tokens_by_hand():
    """Logits 0 and ln 3: weights 1/4 and 3/4."""
    q = np.zeros((1, 1, 8))
    q[0, 0, 0] = 1.0
    k, v = np.zeros((2, 1, 1, 8)), np.zeros((2, 1, 1, 8))
    k[0, 0, 0, 0] = math.log(3) / 2  # the second token lies in block 0
    v[1, 0, 0, :], v[0, 0, 0, :] = 4.0, 8.0
    tables, lengths = np.array([[1, 0]]), np.array([2])
    out, lse, mass = reference.paged_attention(q, k, v, tables, lengths, 2.0, return_lse=True, return_block_mass=True)
    np.testing.assert_allclose(out[0, 0], 0.25 * 4 + 0.75 * 8)
    np.testing.assert_allclose(lse, [[math.log(4)]])
    np.testing.assert_allclose(mass, [[0.25, 0.75]])

    sinks = np.array([math.log(4)])  # as much as both tokens together
    out, lse, mass = reference.paged_attention(q, k, v, tables, lengths, 2.0, sinks=sinks, return_lse=True, return_block_mass=True)
    np.testing.assert_allclose(out[0, 0], (0.25 * 4 + 0.75 * 8) / 2)
    np.testing.assert_allclose(lse, [[math.log(8)]])
    np.testing.assert_allclose(mass, [[0.25, 0.75]])

    out = reference.paged_attention(q, k, v, tables, lengths, 2.0, sliding_window=1)
    np.testing.assert_allclose(out[0, 0], 8.0)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_is_what_dense_pytorch_computes_in_float64(cache, window, cap, sinks):
    case = decode("cpu", cache=cache, window=window, cap=cap, sinks=sinks, lengths=(37, 1, 16, 64))
    double = case.yardstick_in(torch.float64)
    for exact, dense in zip(case.exact(), double, strict=True):
        np.testing.assert_allclose(exact, dense.numpy(), rtol=1e-12, atol=1e-12)


def test_attention_is_scaled_dot_product_attention():
    case = decode("cpu", cache="float32", lengths=(64,), heads=6, kv_heads=2)
    k, v = (cache[case.block_tables[0, :4].long()].flatten(0, 1).transpose(0, 1).double() for cache in (case.k_cache, case.v_cache))
    dense = torch.nn.functional.scaled_dot_product_attention(case.q[0].double()[:, None], k, v, scale=case.sm_scale, enable_gqa=True)
    np.testing.assert_allclose(case.exact()[0][0], dense[:, 0].numpy(), rtol=1e-12)


def test_arrays_and_tensors_are_taken_alike():
    case = decode("cpu", dtype=torch.bfloat16)
    arrays = [x.double().numpy() if x.dtype.is_floating_point else x.numpy() for x in case.arguments[:-1]]
    np.testing.assert_array_equal(reference.quant_paged_attention(*arrays, case.sm_scale), case.exact()[0])


def test_quantisation_by_hand():
    kv = np.zeros((1, 2, 1, 8))
    kv[0, :, 0, :3] = [[254.0, 3.0, -1.0], [-5.0, 0.0, 1.0]]
    q, scale = reference.quantize_kv(kv)
    assert scale == 2 and q[0, :, 0, :3].tolist() == [[127, 2, 0], [-2, 0, 0]]  # 1.5 -> 2, -0.5 -> 0, -2.5 -> -2, 0.5 -> 0
    q, scale = reference.quantize_kv(kv, "token_head")
    np.testing.assert_array_equal(scale, np.array([[[2.0], [5 / 127]]], np.float32))
    assert q[0, :, 0, :3].tolist() == [[127, 2, 0], [-127, 0, 25]]


def test_scores_by_hand():
    nan = math.nan
    scores = reference.eviction_scores([1, 0], [0, 2], np.array([[3.0, nan, 5.0], [nan] * 3]), np.array([[True, False, True], [False] * 3]))
    np.testing.assert_allclose(scores, [0.4 + 0.3 * 4, 0.6])
    ids, _ = reference.evict_blocks([1, 0], [0, 2], np.zeros((2, 1)), np.ones((2, 1), bool), 1)
    assert ids.tolist() == [0]


def test_the_tolerance_finds_what_it_is_for():
    case = decode("cpu", lengths=(37, 0, 64), dtype=torch.float16)
    out, exact, yardstick = case.run(), case.exact()[0], case.yardstick()[0]

    def complaints(changed):
        return reference.outside_tolerance(changed, exact, yardstick, torch.float16)

    assert complaints(out) == []
    off, nan, filled = out.clone(), out.clone(), out.clone()
    off[2, 1, 3] += 0.02
    nan[0, 0, 0] = math.nan
    filled[1] = 0.1
    assert len(complaints(off)) == 1 and complaints(off)[0].startswith("sequence 2: error 0.0")
    assert complaints(nan) == ["sequence 0: not finite where the reference is"]
    assert len(complaints(filled)) == 1 and complaints(filled)[0].startswith("sequence 1: error 0.1")
    assert complaints(out[:, :1])[0].startswith("shape")


def test_every_op_has_a_reference():
    assert set(pagedkv.ops.registry.NAMES) <= set(reference.__all__)
    assert pagedkv.reference is reference
