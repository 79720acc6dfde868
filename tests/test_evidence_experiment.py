"""An experiment: from a notebook's rows and figures to one record; and the hardware and timer beneath it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import evidence_project as project
import pytest
import torch

import pagedkv
from pagedkv.evidence import Experiment, RecordError, figures, hardware
from pagedkv.evidence import record as records
from pagedkv.evidence.timing import measure

NOTEBOOK = "notebooks/attention.ipynb"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def root(tmp_path, monkeypatch):
    root = project.make(tmp_path)
    monkeypatch.setenv("PAGEDKV_ROOT", str(root))
    monkeypatch.setattr(pagedkv, "backend", lambda device: f"stub on {device}")  # compiling is tested elsewhere
    return root


def a_figure(xlabel="shape", ylabel="time (us)"):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.plot([1, 2, 4], [3.0, 2.0, 1.5], label="INT8")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()
    return figure


# ------------------------------------------------------------------------------------- experiment


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_not_timed_uses_every_core_but_in_a_quick_run(root, quick):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        experiment = Experiment("attention", notebook=NOTEBOOK, device="cpu", quick=quick)
        experiment.use_every_core()
        assert torch.get_num_threads() == (1 if quick else hardware.describe("cpu")["threads"])
    finally:
        torch.set_num_threads(before)


def test_a_run_by_a_rule_becomes_a_valid_record(root, capsys):
    experiment = Experiment(
        "attention", notebook=NOTEBOOK, device="cpu", quick=True, record="build/a.json", figures="build/figs",
        rule="attention", sources=["kernels/attention.cu"], inputs=["README.md"], batch=3,
    )  # fmt: skip
    experiment.row(shape="8x512", p50_us=torch.tensor(1.5))
    experiment.figure(a_figure(), "times")
    assert experiment.finish() == root / "build/a.json"

    record = records.read(root / "build/a.json", root)
    assert record["kind"] == "measured"
    assert record["rows"] == [{"shape": "8x512", "p50_us": 1.5}]
    assert record["software"]["backend"] == "stub on cpu"
    provenance = record["provenance"]
    assert provenance["parameters"] == {"device": "cpu", "quick": True, "batch": 3}
    assert provenance["sources"] == records.hashes([NOTEBOOK, "kernels/attention.cu"], root)
    assert provenance["inputs"] == records.hashes(["README.md"], root)
    assert provenance["figures"] == {"times.svg": records.file_hash(root / "build/figs/times.svg")}
    printed = capsys.readouterr().out
    assert "p50_us=1.5" in printed and "build/a.json" in printed


def test_run_by_hand_it_covers_every_source_and_stays_out_of_the_evidence(root):
    experiment = Experiment("attention", notebook=NOTEBOOK, device="cpu")
    experiment.row(value=1)
    path = experiment.finish()
    assert path == root / "build/interactive/cpu/attention.json"
    assert records.read(path, root)["provenance"]["sources"].keys() == {NOTEBOOK, "kernels/attention.cu"}


def test_a_source_edited_while_it_runs_leaves_the_record_stale(root):
    experiment = Experiment("attention", notebook=NOTEBOOK, device="cpu", sources=["kernels/attention.cu"])
    before = records.file_hash(root / "kernels/attention.cu")
    (root / "kernels/attention.cu").write_text("// edited meanwhile\n")
    experiment.row(value=1)
    record = records.read(experiment.finish(), root)
    assert record["provenance"]["sources"]["kernels/attention.cu"] == before


def test_nothing_measured_is_no_record(root):
    experiment = Experiment("attention", notebook=NOTEBOOK, device="cpu", record="build/a.json")
    with pytest.raises(RecordError, match="nothing was measured"):
        experiment.finish()
    assert not (root / "build/a.json").exists()


def test_a_row_that_holds_no_number_is_refused(root):
    experiment = Experiment("attention", notebook=NOTEBOOK, device="cpu")
    with pytest.raises(ValueError, match="p50_us: nan"):
        experiment.row(p50_us=float("nan"))
    with pytest.raises(ValueError, match="at least one field"):
        experiment.row()
    assert experiment.rows == []


def test_a_figure_without_labels_or_with_an_odd_name_is_refused(root):
    experiment = Experiment("attention", notebook=NOTEBOOK, device="cpu")
    with pytest.raises(ValueError, match="no x axis carries a label"):
        experiment.figure(a_figure(xlabel=""), "times")
    with pytest.raises(ValueError, match="no y axis carries a label"):
        experiment.figure(a_figure(ylabel=""), "times")
    with pytest.raises(ValueError, match="expected a name"):
        experiment.figure(a_figure(), "../times")


def test_figures_are_the_same_bytes_in_every_process(root):
    code = "import test_evidence_experiment as t; t.figures.use_style(); print(t.figures.svg(t.a_figure()), end='')"
    path = os.pathsep.join([str(project.REPOSITORY), str(project.REPOSITORY / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "12345"}
    elsewhere = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    figures.use_style()
    text = figures.svg(a_figure())
    assert text == elsewhere == figures.svg(a_figure())
    assert "dc:date" not in text and "Matplotlib v" not in text
    assert len(text) < 40_000


# --------------------------------------------------------------------------------------- hardware


@pytest.mark.parametrize(
    ("kind", "name", "slug"),
    [
        ("cuda", "NVIDIA H200", "cuda-nvidia-h200"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "cuda-nvidia-a100-sxm4-80gb"),
        ("cuda", "Tesla T4", "cuda-tesla-t4"),
        ("cpu", "AMD EPYC", "cpu-amd-epyc"),
        ("cpu", "AMD EPYC 7763 64-Core Processor", "cpu-amd-epyc-7763"),
        ("cpu", "Intel(R) Xeon(R) Platinum 8480C", "cpu-intel-xeon-platinum-8480c"),
        ("cpu", "Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", "cpu-intel-core-i7-8700"),
        ("cpu", "AMD Ryzen Threadripper 3960X 24-Core Processor", "cpu-amd-ryzen-threadripper-3960x"),
        ("cpu", "AMD Athlon 200GE Dual-Core Processor with Radeon Vega Graphics", "cpu-amd-athlon-200ge"),
        ("cpu", "Neoverse-N1", "cpu-neoverse-n1"),
    ],
)
def test_slug_names_the_model_without_counts_or_clocks(kind, name, slug):
    assert hardware.slug(kind, name) == slug


def test_this_machines_description_fits_the_schema():
    described = hardware.describe("cpu")
    assert described["kind"] == "cpu"
    assert described["slug"].startswith("cpu-")
    assert described["cores"] >= 1 and described["threads"] >= 1
    assert described["memory_bytes"] > 1 << 28
    records.plain(described)


@pytest.mark.parametrize("name", ["tpu", "", "CPU", "cuda:x", "cuda:-1", "cpu:0", "mps"])
def test_an_unknown_device_is_one_clear_line(name):
    with pytest.raises(ValueError) as error:
        hardware.resolve(name)
    assert str(error.value) == f"device: expected auto, cpu, cuda or cuda:N, got {name!r}"


def test_auto_is_cuda_where_there_is_one():
    assert hardware.resolve("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_cuda_device_that_is_not_here_is_one_clear_line():
    name = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    with pytest.raises(RuntimeError, match="was asked for, but"):
        hardware.resolve(name)


@needs_cuda
def test_a_gpus_description_fits_the_schema():
    described = hardware.describe("cuda")
    assert described["kind"] == "cuda"
    assert described["slug"].startswith("cuda-")
    assert described["sms"] > 0 and described["l2_bytes"] > 0 and described["memory_bytes"] > 1 << 30
    records.plain(described)


# ----------------------------------------------------------------------------------------- timing


def test_the_host_clock_measures_what_passes():
    times = measure(lambda: time.sleep(0.002), "cpu", budget_s=0.1)
    assert times["mode"] == "cpu"
    assert times["calls_per_repeat"] == 1
    assert times["repeats"] >= 3
    assert 2000 <= times["p10_us"] <= times["p50_us"] <= times["p90_us"]


def test_calls_too_short_for_the_clock_are_timed_together(monkeypatch):
    calls = []
    monkeypatch.setattr(time, "perf_counter", lambda: len(calls) * 1e-6)  # a call takes a microsecond, however busy the machine
    times = measure(lambda: calls.append(1), "cpu", budget_s=0.05, max_repeats=20)
    assert times["calls_per_repeat"] > 10
    assert times["p50_us"] < 50
    assert len(calls) >= times["repeats"] * times["calls_per_repeat"]


def test_a_rotation_takes_its_inputs_in_turn():
    turns = []
    measure(device="cpu", rotate=[lambda i=i: (turns.append(i), time.sleep(0.0005)) for i in range(3)], budget_s=0.05)
    timed = turns[4:]  # one warm-up of each input, one call to estimate
    assert timed[:6] == [0, 1, 2, 0, 1, 2]


def test_the_budget_bounds_the_time_but_leaves_three_samples():
    begin = time.perf_counter()
    times = measure(lambda: time.sleep(0.05), "cpu", budget_s=0.01)
    assert times["repeats"] == 3
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": None, "device": "cpu"}, "expected a callable"),
        ({"fn": None, "device": "cpu", "rotate": []}, "expected a callable"),
        ({"fn": print, "device": "cpu", "mode": "fast"}, "mode: expected one of graph, flush, eager, cpu, got 'fast'"),
        ({"fn": print, "device": "cpu", "mode": "graph"}, "mode: 'graph' needs a CUDA device, got cpu"),
    ],
)
def test_what_cannot_be_timed_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(**arguments)


@needs_cuda
@pytest.mark.parametrize("mode", ["graph", "flush", "eager", "cpu"])
def test_every_mode_times_a_copy_on_the_gpu(mode):
    source = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    targets = [torch.empty_like(source) for _ in range(2)]
    times = measure(device="cuda", mode=mode, rotate=[lambda t=t: t.copy_(source) for t in targets], budget_s=0.3)
    assert times["mode"] == mode
    assert 0 < times["p10_us"] <= times["p50_us"] <= times["p90_us"]
    bytes_per_us = 2 * source.numel() / times["p50_us"]
    assert bytes_per_us < 20e6  # no card moves 20 TB/s: a call that was not waited for would


@needs_cuda
def test_a_graph_takes_less_than_eager_launches():
    x = torch.zeros(32, device="cuda")
    graph, eager = (measure(lambda: x.add_(1), "cuda", mode=mode, budget_s=0.2) for mode in ("graph", "eager"))
    assert graph["calls_per_repeat"] > 50
    assert graph["p50_us"] < eager["p50_us"]
