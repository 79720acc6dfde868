"""The one place that names a device and describes it."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

from pagedkv.ops import checks

# What a record lists of a CPU's instruction sets: those that the kernels could use.
_ISA = (
    *("avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8"),
    *("asimd", "asimddp", "sve"),
)

# Marketing words and counts that do not tell one processor from another.
_NOISE = re.compile(r"\((?:r|tm|c)\)|@.*$|\bwith .*$|\b\w+-core\b|\bcpu\b|\bprocessor\b", re.IGNORECASE)


def resolve(device: str | torch.device = "auto") -> torch.device:
    """`auto` (cuda where present, else cpu), `cpu`, `cuda` or `cuda:N` as a `torch.device` with an index.

    Raises `ValueError` for any other name and `RuntimeError` for a CUDA device that this machine lacks.
    """
    name = str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, got {str(device)!r}")
    checks.present(torch.device(name))
    return torch.device(name if ":" in name else f"cuda:{torch.cuda.current_device()}")


def slug(kind: str, name: str) -> str:
    """`cuda-nvidia-h200`, `cpu-amd-epyc-7763`: kind and model, lower case, without core count or clock."""
    if kind == "cpu":
        name = _NOISE.sub(" ", name)
    return "-".join([kind, *re.findall(r"[a-z0-9]+", name.lower())])


def describe(device: str | torch.device = "auto") -> dict:
    """What a record says of its hardware: `slug, name, kind` and sizes in bytes; None where the system does not tell."""
    device = resolve(device)
    return _describe_cpu() if device.type == "cpu" else _describe_cuda(device)


def l2_bytes(device: torch.device) -> int:
    """Size of a CUDA device's L2 cache in bytes."""
    return torch.cuda.get_device_properties(device).L2_cache_size


def _describe_cpu() -> dict:
    name = _cpu_name()
    flags = set(_cpuinfo("flags", "Features").split())
    return {
        "slug": slug("cpu", name),
        "name": name,
        "kind": "cpu",
        "architecture": platform.machine(),
        "cores": _physical_cores(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": [f for f in _ISA if f in flags],
        "memory_bytes": _memory_bytes(),
        **{f"{level}_bytes": _cache_bytes(level) for level in ("l1d", "l2", "l3")},
        "virtual": "hypervisor" in flags,
    }


def _describe_cuda(device: torch.device) -> dict:
    properties = torch.cuda.get_device_properties(device)
    smi = _nvidia_smi(device, "driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit", "mig.mode.current")
    return {
        "slug": slug("cuda", properties.name),
        "name": properties.name,
        "kind": "cuda",
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": smi["driver_version"],
        "max_sm_clock": smi["clocks.max.sm"],
        "max_memory_clock": smi["clocks.max.memory"],
        "power_limit": smi["power.limit"],
        "mig": smi["mig.mode.current"],
        "host_cpu": _cpu_name(),
    }


def _nvidia_smi(device: torch.device, *fields: str) -> dict[str, str | None]:
    unknown = dict.fromkeys(fields)
    if shutil.which("nvidia-smi") is None:
        return unknown
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    if uuid:
        command.append(f"--id=GPU-{uuid.removeprefix('GPU-')}")
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return unknown
    values = [v.strip() for v in output.strip().splitlines()[0].split(",")] if output.strip() else []
    if len(values) != len(fields):
        return unknown
    return {f: None if v.startswith("[") else v for f, v in zip(fields, values, strict=True)}


def _cpu_name() -> str:
    """The model as the system names it; the machine type where it does not (some ARM hosts)."""
    name = _cpuinfo("model name")
    if not name and shutil.which("lscpu"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            english = {**os.environ, "LC_ALL": "C"}
            lines = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=20, env=english).stdout.splitlines()
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("Model name:")), "")
    if not name and platform.system() == "Darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            name = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=20).stdout.strip()
    return name or platform.processor() or platform.machine() or "unknown"


def _cpuinfo(*keys: str) -> str:
    """The first value in /proc/cpuinfo under any of `keys`; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in keys), "")


def _physical_cores() -> int | None:
    pairs = set()
    for topology in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology"):
        with contextlib.suppress(OSError):
            pairs.add(((topology / "physical_package_id").read_text().strip(), (topology / "core_id").read_text().strip()))
    return len(pairs) or os.cpu_count()


def _cache_bytes(level: str) -> int | None:
    """Size of one instance of a cache as cpu0 sees it."""
    wanted = {"l1d": ("1", "Data"), "l2": ("2", "Unified"), "l3": ("3", "Unified")}[level]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            if ((index / "level").read_text().strip(), (index / "type").read_text().strip()) == wanted:
                return int((index / "size").read_text().strip().removesuffix("K")) * 1024
    return None


def _memory_bytes() -> int | None:
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
