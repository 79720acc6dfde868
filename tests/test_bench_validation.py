"""The validation sweep itself: it finds what is wrong, and says where."""

import math

import pytest
import torch

import pagedkv
from pagedkv.bench import validation
from pagedkv.bench.validation import attention_cases, oracle
from pagedkv.bench.validation.judge import Check, max_error, merged, tolerance, worst
from pagedkv.ops import registry

CPU = torch.device("cpu")
with_torch_compile = pytest.mark.xdist_group("torch.compile")  # as in test_registration.py


def rows_of(part):
    return [{"arch": "native", **row} for row in validation.sweep(CPU, quick=True, part=part)]


@pytest.mark.parametrize("part", [pytest.param(p, marks=with_torch_compile) if p == "registration" else p for p in validation.PARTS])
def test_the_quick_sweep_passes_and_covers_its_ops(part):
    rows = rows_of(part)
    assert not validation.failures(rows)
    covered = {row["op"] for row in rows}
    assert (
        covered
        >= {
            "attention": {"quant_paged_attention", "paged_attention", "merge_attention_states", "float64 oracle"},
            "quantization": {"quantize_kv", "dequantize_kv", "reshape_and_cache"},
            "eviction": {"eviction_scores", "select_eviction_candidates", "evict_blocks"},
            "sequence_eviction": {"accumulate_block_mass", "select_per_sequence", "token_moments", "channel_statistics"},
            "registration": set(registry.NAMES),
        }[part]
    )
    assert len({(row["op"], row["case"], row["dtype"]) for row in rows}) == len(rows), "a row for each op, case and dtype"
    assert all(summary["failed"] == 0 and summary["checks"] > 0 for summary in validation.summary(rows))


@pytest.mark.parametrize(
    ("part", "op", "wrong"),
    [
        ("eviction", "select_eviction_candidates", lambda ids: ids.flip(0)),
        ("eviction", "eviction_scores", lambda scores: scores * (1 + 1e-4)),
        ("quantization", "dequantize_kv", lambda kv: torch.nextafter(kv, kv + 1)),
        ("sequence_eviction", "select_per_sequence", lambda selected: (selected[0].flip(0), *selected[1:])),
        ("sequence_eviction", "token_moments", lambda moments: (moments[0], moments[1] * (1 + 1e-3))),
    ],
)
def test_an_op_that_is_slightly_wrong_is_found(monkeypatch, part, op, wrong):
    right = getattr(pagedkv, op)
    monkeypatch.setattr(pagedkv, op, lambda *args, **options: wrong(right(*args, **options)))
    failed = validation.failures(rows_of(part))
    assert failed and all(op in line or "evict_blocks" in line or "reshape_and_cache" in line for line in failed)


def test_an_op_that_raises_is_a_row_that_fails_and_the_table_goes_on(monkeypatch):
    def refuse(*args, **options):
        raise NotImplementedError("sinks")

    monkeypatch.setattr(pagedkv, "paged_attention", refuse)
    case = next(c for c in attention_cases.CASES if c.name == "plain")
    monkeypatch.setattr(
        validation.attention, "sweep", lambda quick: [(case, torch.float32, "float32"), (case, torch.float32, "int8_block_head")]
    )
    checks = validation.attention.checks(CPU, True)
    first, second = next(merged([next(checks)])), next(merged([next(checks)]))
    assert first["ok"] is False and first["max_error"] is None and "sinks" in first["reason"]
    assert second["op"] == "quant_paged_attention" and second["ok"]


@with_torch_compile
def test_an_op_whose_fake_kernel_promises_another_shape_fails_opcheck_and_says_so(monkeypatch):
    fake = torch.library.opcheck

    def lies_about_scores(op, *args, **options):
        if "eviction_scores" not in str(op):
            return fake(op, *args, **options)
        return {"test_schema": "SUCCESS", "test_faketensor": RuntimeError("shapes differ\nin many lines")}

    monkeypatch.setattr(torch.library, "opcheck", lies_about_scores)
    (line,) = validation.failures(rows_of("registration"))
    assert line.startswith("eviction_scores: opcheck") and "test_faketensor" in line and line.endswith("RuntimeError: shapes differ")


def test_the_large_cases_have_an_oracle_that_agrees_with_the_loops():
    for case, q_dtype, cache in attention_cases.sweep(quick=True):
        if not case.large:
            p = case.build(CPU, q_dtype, cache)
            assert all(
                max_error(a, b) <= 1e-9 * max(1, abs(b).max(where=abs(b) < math.inf, initial=0))
                for a, b in zip(oracle.attention(p), p.reference(), strict=True)
            )


def test_every_hostile_case_is_what_its_name_says():
    def built(name, cache="int8_block_head", q_dtype=torch.float32):
        return next(c for c in attention_cases.CASES if c.name == name).build(CPU, q_dtype, cache)

    bad = built("block ids outside the pool")
    ids = bad.block_tables[bad.block_tables >= 0]
    assert (ids >= bad.k_cache.shape[0]).any()
    assert sum(row.isnan().any().item() for row in oracle.attention(bad)[0]) == 3
    assert built("block ids past 65,535").block_tables.max() > 65_535
    assert built("misaligned head rows").k_cache.stride(2) % 16 != 0
    interleaved = built("K and V interleaved in one tensor")
    assert interleaved.k_cache.untyped_storage().data_ptr() == interleaved.v_cache.untyped_storage().data_ptr()
    low = built("logits below -5e4")
    assert float(oracle.attention(low)[1][1:].max()) < -5e4
    poisoned = built("NaN past the end and in unused blocks", "float32")
    assert poisoned.k_cache.isnan().any() and not any(x.isnan().any() for x in oracle.attention(poisoned))
    pool = attention_cases.huge_pool(CPU, torch.float32)
    assert int(pool.block_tables.max()) * pool.k_cache.stride(0) > 2**31


# -------------------------------------------------------------------------------------------- judging


def test_errors_of_special_values():
    nan, inf = math.nan, math.inf
    assert max_error([nan, inf, 1.0], [nan, inf, 1.5]) == 0.5
    assert max_error([nan], [1.0]) == inf and max_error([1.0], [nan]) == inf
    assert max_error([-inf], [inf]) == inf and max_error([], []) == 0
    with pytest.raises(AssertionError, match="shape"):
        max_error([1.0], [1.0, 2.0])


def test_the_tolerance_is_twice_pytorchs_error_and_a_floor():
    assert tolerance([1.25], [1.0], torch.float32, torch.float32) == pytest.approx(0.5 + 1e-6)
    half_a_place = 2.0**-11
    assert tolerance([1.0], [1.0], torch.float16, torch.float16) == pytest.approx(2 * half_a_place + 1e-3)
    assert tolerance([math.nan], [1.0], torch.float32, torch.float32) == pytest.approx(2.0**-23 + 1e-6)
    assert tolerance([math.nan, 0.0], [math.nan, 0.0], torch.float32, torch.float32) == 1e-6


def test_a_sequence_cannot_hide_behind_another_whose_tolerance_is_wide():
    want, yardstick = [[1.0], [1.0]], [[2.0], [1.0]]  # PyTorch is bad at the first sequence only
    error, limit = worst([torch.tensor([[1.0], [1.1]])], want, yardstick, torch.float32)
    assert error == pytest.approx(0.1) and limit < 2e-6


def test_a_row_shows_the_worst_check():
    checks = [Check("op", "case", "float32", d, error, 1.0) for d, error in (("a", 0.1), ("b", 2.0), ("c", 0.0))]
    (row,) = merged(checks)
    assert (row["worst"], row["checks"], row["ok"], row["max_error"]) == ("b", 3, False, 2.0)
    (row,) = merged([Check("op", "case", "float32", "a", math.inf, 0.0)])
    assert row["max_error"] is None and row["ok"] is False
    (row,) = merged([Check("op", "case", "float32", "", 0.0, 0.0, reason="one GPU", absent=True)])
    assert (row["status"], row["ok"], row["reason"]) == ("absent", None, "one GPU")
