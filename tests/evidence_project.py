"""A small checkout with one measured record, one published one, a ledger and a README: what the evidence tests tamper with."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import yaml

from pagedkv.evidence import record as records

REPOSITORY = Path(__file__).resolve().parents[1]
RECORD = "results/cpu-test/attention.json"
CLAIM = "attention.cpu-test.8x512.p50_us"

CLAIMS = [
    {
        "id": CLAIM,
        "statement": "INT8 paged decode",
        "kind": "measured",
        "rule": "attention",
        "unit": "us",
        "evidence": {"file": RECORD, "where": {"shape": "8x512", "ours": True}, "field": "p50_us"},
        "expect": {"max": 130},
    },
    {
        "id": "attention.cpu-test.8x512.vs_peer",
        "statement": "Times faster than the fastest peer",
        "kind": "measured",
        "rule": "attention",
        "unit": "times",
        "evidence": {
            "file": RECORD,
            "where": {"shape": "8x512", "ours": False},
            "field": "p50_us",
            "reduce": "min",
            "over": {"where": {"shape": "8x512", "ours": True}, "field": "p50_us"},
        },
        "expect": {"min": 2},
        "goal": {"min": 4},
    },
    {
        "id": "published.8x512.p50_us",
        "statement": "As published",
        "kind": "published",
        "rule": None,
        "unit": "us",
        "evidence": {"file": "results/published/attention.json", "where": {"shape": "8x512"}, "field": "p50_us"},
        "expect": {"equals": 1760},
    },
    {
        "id": "vllm.ratio",
        "statement": "Inside vLLM",
        "kind": "measured",
        "rule": "vllm",
        "unit": None,
        "goal": {"min": 1.4},
        "pending": "no card",
    },
]

README = f"""# A project

INT8 decode takes <!--claim:{CLAIM}-->125<!--/claim--> us on `8x512`, with Python `3.10` and an H200.
"""


def measured_record(root: Path, **changes) -> dict:
    record = {
        "schema_version": 1,
        "kind": "measured",
        "experiment": "attention",
        "hardware": {"slug": "cpu-test", "name": "Test", "kind": "cpu"},
        "software": {"python": "3.11.0", "torch": "2.13.0", "backend": "c++ (portable)"},
        "provenance": {
            "rule": "attention",
            "notebook": "notebooks/attention.ipynb",
            "parameters": {"device": "cpu", "quick": False},
            "sources": records.hashes(["notebooks/attention.ipynb", "kernels/attention.cu"], root),
            "inputs": {},
            "figures": {"times.svg": records.file_hash(root / "figures/cpu-test/times.svg")},
            "finished_at": "2026-11-30T12:00:00Z",
            "seconds": 12.5,
        },
        "rows": [
            {"shape": "8x512", "ours": True, "p50_us": 125.25},
            {"shape": "8x512", "ours": False, "p50_us": 400.8},
            {"shape": "8x512", "ours": False, "p50_us": 375.75},
            {"shape": "32x1024", "ours": True, "p50_us": 500.5},
        ],
    }
    return {**record, **changes}


def published_record() -> dict:
    nothing = {"rule": None, "notebook": None, "parameters": {}, "sources": {}, "inputs": {}, "finished_at": None, "seconds": None}
    return {
        "schema_version": 1,
        "kind": "published",
        "experiment": "attention",
        "hardware": {"slug": "cuda-nvidia-t1000", "name": "NVIDIA T1000", "kind": "cuda"},
        "software": {},
        "provenance": {**nothing, "published": {"source": "a report", "note": "not measured here"}},
        "rows": [{"shape": "8x512", "p50_us": 1760.0}],
    }


def make(root: Path) -> Path:
    """Write the checkout under `root`; every claim of it stands."""
    for path, text in {
        "notebooks/attention.ipynb": "{}",
        "kernels/attention.cu": "// a kernel\n",
        "figures/cpu-test/times.svg": "<svg/>\n",
        "README.md": README,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    shutil.copytree(REPOSITORY / "workflow" / "schemas", root / "workflow" / "schemas")
    records.write(measured_record(root), root / RECORD, root)
    records.write(published_record(), root / "results/published/attention.json", root)
    write_claims(root, CLAIMS)
    return root


def write_claims(root: Path, claims: list[dict]) -> None:
    (root / "workflow/claims.yaml").write_text(yaml.safe_dump(claims, sort_keys=False))


def edit_claims(root: Path, edit) -> None:
    """Let `edit` change the list of claims in place."""
    claims = copy.deepcopy(yaml.safe_load((root / "workflow/claims.yaml").read_text()))
    edit(claims)
    write_claims(root, claims)


def edit_record(root: Path, edit, name: str = RECORD, *, honest: bool) -> None:
    """Let `edit` change a record in place; `honest` gives it a digest that fits, as a run would."""
    path = root / name
    record = json.loads(path.read_text())
    edit(record)
    if honest:
        record["provenance"]["digest"] = records.digest(record)
    path.write_text(records.dumps(record))
