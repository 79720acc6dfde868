"""What the benchmarks measure on: shapes, pools, peers that agree before they are timed, ratios."""

import dataclasses

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import reference
from pagedkv.bench import attention, bandwidth, eviction
from pagedkv.bench.attention_peers import IMPLEMENTATIONS
from pagedkv.bench.comparison import Absent, rel_error
from pagedkv.bench.inputs import PagedInputs, rotations, shape

CPU = torch.device("cpu")
SMALL = "3x40"


@pytest.fixture
def inputs():
    return PagedInputs(shape(SMALL), CPU, num_rotations=3)


# -------------------------------------------------------------------------------------------- inputs


def test_a_shape_is_spelled_by_its_name():
    assert shape("64x2048").seq_lens == (2048,) * 64
    assert (shape("64x2048").num_heads, shape("64x2048").num_kv_heads, shape("64x2048").head_dim) == (32, 8, 128)
    assert (shape("2x64_kv32_d256").num_kv_heads, shape("2x64_kv32_d256").head_dim) == (32, 256)
    ragged = shape("ragged_50x800").seq_lens
    assert ragged == shape("ragged_50x800").seq_lens and min(ragged) >= 100 and max(ragged) <= 800 and len(set(ragged)) > 10
    assert shape("skewed_4x1000").seq_lens == (1000, 512, 512, 512)
    for wrong in ("64", "x2048", "64x2048_d", "torn_64x2048", "64x2048 "):
        with pytest.raises(ValueError, match="shape: expected"):
            shape(wrong)


def test_bytes_are_those_of_the_tensors(inputs):
    full = shape("3x48")  # whole blocks, so that every slot counts
    whole = PagedInputs(full, CPU, num_rotations=1)
    blocks = whole.block_tables[0].flatten().long()
    for kv_dtype in ("int8_block_head", "int8_token_head", "float16", "float32"):
        assert full.kv_bytes(kv_dtype) == sum(x[blocks].nbytes for x in whole.cache(kv_dtype))
    assert inputs.shape.kv_bytes("float16") == 2 * 3 * 40 * 8 * 128 * 2


def test_rotations_use_disjoint_blocks_of_a_pool_that_holds_more(inputs):
    used = torch.cat([t.flatten() for t in inputs.block_tables])
    used = used[used >= 0]
    assert len(used) == len(set(used.tolist())) == 3 * inputs.shape.num_blocks < inputs.pool_blocks
    assert int(used.max()) < inputs.pool_blocks
    assert not torch.equal(used, used.sort().values), "the blocks lie in random order"
    assert rotations(shape("1x16"), CPU) >= rotations(shape("64x2048"), CPU) == 1


def test_every_format_decodes_to_the_same_numbers(inputs):
    want = pagedkv.dequantize_kv(*inputs.cache("int8_block_head")[:2])
    assert torch.equal(pagedkv.dequantize_kv(*inputs.cache("int8_token_head")[:2]), want)
    for kv_dtype in ("float16", "float32", "bfloat16"):
        assert torch.equal(inputs.cache(kv_dtype)[0].float(), want)
    k, _ = inputs.dense("float32", rotation=1)
    table = inputs.block_tables[1]
    assert torch.equal(k[2, 5, 37], want[table[2, 37 // 16], 37 % 16, 5])
    with pytest.raises(ValueError, match="one length"):
        PagedInputs(shape("ragged_3x90"), CPU, num_rotations=1).dense("float32")


# --------------------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("name", [SMALL, "ragged_4x90"])
@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if "cpu" in i.devices], ids=lambda i: f"{i.name} {i.kv_dtype}")
def test_each_implementation_computes_attention(implementation, name):
    inputs = PagedInputs(shape(name), CPU, num_rotations=2)
    if "dense" in implementation.name and not inputs.shape.uniform:
        with pytest.raises(Absent, match="one length"):
            implementation.prepare(inputs, implementation.kv_dtype)
        return
    calls = implementation.prepare(inputs, implementation.kv_dtype)
    assert len(calls) == 2
    want = attention.expected(inputs, inputs.shape.num_seqs)
    assert rel_error(implementation.read(calls[0]()), want) < 0.01
    assert not torch.equal(calls[0](), calls[1]()), "rotations are different inputs"


def sweep(monkeypatch, *implementations):
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", implementations)
    roof = bandwidth.bandwidth_rows(CPU, ("cpu",))
    return list(attention.shape_rows(SMALL, CPU, roof))


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setitem(bandwidth._READ_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(bandwidth, "last_level_cache", lambda device: 0)


def test_a_wrong_peer_is_absent_and_being_wrong_ourselves_is_an_error(monkeypatch, quick_timer, small_buffers):
    ours = IMPLEMENTATIONS[0]
    wrong = dataclasses.replace(ours, prepare=lambda inputs, kv_dtype: [lambda: torch.zeros(3, 32, 128)])
    good, bad = sweep(monkeypatch, ours, dataclasses.replace(wrong, ours=False))
    assert good["rel_error"] < 0.01 and good["gb_per_s"] == good["bytes"] / 2000
    assert good["roof_fraction"] == pytest.approx(good["roof_us"] / 2.0)
    assert bad["status"] == "absent" and "relative error 1" in bad["reason"]
    with pytest.raises(AssertionError):
        sweep(monkeypatch, wrong)


def test_attention_ratios_compare_with_the_fastest_peer_of_the_run():
    def row(implementation, kv_dtype, p50, **more):
        base = {"kind": "attention", "shape": "s", "mode": "cpu", "status": "measured", "ours": implementation.startswith("pagedkv")}
        return base | {"implementation": implementation, "kv_dtype": kv_dtype, "p50_us": p50, "bytes": 100} | more

    rows = [
        row("pagedkv", "int8_block_head", 10.0),
        row("pagedkv", "int8_token_head", 11.0, bytes=110),
        row("pagedkv", "float16", 15.0),
        row("pagedkv, block mass", "int8_block_head", 12.0),
        row("pagedkv, rotated", "int8_block_head", 10.5),
        row("gather + expand + SDPA", "float16", 90.0),
        row("SDPA cuDNN, dense", "float16", 20.0),
        {
            "kind": "attention",
            "shape": "s",
            "implementation": "x",
            "kv_dtype": "float8_e4m3fn",
            "ours": False,
            "status": "absent",
            "reason": "?",
        },
    ]
    derived = {r["quantity"]: r for r in attention.derived_rows(rows)}
    assert derived["vs_fp16"]["value"] == 2.0 and derived["vs_fp16"]["peer"] == "SDPA cuDNN, dense (float16)"
    assert derived["vs_gathered_sdpa"]["value"] == 9.0
    assert derived["fp16_vs_fp16"]["value"] == pytest.approx(20 / 15)
    assert derived["token_head_cost"]["value"] == pytest.approx(1.0)
    assert (derived["block_mass_cost"]["value"], derived["block_mass_cost"]["extra_us"]) == (1.2, 2.0)
    assert (derived["rotation_cost"]["value"], derived["rotation_cost"]["extra_us"]) == (1.05, 0.5)
    assert derived["vs_fp8"]["status"] == "absent" and "value" not in derived["vs_fp8"]


# ------------------------------------------------------------------------------------------ eviction


def test_every_eviction_implementation_picks_what_a_stable_sort_of_its_scores_picks(quick_timer):
    rows = list(eviction.size_rows(1000, CPU, fractions=(0.15, 0.5), read_gb_per_s=10.0))
    assert {row["fraction"] for row in rows} == {0.15, 0.5}
    for row in rows:
        if row["status"] == "absent":
            assert row["implementation"] == "torch.compile, topk" and row["reason"]
        elif row["part"] == "score":
            assert row["exact"] is None
        elif "unsorted" not in row["implementation"]:
            assert row["exact"] is True, row
    assert all("roof_us" in row for row in rows if row["status"] == "measured" and row["part"] != "select")


def test_numpy_and_torch_score_as_the_op_does():
    pool = eviction.Statistics.random(300, CPU)
    want = pagedkv.eviction_scores(*pool)
    assert torch.allclose(eviction.torch_scores(*pool), want, atol=1e-6)
    assert np.allclose(eviction.numpy_scores(*pool.host), want.numpy(), atol=1e-6)


def test_wrong_ids_of_our_own_are_an_error(monkeypatch, quick_timer):
    reverse = dataclasses.replace(eviction.IMPLEMENTATIONS[0], prepare=lambda s, k: lambda: pagedkv.evict_blocks(*s, k)[0].flip(0))
    monkeypatch.setattr(eviction, "IMPLEMENTATIONS", (reverse,))
    with pytest.raises(AssertionError, match="stable sort"):
        list(eviction.size_rows(200, CPU))


@pytest.mark.parametrize("name", eviction.DISTRIBUTIONS)
def test_the_order_that_selections_are_held_to_is_the_references(name):
    scores = eviction.DISTRIBUTIONS[name](500, torch.Generator().manual_seed(0))
    assert scores.dtype == torch.float32 and scores.shape == (500,)
    np.testing.assert_array_equal(eviction.order(scores), reference.select_eviction_candidates(scores, 500))


def test_the_worst_distribution_is_named(quick_timer):
    *rows, worst = eviction.adversarial_rows(300, CPU)
    assert [row["distribution"] for row in rows] == list(eviction.DISTRIBUTIONS)
    assert rows[0]["ratio"] == 1.0
    assert (worst["quantity"], worst["value"]) == ("worst_ratio", max(row["ratio"] for row in rows))


def test_trials_count_those_that_are_exact(monkeypatch):
    assert eviction.exact_trials(60, CPU, max_blocks=300)["exact"] == 60
    honest = pagedkv.select_eviction_candidates
    monkeypatch.setattr(pagedkv, "select_eviction_candidates", lambda scores, k: honest(scores, k).flip(0))
    assert 0 < eviction.exact_trials(60, CPU, max_blocks=300)["exact"] < 60  # one block, or none, is in order both ways


def test_eviction_ratios_take_the_fastest_peer_of_the_kind():
    def row(implementation, p50, mode="graph", blocks=10):
        return {
            "kind": "eviction",
            "status": "measured",
            "blocks": blocks,
            "fraction": 0.15,
            "implementation": implementation,
            "mode": mode,
            "p50_us": p50,
        }

    rows = [
        row("pagedkv, fused", 2.0),
        row("NumPy, argsort", 50.0, "cpu"),
        row("NumPy, argpartition", 30.0, "cpu"),
        row("torch eager, topk", 8.0),
        row("torch eager, topk", 1.0, "flush"),
        row("torch eager, topk", 1.0, blocks=11),
    ]
    derived = {r["quantity"]: r for r in eviction.derived_rows(rows)}
    assert (derived["vs_numpy"]["value"], derived["vs_numpy"]["peer"]) == (15.0, "NumPy, argpartition")
    assert derived["vs_eager"]["value"] == 4.0
    assert derived["vs_compile"]["status"] == "absent"


# --------------------------------------------------------------------------------------------- roofs


def test_the_roof_is_the_best_read(quick_timer, small_buffers):
    rows = bandwidth.bandwidth_rows(CPU, ("cpu",))
    assert {row["kind"] for row in rows} == {"bandwidth"} and any(row["implementation"] == "copy" for row in rows)
    assert bandwidth.read_gb_per_s(rows, "cpu") == (1 << 20) / 2000
    assert bandwidth.gather_roof(PagedInputs(shape(SMALL), CPU, num_rotations=1), "int8_block_head") is None
