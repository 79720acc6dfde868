"""`pagedkv verify` finds what is wrong with the evidence, and names it."""

from __future__ import annotations

import json
import subprocess
import sys

import evidence_project as project
import pytest
from evidence_project import CLAIM, RECORD

from pagedkv import cli
from pagedkv.evidence import schema, verify
from pagedkv.evidence.verify import Verifier


@pytest.fixture
def root(tmp_path):
    return project.make(tmp_path)


def found(root, name=CLAIM) -> verify.Finding:
    """What verify says of one claim, record or line of prose."""
    return next(f for f in Verifier(root).findings() if f.id == name)


def status(root, *flags: str) -> int:
    return cli.main(["verify", "--root", str(root), *flags])


def test_a_sound_checkout_holds(root, capsys):
    assert status(root) == 0
    assert {f.id: f.status for f in Verifier(root).findings()} == {
        CLAIM: "holds",
        "attention.cpu-test.8x512.vs_peer": "holds",
        "published.8x512.p50_us": "published",
        "vllm.ratio": "pending",
    }
    assert "4 claims: 2 holds, 1 pending, 1 published" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- tampering


def test_one_digit_changed_in_a_record_is_found(root, capsys):
    path = root / RECORD
    path.write_text(path.read_text().replace("125.25", "125.24"))
    assert status(root) == 1
    assert found(root).status == "fails"
    assert f"{RECORD}: its digest does not match" in capsys.readouterr().out


def test_a_digit_changed_in_a_row_that_no_claim_selects_is_found(root):
    path = root / RECORD
    path.write_text(path.read_text().replace("500.5", "500.6"))
    assert found(root).status == "fails"


def test_a_hash_of_a_source_changed_to_hide_staleness_is_found(root):
    (root / "kernels/attention.cu").write_text("// another kernel\n")
    hashes = project.measured_record(root)["provenance"]["sources"]
    project.edit_record(root, lambda r: r["provenance"]["sources"].update(hashes), honest=False)
    assert found(root).status == "fails"


def test_a_deleted_record_is_missing(root, capsys):
    (root / RECORD).unlink()
    assert status(root) == 1
    assert found(root).status == "missing"
    assert f"{RECORD}: there is no such record" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{", '{"rows": []}', "[1]", "null", '{"rows": NaN}', "\x00\x01", "[" * 100_000])
def test_a_corrupt_record_fails_in_one_line(root, text):
    (root / RECORD).write_text(text)
    assert status(root) == 1
    assert found(root).status == "fails"
    assert found(root).reason.startswith(RECORD) and "\n" not in found(root).reason


@pytest.mark.parametrize("source", ["kernels/attention.cu", "notebooks/attention.ipynb"])
@pytest.mark.parametrize("change", ["edited", "removed"])
def test_a_source_that_moved_on_makes_a_claim_stale(root, source, change, capsys):
    if change == "edited":
        (root / source).write_text((root / source).read_text() + " ")
    else:
        (root / source).unlink()
    assert status(root) == 1
    assert found(root).status == "stale"
    assert source in found(root).reason
    assert found(root).value == 125.25
    capsys.readouterr()
    assert status(root, "--allow-stale") == 0
    assert f"stale      {CLAIM}" in capsys.readouterr().out


def test_allow_stale_allows_nothing_else(root):
    (root / "kernels/attention.cu").write_text("")
    project.edit_claims(root, lambda claims: claims[0].update(expect={"max": 100}))
    assert found(root).status == "fails"
    assert status(root, "--allow-stale") == 1


@pytest.mark.parametrize("expect", [{"max": 125}, {"min": 126}, {"equals": 125}, {"min": 100, "max": 125.2}, {"equals": "fast"}])
def test_a_bound_tightened_past_the_value_fails(root, expect):
    project.edit_claims(root, lambda claims: claims[0].update(expect=expect))
    assert status(root) == 1
    assert found(root).status == "fails"
    assert "125" in found(root).reason


@pytest.mark.parametrize("expect", [{"max": 125.25}, {"min": 125.25}, {"equals": 125.25}])
def test_a_bound_at_the_value_holds(root, expect):
    project.edit_claims(root, lambda claims: claims[0].update(expect=expect))
    assert found(root).status == "holds"


def test_a_published_figure_cannot_pass_for_a_measured_one(root):
    project.edit_claims(root, lambda claims: claims[2].update(kind="measured"))
    assert found(root, "published.8x512.p50_us").status == "fails"


def test_a_measured_figure_cannot_pass_for_a_published_one(root):
    project.edit_claims(root, lambda claims: claims[0].update(kind="published"))
    assert found(root).status == "fails"


def test_a_quick_run_is_no_evidence(root):
    project.edit_record(root, lambda r: r["provenance"]["parameters"].update(quick=True), honest=True)
    assert found(root).status == "fails"
    assert "quick" in found(root).reason


def test_a_record_of_other_hardware_in_this_folder_fails(root):
    project.edit_record(root, lambda r: r["hardware"].update(slug="cpu-other"), honest=True)
    assert found(root).status == "fails"


def test_a_record_made_by_another_rule_than_the_claim_says_fails(root):
    project.edit_claims(root, lambda claims: claims[0].update(rule="eviction"))
    assert found(root).status == "fails"


def test_a_figure_changed_after_the_run_is_found(root):
    (root / "figures/cpu-test/times.svg").write_text("<svg>prettier</svg>\n")
    assert status(root) == 1
    assert found(root, "figures/cpu-test/times.svg").status == "fails"


def test_a_record_that_no_claim_rests_on_is_checked_too(root):
    (root / "results/cpu-test/eviction.json").write_text("{")
    assert status(root) == 1
    assert found(root, "results/cpu-test/eviction.json").status == "fails"


# ------------------------------------------------------------------------------------- the ledger


def test_a_claim_without_evidence_is_missing(root):
    project.edit_claims(root, lambda claims: claims[3].pop("pending"))
    assert status(root) == 1
    assert found(root, "vllm.ratio").status == "missing"


def test_evidence_without_a_bound_fails(root):
    project.edit_claims(root, lambda claims: claims[0].pop("expect"))
    assert found(root).status == "fails"


def test_pending_cannot_hide_evidence(root):
    project.edit_claims(root, lambda claims: claims[0].update(pending="later"))
    assert found(root).status == "fails"
    assert "both" in found(root).reason


def test_an_id_used_twice_fails(root):
    project.edit_claims(root, lambda claims: claims.append({**claims[3], "id": CLAIM}))
    assert status(root) == 1
    assert [f.status for f in Verifier(root).findings() if f.id == CLAIM] == ["holds", "fails"]


@pytest.mark.parametrize("change", [{"kind": "guessed"}, {"goal": {"about": 3}}, {"colour": "blue"}, {"unit": 5}, {"statement": ""}])
def test_an_entry_that_the_schema_refuses_fails(root, change):
    project.edit_claims(root, lambda claims: claims[0].update(change))
    assert status(root) == 1
    assert found(root).reason.startswith("ledger: ")


def test_an_entry_that_is_no_claim_fails(root):
    project.edit_claims(root, lambda claims: claims.append("fast"))
    assert found(root, "entry 5").status == "fails"


@pytest.mark.parametrize("where", [{"shape": "1x1"}, {"colour": "blue"}])
def test_a_row_that_is_not_there_is_missing(root, where):
    project.edit_claims(root, lambda claims: claims[0]["evidence"].update(where=where))
    assert found(root).status == "missing"


def test_a_field_that_is_not_there_is_missing(root):
    project.edit_claims(root, lambda claims: claims[0]["evidence"].update(field="p99_us"))
    assert found(root).status == "missing"


def test_a_claim_that_fits_several_rows_fails(root):
    project.edit_claims(root, lambda claims: claims[0]["evidence"].update(where={"shape": "8x512"}))
    assert found(root).status == "fails"
    assert "3 rows" in found(root).reason


@pytest.mark.parametrize(("reduce", "value"), [("min", 375.75), ("max", 400.8), ("mean", 388.275), ("sum", 776.55), ("count", 2)])
def test_several_rows_reduce_to_one_value(root, reduce, value):
    over = {"field": "p50_us", "where": {"shape": "32x1024"}}
    project.edit_claims(root, lambda claims: claims[1]["evidence"].update(reduce=reduce, over=over))
    assert found(root, "attention.cpu-test.8x512.vs_peer").value == pytest.approx(value / 500.5)


@pytest.mark.parametrize(
    "text", ["id: x", "- id: [", "", "- id: a\n  id: b\n  statement: two ids", "- {? [1, 2] : 3}", "- 2026-13-01", "- !!bool x"]
)
def test_a_ledger_that_is_no_list_of_claims_is_one_line_and_exit_2(root, text, capsys):
    (root / "workflow/claims.yaml").write_text(text)
    assert status(root) == 2
    error = capsys.readouterr().err
    assert error.startswith("pagedkv: ") and "claims.yaml" in error and error.count("\n") == 1


def test_a_folder_that_is_no_checkout_is_one_line_and_exit_2(tmp_path, capsys):
    assert cli.main(["verify", "--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("pagedkv: no PagedKV checkout")


# ----------------------------------------------------------------------------------------- goals


def test_an_unmet_goal_is_listed_last_with_its_distance_and_is_no_failure(root, capsys):
    assert status(root) == 0
    assert found(root, "attention.cpu-test.8x512.vs_peer").goal_met is False
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["attention.cpu-test.8x512.vs_peer", "3.00", "times,", "goal", "at", "least", "4:", "25.0", "%", "short"]


def test_what_was_tried_for_a_goal_follows_it_and_is_not_said_once_it_is_met(root, capsys):
    project.edit_claims(root, lambda claims: claims[1].update(tried="Two warps instead of one."))
    status(root)
    assert capsys.readouterr().out.splitlines()[-1].strip() == "Two warps instead of one."
    project.edit_claims(root, lambda claims: claims[1].update(goal={"min": 3}))
    status(root)
    assert "Two warps" not in capsys.readouterr().out


def test_a_met_goal_is_not_listed(root, capsys):
    project.edit_claims(root, lambda claims: claims[1].update(goal={"min": 3}))
    status(root)
    assert found(root, "attention.cpu-test.8x512.vs_peer").goal_met is True
    assert "not met" not in capsys.readouterr().out


def test_a_goal_without_a_value_is_neither_met_nor_missed(root):
    assert found(root, "vllm.ratio").goal_met is None


def test_json_has_the_fields_of_the_contract(root, capsys):
    assert status(root, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed[0]) == ["id", "status", "value", "unit", "expect", "goal", "goal_met", "rule", "evidence"]
    assert [p["id"] for p in printed] == [c["id"] for c in project.CLAIMS]
    assert printed[0] | {"status": "holds", "value": 125.25, "unit": "us", "expect": {"max": 130}, "rule": "attention"} == printed[0]


def test_json_names_the_culprit_too(root, capsys):
    (root / "README.md").write_text(project.README + "\nIt is 12.5 times faster.\n")
    assert status(root, "--json") == 1
    assert [p["id"] for p in json.loads(capsys.readouterr().out) if p["status"] == "fails"] == ["README.md:5"]


@pytest.mark.parametrize("name", ["record", "claim"])
@pytest.mark.parametrize("text, said", [("{", "not JSON"), ('{"type": 3}', "not a JSON schema"), (None, "")])
def test_a_broken_schema_is_one_line(root, capsys, name, text, said):
    file = root / f"workflow/schemas/{name}.json"
    file.unlink() if text is None else file.write_text(text)
    schema.validator.cache_clear()  # of the run that made the miniature project
    assert status(root) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and f"{name}.json" in printed and said in printed


def test_a_reader_that_stops_early_leaves_no_traceback(root):
    command = f"{sys.executable} -m pagedkv.cli verify --root {root} | head -n 0"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=project.REPOSITORY)
    assert done.stderr == ""
