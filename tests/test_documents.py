"""README and CONTRIBUTING: links lead somewhere, commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_leads_to_a_file(name):
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()) if "://" not in t]
    missing = [t for t in targets if not (ROOT / t.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_make_target_named_exists(name):
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", (ROOT / name).read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_in_a_code_span_exists(name):
    rooms = "kernels|pagedkv|workflow|notebooks|results|figures|tests"
    spans = re.findall(rf"`((?:{rooms})/[A-Za-z0-9_./-]*)`", (ROOT / name).read_text())
    assert spans, "the documents name the rooms"
    assert [s for s in spans if not (ROOT / s).exists()] == []
