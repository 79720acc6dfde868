"""The ladder's predictions and its source; that its kernels compute attention is checked where they can run, before they are timed."""

import subprocess

import pytest
import torch

from pagedkv.bench import ladder, toolchain
from pagedkv.bench.inputs import PagedInputs, shape
from pagedkv.ops import build

MANY, ONE = shape("256x4096"), shape("1x131072")


def predicted(number: int, at, roof_us: float = 500.0):
    return ladder.predicted_us(ladder.RUNGS[number - 1], at, roof_us, sms=132, clock_ghz=2.0)


def test_each_rung_removes_what_limits_the_one_below():
    assert [predicted(n, MANY)[1] for n in (1, 2, 3, 4)] == ["latency", "instructions", "instructions", "bytes"]
    assert [predicted(n, ONE, 60.0)[1] for n in (1, 2, 3, 4)] == ["latency", "latency", "instructions", "bytes"]
    for at, roof in ((MANY, 500.0), (ONE, 60.0)):
        times = [predicted(n, at, roof)[0] for n in (1, 2, 3, 4)]
        assert times == sorted(times, reverse=True) and times[-1] == roof


def test_a_prediction_is_the_arithmetic_that_it_claims():
    us, limit = predicted(1, ONE, 60.0)  # 8,192 pages in a row, 12,000 cycles each, at 2 GHz
    assert (us, limit) == (8192 * 12_000 / 2.0 / 1e3, "latency")
    us, limit = predicted(2, MANY)  # 2,048 CTAs of 256 pages, 4 x 438 instructions each, on 132 x 4 schedulers
    assert limit == "instructions" and us == pytest.approx(2048 * 256 * 4 * 438 / (132 * 4) / 2.0 / 1e3)


def test_the_top_is_predicted_at_the_roof_scales_included():
    for at, roof in ((MANY, 500.0), (ONE, 60.0)):
        us, limit = ladder.predicted_top_us(at, roof, sms=132, clock_ghz=2.0)
        assert limit == "bytes" and us == pytest.approx(roof * (1 + 4 / (16 * 128)))
    few = ladder.predicted_top_us(MANY, 500.0, sms=4, clock_ghz=2.0)  # hardly any bytes under way
    assert few[1] == "latency" and few[0] == pytest.approx(MANY.kv_bytes("int8_block_head") / (4 * 98304) * 600 / 2.0 / 1e3)


def test_what_came_of_a_prediction_is_told_in_a_line():
    row = {"shape": "1x9", "predicted_us": 50.0, "predicted_limit": "bytes", "p50_us": 60.0, "over_prediction": 1.2, "roof_fraction": 0.8}
    assert ladder.seen(row | {"step": 2.0}) == (
        "1x9: predicted 50 us (bytes), seen 60 us, 1.20 times as long; 2 times as fast as the rung below; 80 % of the roof"
    )
    assert "below" not in ladder.seen(row | {"step": None})


def test_splits_fill_the_device_and_no_more():
    assert [rung.num_splits(ONE, 132) for rung in ladder.RUNGS] == [1, 1, 49, 49]
    assert [rung.num_splits(MANY, 132) for rung in ladder.RUNGS] == [1, 1, 1, 1]
    assert ladder.RUNGS[3].num_splits(shape("1x300"), 132) == 2, "not shorter than 16 pages"


def test_the_notebook_shows_each_rung_by_its_own_source():
    sources = [ladder.source_of(n) for n in (1, 2, 3, 4)]
    assert "rung1(" in sources[0] and "rungs2and3(" in sources[1] and sources[1] == sources[2] and "rung4(" in sources[3]
    assert "extern" not in sources[3]


def test_the_ladder_is_for_one_kind_of_shape():
    for name in ("1x64_d64", "1x64_kv32"):
        with pytest.raises(ValueError, match="head_dim 128"):
            ladder.rung_calls(ladder.RUNGS[0], PagedInputs(shape(name), torch.device("cpu"), num_rotations=1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["3x700", "ragged_5x300", "1x5000"])
def test_every_rung_computes_attention(name):
    climb = ladder.Climb(name, torch.device("cuda", 0))
    for number in range(1, ladder.TOP + 1):
        row = climb.rung(number)
        assert row["rel_error"] < 1e-3 and row["over_prediction"] == row["p50_us"] / row["predicted_us"]
    assert climb.height()["value"] > 0


def test_the_ladder_is_no_part_of_the_library():
    assert not any("ladder" in str(path) for path in build.tracked_files("cuda"))


@pytest.mark.skipif(toolchain.nvcc() is None, reason="needs nvcc")
def test_the_source_compiles_alone_without_torch(tmp_path):
    source = build.KERNELS / "ladder" / "decode.cu"
    command = [toolchain.nvcc(), "-std=c++17", "-arch=sm_80", "-cubin", "-o", tmp_path / "ladder.cubin", source]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
