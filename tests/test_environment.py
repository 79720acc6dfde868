"""environment.yml (conda-forge) and pyproject.toml ask for the same; an installed wheel can compile its kernels."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]

# Where the channel names a package otherwise than the index.
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
# What an environment needs besides, and the index does not carry.
CONDA_ONLY = {"python", "pip", "cxx-compiler"}
# A library's own user does not need the pipeline; whoever builds the environment does.
EXTRAS = ("evidence", "lab", "model", "peers", "test")


def _project() -> dict:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        tomllib = pytest.importorskip("tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _split(requirement: str) -> tuple[str, frozenset[str]]:
    """`torch>=2.10,<2.14` -> torch, {>=2.10, <2.14}. The two grammars agree on operators and versions."""
    name, bounds = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(.*)", requirement.strip()).groups()
    return name.lower(), frozenset(b.strip() for b in bounds.split(",") if b.strip())


def _wanted() -> dict[str, frozenset[str]]:
    project = _project()
    requirements = [*project["dependencies"], *(r for extra in EXTRAS for r in project["optional-dependencies"][extra])]
    return dict(map(_split, requirements))


def _environment() -> tuple[list[str], list[str]]:
    """The channel's lines, and those left to pip."""
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return [line for line in lines if isinstance(line, str)], next(line["pip"] for line in lines if isinstance(line, dict))


def test_conda_lines_are_match_specs():
    rattler = pytest.importorskip("rattler")
    for line in _environment()[0]:
        spec = rattler.MatchSpec(line, strict=True)
        assert spec.name.normalized == line.split()[0]


def test_environment_and_pyproject_ask_for_the_same():
    conda, pip = _environment()
    wanted = _wanted()
    by_channel = {name: bounds for name, bounds in map(_split, conda) if name not in CONDA_ONLY}
    by_pip = dict(map(_split, (line for line in pip if not line.startswith("-e"))))
    assert not by_channel.keys() & by_pip.keys()
    assert {**by_channel, **by_pip} == {
        (name if name in by_pip else CONDA_NAMES.get(name, name)): bounds for name, bounds in wanted.items()
    }
    assert "-e ." in pip


def test_the_python_of_the_environment_can_run_the_pipeline():
    """pyproject's lower bound is the library's; Snakemake's is higher."""
    (python,) = (bounds for name, bounds in map(_split, _environment()[0]) if name == "python")
    assert ">=3.11" in python
    assert _project()["requires-python"] == ">=3.10"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: setuptools leaves folders behind in the tree it builds from
    source.mkdir()
    for name in ("pagedkv", "kernels", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", ROOT / name, source], check=True)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next((source / "dist").glob("pagedkv-*.whl"))


def test_a_wheel_carries_every_module_and_every_kernel_source(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "pagedkv").rglob("*.py")}
    kernels = {"pagedkv/_kernels/" + p.relative_to(ROOT / "kernels").as_posix() for p in (ROOT / "kernels").rglob("*.*") if p.is_file()}
    assert inside == modules | kernels


def test_an_installed_wheel_compiles_its_own_kernels(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = """
import torch, pagedkv
from pagedkv.ops import build
assert build.KERNELS.parts[-2:] == ("pagedkv", "_kernels") and "site" in build.KERNELS.parts, build.KERNELS
if (missing := build.missing_tool("cpu")) is None:
    assert pagedkv.backend("cpu") != "pytorch", pagedkv.backend("cpu")
q, scale = pagedkv.quantize_kv(torch.ones(2, 4, 1, 8))
assert q.unique().tolist() == [127] and torch.allclose(scale, torch.tensor(1 / 127))
print(missing or "compiled")
"""
    # -P or not, the tree under test must not be found: run elsewhere, with the wheel's folder alone on the path.
    # The compiled library is the same as the tree's, sources and flags alike, so a shared cache saves the time.
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() != "compiled":
        pytest.skip(done.stdout.strip())


def _set_up(folder: Path, python: str, **environment: str) -> subprocess.CompletedProcess:
    """`make` up to the virtual environment, with a Python that is this script."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{python}\n")
    fake.chmod(0o755)
    command = ["make", "-f", ROOT / "Makefile", "-C", ROOT, f"VENV={folder / 'venv'}", f"PYTHON={fake}", folder / "venv/.ready"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize(
    "python, said",
    [
        # --version is what the message repeats; -c 'import sys; ...' asks for the version, -c 'import ensurepip...' for venv.
        ('case "$*" in --version) echo Python 3.9.2;; *) exit 1;; esac', "error: Python 3.9.2 cannot run the pipeline: Snakemake 9 needs"),
        ('case "$*" in *ensurepip*) exit 1;; *) exit 0;; esac', "error: this Python has no venv module: apt-get install python3-venv"),
    ],
    ids=["too old", "without venv"],
)
def test_set_up_says_what_the_machine_lacks(tmp_path, python, said):
    done = _set_up(tmp_path, python)
    assert done.returncode != 0 and said in done.stderr
    assert not (tmp_path / "venv").exists()


def test_set_up_without_a_compiler_goes_on_and_says_so(tmp_path):
    """Up to the environment itself, which this Python refuses to make."""
    done = _set_up(tmp_path, 'case "$*" in "-m venv"*) exit 3;; *) exit 0;; esac', CXX="no-such-compiler")
    assert "note: no C++ compiler" in done.stderr and "Error 3" in done.stderr


def test_set_up_without_a_python(tmp_path):
    command = ["make", "-C", ROOT, f"VENV={tmp_path}", "PYTHON=no-such-python", tmp_path / ".ready"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "error: no no-such-python: apt-get install python3" in done.stderr


def test_the_version_is_said_once():
    """pyproject reads it from the package; the citation and the changelog repeat it."""
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "pagedkv" / "__init__.py").read_text(), re.MULTILINE)[1]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
