"""The report and its tables: what ran, every claim, every figure, what is absent."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import evidence_project
import pytest

from pagedkv.evidence import record as records
from pagedkv.evidence import report, tables

SVG = """<?xml version="1.0"?>
<!DOCTYPE svg>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"><defs><path id="m1"/></defs>
<g clip-path="url(#m1)"><use xlink:href="#m1"/></g></svg>
"""


@pytest.fixture
def project(tmp_path):
    root = evidence_project.make(tmp_path)
    (root / "figures/cpu-test/times.svg").write_text(SVG)
    evidence_project.edit_record(
        root,
        lambda r: r["provenance"]["figures"].update({"times.svg": records.file_hash(root / "figures/cpu-test/times.svg")}),
        honest=True,
    )
    return root


def run_record(root, edit=lambda record: None):
    """A run's record and figure under build/, not published yet."""
    record = evidence_project.measured_record(root)
    edit(record)
    folder = root / "build/evidence/cpu/figures/attention"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "times.svg").write_text(SVG)
    records.write(record, root / "build/evidence/cpu/attention.json", root)
    return root / "build/evidence/cpu/attention.json"


def test_the_claims_are_judged_on_the_records_of_this_run(project):
    faster = run_record(project, lambda r: r["rows"][0].update(p50_us=90.0))
    (project / evidence_project.RECORD).unlink()
    judged = {row["id"]: row for row in report.claims(report.read([faster], project), project)}
    assert judged[evidence_project.CLAIM]["status"] == "holds" and judged[evidence_project.CLAIM]["value"].startswith("90")
    assert judged["attention.cpu-test.8x512.vs_peer"]["goal"] == "at least 4 (met)"
    assert judged["vllm.ratio"]["status"] == "pending" and judged["vllm.ratio"]["reason"] == "no card"
    assert judged["published.8x512.p50_us"]["status"] == "published"


def test_a_missed_goal_shows_its_distance(project):
    judged = {row["id"]: row for row in report.claims(report.read([run_record(project)], project), project)}
    assert judged["attention.cpu-test.8x512.vs_peer"]["goal"] == "at least 4 (not met: 25.0 % short)"


def test_a_quick_run_is_no_evidence(project):
    quick = run_record(project, lambda r: (r["provenance"]["parameters"].update(quick=True), r["rows"][0].update(p50_us=9999.0)))
    sources = report.read([quick], project)
    judged = {row["id"]: row for row in report.claims(sources, project)}
    assert judged[evidence_project.CLAIM]["status"] == "holds" and judged[evidence_project.CLAIM]["value"].startswith("125")
    report.build(sources, project / "build/report/index.html", project)
    assert "A quick run" in (project / "build/report/index.html").read_text()


def test_what_is_absent_is_listed_with_its_reason(project):
    rows = [{"shape": f"{n}x8", "status": "absent", "reason": "flashinfer is not installed"} for n in range(5)]
    sources = report.read([run_record(project, lambda r: r["rows"].extend(rows))], project)
    (found,) = [row for row in report.absences(sources, project) if row["experiment"] == "attention"]
    assert found["why"] == "flashinfer is not installed" and found["absent"] == "0x8; 1x8; 2x8; and 2 more"
    assert report.overview(sources)[0]["absent"] == 5
    assert any(row["device"] == "CUDA" for row in report.absences(sources, project)), "no CUDA device ran"


def test_other_hardware_is_named(project):
    (project / "results/cuda-nvidia-h200").mkdir()
    rows = report.absences(report.read([run_record(project)], project), project)
    assert any(row["device"] == "cuda-nvidia-h200" for row in rows) and not any(row["device"] == "published" for row in rows)


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.open, self.text, self.links = [], [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[a] for a in ("src", "href") if a in attributes]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_stands_alone_and_holds_every_figure_claim_and_row(project):
    sources = report.read([run_record(project), project / evidence_project.RECORD], project)
    page_path, text_path = report.build(sources, project / "build/report/index.html", project)
    page = Page()
    page.feed(page_path.read_text())
    text = " ".join(page.text)
    assert page_path.read_text().count("<svg") == 2 and page.links == [], "figures are inside, nothing is loaded"
    assert len(page.ids) == len(set(page.ids)), "the ids of two figures do not collide"
    for expected in (evidence_project.CLAIM, "no card", "125.2", "375.8", "1,760", "NVIDIA T1000"):
        assert expected in text
    for svg in re.findall(r"<svg.*?</svg>", page_path.read_text(), flags=re.DOTALL):
        tree = ElementTree.fromstring(svg)
        ids = {e.get("id") for e in tree.iter() if e.get("id")}
        assert {e.get("{http://www.w3.org/1999/xlink}href")[1:] for e in tree.iter() if e.tag.endswith("use")} <= ids
    for link in re.findall(r"\]\((.*?)\)", text_path.read_text()):
        assert (text_path.parent / link).is_file()
    assert evidence_project.CLAIM in text_path.read_text()


def test_the_report_is_the_same_bytes_for_the_same_records(project):
    sources = report.read([run_record(project)], project)
    first = [p.read_bytes() for p in report.build(sources, project / "build/report/index.html", project)]
    assert [p.read_bytes() for p in report.build(sources, project / "build/report/index.html", project)] == first


def test_a_figure_that_another_run_drew_is_refused(project, capsys):
    path = run_record(project)
    (path.parent / "figures/attention/times.svg").write_text("<svg/>")
    assert report.main([str(path), "--out", str(project / "out.html"), "--root", str(project)]) == 1
    assert "times.svg: not the figure that the run of" in capsys.readouterr().err
    assert not (project / "out.html").exists()


def test_a_corrupt_record_is_one_line(project, capsys):
    path = run_record(project)
    record = json.loads(path.read_text())
    record["rows"][0]["p50_us"] = 1.0
    path.write_text(json.dumps(record))
    assert report.main([str(path), "--out", str(project / "out.html"), "--root", str(project)]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


# ---------------------------------------------------------------------------------------------- tables


def test_measured_beside_published():
    measured = [{"n": 1, "t": 2.0, "u": 5}, {"n": 2, "t": 3.0, "u": 6}]
    found = tables.beside(measured, [{"n": 2, "t": 9.0}], on=["n"], fields=["t", "u"])
    assert found == [{"n": 1, "t": 2.0, "t (published)": None, "u": 5}, {"n": 2, "t": 3.0, "t (published)": 9.0, "u": 6}]


def test_a_markdown_table():
    text = tables.markdown_table([{"a": "x|y", "b": 1234}, {"a": None, "b": 0.00012345, "c": True}])
    assert text == "| a | b | c |\n|---|---:|---|\n| x\\|y | 1,234 |  |\n|  | 1.234e-04 | yes |\n"


def test_html_is_escaped():
    assert "<td>&lt;b&gt;&amp;</td>" in tables.html_table([{"a": "<b>&"}])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.5, "0.5"), (123.456, "123.5"), (27320000.0, "27,320,000"), (1e12, "1.000e+12"), (None, ""), (False, "no"), (3, "3")],
)
def test_cells(value, text):
    assert tables.cell(value) == text
