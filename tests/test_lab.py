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
    """What `make lab` starts, from this environment and without a browser: its address and token, as the server itself notes them down."""
    venv, runtime = tmp_path / "venv", tmp_path / "runtime"
    venv.mkdir()
    (venv / "bin").symlink_to(Path(sys.prefix) / "bin")
    for ready in (".ready", ".ready-lab"):
        (venv / ready).touch()  # nothing is installed
    environment = {**os.environ, "HOME": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(runtime)}
    command = ["make", "-C", ROOT, "lab", f"VENV={venv}", "LAB_FLAGS=--allow-root --no-browser --port=0"]
    log = tmp_path / "log"
    with log.open("w") as out:
        make = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (found := [file for file in runtime.glob("jpserver-*.json") if file.stat().st_size]):
            assert make.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield json.loads(found[0].read_text())
    finally:
        os.killpg(make.pid, signal.SIGTERM)
        make.wait(30)


def get(server, path):
    request = urllib.request.Request(server["url"] + path, headers={"Authorization": f"token {server['token']}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def test_make_lab_serves_the_notebooks(server):
    assert "<title>JupyterLab</title>" in get(server, "lab")
    served = {item["name"] for item in json.loads(get(server, "api/contents"))["content"]}
    assert {notebook.name for notebook in ROOT.glob("notebooks/*.ipynb")} <= served
