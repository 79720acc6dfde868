"""Every number in README comes from the ledger: others are found, markers are filled."""

from __future__ import annotations

import evidence_project as project
import pytest
from evidence_project import CLAIM

from pagedkv import cli
from pagedkv.evidence import prose

VALUES = {"a.b": "66.2", "c": "1,024"}


def problems(text: str) -> list[str]:
    return [problem for _, problem in prose.check(text, VALUES.__getitem__)]


@pytest.mark.parametrize(
    "text",
    [
        "No number at all.",
        "INT8, FP16, sm_75, H200, T1000, Q4_1, p50, AVX-512, Llama-3-8B, SmolLM2-135M, Apache-2.0, E4M3.",
        "It takes <!--claim:a.b-->66.2<!--/claim--> us and <!--claim:c-->1,024<!--/claim--> blocks.",
        "<!--claim:a.b--> 66.2 <!--/claim-->",
        "Python `3.10`, PagedKV `0.1.1`, shape `64x2048`, `--cores 1`, `x = 3`",
        "```\nsnakemake --cores 1  # 25 us\n```",
        "~~~text\n12.5\n~~~",
        "```\nan open block ends with the file: 12.5",
        "[the paper](https://arxiv.org/abs/2309.06180) and <https://example.org/12.5> and https://example.org/3",
        '![a figure](figures/cpu-test/times-2.svg "Times")',
        "[link][label]\n\n[label]: https://example.org/12 'Title'",
        '<img src="figures/times.svg" width="600">',
        "1. First.\n2. Second.\n",
        "<!-- a comment of 2026 -->",
        "a&#8239;b &nbsp;",
        "`<!--claim:unknown-->` in a code span is an example, not a marker.",
    ],
)
def test_prose_without_a_loose_number_passes(text):
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It takes 12.5 us.", "12.5"),
        ("It is 2x faster.", "2x"),
        ("It is 12× faster.", "12×"),
        ("(3.1 times)", "3.1"),
        ("about ~97 %", "97"),
        ("a value of -5", "-5"),
        ("+3 %", "+3"),
        ("**12.5** us", "12.5"),
        ("_12_ us", "_12_"),
        ("$0.5", "$0.5"),
        ("| shape | us |\n|---|---|\n| `8x512` | 7.8 |", "7.8"),
        ("a ratio=12", "12"),
        ("speed/12", "12"),
        ("[12 us](https://example.org)", "12"),
        ("## 3 kernels", "3"),
        ("Python 3.10", "3.10"),
        ("in 1,024 blocks", "1"),
        ("<b>12</b>", "12"),
        (".95 of the roof", ".95"),
        ("> 12 quoted", "12"),
        ("1.5 us is no list marker", "1.5"),
        ("![25 us](figure.svg)", "25"),
        ("64x2048", "64x2048"),
        ("a ``` b 12", "12"),
    ],
)
def test_a_number_that_no_claim_backs_is_found(text, number):
    assert f"the number {number} is backed by no claim" in problems(text)


@pytest.mark.parametrize("span", ["`12.5 us`", "`97 %`", "`3.1x`", "`~4.4 TB/s`", "``25 ms``"])
def test_a_quantity_cannot_hide_in_a_code_span(span):
    assert len(problems(f"It takes {span}.")) == 1


def test_problems_name_their_line():
    assert [line for line, _ in prose.check("# Title\n\n```\n1\n```\nfast\nand 5 times\n", VALUES.__getitem__)] == [7]


@pytest.mark.parametrize(
    "text",
    [
        "<!--claim:a.b-->66.3<!--/claim-->",
        "<!--claim:a.b--><!--/claim-->",
        "<!--claim:unknown-->66.2<!--/claim-->",
        "<!--claim:-->66.2<!--/claim-->",
        "<!--claim:a.b-->66.2",
        "66.2<!--/claim-->",
        "<!--claim:a.b-->66.2 <!--claim:c-->1,024<!--/claim-->",
    ],
)
def test_a_marker_that_disagrees_or_is_broken_is_found(text):
    assert problems(text)


def test_render_fills_markers_and_nothing_else():
    text = "x <!-- claim: a.b -->?<!-- /claim --> y\n```\n<!--claim:c-->?<!--/claim-->\n```\n"
    assert prose.render(text, VALUES.__getitem__) == "x <!--claim:a.b-->66.2<!--/claim--> y\n```\n<!--claim:c-->?<!--/claim-->\n```\n"


def test_a_number_typed_into_readme_is_found_by_verify(tmp_path, capsys):
    root = project.make(tmp_path)
    (root / "README.md").write_text(project.README + "\nIt is 12.5 times faster.\n")
    assert cli.main(["verify", "--root", str(root)]) == 1
    assert "fails      README.md:5" in capsys.readouterr().out


def test_a_number_typed_into_a_marker_is_found_by_verify(tmp_path, capsys):
    root = project.make(tmp_path)
    (root / "README.md").write_text(project.README.replace(">125<", ">120<"))
    assert cli.main(["verify", "--root", str(root)]) == 1
    assert f"the marker of {CLAIM} says 120, the ledger says 125" in capsys.readouterr().out


def test_a_number_typed_into_a_report_under_results_is_found_by_verify(tmp_path, capsys):
    root = project.make(tmp_path)
    (root / "results/cpu-test/summary.md").write_text("It is 12.5 times faster.\n")
    assert cli.main(["verify", "--root", str(root)]) == 1
    assert "results/cpu-test/summary.md:1" in capsys.readouterr().out


def test_a_document_that_is_not_utf8_is_named_in_one_line(tmp_path, capsys):
    root = project.make(tmp_path)
    (root / "README.md").write_bytes(project.README.encode() + b"\xff")
    assert cli.main(["verify", "--root", str(root)]) == 1
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("fails")] == ["README.md"]
    assert cli.main(["render", "--root", str(root)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pagedkv: README.md: cannot be read") and error.count("\n") == 1


def test_render_command_makes_readme_agree_with_the_ledger(tmp_path, capsys):
    root = project.make(tmp_path)
    (root / "README.md").write_text(project.README.replace(">125<", ">?<"))
    assert cli.main(["render", "--root", str(root)]) == 0
    assert (root / "README.md").read_text() == project.README
    assert cli.main(["verify", "--root", str(root)]) == 0
    assert cli.main(["render", "--root", str(root)]) == 0
    assert "every marker already" in capsys.readouterr().out


def test_a_claim_without_a_value_is_rendered_as_not_measured(tmp_path):
    root = project.make(tmp_path)
    (root / "README.md").write_text("<!--claim:vllm.ratio-->1.5<!--/claim--> times\n")
    assert cli.main(["verify", "--root", str(root)]) == 1
    cli.main(["render", "--root", str(root)])
    assert (root / "README.md").read_text() == "<!--claim:vllm.ratio-->not measured<!--/claim--> times\n"
    assert cli.main(["verify", "--root", str(root)]) == 0


def test_render_refuses_an_unknown_claim_and_leaves_the_text(tmp_path, capsys):
    root = project.make(tmp_path)
    text = "<!--claim:no.such-->5<!--/claim-->\n"
    (root / "README.md").write_text(text)
    assert cli.main(["render", "--root", str(root)]) == 2
    assert "no.such" in capsys.readouterr().err
    assert (root / "README.md").read_text() == text
