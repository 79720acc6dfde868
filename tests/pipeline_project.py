"""A miniature PagedKV for the tests of the pipeline: the real Snakefile, rules and scripts over notebooks of one cell."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]

# A notebook that measures nothing: it writes a record that the schema accepts, without the time that torch takes to load.
CELL = """
import hashlib, os, sys
from pathlib import Path
def sha(path): return hashlib.sha256(Path(path).read_bytes()).hexdigest()
print("measuring {name} with", sys.executable, flush=True)
Path("build/ran.txt").open("a").write("{name} ")
{extra}
figure = Path(figures, "{name}.svg")
figure.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
content = dict(
    schema_version=1, kind="measured", experiment="{name}",
    hardware=dict(slug="cpu-test", name="test", kind="cpu"), software=dict(python="3", torch="2", backend="none"),
    provenance=dict(rule=rule, notebook="notebooks/{name}.ipynb", parameters=dict(device=device, quick=quick),
                    sources={{s: sha(s) for s in sources}}, inputs={{s: sha(s) for s in inputs}}, figures={{figure.name: sha(figure)}},
                    finished_at="2026-01-01T00:00:00Z", seconds=1.0),
    rows=[dict(value={value}), *{absent}])
from pagedkv.evidence import record as records
content["provenance"]["digest"] = records.digest(content)
Path(record).write_text(records.dumps(content))
"""
PARAMETERS = 'device = "auto"\nquick = False\nrecord = None\nfigures = None\nrule = None\nsources = None\ninputs = None'

# summary reads the records of all others, beta the model's status
EXPERIMENTS = {
    "build": {"stage": "build", "sources": ["kernels"]},
    "alpha": {"stage": "benchmark", "sources": ["kernels"], "exclusive": True},
    "beta": {"stage": "quality", "sources": ["pagedkv/beta.py"], "model": True},
    "summary": {"stage": "summary", "sources": ["pagedkv/summary.py"], "reads": ["*"]},
}

CLAIM = {
    "id": "alpha.value",
    "statement": "What alpha measured",
    "kind": "measured",
    "rule": "alpha",
    "unit": None,
    "evidence": {"file": "results/cpu-test/alpha.json", "where": {}, "field": "value"},
    "expect": {"equals": 1},
}

# Stands in for pagedkv.models: no network in these tests.
MODELS = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
print("no KV dump: cannot download: no network", file=sys.stderr)
named = [a for a in sys.argv if a.startswith(("--model=", "--text=", "--strict"))]
status = {"available": False, "reason": "no network", "named": named}
(out / "status.json").write_text(json.dumps(status))
sys.exit("--strict" in named)
"""


class Project:
    def __init__(self, root: Path):
        self.root = root
        for name in ("workflow/rules", "workflow/scripts", "workflow/schemas", "workflow/profiles"):
            shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "Snakefile", root)
        (root / "profiles").symlink_to("workflow/profiles")
        for name in ("kernels", "pagedkv", "notebooks"):
            (root / name).mkdir()
        (root / "kernels" / "op.cpp").write_text("// an op\n")
        for name in ("beta", "kv_dump", "summary"):
            (root / "pagedkv" / f"{name}.py").write_text("")
        (root / "pagedkv" / "__init__.py").write_text("")
        (root / "pagedkv" / "evidence").mkdir()
        (root / "pagedkv" / "evidence" / "__init__.py").write_text("")
        for name in ("ledger", "prose", "record", "report", "root", "schema", "tables", "verify"):
            shutil.copy(REPOSITORY / "pagedkv" / "evidence" / f"{name}.py", root / "pagedkv" / "evidence")
        (root / "pagedkv" / "models.py").write_text(MODELS)
        config = {
            "device": "cpu",
            "quick": False,
            "model": None,
            "text": None,
            "tokens": 64,
            "sources": {"kernels": ["kernels/**/*"]},
            "experiments": EXPERIMENTS,
        }
        (root / "workflow" / "config.yaml").write_text(yaml.safe_dump(config))
        (root / "workflow" / "claims.yaml").write_text(yaml.safe_dump([CLAIM]))
        (root / "README.md").write_text("It is <!--claim:alpha.value--><!--/claim-->.\n")
        for name in EXPERIMENTS:
            self.notebook(name)
        decoy = root / ".home" / ".local" / "share" / "jupyter" / "kernels" / "python3"  # a kernelspec of the user's, which nothing may use
        decoy.mkdir(parents=True)
        (decoy / "kernel.json").write_text(json.dumps({"argv": ["/bin/false"], "display_name": "decoy", "language": "python"}))

    def notebook(self, name: str, extra: str = "", value: int = 1, absent: tuple[dict, ...] = ()) -> None:
        notebook = nbformat.v4.new_notebook()
        parameters = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
        notebook.cells = [parameters, nbformat.v4.new_code_cell(CELL.format(name=name, extra=extra, value=value, absent=absent))]
        nbformat.write(notebook, self.root / "notebooks" / f"{name}.ipynb")

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SNAKEMAKE", "PAGEDKV", "PYTEST", "PYTHONPATH"))}
        return {**kept, "XDG_CACHE_HOME": str(self.root / ".cache"), "HOME": str(self.root / ".home")}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]

    def snakemake(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess:
        """`output` of the result holds both streams."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.root,
            env=self.environment(),
            text=True,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        done.output = done.stdout
        return done

    def start(self) -> subprocess.Popen:
        """The same in the background, as a terminal would start it: a process group of its own, which minds SIGINT."""
        return subprocess.Popen(
            self.command(),
            cwd=self.root,
            env=self.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def would_run(self, *arguments: str) -> list[str]:
        """The notebooks that a run would execute, sorted, without running them."""
        done = self.snakemake("--dry-run", *arguments)
        assert done.returncode == 0, done.output
        return sorted(re.findall(r"wildcards: device=cpu, experiment=(\w+)", done.output))

    def ran(self) -> list[str]:
        """The notebooks that ran since the last call, sorted."""
        log = self.root / "build" / "ran.txt"
        names = sorted(log.read_text().split()) if log.exists() else []
        log.unlink(missing_ok=True)
        return names
