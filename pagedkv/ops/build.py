"""Compile the kernels once, through `torch.utils.cpp_extension`, and load them.

A build lives in `<cache>/<backend>-<key>/`, where the key hashes the sources, the flags, the compilers and
torch's version. `PAGEDKV_CACHE_DIR` names the cache (default `$XDG_CACHE_HOME/pagedkv`);
`PAGEDKV_CPU_ISA` = native | avx2 | portable and `PAGEDKV_CUDA_ARCH` (say `75+PTX`, `9.0`; default: the
devices present) choose what is compiled for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils import cpp_extension

_PACKAGE = Path(__file__).resolve().parents[1]

# A wheel carries the sources inside the package; a checkout has them beside it.
KERNELS = next(p for p in (_PACKAGE / "_kernels", _PACKAGE.parent / "kernels") if p.is_dir())

_CPU_ISA_FLAGS = {
    "native": ["-march=native"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "portable": [],
}
_BYTES_PER_JOB = 3 << 30  # nvcc with heavy templates: what one compiler process may take


def sources(backend: str) -> list[Path]:
    """The files that are compiled for a backend ("cpu" or "cuda"), bindings first."""
    return [KERNELS / "bindings.cpp", *sorted((KERNELS / backend).glob("*.cpp" if backend == "cpu" else "*.cu"))]


def tracked_files(backend: str) -> list[Path]:
    """Every file a build depends on, headers included."""
    return sorted(p for p in (*KERNELS.glob("*.*"), *(KERNELS / backend).rglob("*")) if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


def include_paths(backend: str) -> list[Path]:
    """Where `#include "..."` is looked for."""
    return [KERNELS, KERNELS / backend]


def cache_dir() -> Path:
    root = os.environ.get("PAGEDKV_CACHE_DIR")
    if root:
        return Path(root).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv"


def missing_tool(backend: str) -> str | None:
    """What this machine lacks to compile a backend, in words; None where nothing is missing."""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler}) was found"
    if backend == "cuda":
        if cpp_extension.CUDA_HOME is None or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
            return "no CUDA compiler (nvcc) was found"
        if torch.version.cuda is None:
            return "this torch is a CPU build"
    with _ninja_on_path():
        if not cpp_extension.is_ninja_available():
            return "no ninja was found (pip install ninja)"
    return None


def cuda_arch_flags() -> list[str]:
    """`-gencode` flags: `PAGEDKV_CUDA_ARCH` where set, else the machine code of each device present."""
    asked = os.environ.get("PAGEDKV_CUDA_ARCH")
    if asked:
        archs = [a.strip().replace(".", "") for a in asked.replace(";", ",").split(",")]
    else:
        archs = sorted({"{}{}".format(*torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())})
    flags = []
    for arch in archs:
        number, _, ptx = arch.partition("+")
        flags.append(f"-gencode=arch=compute_{number},code={'compute' if ptx else 'sm'}_{number}")
    return flags


def flags(backend: str) -> dict[str, list[str]]:
    """`extra_cflags`, `extra_cuda_cflags` and `extra_ldflags` for `cpp_extension.load`."""
    common = ["-O3", f"-DPAGEDKV_LIBRARY=pagedkv_{backend}"]
    if backend == "cpu":
        isa = os.environ.get("PAGEDKV_CPU_ISA", "native")
        if isa not in _CPU_ISA_FLAGS:
            raise ValueError(f"PAGEDKV_CPU_ISA: expected one of {', '.join(_CPU_ISA_FLAGS)}, got {isa!r}")
        return {"extra_cflags": [*common, "-fopenmp", *_CPU_ISA_FLAGS[isa]], "extra_ldflags": ["-fopenmp"]}
    common.append("-DPAGEDKV_CUDA")
    return {"extra_cflags": common, "extra_cuda_cflags": [*common, "-lineinfo", *cuda_arch_flags()]}


def key(backend: str) -> str:
    """A hash of everything that the compiled library depends on."""
    return key_of(tracked_files(backend), flags(backend), _compiler_versions(backend), _cpu_features())


def key_of(files: list[Path], *more: object) -> str:
    """A hash of files of `KERNELS`, of torch's and Python's versions, and of whatever else decides what comes out."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(KERNELS).as_posix().encode() + b"\0" + path.read_bytes())
    digest.update(repr((torch.__version__, platform.python_version_tuple()[:2], *more)).encode())
    return digest.hexdigest()[:16]


def load(backend: str) -> Path:
    """Compile a backend unless the cache holds it, load it, and return its directory.

    A build happens in a directory of its own and is renamed into place when it is whole, so one that was killed
    is never mistaken for a finished one, and the lock file that `cpp_extension` leaves in it keeps nobody
    waiting. Builds of one key exclude each other by a file lock, which the system releases when its holder dies.

    Raises:
        RuntimeError: the compiler failed; the message holds what it said.
        OSError: the cache cannot be written.
    """
    directory = cache_dir() / f"{backend}-{key(backend)}"
    name = f"pagedkv_{backend}_kernels"
    compiled(directory, f"the {backend} kernels", name=name, sources=[str(p) for p in sources(backend)],
             extra_include_paths=[str(p) for p in include_paths(backend)], with_cuda=backend == "cuda", **flags(backend))  # fmt: skip
    torch.ops.load_library(directory / f"{name}.so")
    return directory


def compiled(directory: Path, what: str, **how) -> Path:
    """`directory`, in which `cpp_extension.load(**how)` has left `<name>.so`: now, or once before. See `load`."""
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(directory.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                _compile(directory, what, how)
    return directory


def _compile(directory: Path, what: str, how: dict) -> None:
    for leftover in directory.parent.glob(f"{directory.name}.building-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # we hold the lock: its builder is dead
    building = directory.with_name(f"{directory.name}.building-{os.getpid()}")
    building.mkdir()
    started = time.monotonic()
    print(f"pagedkv: compiling {what} into {directory} (once)", file=sys.stderr, flush=True)
    with _ninja_on_path(), _bounded_jobs():
        cpp_extension.load(build_directory=str(building), is_python_module=False, **how)
    seconds = time.monotonic() - started
    (building / "seconds").write_text(f"{seconds:.1f}\n")
    building.rename(directory)
    print(f"pagedkv: compiled in {seconds:.0f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ninja_on_path():
    """The ninja wheel puts its binary beside the interpreter, which need not be on PATH."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def max_jobs() -> int:
    """How many compilers may run at once: $MAX_JOBS where set, else as many as there are cores and memory allows."""
    if "MAX_JOBS" in os.environ:
        return max(1, int(os.environ["MAX_JOBS"]))
    return max(1, min(len(os.sched_getaffinity(0)), _available_memory() // _BYTES_PER_JOB))


@contextlib.contextmanager
def _bounded_jobs():
    """`max_jobs`, told to ninja."""
    if "MAX_JOBS" in os.environ:
        yield
        return
    os.environ["MAX_JOBS"] = str(max_jobs())
    try:
        yield
    finally:
        del os.environ["MAX_JOBS"]


def _available_memory() -> int:
    """Bytes that this process may still take: what the system has to spare, or less where a cgroup limits it."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2 here, or no limit ("max")
        cgroup = Path("/sys/fs/cgroup")
        limit = int((cgroup / "memory.max").read_text())
        available = min(available, limit - int((cgroup / "memory.current").read_text()))
    return available


def _compiler_versions(backend: str) -> list[str]:
    tools = [cpp_extension.get_cxx_compiler()]
    if backend == "cuda":
        tools.append(str(Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc"))
    return [subprocess.run([t, "--version"], capture_output=True, text=True, check=True).stdout for t in tools]


def _cpu_features() -> str:
    """What -march=native depends on, so that a cache shared by unlike machines stays right."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
