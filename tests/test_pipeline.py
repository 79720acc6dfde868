"""The pipeline's promises, held against the real Snakefile, rules and scripts over one-cell notebooks.

The same promises over the real notebooks: .ci/run.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pipeline_project import EXPERIMENTS, Project

pytest.importorskip("snakemake", reason="the pipeline needs the extra [evidence]")

pytestmark = pytest.mark.xdist_group("pipeline")  # one worker: they share what the first run built

ALL = sorted(EXPERIMENTS)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A project with everything built; copied, never changed."""
    project = Project(tmp_path_factory.mktemp("built"))
    done = project.snakemake()
    assert done.returncode == 0, done.output
    project.first_output = done.output
    assert project.ran() == ALL
    return project


@pytest.fixture
def project(built, tmp_path):
    """A copy of the finished project, times of its files included."""
    copy = Project.__new__(Project)
    copy.root = tmp_path / "project"
    shutil.copytree(built.root, copy.root, symlinks=True)
    return copy


def test_one_command_builds_publishes_and_shows_progress(built):
    assert "[alpha cpu] measuring alpha" in built.first_output
    for name in ALL:
        record = json.loads((built.root / "results" / "cpu-test" / f"{name}.json").read_text())
        assert record["provenance"]["rule"] == name
        assert (built.root / "figures" / "cpu-test" / f"{name}.svg").is_file()
        assert (built.root / "build" / "notebooks" / "cpu" / f"{name}.ipynb").is_file()


def test_publishing_fills_the_claim_markers_and_the_report_is_written(built):
    assert (built.root / "README.md").read_text() == "It is <!--claim:alpha.value-->1<!--/claim-->.\n"
    assert "What alpha measured" in (built.root / "build" / "report" / "index.html").read_text()
    assert "What alpha measured" in (built.root / "build" / "report" / "index.md").read_text()


def test_a_record_names_what_it_was_given(built):
    summary = json.loads((built.root / "results" / "cpu-test" / "summary.json").read_text())["provenance"]
    assert list(summary["sources"]) == ["notebooks/summary.ipynb", "pagedkv/summary.py"]
    assert sorted(summary["inputs"]) == [f"build/evidence/cpu/{name}.json" for name in ("alpha", "beta", "build")]
    beta = json.loads((built.root / "results" / "cpu-test" / "beta.json").read_text())["provenance"]
    assert list(beta["inputs"]) == ["build/model/status.json"]


def test_a_second_call_has_nothing_to_do(project):
    done = project.snakemake()
    assert done.returncode == 0 and "Nothing to be done" in done.output
    assert project.ran() == []


def test_a_copy_without_the_build_folder_rebuilds_everything(project):
    """A clone: committed results are there, with times that say nothing."""
    shutil.rmtree(project.root / "build")
    shutil.rmtree(project.root / ".snakemake")
    assert project.would_run() == ALL


@pytest.mark.parametrize(
    "edited, rerun",
    [
        (["notebooks/alpha.ipynb"], ["alpha", "summary"]),
        (["notebooks/summary.ipynb", "README.md"], ["summary"]),
        (["pagedkv/beta.py"], ["beta", "summary"]),
        (["kernels/op.cpp"], ["alpha", "build", "summary"]),
        (["kernels/another.cpp"], ["alpha", "build", "summary"]),
    ],
    ids=" ".join,
)
def test_an_edit_reruns_what_depends_on_it_only(project, edited, rerun):
    for path in (project.root / name for name in edited):
        path.write_text(path.read_text().replace("measuring", "measuring again") + "\n" if path.exists() else "// new\n")
    (project.root / "notebooks" / "build.ipynb").touch()  # a new time alone reruns nothing
    assert project.would_run() == rerun


def test_a_run_keeps_others_out_and_one_that_is_killed_leaves_nothing_behind_and_is_resumed(project):
    project.notebook("alpha", extra="import time; Path('build/pid').write_text(str(os.getpid())); time.sleep(300)")
    mark = project.root / "build" / "pid"

    def at_work():
        mark.unlink(missing_ok=True)
        process = project.start()
        _wait_until(lambda: mark.exists() and mark.read_text())
        return process, int(mark.read_text())

    def ended(process, kernel):
        process.wait(timeout=60)
        _wait_until(lambda: not Path(f"/proc/{kernel}").exists())  # the notebook ends with the run
        assert not (project.root / "build" / "evidence" / "cpu" / "alpha.json").exists()

    process, kernel = at_work()
    second = project.snakemake()
    assert second.returncode == 1 and "another Snakemake is at work in this tree" in second.output
    process.kill()  # Snakemake alone: its jobs are left to notice
    ended(process, kernel)

    process, kernel = at_work()
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C: the whole group
    ended(process, kernel)

    project.ran()
    project.notebook("alpha", value=2)
    done = project.snakemake()
    assert done.returncode == 0, done.output
    assert project.ran() == ["alpha", "summary"]
    assert json.loads((project.root / "results" / "cpu-test" / "alpha.json").read_text())["rows"] == [{"value": 2}]


def test_notebooks_that_fail_are_named_with_what_went_wrong(project):
    """A cell that raises, a kernel that dies, and a notebook that ends without a record."""
    project.notebook("alpha", extra="raise ArithmeticError('the op is wrong')")
    project.notebook("beta", extra="os._exit(9)")
    project.notebook("build", extra="record = 'build/elsewhere.json'")
    published = (project.root / "results" / "cpu-test" / "alpha.json").read_bytes()
    done = project.snakemake("--keep-going")
    assert done.returncode == 1
    assert "ArithmeticError: the op is wrong" in done.output
    assert "error: notebooks/alpha.ipynb failed on cpu" in done.output
    assert "the op is wrong" in (project.root / "build" / "notebooks" / "cpu" / "alpha.ipynb").read_text()
    assert "error: notebooks/beta.ipynb failed on cpu" in done.output and "died" in done.output.lower()
    assert "notebooks/build.ipynb ended without a record" in done.output
    for name in ("alpha", "beta", "build"):
        assert not (project.root / "build" / "evidence" / "cpu" / f"{name}.json").exists()
    assert (project.root / "results" / "cpu-test" / "alpha.json").read_bytes() == published


def test_a_corrupt_record_is_named_not_published_and_made_again(project):
    path = project.root / "build" / "evidence" / "cpu" / "alpha.json"
    published = (project.root / "results" / "cpu-test" / "alpha.json").read_bytes()
    path.write_text(path.read_text()[:200])
    done = project.snakemake("publish")
    assert done.returncode == 1
    assert "build/evidence/cpu/alpha.json: corrupt, not JSON" in done.output and "Traceback" not in done.output
    assert (project.root / "results" / "cpu-test" / "alpha.json").read_bytes() == published

    path.unlink()
    assert "alpha" in project.would_run()


def test_a_record_with_a_changed_number_is_not_published(project):
    path = project.root / "build" / "evidence" / "cpu" / "alpha.json"
    path.write_text(path.read_text().replace('"value": 1', '"value": 3'))
    done = project.snakemake("publish")
    assert done.returncode == 1 and "alpha.json: its digest does not match" in done.output


def test_a_full_disk_is_named(project):
    """build/ on a file system of its own, with room for nothing more; in a mount namespace, so that nothing outlives the test."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user cannot make a mount namespace")
    project.notebook("alpha", value=2, extra="print('x' * 400_000)")
    fill = "mount -t tmpfs -o size=256k tmpfs build/notebooks && exec " + shlex.join(project.command("alpha"))
    done = subprocess.run(["unshare", "-m", "sh", "-c", fill], cwd=project.root, env=project.environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and "error: notebooks/alpha.ipynb failed on cpu" in done.stderr
    assert not (project.root / "build" / "evidence" / "cpu" / "alpha.json").exists()


def test_without_a_model_the_rest_still_runs(built):
    status = json.loads((built.root / "build" / "model" / "status.json").read_text())
    assert status == {"available": False, "reason": "no network", "named": []}
    assert "no KV dump: cannot download: no network" in built.first_output


def test_one_can_name_another_model_and_text(project):
    (project.root / "my text").write_text("Once")
    options = ("--config", "model=owner/name", "text=my text")
    assert project.would_run(*options) == ["beta", "summary"]
    assert project.snakemake("model", *options).returncode == 0
    status = json.loads((project.root / "build" / "model" / "status.json").read_text())
    assert status["named"] == ["--model=owner/name", "--text=my text"], "a hub may be out of reach: not strict"


@pytest.mark.parametrize(
    "option, fault",
    [
        ("model=/nope", "no such file"),
        ("model=./nope", "no such file"),
        ("model=nope.gguf", "no such file"),
        ("model=kernels", "a folder without config.json"),
        ("model=kernels/op.cpp", "neither a GGUF file (.gguf) nor a folder"),
        ("model=damaged.gguf", "neither a GGUF file (.gguf) nor a folder"),
        ("text=/nope", "no such file"),
        ("text=latin", "not UTF-8"),
    ],
)
def test_a_named_model_or_text_that_is_not_there_ends_the_run_with_one_line(project, option, fault):
    (project.root / "damaged.gguf").write_bytes(b"not a model")
    (project.root / "latin").write_bytes("café".encode("latin-1"))
    project.ran()
    done = project.snakemake("--config", option)
    assert done.returncode == 1 and project.ran() == []
    assert done.output.splitlines()[-1] == f"error: {option}: {fault}" and "Traceback" not in done.output


def test_a_named_model_that_only_its_reading_finds_damaged_ends_the_run(project):
    """The stand-in reads none."""
    published = (project.root / "results" / "cpu-test" / "beta.json").read_bytes()
    (project.root / "a model.gguf").write_bytes(b"GGUF and no more")
    project.notebook("beta", value=2)
    done = project.snakemake("--config", "model=a model.gguf")
    assert done.returncode == 1 and "no KV dump" in done.output
    assert project.ran() == []
    assert (project.root / "results" / "cpu-test" / "beta.json").read_bytes() == published


def test_a_run_without_the_model_keeps_the_committed_rows_of_a_model(project):
    committed = project.root / "results" / "cpu-test" / "beta.json"
    published = committed.read_bytes()
    project.notebook("beta", absent=({"what": "model", "status": "absent", "reason": "no network"},))
    done = project.snakemake()
    assert done.returncode == 0, done.output
    assert "results/cpu-test/beta.json stays as it is, with the model's rows: this run has none (no network)" in done.output
    assert committed.read_bytes() == published
    committed.unlink()
    for _ in range(2):  # none is committed, and then one that lacks them too
        (project.root / "build" / "published.stamp").unlink()
        done = project.snakemake("publish")
        assert done.returncode == 0 and "stays as it is" not in done.output
        assert json.loads(committed.read_text())["rows"][1]["status"] == "absent"


def test_a_quick_run_stays_under_build_quick_and_publishes_nothing(project):
    shutil.rmtree(project.root / "results")
    done = project.snakemake("--config", "quick=true")
    assert done.returncode == 0, done.output
    assert project.ran() == ALL
    assert not (project.root / "results").exists()
    assert (
        json.loads((project.root / "build" / "quick" / "evidence" / "cpu" / "alpha.json").read_text())["provenance"]["parameters"]["quick"]
        is True
    )


@pytest.mark.parametrize(
    "targets, ran", [(["benchmark", "model"], ["alpha"]), (["beta", "build"], ["beta", "build"]), (["figures"], ALL)], ids=str
)
def test_each_target_runs_its_part(project, targets, ran):
    shutil.rmtree(project.root / "build")
    assert project.would_run(*targets) == ran


@pytest.mark.parametrize(
    "option, message",
    [
        ("device=gpu", "error: unknown device 'gpu': expected one of auto, cpu, cuda (--config device=...)"),
        ("quick=perhaps", "error: configuration, $.quick: 'perhaps' is not of type 'boolean'"),
        ("devise=cpu", "'devise' was unexpected"),
    ],
)
def test_a_bad_option_gets_one_line(project, option, message):
    done = project.snakemake("--config", option)
    assert done.returncode == 1
    assert done.output.splitlines()[-1].endswith(message) or message in done.output.splitlines()[-1]
    assert "Traceback" not in done.output


def test_a_gpu_that_is_not_there_gets_one_line(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = project.snakemake("--dry-run", "--config", "device=cuda")
    assert done.returncode == 1
    assert done.output.splitlines()[-1].startswith("error: device=cuda, but there is no GPU here that torch can use")
    assert "Traceback" not in done.output


def test_a_source_pattern_that_matches_nothing_is_an_error(project):
    (project.root / "pagedkv" / "beta.py").unlink()
    done = project.snakemake()
    assert done.returncode == 1 and "experiments.beta.sources: pagedkv/beta.py matches no file" in done.output


def test_the_kernel_is_this_interpreter_whatever_kernelspecs_are_installed(built):
    named = re.search(r"\[alpha cpu\] measuring alpha with (.+)", built.first_output)[1]
    assert named in (sys.executable, os.path.realpath(sys.executable))


def _wait_until(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)
