"""`make lab` as it is: JupyterLab comes up and serves the notebooks."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab", reason="JupyterLab is not installed here: pip install '.[lab]'")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def server(tmp_path):
    """What `make lab` starts, from this environment and without a browser: what it notes down of itself, address and token among it."""
    venv, runtime, log = tmp_path / "venv", tmp_path / "runtime", tmp_path / "log"
    venv.mkdir()
    (venv / "bin").symlink_to(Path(sys.prefix) / "bin")
    for ready in (".ready", ".ready-lab"):
        (venv / ready).touch()  # nothing is installed
    environment = {**os.environ, "HOME": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(runtime)}
    command = ["make", "-C", ROOT, "lab", f"VENV={venv}", "LAB_FLAGS=--allow-root --no-browser --port=0"]
    with log.open("w") as out:
        make = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 60
    try:
        while (found := answering(runtime)) is None:
            assert make.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found
    finally:
        os.killpg(make.pid, signal.SIGTERM)
        make.wait(30)


def answering(runtime: Path) -> dict | None:
    """The server's note, once there is one and the server answers: it writes first and listens then."""
    try:
        (note,) = runtime.glob("jpserver-*.json")
        found = json.loads(note.read_text())
        get(found, "api/status")
    except (ValueError, OSError):
        return None
    return found


def get(server: dict, path: str) -> str:
    request = urllib.request.Request(server["url"] + path, headers={"Authorization": f"token {server['token']}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def test_make_lab_serves_the_notebooks(server):
    assert "<title>JupyterLab</title>" in get(server, "lab")
    served = {item["name"] for item in json.loads(get(server, "api/contents"))["content"]}
    assert {notebook.name for notebook in ROOT.glob("notebooks/*.ipynb")} <= served
