"""workflow/config.yaml: an experiment's sources hold all that its figures depend on."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIG = yaml.safe_load((ROOT / "workflow" / "config.yaml").read_text())
EXPERIMENTS = CONFIG["experiments"]

# What no figure depends on. An error message, the fallback without a compiler (the record names the backend), and the writing of
# records and figures move no number; timing does, and is not among them.
NEUTRAL = {
    "pagedkv/ops/checks.py",
    "pagedkv/ops/eager.py",
    *(
        f"pagedkv/evidence/{name}.py"
        for name in ("__init__", "experiment", "figures", "hardware", "ledger", "prose", "record", "root", "tables", "verify")
    ),
}


def _sources(experiment: str) -> set[str]:
    found = set()
    for name in EXPERIMENTS[experiment]["sources"]:
        for pattern in CONFIG["sources"].get(name, [name]):
            found |= {p.relative_to(ROOT).as_posix() for p in ROOT.glob(pattern) if p.is_file()}
    return found


def _included(file: str) -> set[str]:
    """What a kernel source includes of this project, and so on."""
    found, left = set(), [ROOT / file]
    while left:
        path = left.pop()
        for name in re.findall(r'^\s*#include "(.+?)"', path.read_text(), re.MULTILINE):
            target = next((p for p in (path.parent / name, ROOT / "kernels" / name) if p.is_file()), None)
            if target is not None and (relative := target.resolve().relative_to(ROOT).as_posix()) not in found:
                found.add(relative)
                left.append(target)
    return found


def _module_file(name: str) -> str | None:
    base = Path(*name.split("."))
    return next((p.as_posix() for p in (base.with_suffix(".py"), base / "__init__.py") if (ROOT / p).is_file()), None)


def _imported(code: str) -> set[str]:
    """The project's modules that Python code imports at its top or inside a function; not through `import pagedkv` itself."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pagedkv."):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom) and node.module == "pagedkv":
            names |= {f"pagedkv.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("pagedkv.")}
    return {file for name in names if (file := _module_file(name))}


def _notebook_code(experiment: str) -> str:
    cells = json.loads((ROOT / "notebooks" / f"{experiment}.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return re.sub(r"^\s*[%!].*$", "", code, flags=re.MULTILINE)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_sources_hold_what_the_kernels_include(experiment):
    sources = _sources(experiment)
    kernels = {s for s in sources if s.startswith("kernels/") and s.endswith((".cpp", ".cu"))}
    assert set().union(*map(_included, kernels)) - sources == set()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_sources_hold_the_modules_that_the_notebook_imports(experiment):
    sources, seen = _sources(experiment), set()
    left = _imported(_notebook_code(experiment))
    while left:
        file = left.pop()
        if file in seen or file in NEUTRAL or Path(file).name == "__init__.py":
            continue
        seen.add(file)
        left |= _imported((ROOT / file).read_text())
    assert seen - sources == set()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_notebook_is_committed_without_outputs_and_takes_the_parameters(experiment):
    cells = json.loads((ROOT / "notebooks" / f"{experiment}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    (parameters,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    names = {target.id for node in ast.parse("".join(parameters["source"])).body for target in node.targets}
    assert names >= {"device", "quick", "record", "figures", "rule", "sources", "inputs"}


def test_every_notebook_is_an_experiment_and_every_stage_has_one():
    assert {p.stem for p in (ROOT / "notebooks").glob("*.ipynb")} == set(EXPERIMENTS)
    assert {entry["stage"] for entry in EXPERIMENTS.values()} == {"build", "validate", "benchmark", "quality", "summary"}


def test_every_kernel_file_is_a_source_of_some_measurement():
    """A kernel that only `build` and `validate` depend on is one whose speed or quality nobody measures, or a missing pattern."""
    measured = set().union(*(_sources(e) for e in EXPERIMENTS if EXPERIMENTS[e]["stage"] in ("benchmark", "quality")))
    kernels = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kernels").rglob("*.*") if p.is_file()}
    assert kernels - measured == set()
