"""The cache write's benchmark: what its calls write, which bytes it counts, and how roundings add up."""

import dataclasses

import pytest
import torch

import pagedkv
from pagedkv.bench import append
from pagedkv.bench.append import IMPLEMENTATIONS, Inputs
from pagedkv.bench.comparison import rel_error

CPU = torch.device("cpu")
COPIES = [{"mode": "cpu", "gb_per_s": 2.0}, {"mode": "cpu", "gb_per_s": 4.0}]


def test_a_prompt_fills_blocks_and_a_decode_step_touches_one_for_each_token():
    prompt, step = Inputs(96, CPU, rotations=2), Inputs(64, CPU, rotations=3)
    assert prompt.num_blocks == 12 and sorted(prompt.slots.flatten().tolist()) == list(range(192))
    assert prompt.slots[0].tolist() != sorted(prompt.slots[0].tolist()), "the blocks lie in random order"
    assert step.num_blocks == 192 and len(set((step.slots // append.BLOCK_SIZE).flatten().tolist())) == 192
    assert len(set((step.slots % append.BLOCK_SIZE).flatten().tolist())) > 8


@pytest.mark.parametrize("kv_dtype", ["int8_block_head", "int8_token_head", "float16", "float8_e4m3fn"])
def test_bytes_are_those_of_the_tensors(kv_dtype):
    inputs = Inputs(96, CPU, rotations=1)
    assert append.moved_bytes(96, kv_dtype) == sum(x.nbytes for x in (inputs.keys, inputs.values, *inputs.pool(kv_dtype)))


@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if "cpu" in i.devices], ids=lambda i: f"{i.name} {i.kv_dtype}")
@pytest.mark.parametrize("tokens", [80, 64])
def test_each_implementation_writes_its_rotation_and_no_other(implementation, tokens):
    inputs = Inputs(tokens, CPU, rotations=2)
    calls = implementation.prepare(inputs, implementation.kv_dtype)
    assert len(calls) == 2
    calls[1]()
    assert not inputs.written_k(implementation.kv_dtype, 0).any()
    got = implementation.read(inputs.written_k(implementation.kv_dtype, 1))
    assert rel_error(got, inputs.keys[1]) < 0.02


def test_a_few_lines_of_pytorch_write_what_the_op_does():
    inputs = Inputs(80, CPU, rotations=1)
    ours, theirs = ([x.clone() for x in inputs.pool("int8_token_head")] for _ in range(2))
    pagedkv.reshape_and_cache(inputs.keys[0], inputs.values[0], *ours, inputs.slots[0])
    append.torch_write(inputs.keys[0], inputs.values[0], *theirs, inputs.slots[0])
    for a, b in zip(ours, theirs, strict=True):
        if a.dtype == torch.int8:  # the quotient's rounding to float32 may bring it onto a tie
            difference = (a.int() - b.int()).abs()
            assert difference.max() <= 1 and difference.double().mean() < 1e-3
        else:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_a_peer_that_writes_nothing_is_absent_and_that_of_ourselves_is_an_error(monkeypatch, quick_timer):
    def sweep(*implementations):
        monkeypatch.setattr(append, "IMPLEMENTATIONS", implementations)
        return list(append.size_rows(80, CPU, COPIES))

    ours = IMPLEMENTATIONS[0]
    idle = dataclasses.replace(ours, prepare=lambda inputs, kv_dtype: [lambda: None])
    good, bad = sweep(ours, dataclasses.replace(idle, ours=False))
    assert good["roof_us"] == append.moved_bytes(80, "int8_block_head") / 4.0 / 1e3 and good["roof_fraction"] == good["roof_us"] / 2.0
    assert bad["status"] == "absent" and "relative error 1" in bad["reason"]
    with pytest.raises(AssertionError):
        sweep(idle)


def test_ratios_compare_with_the_peer_of_the_same_work():
    def row(implementation, kv_dtype, p50, tokens=64):
        base = {"kind": "append", "tokens": tokens, "mode": "graph", "status": "measured"}
        return base | {"implementation": implementation, "kv_dtype": kv_dtype, "p50_us": p50}

    rows = [
        row("pagedkv", "int8_token_head", 2.0),
        row("torch eager", "int8_token_head", 8.0),
        row("torch eager", "float16", 1.0),
        row("torch eager", "int8_token_head", 1.0, tokens=65),
        row("FlashInfer", "float16", 3.0),
    ]
    derived = {r["quantity"]: r for r in append.derived_rows(rows)}
    assert (derived["vs_eager"]["value"], derived["vs_flashinfer_fp16"]["value"]) == (4.0, 1.5)
    assert derived["vs_compile"]["status"] == derived["vs_flashinfer_fp8"]["status"] == "absent"


def test_the_copy_ceiling_is_the_fastest_copy(quick_timer):
    rows = append.copy_rows(1 << 16, CPU, ("cpu",))
    assert len(rows) == 2 and append.copy_gb_per_s(rows, "cpu") == (1 << 16) / 2000


# --------------------------------------------------------------------------------------------- consistency


def test_token_scales_round_once_and_block_scales_more_often(device):
    found = {granularity: append.further_roundings(200, device, granularity) for granularity in ("block_head", "token_head")}
    assert not found["token_head"].any()
    assert len(found["block_head"]) == 400 and 1 < found["block_head"].max() < 15, "16 writes add at most 15 roundings"
    row = append.consistency_row("block_head", found["block_head"])
    assert row["worst"] == float(found["block_head"].max()) and 0 < row["mean"] < row["worst"] and 0 < row["share_above_1"] < 1


def test_a_fill_whose_first_token_is_the_largest_is_rounded_once(monkeypatch):
    draw = torch.randn

    def largest_first(*size, **options):
        x = draw(*size, **options)
        x[:, 0] *= 100
        return x

    monkeypatch.setattr(torch, "randn", largest_first)
    assert append.further_roundings(50, CPU, "block_head").max() < 1e-4
