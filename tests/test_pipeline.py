"""The pipeline's promises, held against the real Snakefile, rules and scripts over one-cell notebooks.

The same promises over the real notebooks: .ci/run.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
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
        ("notebooks/alpha.ipynb", ["alpha", "summary"]),
        ("notebooks/build.ipynb", ["build", "summary"]),
        ("notebooks/summary.ipynb", ["summary"]),
        ("pagedkv/beta.py", ["beta", "summary"]),
        ("kernels/op.cpp", ["alpha", "build", "summary"]),
        ("kernels/another.cpp", ["alpha", "build", "summary"]),
        ("README.md", []),
    ],
)
def test_an_edit_reruns_what_depends_on_it_only(project, edited, rerun):
    path = project.root / edited
    path.write_text(path.read_text().replace("measuring", "measuring again") + "\n" if path.exists() else "// new\n")
    assert project.would_run() == rerun


def test_touching_a_file_without_changing_it_reruns_nothing(project):
    (project.root / "notebooks" / "alpha.ipynb").touch()
    assert project.would_run() == []


@pytest.mark.parametrize(
    "kill",
    [
        lambda process: process.kill(),  # Snakemake alone: its jobs are left to notice
        lambda process: os.killpg(process.pid, signal.SIGINT),  # Ctrl-C: the whole group
    ],
    ids=["killed", "interrupted"],
)
def test_a_killed_run_leaves_nothing_behind_and_resumes(project, kill):
    project.notebook("alpha", extra="import time; Path('build/pid').write_text(str(os.getpid())); time.sleep(60)")
    mark = project.root / "build" / "pid"
    process = project.start()
    _wait_until(lambda: mark.exists() and mark.read_text())
    kernel = int(mark.read_text())
    kill(process)
    process.wait(timeout=60)
    _wait_until(lambda: not Path(f"/proc/{kernel}").exists())  # the notebook ends with the run
    assert not (project.root / "build" / "evidence" / "cpu" / "alpha.json").exists()
    project.ran()

    project.notebook("alpha", value=2)
    done = project.snakemake()
    assert done.returncode == 0, done.output
    assert project.ran() == ["alpha", "summary"]
    assert json.loads((project.root / "results" / "cpu-test" / "alpha.json").read_text())["rows"] == [{"value": 2}]


def test_a_failing_cell_ends_the_run_with_its_traceback_and_the_notebook(project):
    project.notebook("alpha", extra="raise ArithmeticError('the op is wrong')")
    published = (project.root / "results" / "cpu-test" / "alpha.json").read_bytes()
    done = project.snakemake()
    assert done.returncode == 1
    assert "ArithmeticError: the op is wrong" in done.output
    assert "error: notebooks/alpha.ipynb failed on cpu" in done.output
    assert "the op is wrong" in (project.root / "build" / "notebooks" / "cpu" / "alpha.ipynb").read_text()
    assert not (project.root / "build" / "evidence" / "cpu" / "alpha.json").exists()
    assert (project.root / "results" / "cpu-test" / "alpha.json").read_bytes() == published


def test_a_kernel_that_dies_ends_the_run(project):
    project.notebook("alpha", extra="os._exit(9)")
    done = project.snakemake()
    assert done.returncode == 1
    assert "error: notebooks/alpha.ipynb failed on cpu" in done.output and "died" in done.output.lower()


def test_a_notebook_that_writes_no_record_is_an_error(project):
    project.notebook("alpha", extra="record = 'build/elsewhere.json'")
    done = project.snakemake()
    assert done.returncode == 1 and "notebooks/alpha.ipynb ended without a record" in done.output


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
    assert project.would_run() == []
    options = ("--config", "model=/models/a b.gguf", "text=mine.txt")
    assert project.would_run(*options) == ["beta", "summary"]
    assert project.snakemake("model", *options).returncode == 0
    status = json.loads((project.root / "build" / "model" / "status.json").read_text())
    assert status["named"] == ["--model=/models/a b.gguf", "--text=mine.txt"]


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
    assert "Nothing to be done" in project.snakemake("--config", "quick=true").output


@pytest.mark.parametrize(
    "target, ran", [("benchmark", ["alpha"]), ("beta", ["beta"]), ("build", ["build"]), ("model", []), ("figures", ALL)]
)
def test_each_target_runs_its_part(project, target, ran):
    shutil.rmtree(project.root / "build")
    assert project.would_run(target) == ran


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


def test_a_source_pattern_that_matches_nothing_is_an_error(project):
    (project.root / "pagedkv" / "beta.py").unlink()
    done = project.snakemake()
    assert done.returncode == 1 and "experiments.beta.sources: pagedkv/beta.py matches no file" in done.output


def test_two_runs_in_one_tree_exclude_each_other(project):
    project.notebook("alpha", extra="import time; Path('build/pid').write_text(str(os.getpid())); time.sleep(60)")
    first = project.start()
    try:
        _wait_until((project.root / "build" / "pid").exists)
        second = project.snakemake()
        assert second.returncode == 1 and "another Snakemake is at work in this tree" in second.output
    finally:
        first.kill()
        first.wait()


def test_the_kernel_is_this_interpreter_whatever_kernelspecs_are_installed(project):
    decoy = project.root / ".home" / ".local" / "share" / "jupyter" / "kernels" / "python3"
    decoy.mkdir(parents=True)
    (decoy / "kernel.json").write_text(json.dumps({"argv": ["/bin/false"], "display_name": "decoy", "language": "python"}))
    project.notebook("alpha", extra="import sys; print(sys.executable)")
    done = project.snakemake("alpha")
    assert done.returncode == 0, done.output
    assert f"[alpha cpu] {os.path.realpath(os.sys.executable)}" in done.output or f"[alpha cpu] {os.sys.executable}" in done.output


def _wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)
