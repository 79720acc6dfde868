"""Schemes at equal bytes: which rows, what a rotary embedding between two K is, how draws and layers are summed up."""

import dataclasses

import pytest
import torch

from pagedkv.bench import distributions, equal_bytes, schemes
from pagedkv.kv_dump import Dump


def embed(k, base=10_000.0):
    """A rotary embedding of `[tokens, heads, head_dim]`, pairs (i, i + head_dim / 2), by the textbook."""
    tokens, _, dim = k.shape
    angles = torch.arange(tokens)[:, None] * base ** (-torch.arange(dim // 2) * 2 / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = k.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def dump(layers=2, tokens=50, queries=6):
    generator = torch.Generator().manual_seed(0)
    before, v = torch.randn(2, layers, tokens, 3, 16, generator=generator)
    q = torch.randn(layers, queries, 9, 16, generator=generator)
    return Dump(q, torch.stack([embed(k) for k in before]), v, before, 0.25)


def test_every_scheme_is_compared_unless_some_are_named():
    assert [row["scheme"] for row in equal_bytes.synthetic("gaussian", 128, 0)] == list(schemes.SCHEMES)
    assert equal_bytes.BASE in schemes.SCHEMES


@pytest.mark.parametrize("name", equal_bytes.DISTRIBUTIONS)
def test_a_draw_has_a_row_for_each_scheme_and_says_what_is_over_the_budget(name, device):
    rows = list(equal_bytes.synthetic(name, 128, 0, device, ["int8_token_head", "k_per_channel"]))
    assert [(row["scheme"], row["within_budget"]) for row in rows] == [("int8_token_head", True), ("k_per_channel", False)]
    assert all(row["data"] == name and row["head_dim"] == 128 and 0 < row["rel_error"] < 0.2 for row in rows)


def test_the_bound_is_below_every_scheme_and_has_the_errors_of_its_bits():
    found = equal_bytes.bound("gaussian", 64, 0)
    (ours,) = equal_bytes.synthetic("gaussian", 64, 0, "cpu", ["int8_token_head"])
    assert 0 < found["rel_error"] < ours["rel_error"]
    assert found["percent_of_fp16"] == schemes.BUDGET


def test_the_embedding_is_found_between_k_before_and_after_it():
    d = dump()
    before, after = (distributions.causal(d.q[0], k[0], d.v[0], d.sm_scale).k for k in (d.k_before_rope, d.k))
    rope = equal_bytes.rope_between(before, after)
    assert rope.shape == (*before.shape[:2], 1, 8)
    torch.testing.assert_close(rope.abs(), torch.ones_like(rope.abs()))
    turned = equal_bytes._pairs(before) * rope
    torch.testing.assert_close(torch.cat([turned.real, turned.imag], -1), after, rtol=1e-4, atol=1e-5)


def test_what_is_no_embedding_is_refused():
    before, after = torch.randn(2, 4, 16, 3, 16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="rotary"):
        equal_bytes.rope_between(before, after)


def test_before_the_embedding_what_is_exact_stays_exact_and_each_place_has_its_rows(device):
    rows = list(equal_bytes.layers(dump(), "some", device, ["float16", "int8_block_head"]))
    assert [(row["layer"], row["stored"], row["scheme"]) for row in rows[:4]] == [
        (0, "after rope", "float16"),
        (0, "after rope", "int8_block_head"),
        (0, "before rope", "float16"),
        (0, "before rope", "int8_block_head"),
    ]
    assert len(rows) == 8
    for row in rows:
        assert row["rel_error"] < (1e-3 if row["scheme"] == "float16" else 0.05)
    assert len(list(equal_bytes.layers(dump(), "some", device, ["float16"], count=1))) == 2


def test_a_model_without_keys_before_the_embedding_is_measured_after_it():
    bare = dataclasses.replace(dump(), k_before_rope=None)
    assert {row["stored"] for row in equal_bytes.layers(bare, "some", "cpu", ["float16"])} == {"after rope"}


def test_a_summary_pools_squares_and_averages_the_rest():
    def row(scheme, seed, rmse, rel_error):
        metrics = {"rmse": rmse, "rel_error": rel_error, "weight_kl": 1.0 + seed, "top1_agreement": 0.5}
        return {"data": "d", "head_dim": 64, "seed": seed, "scheme": scheme, "percent_of_fp16": 50.0, "within_budget": True, **metrics}

    rows = [row("int8_block_head", 0, 3.0, 0.3), row("int8_block_head", 1, 4.0, 0.5)]
    rows += [row("fp8_e4m3_token_head", 0, 1.0, 0.4), row("fp8_e4m3_token_head", 1, 1.0, 0.4)]
    block, fp8 = equal_bytes.summarise(rows)
    assert block["rmse"] == pytest.approx(12.5**0.5) and block["rmse_ratio"] == 1.0
    assert fp8["rmse_ratio"] == pytest.approx(1 / 12.5**0.5)
    assert (block["rel_error"], block["rel_error_worst"], block["weight_kl"], block["over"]) == (0.4, 0.5, 1.5, 2)
    assert (block["worse_than_fp8"], fp8["worse_than_fp8"]) == (1, 0)
