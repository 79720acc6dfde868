"""The committed evidence itself: it stands, and each way of tampering with it is found."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import yaml
from evidence_project import REPOSITORY, edit_claims

from pagedkv import cli
from pagedkv.evidence.verify import Verifier

CLAIMS = yaml.safe_load((REPOSITORY / "workflow/claims.yaml").read_text())
RECORDS = sorted(p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "results").glob("*/*.json"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what verify reads."""
    root = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for folder in ("workflow", "results", "figures", "notebooks", "kernels", "pagedkv"):
        if (REPOSITORY / folder).is_dir():
            shutil.copytree(REPOSITORY / folder, root / folder, ignore=ignored)
    for file in REPOSITORY.glob("*"):
        if file.is_file():
            shutil.copy(file, root)
    return root


@pytest.fixture(scope="module")
def kept(checkout):
    return {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file()}


@pytest.fixture
def restored(checkout, kept):
    """The copy, put back in order after a test has tampered with it."""
    yield checkout
    for path in checkout.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()
    for path, content in kept.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def findings(root) -> dict:
    return {f.id: f for f in Verifier(root).findings()}


def status(root, *flags: str) -> int:
    return cli.main(["verify", "--root", str(root), *flags])


def test_nothing_fails_and_nothing_is_missing(checkout):
    assert [f"{f.id}: {f.reason}" for f in findings(checkout).values() if f.status in ("fails", "missing")] == []
    assert status(checkout, "--allow-stale") == 0


# Each record is tampered with, all of them at once: what is found is asked for each by its name.


def test_one_digit_changed_in_any_record_is_found(restored):
    for path in (restored / name for name in RECORDS):
        head, _, rows = path.read_text().partition('\n "rows": [')
        digit = re.search(r"[0-9](?=[^0-9]*\Z)", rows)
        changed = str((int(digit[0]) + 1) % 10)
        path.write_text(f'{head}\n "rows": [{rows[: digit.start()]}{changed}{rows[digit.end() :]}')
        assert json.loads(path.read_text())  # still JSON: what is found is the digit
    assert status(restored, "--allow-stale") == 1
    named = " ".join(f.id + f.reason for f in findings(restored).values() if f.status == "fails")
    assert [name for name in RECORDS if name not in named] == []


def test_any_record_deleted_is_missing(restored):
    claimed = {c["evidence"]["file"] for c in CLAIMS if "evidence" in c}
    for name in claimed:
        (restored / name).unlink()
    assert status(restored, "--allow-stale") == 1
    found = [f for f in findings(restored).values() if f.evidence and f.evidence["file"] in claimed]
    assert {f.evidence["file"] for f in found} == claimed
    assert {f.status for f in found} == {"missing"}


def test_a_source_of_any_record_edited_makes_it_stale(restored):
    measured = [name for name in RECORDS if not name.startswith("results/published/")]
    edited = set()
    for name in measured:
        sources = list(json.loads((restored / name).read_text())["provenance"]["sources"])
        edited.add(next((s for s in sources if s.startswith("kernels/")), sources[0]))
    for source in (restored / s for s in edited):
        source.write_bytes(source.read_bytes() + b"\n")
    assert status(restored) == 1
    touched = {name: [] for name in measured}
    for f in findings(restored).values():
        for name in {f.id, f.evidence["file"] if f.evidence else None} & touched.keys():
            touched[name].append(f.status)
    assert {name: set(statuses) for name, statuses in touched.items()} == {name: {"stale"} for name in measured}


def test_any_bound_tightened_past_the_value_fails(restored):
    values = {f.id: f.value for f in findings(restored).values() if f.evidence}

    def tighten(claims):
        for claim in claims:
            value = values.get(claim["id"])
            if isinstance(value, (bool, str)):
                claim["expect"] = {"equals": f"not {value}"}
            elif value is not None:
                claim["expect"] = {"max": value - abs(value) * 1e-6 - 1e-12}

    edit_claims(restored, tighten)
    assert status(restored, "--allow-stale") == 1
    after = findings(restored)
    assert values
    assert {after[claim_id].status for claim_id in values} == {"fails"}


def test_a_number_typed_into_readme_is_found(restored):
    readme = restored / "README.md"
    before = readme.read_text() if readme.exists() else ""
    readme.write_text(before + "\nIt is 17.5 times faster than that.\n")
    line = readme.read_text().count("\n")
    assert status(restored, "--allow-stale") == 1
    assert findings(restored)[f"README.md:{line}"].status == "fails"


def test_published_figures_are_never_called_measured():
    for claim in CLAIMS:
        published = claim.get("evidence", {}).get("file", "").startswith("results/published/")
        assert published == (claim["kind"] == "published") == claim["id"].startswith("published."), claim["id"]


def test_a_goal_that_is_missed_says_what_was_tried(checkout):
    assert [f.id for f in findings(checkout).values() if f.goal_met is False and not f.tried] == []


def test_a_figure_within_the_noise_is_claimed_as_such():
    """Where a claim's row gives an interval and that holds "no difference", the statement says so; and nowhere else."""
    seen = 0
    for claim in CLAIMS:
        evidence = claim.get("evidence", {"reduce": None})
        if "over" in evidence or "reduce" in evidence:
            continue
        rows = json.loads((REPOSITORY / evidence["file"]).read_text())["rows"]
        (row,) = [r for r in rows if r.items() >= evidence["where"].items()]
        low, high = (row.get(f"{evidence['field']}_{end}") for end in ("low", "high"))
        if low is not None:
            none = 0 if "delta" in evidence["field"] else 1
            assert (low <= none <= high) == bool(re.search(f"interval( over windows)? includes {none}", claim["statement"])), claim["id"]
            seen += 1
    assert seen > 5
