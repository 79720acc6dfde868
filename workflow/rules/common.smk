# The configuration, checked; which devices to measure; which files an experiment depends on and makes.

import ctypes
import fcntl
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import jsonschema
from snakemake.exceptions import WorkflowError


def stop(message):
    """End with one line: a mistake in the configuration needs no traceback."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(1)


def take_tree():
    """One run at a time in a tree. Snakemake's own lock outlives a kill and then has to be removed by hand, so the
    default profile leaves it out; the system frees this one when its holder dies."""
    Path("build").mkdir(exist_ok=True)
    lock = open("build/.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stop("another Snakemake is at work in this tree")
    HELD.append(lock)


HELD = []
DEVICE_CHOICES = ("auto", "cpu", "cuda")
STAGES = ("build", "validate", "benchmark", "quality", "summary")

if str(config["quick"]).lower() in ("true", "false"):
    config["quick"] = str(config["quick"]).lower() == "true"  # on the command line, Snakemake reads only True and False so
if config["device"] not in DEVICE_CHOICES:
    stop(f"unknown device {config['device']!r}: expected one of {', '.join(DEVICE_CHOICES)} (--config device=...)")
try:
    jsonschema.validate(config, json.loads(Path(workflow.basedir, "workflow/schemas/config.json").read_text()))
except jsonschema.ValidationError as error:
    stop(f"configuration, {error.json_path}: {error.message}")
except (OSError, ValueError, jsonschema.SchemaError) as error:
    stop(f"workflow/schemas/config.json is no JSON schema: {str(error).splitlines()[0]}")

EXPERIMENTS = config["experiments"]
QUICK = config["quick"]
ROOT = "build/quick" if QUICK else "build"


def gpu_present():
    """Whether the driver sees a GPU. Asked of the driver itself: importing torch takes seconds, at every start."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def torch_has_cuda():
    spec = find_spec("torch")
    return spec is not None and "+cpu" not in Path(spec.origin).with_name("version.py").read_text()


usable_gpu = config["device"] != "cpu" and gpu_present() and torch_has_cuda()
if config["device"] == "cuda" and not usable_gpu:
    stop("device=cuda, but there is no GPU here that torch can use (`pagedkv doctor` says what is missing)")
DEVICES = [config["device"]] if config["device"] != "auto" else ["cpu", "cuda"] if usable_gpu else ["cpu"]


def runs_on(experiment, device):
    return device in EXPERIMENTS[experiment].get("devices", ["cpu", "cuda"])


def record(experiment, device):
    return f"{ROOT}/evidence/{device}/{experiment}.json"


def records(experiments=EXPERIMENTS, devices=DEVICES):
    return [record(e, d) for d in devices for e in experiments if runs_on(e, d)]


def figure_folders():
    return [f"{ROOT}/evidence/{d}/figures/{e}" for d in DEVICES for e in EXPERIMENTS if runs_on(e, d)]


def sources(experiment, device):
    """The files that an experiment's figures depend on, its notebook first, relative to the repository. Another device's
    kernels are not among them; but `build` compiles the CUDA files wherever it runs."""
    compiles_cuda = device == "cuda" or EXPERIMENTS[experiment]["stage"] == "build"
    others = (*([] if device == "cpu" else ["kernels/cpu/"]), *([] if compiles_cuda else ["kernels/cuda/"]))
    found = {f"notebooks/{experiment}.ipynb": None}
    for name in EXPERIMENTS[experiment]["sources"]:
        for pattern in config["sources"].get(name, [name]):
            matches = sorted(p.as_posix() for p in Path(".").glob(pattern) if p.is_file() and "__pycache__" not in p.parts)
            if not matches:
                stop(f"configuration, experiments.{experiment}.sources: {pattern} matches no file")
            found.update(dict.fromkeys(m for m in matches if not m.startswith(others)))
    return list(found)


def reads(experiment, device):
    """The records that an experiment reads."""
    named = EXPERIMENTS[experiment].get("reads", [])
    if named == ["*"]:
        named = [e for e in EXPERIMENTS if e != experiment]
    return records(named, [device])


# What one can ask for by name: a stage, or one experiment. A stage goes before an experiment of the same name.
TARGETS = {name: [name] for name in EXPERIMENTS}
TARGETS.update({stage: members for stage in STAGES if (members := [e for e in EXPERIMENTS if EXPERIMENTS[e]["stage"] == stage])})


onstart:
    take_tree()


wildcard_constraints:
    device="cpu|cuda",
    experiment="|".join(EXPERIMENTS),
