"""Random problems: what judges them agrees with the plain loops, a wrong op is found, and a number says which problem it was."""

import json
import sys

import pytest
import torch

import pagedkv
from pagedkv.bench import fuzz
from pagedkv.bench.validation.judge import max_error, worst

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only make threads wait for each other
    yield
    torch.set_num_threads(threads)


def small(numbers):
    """Those of the problems that the plain loops can judge within a moment."""
    for number in numbers:
        p, _ = fuzz.draw(number, CPU)
        tokens = int(p.seq_lens.long().clamp(0, p.block_tables.shape[1] * p.k_cache.shape[1]).sum())
        if tokens * p.q.shape[1] <= 3000 and p.k_cache.numel() <= 1 << 22:
            yield number, p


def test_the_batched_reference_is_the_plain_loops():
    problems = list(small(range(70)))
    assert len(problems) > 10
    for number, p in problems:
        for name, got, want in zip(("out", "lse", "block_mass"), fuzz.attention_in(p, torch.float64), p.reference(), strict=True):
            assert max_error(got, want) < 1e-9, (number, name)


def test_judging_on_the_device_is_judging_by_the_rule_of_all_outputs():
    for number, p in list(small(range(40))):
        want, yardstick = fuzz.attention_in(p, torch.float64), fuzz.attention_in(p, p.q.dtype)
        for got, right, rounded in zip(p.run(return_lse=True, return_block_mass=True), want, yardstick, strict=True):
            if got.numel() == 0:
                continue
            share = float(fuzz.share_of_tolerance(got, right, rounded, p.q.dtype).max())
            error, allowed = worst([got], right.numpy(), rounded.double().numpy(), p.q.dtype)
            assert share == pytest.approx(error / allowed), number


def test_a_number_is_a_problem():
    (p, features), (again, _) = fuzz.draw(17, CPU), fuzz.draw(17, CPU)
    assert torch.equal(p.q, again.q) and torch.equal(p.block_tables, again.block_tables) and features
    assert not torch.equal(p.k_cache[0], fuzz.draw(18, CPU)[0].k_cache[0])


def test_what_users_report_is_among_the_problems():
    reported = {
        "an empty sequence",
        "NaN past the end",
        "a bad block id",
        "a bad length",
        "block ids past 65,535",
        "sliding_window",
        "logits_soft_cap",
        "sinks",
        "K and V interleaved",
        "heads first",
        "rows 4 elements further apart",
        "odd block_size or head_dim",
        "int8_token_head cache",
        "float32 q",
    }
    seen, number = set(), 0
    while not reported <= seen and number < 300:
        seen |= set(fuzz.draw(number, CPU)[1])
        number += 1
    assert reported - seen == set()


def test_a_right_op_passes_and_a_wrong_one_is_found_by_its_number(monkeypatch):
    result = fuzz.fuzz(CPU, 0, 12)
    assert (result["failures"], result["failed"], result["calls"]) == (0, [], 24) and 0 < result["worst_share"] <= 1
    right = pagedkv.quant_paged_attention

    def wrong(q, k, k_scale, v, v_scale, tables, lens, sm_scale, **options):
        return right(q, k, k_scale, v, v_scale, tables, (lens - 1).clamp(min=0), sm_scale, **options)  # the last token is lost

    monkeypatch.setattr(pagedkv, "quant_paged_attention", wrong)
    result = fuzz.fuzz(CPU, 0, 12)
    assert result["failures"] == len(result["failed"]) > 0
    number = result["failed"][0]["problem"]
    assert fuzz.fuzz(CPU, number, 1)["failures"] == 1


def test_an_op_that_refuses_is_a_failure(monkeypatch):
    def refuse(*args, **options):
        raise ValueError("block_tables")

    monkeypatch.setattr(pagedkv, "quant_paged_attention", refuse)
    monkeypatch.setattr(pagedkv, "paged_attention", refuse)
    result = fuzz.fuzz(CPU, 0, 2)
    assert result["failures"] == 2 and result["failed"][0]["share"] is None
    json.dumps(result, allow_nan=False)


def test_processes_share_the_problems():
    together, alone = fuzz.fuzz_in_processes(CPU, 3, 5, workers=2), fuzz.fuzz(CPU, 3, 5)
    assert together == alone


def test_a_process_that_dies_is_an_error(monkeypatch):
    monkeypatch.setattr(fuzz.child, "command", lambda *a: [sys.executable, "-c", "raise SystemExit('no device')"])
    with pytest.raises(RuntimeError, match="no device"):
        fuzz.fuzz_in_processes(CPU, 0, 1, workers=1)
