"""Compiling at first use: once, within the machine's memory, and whatever happened to the build before."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pagedkv.ops import build

CXX = build.cpp_extension.get_cxx_compiler()
needs_compiler = pytest.mark.skipif(build.missing_tool("cpu") is not None, reason="no compiler here")
ROOT = Path(build.__file__).parents[2]


@pytest.fixture
def project(tmp_path):
    """A kernels folder that compiles in no time, a cache of its own, and a compiler that can be told to hang."""
    (tmp_path / "kernels" / "cpu").mkdir(parents=True)
    (tmp_path / "kernels" / "bindings.cpp").write_text('extern "C" int pagedkv_answer() { return 42; }\n')
    (tmp_path / "kernels" / "cpu" / "op.cpp").write_text('#include "op.h"\nint pagedkv_op() { return ANSWER; }\n')
    (tmp_path / "kernels" / "cpu" / "op.h").write_text("#define ANSWER 1\n")
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nif [ -e {tmp_path}/hang ]; then case "$*" in *-c*) sleep 60;; esac; fi\nexec {CXX} "$@"\n')
    compiler.chmod(0o755)
    return tmp_path


def start(project, code="build.load('cpu')", **environment):
    """Python in a session of its own, with `build` pointed at the project; prints the seconds of processor time, children included."""
    program = f"""
        import os, pathlib
        from pagedkv.ops import build
        build.KERNELS = pathlib.Path({str(project / "kernels")!r})
        started = sum(os.times()[:4])
        {code}
        print(f"{{sum(os.times()[:4]) - started:.2f}}")
    """
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PAGEDKV_") and k != "MAX_JOBS"},
        "PAGEDKV_CACHE_DIR": str(project / "cache"),
        "PYTHONPATH": str(ROOT),
        "CXX": str(project / "c++"),
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=60):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out, err


@needs_compiler
def test_of_two_processes_that_start_together_one_compiles_and_says_so(project):
    pair = [start(project) for _ in range(2)]
    messages = "".join(finish(process)[1] for process in pair)
    assert messages.count("compiling the cpu kernels") == 1
    out, later = finish(start(project))
    assert later == "" and float(out) < 1, "a cached load takes less than a second"
    (built,) = (p for p in (project / "cache").iterdir() if p.is_dir())
    assert (built / "pagedkv_cpu_kernels.so").is_file()


@needs_compiler
@pytest.mark.parametrize("victim", ["python alone", "the whole session"])
def test_a_build_killed_in_the_middle_keeps_nobody_waiting(project, victim):
    """cpp_extension leaves a file named lock in a killed build, and waits for ever for its removal."""
    (project / "hang").touch()
    killed = start(project)
    deadline = time.monotonic() + 60
    while not list((project / "cache").glob("*/lock")):
        assert killed.poll() is None and time.monotonic() < deadline, "the build never started"
        time.sleep(0.05)
    time.sleep(0.5)
    try:
        (os.killpg if victim == "the whole session" else os.kill)(killed.pid, signal.SIGKILL)
        killed.wait()
        assert list((project / "cache").glob("*/lock")), "the stale lock that this test is about"
        (project / "hang").unlink()
        finish(start(project), timeout=45)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started has ended by itself
            os.killpg(killed.pid, signal.SIGKILL)
    assert [p.name for p in (project / "cache").iterdir() if p.is_dir() and "building" in p.name] == []


@needs_compiler
def test_a_source_that_does_not_compile_is_an_error_that_shows_what_the_compiler_said(project):
    (project / "kernels" / "cpu" / "op.cpp").write_text("int pagedkv_op( {\n")
    process = start(project)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "RuntimeError" in err and "op.cpp:1" in err
    (project / "kernels" / "cpu" / "op.cpp").write_text("int pagedkv_op() { return 1; }\n")
    finish(start(project))


@needs_compiler
def test_the_key_follows_sources_headers_and_flags(project, monkeypatch):
    monkeypatch.setattr(build, "KERNELS", project / "kernels")
    keys = [build.key("cpu")]
    assert build.key("cpu") == keys[0]
    (project / "kernels" / "cpu" / "op.h").write_text("#define ANSWER 2\n")
    keys.append(build.key("cpu"))
    (project / "kernels" / "ops.h").write_text("\n")
    keys.append(build.key("cpu"))
    monkeypatch.setenv("PAGEDKV_CPU_ISA", "portable")
    keys.append(build.key("cpu"))
    assert len(set(keys)) == len(keys)


def test_an_unknown_instruction_set_is_named(monkeypatch):
    monkeypatch.setenv("PAGEDKV_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match=r"^PAGEDKV_CPU_ISA: expected one of native, avx2, portable, got 'sse9'"):
        build.flags("cpu")


@pytest.mark.parametrize(
    "asked, flags",
    [
        ("9.0", ["-gencode=arch=compute_90,code=sm_90"]),
        ("75+PTX", ["-gencode=arch=compute_75,code=compute_75"]),
        ("8.0; 12.0", ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_120,code=sm_120"]),
    ],
)
def test_cuda_architectures(monkeypatch, asked, flags):
    monkeypatch.setenv("PAGEDKV_CUDA_ARCH", asked)
    assert build.cuda_arch_flags() == flags


@pytest.mark.parametrize("gigabytes, jobs", [(1, 1), (7, 2), (1000, 4)])
def test_as_many_compilers_as_memory_allows(monkeypatch, gigabytes, jobs):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(build, "_available_memory", lambda: gigabytes << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    with build._bounded_jobs():
        assert os.environ["MAX_JOBS"] == str(jobs)
    assert "MAX_JOBS" not in os.environ


def test_max_jobs_of_the_user_stands(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "7")
    with build._bounded_jobs():
        assert os.environ["MAX_JOBS"] == "7"


def test_the_memory_of_this_machine_is_known():
    assert 0 < build._available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_without_a_compiler_the_ops_run_in_pytorch_and_say_so_once(project):
    code = """
        import warnings, torch, pagedkv
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert pagedkv.backend() == "pytorch"
            for _ in range(3):
                assert pagedkv.select_eviction_candidates(torch.tensor([3.0, 1.0, 2.0]), 2).tolist() == [1, 2]
        (warning,) = (w for w in seen if "pagedkv" in str(w.message))
        assert issubclass(warning.category, RuntimeWarning)
        print(warning.message)
    """
    out, _ = finish(start(project, textwrap.indent(textwrap.dedent(code), " " * 8).strip(), CXX="/nowhere/c++"))
    assert "no C++ compiler (/nowhere/c++) was found; the cpu ops run in plain PyTorch" in out


def test_plain_pytorch_can_be_asked_for_and_nothing_else(project):
    code = "import pagedkv; print(pagedkv.backend())"
    assert finish(start(project, code, PAGEDKV_BACKEND="pytorch"))[0].startswith("pytorch\n")
    process = start(project, code, PAGEDKV_BACKEND="numpy")
    assert "ValueError: PAGEDKV_BACKEND: expected pytorch" in process.communicate(timeout=60)[1]
