"""What the memory checkers watch, and how their reports are read."""

import subprocess
from types import SimpleNamespace

import pytest
import torch
from test_arguments import OPS

from pagedkv.bench import robustness

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at void pagedkv::merge_states<float, (bool)1>(pagedkv::MergeParams)+0x1b0
=========     by thread (64,0,0) in block (3,0,0)
========= ERROR SUMMARY: 7 errors
"""


def test_a_report_is_counted_and_its_beginning_kept():
    assert robustness.reports_in(MEMCHECK) == 7
    assert robustness.first_report(MEMCHECK).startswith("Invalid __global__ read of size 16 bytes; at void pagedkv::merge_states")
    assert robustness.reports_in("========= ERROR SUMMARY: 0 errors\n") == 0
    assert robustness.reports_in("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n") == 3
    assert robustness.first_report("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") is None
    assert robustness.reports_in("========= Error: Device not supported\n") is None


class Watched:
    """A checker that ends at once; `said` is its program's output, `reported` what it wrote."""

    def __init__(self, said="836 calls\n", reported="========= ERROR SUMMARY: 0 errors\n"):
        self.said, self.reported, self.commands = said, reported, []

    def __call__(self, command, **how):
        self.commands.append((command, how["env"]))
        said, reported = self.said, self.reported
        if "--plant" in command:
            said, reported = "CUDA error: unspecified launch failure\n", "========= ERROR SUMMARY: 2 errors\n"
        with open(command[command.index("--log-file") + 1], "w") as log:
            log.write(reported)
        return SimpleNamespace(communicate=lambda timeout: (said, None), returncode=0)


def test_every_tool_watches_every_architecture_and_the_controls_are_apart(monkeypatch):
    popen = Watched()
    monkeypatch.setattr(robustness, "sanitizer", lambda: "/usr/local/cuda/bin/compute-sanitizer")
    monkeypatch.setattr(robustness.subprocess, "Popen", popen)
    rows = list(robustness.sanitizer_rows(CUDA, {"native": None, "compute_75": "75+PTX"}))
    watched = [r for r in rows if r["kind"] == "sanitizer"]
    assert {(r["tool"], r["arch"]) for r in watched} == {(t, a) for t in robustness.TOOLS for a in ("native", "compute_75")}
    assert all(r["calls"] == 836 and r["reports"] == 0 and r["first_report"] is None for r in watched)
    assert [(r["tool"], r["reports"]) for r in rows if r["kind"] == "control"] == [("memcheck", 2), ("initcheck", 2)]
    for command, environment in popen.commands:
        assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        assert ("--kernel-name" in command) == ("initcheck" not in command[:3]), "initcheck has to see every write"
    assert sum(environment.get("PAGEDKV_CUDA_ARCH") == "75+PTX" for _, environment in popen.commands) == len(robustness.TOOLS)


def test_a_sweep_that_did_not_end_is_an_error_and_no_tool_is_one_row(monkeypatch):
    monkeypatch.setattr(robustness, "sanitizer", lambda: "compute-sanitizer")
    for broken in (Watched(said="Traceback"), Watched(reported="========= Error: Device not supported\n")):
        monkeypatch.setattr(robustness.subprocess, "Popen", broken)
        with pytest.raises(RuntimeError, match="memcheck"):
            list(robustness.sanitizer_rows(CUDA, {"native": None}))
    monkeypatch.setattr(robustness, "sanitizer", lambda: None)
    (row,) = robustness.sanitizer_rows(CUDA, {"native": None})
    assert row["status"] == "absent" and "compute-sanitizer" in row["reason"]


def test_the_library_is_held_against_what_was_launched(monkeypatch, tmp_path):
    held = [
        "void pagedkv::(anonymous namespace)::a<float>(int)",
        "void pagedkv::b(int)",
        "void pagedkv::c(int)",
        "pagedkv::architecture_probe()",
    ]
    (tmp_path / "library.so").touch()
    monkeypatch.setattr(robustness.build, "load", lambda backend: tmp_path)
    monkeypatch.setattr(robustness, "kernels_in", lambda library: held)

    def listed(command, env, **how):
        name = "void pagedkv::c(int)" if "PAGEDKV_CUDA_ARCH" in env else "void pagedkv::a<float>(int)"
        return SimpleNamespace(communicate=lambda timeout: (f"{name}\n", ""), returncode=0, kill=lambda: None)

    monkeypatch.delenv("PAGEDKV_CUDA_ARCH", raising=False)
    monkeypatch.setattr(robustness.subprocess, "Popen", listed)
    row = robustness.coverage_row(CUDA, {"native": None})
    assert (row["kernels"], row["launched"], row["unreachable"]) == (4, 1, 1)
    assert (row["missed"], row["names"]) == (2, ["void pagedkv::b(int)", "void pagedkv::c(int)"])
    row = robustness.coverage_row(CUDA, {"native": None, "compute_75": "75+PTX"})
    assert (row["missed"], row["names"]) == (1, ["void pagedkv::b(int)"])


def test_kernels_are_read_from_cuobjdump(monkeypatch, tmp_path):
    said = " Function _ZN7pagedkv1bEi:\n  REG:40 STACK:0\n Function _ZN7pagedkv1cEi:\n  REG:8 STACK:0\n"
    monkeypatch.setattr(robustness.shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(robustness.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, said, ""))
    monkeypatch.setattr(robustness, "demangled", lambda names, parameters: [f"demangled {n}" for n in names])
    assert robustness.kernels_in(tmp_path) == ["demangled _ZN7pagedkv1bEi", "demangled _ZN7pagedkv1cEi"]


def test_the_sweep_calls_every_op_on_whatever_device():
    names = set()
    for what, call in robustness.variants(CPU):
        names.add(what.split()[0])
        if len(names) % 3 == 0 or what.endswith("all options"):
            call()
    assert names == {*OPS}, "a new op comes with its variants"


def test_repeats_run_through_every_architectures_code(monkeypatch):
    """The other's comes from a process of its own, which here runs this machine's."""
    environment = robustness.child.environment
    monkeypatch.setattr(robustness.child, "environment", lambda arch: asked.append(arch) or environment())
    asked = []
    rows = list(robustness.sameness_rows(CPU, {"native": None, "compute_75": "75+PTX"}, 1))
    assert asked == ["75+PTX"]
    native, other = ([row for row in rows if row["arch"] == arch] for arch in ("native", "compute_75"))
    assert [{**row, "arch": "native"} for row in other] == native and len(native) == 9


def test_a_process_that_breaks_is_an_error_that_says_what_it_said(monkeypatch):
    monkeypatch.setattr(robustness.child, "command", lambda *_: [robustness.sys.executable, "-c", "raise ValueError('no such device')"])
    with pytest.raises(RuntimeError, match=r"compute_75.*ended with 1(.|\n)*no such device"):
        list(robustness.sameness_rows(CPU, {"compute_75": "75+PTX"}, 1))


def test_repeats_are_compared_bit_for_bit(monkeypatch):
    assert all(row["differ"] == 0 and row["repeats"] == 2 for row in robustness.repeat_rows(CPU, 2))
    evict = robustness.pagedkv.evict_blocks
    turn = iter(range(100))
    monkeypatch.setattr(robustness.pagedkv, "evict_blocks", lambda *a: (evict(*a)[0] + next(turn), evict(*a)[1]))
    assert list(robustness.repeat_rows(CPU, 2))[-1]["differ"] == 2
