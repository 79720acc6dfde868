"""What the build notebook records: tools, flags, and what ptxas says of each kernel."""

import subprocess

import pytest
import torch

from pagedkv.bench import toolchain
from pagedkv.ops import build

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90'
ptxas info    : Function properties for _Z5firstv
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack, 2048 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 3.00 ms
ptxas info    : Function properties for _Z6helperv
    64 bytes stack frame, 64 bytes spill stores, 64 bytes spill loads
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90'
ptxas info    : Function properties for _Z6secondv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
"""


def test_ptxas_output_is_read_kernel_by_kernel(monkeypatch):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)  # names stay mangled
    first, second = toolchain.parse_ptxas(PTXAS)
    assert first == {"kernel": "_Z5firstv", "registers": 40, "spill_bytes": 20, "stack_bytes": 16, "shared_bytes": 2048}
    assert second == {"kernel": "_Z6secondv", "registers": 8, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0}
    assert toolchain.parse_ptxas("") == []


def test_a_machine_without_nvcc_gets_one_row_that_says_so(monkeypatch):
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    (row,) = toolchain.cuda_rows()
    assert row["status"] == "absent" and "nvcc" in row["reason"]
    assert not toolchain.failures([row])


def test_the_tools_are_named_with_their_versions():
    rows = {row["tool"]: row for row in toolchain.compiler_rows()}
    assert set(rows) == {"C++", "CUDA", "ninja"}
    assert all(row.get("version") if row["status"] == "measured" else row["reason"] for row in rows.values())


def test_the_library_row_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(build, "missing_tool", lambda backend: "no C++ compiler (c++) was found")
    row = toolchain.library_row(torch.device("cpu"))
    assert row["status"] == "absent" and row["reason"] == "no C++ compiler (c++) was found"


@pytest.mark.skipif(toolchain.nvcc() is None, reason="needs nvcc")
def test_a_file_is_compiled_once_and_a_failure_does_not_stop_the_others(monkeypatch, tmp_path):
    kernels = tmp_path / "kernels"
    (kernels / "cuda").mkdir(parents=True)
    (kernels / "cuda" / "good.cu").write_text("__global__ void good(float* x) { x[threadIdx.x] *= 2.f; }\n")
    (kernels / "cuda" / "bad.cu").write_text("__global__ void bad() { no_such_function(); }\n")
    monkeypatch.setattr(build, "KERNELS", kernels)
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))

    def compile_all():
        rows = list(toolchain.cuda_rows(quick=True))
        return rows, {row["file"]: row for row in rows if row["kind"] == "compilation"}

    rows, by_file = compile_all()
    assert by_file["cuda/good.cu"]["ok"] and not by_file["cuda/good.cu"]["cached"]
    assert not by_file["cuda/bad.cu"]["ok"] and "no_such_function" in by_file["cuda/bad.cu"]["errors"]
    (failure,) = toolchain.failures(rows)
    assert failure.startswith("cuda/bad.cu for sm_90")
    (kernel,) = [row for row in rows if row["kind"] == "kernel"]
    assert kernel["kernel"] in ("good", "_Z4goodPf") and kernel["registers"]["sm_90"] == kernel["max_registers"] > 0
    _, again = compile_all()
    assert again["cuda/good.cu"]["cached"] and not again["cuda/bad.cu"]["cached"], "a failure is not remembered"
    (kernels / "cuda" / "good.cu").write_text("__global__ void good(float* x) { x[threadIdx.x] *= 3.f; }\n")
    assert not compile_all()[1]["cuda/good.cu"]["cached"]


def test_a_compiler_that_dies_leaves_no_result_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    killed = subprocess.CompletedProcess([], -9, "", "killed")
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *a, **k: killed)
    source = next((build.KERNELS / "cuda").glob("*.cu"))
    result = toolchain._compile(["nvcc", "-O3"], source, "90", True, "0")
    assert not result["ok"] and result["errors"] == "killed" and not list(tmp_path.rglob("*.json"))
