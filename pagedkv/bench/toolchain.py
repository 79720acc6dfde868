"""Compile what this machine can compile, and say what came out: seconds, flags, registers, spills.

Two things: the library itself, through `cpp_extension` as a user gets it; and, where nvcc exists, every CUDA file for
every architecture that the project supports, which needs no GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from torch.utils import cpp_extension

import pagedkv
from pagedkv.evidence.record import write_text
from pagedkv.ops import build

ARCHS = ("75", "80", "86", "89", "90", "100", "120")
QUICK_ARCHS = ("90",)  # the newer instructions; what older architectures take instead, a full run compiles
_STANDARD = "-std=c++17"
_TIMEOUT_S = 1200


def nvcc() -> Path | None:
    """The CUDA compiler, or None. torch need not be a CUDA build."""
    homes = [os.environ.get("CUDA_HOME"), cpp_extension.CUDA_HOME, "/usr/local/cuda"]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home] + [Path(found) for found in [shutil.which("nvcc")] if found]
    return next((path for path in candidates if path.exists()), None)


def compiler_rows() -> Iterator[dict]:
    """`kind` "compiler": the version line of each tool, or its absence."""
    tools = {"C++": cpp_extension.get_cxx_compiler(), "CUDA": str(nvcc() or "nvcc"), "ninja": "ninja"}
    for tool, command in tools.items():
        row = {"kind": "compiler", "tool": tool}
        found = shutil.which(command) or shutil.which(command, path=Path(sys.executable).parent)  # the ninja wheel's place
        if found is None:
            yield row | {"status": "absent", "reason": f"{Path(command).name} was not found"}
            continue
        lines = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()
        version = next((line for line in lines if "release" in line), lines[0])
        yield row | {"status": "measured", "version": version}


def library_row(device: torch.device) -> dict:
    """Compile (unless cached) and load the kernels of one device type through `cpp_extension`.

    `kind` "library", `backend`, `seconds` that the compilation took, `cached` (whether an earlier run paid them), `flags`.
    `status` "absent" with a `reason` where a tool is missing. Raises `RuntimeError` where compilation fails.
    """
    row = {"kind": "library", "backend": device.type}
    missing = build.missing_tool(device.type)
    if missing:
        return row | {"status": "absent", "reason": missing}
    cached = (build.cache_dir() / f"{device.type}-{build.key(device.type)}").exists()
    directory = build.load(device.type)
    flags = [flag for group in build.flags(device.type).values() for flag in group]
    return row | {"status": "measured", "seconds": float((directory / "seconds").read_text()), "cached": cached,
                  "flags": " ".join(flags), "built": pagedkv.backend(device)}  # fmt: skip


# ------------------------------------------------------------------------------------------ CUDA files


def cuda_rows(quick: bool = False) -> Iterator[dict]:
    """Compile every `kernels/cuda/*.cu` for every architecture (`quick`: of `QUICK_ARCHS`), `build.max_jobs()` at a time.

    Yields a row of `kind` "compilation" for each (file, arch) as it ends: `seconds`, `ok`, `errors`, `cached`; then one of `kind` "kernel"
    for each kernel: `registers`, `spill_bytes` (stores and loads), `stack_bytes`, `shared_bytes` (static) by architecture,
    `max_registers` and `max_spill_bytes` over them. A result is cached by the hash of what it depends on. Without nvcc: one
    row, `status` "absent".
    """
    compiler = nvcc()
    if compiler is None:
        yield {
            "kind": "compilation",
            "status": "absent",
            "reason": "no nvcc was found (CUDA toolkit, https://developer.nvidia.com/cuda-downloads)",
        }
        return
    files = sorted((build.KERNELS / "cuda").glob("*.cu"))
    headers = [p for p in build.tracked_files("cuda") if p.suffix in (".h", ".cuh")]
    version = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, check=True).stdout
    common = hashlib.sha256(version.encode())
    for header in headers:
        common.update(header.relative_to(build.KERNELS).as_posix().encode() + header.read_bytes())
    archs = QUICK_ARCHS if quick else ARCHS
    flags = [_STANDARD, *cpp_extension.COMMON_NVCC_FLAGS, "-O3", "-Xptxas", "-v", "-lineinfo"]  # as the library is compiled
    if quick and "--Ofast-compile" in subprocess.run([str(compiler), "--help"], capture_output=True, text=True, check=True).stdout:
        flags.append("--Ofast-compile=max")  # five times as fast; whether it compiles is what a quick run asks
    with ThreadPoolExecutor(build.max_jobs()) as pool:
        # The first architecture of each file also compiles its host half.
        jobs = {
            pool.submit(_compile, [str(compiler), *flags], path, arch, arch == archs[0], common.hexdigest()): (path, arch)
            for arch in archs
            for path in files
        }
        kernels = []
        for job in as_completed(jobs):
            path, arch = jobs[job]
            result = job.result()
            name = path.relative_to(build.KERNELS).as_posix()
            kernels += [{"file": name, "arch": f"sm_{arch}", **kernel} for kernel in result.pop("kernels")]
            yield {"kind": "compilation", "file": name, "arch": f"sm_{arch}", "status": "measured", **result}
    yield from _kernel_rows(kernels)


def _kernel_rows(kernels: list[dict]) -> Iterator[dict]:
    by_name: dict[tuple[str, str], list[dict]] = {}
    for kernel in sorted(kernels, key=lambda k: (k["file"], k["kernel"], int(k["arch"].removeprefix("sm_")))):
        by_name.setdefault((kernel["file"], kernel["kernel"]), []).append(kernel)
    for (file, name), found in by_name.items():
        resources = {field: {k["arch"]: k[field] for k in found} for field in ("registers", "spill_bytes", "stack_bytes", "shared_bytes")}
        yield {
            "kind": "kernel",
            "file": file,
            "kernel": name,
            "status": "measured",
            **resources,
            "max_registers": max(resources["registers"].values()),
            "max_spill_bytes": max(resources["spill_bytes"].values()),
        }


def _compile(compiler: list[str], source: Path, arch: str, host_too: bool, common: str) -> dict:
    output = ["-c", "-o", os.devnull] if host_too else ["-cubin", "-o", os.devnull]
    flags = [*compiler[1:], f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    key = hashlib.sha256("\0".join([common, source.name, *flags, *output]).encode() + source.read_bytes()).hexdigest()[:24]
    cached = build.cache_dir() / "ptxas" / f"{key}.json"
    if cached.exists():
        return {**json.loads(cached.read_text()), "cached": True}
    command = [compiler[0], *flags, *(f"-I{p}" for p in build.include_paths("cuda")), *output, str(source)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    result = {
        "seconds": round(time.monotonic() - started, 1),
        "ok": done.returncode == 0,
        "errors": None if done.returncode == 0 else (done.stderr + done.stdout).strip()[-1500:],
        "flags": " ".join(flags),
        "kernels": parse_ptxas(done.stderr + done.stdout),
    }
    if result["ok"]:
        write_text(cached, json.dumps(result))
    return {**result, "cached": False}


_PATTERNS = {
    "entry": re.compile(r"Compiling entry function '(\S+)' for '(\S+)'"),
    "properties": re.compile(r"Function properties for (\S+)"),
    "stack": re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"),
    "registers": re.compile(r"Used (\d+) registers"),
    "shared": re.compile(r"(\d+) bytes smem"),
}


def parse_ptxas(text: str) -> list[dict]:
    """What `ptxas -v` says of each kernel (entry function); device functions that it also lists are left out.

    `kernel`, `registers`, `spill_bytes` (stores plus loads), `stack_bytes`, `shared_bytes`.
    """
    kernels, current, described = [], None, None
    for line in text.splitlines():
        if found := _PATTERNS["entry"].search(line):
            current = {"kernel": found[1], "registers": 0, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0}
            kernels.append(current)
        elif found := _PATTERNS["properties"].search(line):
            described = found[1]
        elif current is None:
            continue
        elif (found := _PATTERNS["stack"].search(line)) and described == current["kernel"]:
            current["stack_bytes"], current["spill_bytes"] = int(found[1]), int(found[2]) + int(found[3])
        elif found := _PATTERNS["registers"].search(line):
            current["registers"] = int(found[1])
            if shared := _PATTERNS["shared"].search(line):
                current["shared_bytes"] = int(shared[1])
    names = demangled([k["kernel"] for k in kernels])
    return [{**kernel, "kernel": name} for kernel, name in zip(kernels, names, strict=True)]


def demangled(names: list[str], parameters: bool = False) -> list[str]:
    """Readable names where c++filt is found (binutils), with or without parameters; mangled ones where not."""
    if not names or shutil.which("c++filt") is None:
        return names
    done = subprocess.run(["c++filt", *([] if parameters else ["--no-params"])], input="\n".join(names), capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return lines if done.returncode == 0 and len(lines) == len(names) else names


def failures(rows: list[dict]) -> list[str]:
    """One text for each compilation that failed."""
    return [f"{r['file']} for {r['arch']}:\n{r['errors']}" for r in rows if r["kind"] == "compilation" and r.get("ok") is False]
