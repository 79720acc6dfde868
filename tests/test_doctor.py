"""`pagedkv doctor` names what is missing, what that blocks, and the command to get it."""

from __future__ import annotations

import json
import os
import stat

import pytest

from pagedkv import cli
from pagedkv.evidence import doctor


@pytest.fixture(scope="module")
def pieces():
    return {p.name: p for p in doctor.examine()}


def test_every_missing_piece_says_what_it_blocks_and_how_to_get_it(pieces):
    for piece in pieces.values():
        assert piece.found
        if not piece.ok:
            assert piece.blocks and piece.get, piece.name


def test_it_looks_for_what_the_project_can_use(pieces):
    assert pieces.keys() >= {
        "python", "C++ compiler", "ninja", "nvcc", "torch", "torch with CUDA", "GPU", "disk space", "snakemake", "papermill", "matplotlib",
        "jupyterlab", "transformers", "gguf", "model and text", "flashinfer-python", "vllm", "vLLM plugin", "Nsight Compute",
    }  # fmt: skip


def test_what_the_suite_itself_runs_on_is_found(pieces):
    assert pieces["python"].ok == (os.sys.version_info >= (3, 11))
    assert pieces["torch"].ok


def test_a_missing_compiler_is_named_and_what_needs_it_is_said_not_to_run(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    pieces = doctor.examine()
    piece = {p.name: p for p in pieces}["C++ compiler"]
    assert not piece.ok
    assert piece.found == "no no-such-compiler on PATH"
    assert "apt-get install g++" in piece.get
    assert "C++ compiler" in doctor.abilities(pieces)["CPU ops, compiled"]
    assert "C++ compiler" not in doctor.abilities(pieces)["evidence of this CPU"]
    assert any(line.startswith("CPU ops, compiled: no, without C++ compiler") for line in doctor.as_text(pieces).splitlines())


def test_a_compiler_on_path_is_found(monkeypatch, tmp_path):
    script = tmp_path / "my-c++"
    script.write_text("#!/bin/sh\necho my-c++ 99.1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    piece = {p.name: p for p in doctor.examine()}["C++ compiler"]
    assert piece.ok
    assert piece.found == "my-c++ 99.1"


def test_a_model_that_was_downloaded_needs_no_network(monkeypatch, tmp_path):
    (tmp_path / "workflow/schemas").mkdir(parents=True)
    (tmp_path / "workflow/schemas/record.json").write_text("{}")
    (tmp_path / "build/downloads").mkdir(parents=True)
    (tmp_path / "build/downloads/model.gguf").write_text("")
    monkeypatch.setenv("PAGEDKV_ROOT", str(tmp_path))
    monkeypatch.setattr(doctor, "_output", lambda *command: "")  # nothing can be run, so no index answers
    piece = {p.name: p for p in doctor.examine()}["model and text"]
    assert piece.ok
    assert piece.found == "build/downloads/model.gguf is there"


def test_without_network_the_model_is_named(monkeypatch, tmp_path):
    (tmp_path / "workflow/schemas").mkdir(parents=True)
    (tmp_path / "workflow/schemas/record.json").write_text("{}")
    monkeypatch.setenv("PAGEDKV_ROOT", str(tmp_path))
    monkeypatch.setattr(doctor, "_output", lambda *command: "")
    piece = {p.name: p for p in doctor.examine()}["model and text"]
    assert not piece.ok
    assert "no network?" in piece.found and "model=" in piece.get


def test_the_command_prints_text_and_json(pieces, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: list(pieces.values()))
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "C++ compiler" in text and text.splitlines()[-1].endswith(("runs", "nothing is missing"))
    assert cli.main(["doctor", "--json"]) == 0
    assert {"name", "ok", "found", "blocks", "get"} == json.loads(capsys.readouterr().out)[0].keys()
