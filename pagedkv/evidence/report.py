"""The report: every claim, every figure and every row of a set of records, and what is absent and why.

    python -m pagedkv.evidence.report --out build/report/index.html RECORD.json ...

writes one HTML file that needs nothing beside it and, next to it, the same in Markdown (`index.md`; figures by
relative path, without the full tables). The claims are judged against the records given, so that the report of a run
speaks of that run; what the records do not cover (other hardware) is judged against the committed evidence.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedkv.evidence import ledger, verify
from pagedkv.evidence import record as records
from pagedkv.evidence.root import find_root
from pagedkv.evidence.tables import beside, columns_of, html_table, markdown_table

# For the experiments whose rows line up with published ones: the fields they agree in, and those to set side by side.
_BESIDE = {
    "memory": (["pool", "granularity"], ["fp16_mib", "int8_mib", "savings_percent"]),
    "quality": (["data", "scheme"], ["rmse", "max_abs", "out_std"]),
    "proxy": (["seq_len", "noise", "granularity"], ["fp32_accuracy", "int8_accuracy", "disagreement"]),
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1, h2, h3 { line-height: 1.2 } h2 { border-top: 1px solid #ccc; padding-top: 1.2rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: 13px; margin: .6rem 0 }
th, td { padding: .15rem .6rem; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #666 }
tr:nth-child(even) td { background: #f4f4f4 } .n { text-align: right; font-variant-numeric: tabular-nums }
figure { margin: 1rem 0 } figure svg { max-width: 100%; height: auto } figcaption, .note { color: #555; font-size: 13px }
.scroll { overflow-x: auto } summary { cursor: pointer } .bad { font-weight: bold }
"""


@dataclass(frozen=True)
class Source:
    """A record, and the folder its run drew figures into."""

    record: dict
    path: Path
    figures: Path

    @property
    def name(self) -> str:
        return self.record["experiment"]

    def drawn(self) -> list[Path]:
        """Raises `RecordError` for a figure that is missing or is not the one that this run drew."""
        files = []
        for name, wanted in self.record["provenance"].get("figures", {}).items():
            file = self.figures / name
            if not file.is_file() or records.file_hash(file) != wanted:
                raise records.RecordError(f"{file}: not the figure that the run of {self.path} drew")
            files.append(file)
        return files


def read(paths: Iterable[str | Path], root: Path) -> list[Source]:
    """Records with their figures: `figures/<experiment>/` beside a run's record, `figures/<hardware>/` for committed ones.

    Raises `RecordError`.
    """
    sources = []
    for path in map(Path, paths):
        record = records.read(path, root)
        beside_it = path.parent / "figures" / path.stem
        sources.append(Source(record, path, beside_it if beside_it.is_dir() else root / "figures" / record["hardware"]["slug"]))
    return sources


class _ThisRun(verify.Verifier):
    """Claims judged against the records of a run that is not published yet, and against the committed ones for the rest."""

    def __init__(self, root: Path, sources: Sequence[Source]):
        # A quick run is no evidence: the committed records stay in force.
        full = [s for s in sources if not s.record["provenance"]["parameters"].get("quick")]
        self._fresh = {f"results/{s.record['hardware']['slug']}/{s.name}.json": s.record for s in full}
        super().__init__(root)

    def _read(self, name: str) -> tuple[dict | None, str]:
        return (self._fresh[name], "") if name in self._fresh else super()._read(name)


def claims(sources: Sequence[Source], root: Path) -> list[dict]:
    """One row a claim: `id, claim, status, value, expected, goal, reason`, texts made to be shown."""
    verifier = _ThisRun(root, sources)
    rows = []
    for claim in verifier.claims:
        found = verifier.claim(claim)
        value = "" if found.value is None else " ".join(filter(None, [ledger.text(found.value, found.format), found.unit]))
        goal = ledger.bounds_text(found.goal)
        if found.goal_met is not None:
            goal += " (met)" if found.goal_met else f" (not met: {ledger.distance(found.value, found.goal)})"
        rows.append(
            {
                "id": found.id,
                "claim": claim.statement,
                "status": found.status,
                "value": value,
                "expected": ledger.bounds_text(found.expect),
                "goal": goal,
                "reason": found.reason or found.tried,
            }
        )
    return rows


def absences(sources: Sequence[Source], root: Path) -> list[dict]:
    """What the run did not measure: rows that say so, and hardware that has committed evidence but did not run here."""
    rows = []
    for source in sources:
        grouped: dict[str, list[str]] = {}
        for row in source.record["rows"]:
            if row.get("status") == "absent":
                what = ", ".join(str(v) for k, v in row.items() if k not in ("status", "reason", "ours") and isinstance(v, str))
                grouped.setdefault(row.get("reason") or "no reason given", []).append(what)
        for reason, what in grouped.items():
            listed = "; ".join(dict.fromkeys(what[:3])) + (f"; and {len(what) - 3} more" if len(what) > 3 else "")
            rows.append({"experiment": source.name, "device": source.record["hardware"]["name"], "absent": listed, "why": reason})
    here = {s.record["hardware"]["slug"] for s in sources}
    for folder in sorted((root / "results").glob("*/")):
        if folder.name != "published" and folder.name not in here:
            rows.append(
                {
                    "experiment": "all",
                    "device": folder.name,
                    "absent": "measurements",
                    "why": "another machine; its committed evidence stands",
                }
            )
    if not any(s.record["hardware"]["kind"] == "cuda" for s in sources):
        rows.append(
            {"experiment": "all", "device": "CUDA", "absent": "measurements", "why": "no CUDA device in this run; see `pagedkv doctor`"}
        )
    return rows


def overview(sources: Sequence[Source]) -> list[dict]:
    """One row a record: what ran where, on what, for how long."""
    return [
        {
            "experiment": s.name,
            "device": s.record["hardware"]["name"],
            "backend": s.record["software"].get("backend"),
            "rows": len(s.record["rows"]),
            "absent": sum(row.get("status") == "absent" for row in s.record["rows"]),
            "seconds": s.record["provenance"]["seconds"],
            "finished": s.record["provenance"]["finished_at"],
            "quick": bool(s.record["provenance"]["parameters"].get("quick")),
        }
        for s in sources
    ]


def against_published(source: Source, root: Path) -> list[dict]:
    """Measured beside published where rows line up, else the published rows; empty where nothing was published."""
    try:
        others = records.published(source.name, root)
    except records.RecordError:
        if (root / "results" / "published" / f"{source.name}.json").exists():
            raise
        return []
    if source.name not in _BESIDE:
        return others
    on, fields = _BESIDE[source.name]
    rows = [row for row in source.record["rows"] if row.get("seed", 0) == 0 and any(field in row for field in fields)]
    keys = {tuple(o.get(name) for name in on) for o in others}
    return beside([row for row in rows if tuple(row.get(name) for name in on) in keys], others, on, fields)


def build(sources: Sequence[Source], out: Path, root: Path) -> list[Path]:
    """Write `out` (HTML) and its `.md` neighbour. Raises `RecordError` for figures at odds with records and for a full disk."""
    judged = claims(sources, root)
    records.write_text(out, "".join(_html(sources, judged, root)))
    text = out.with_suffix(".md")
    records.write_text(text, "".join(_markdown(sources, judged, root, text.parent)))
    return [out, text]


def summary_line(judged: Sequence[dict]) -> str:
    counts = Counter(row["status"] for row in judged)
    return f"{len(judged)} claims: " + ", ".join(f"{counts[s]} {s}" for s in verify.STATUSES if counts[s])


def _notes(sources: Sequence[Source]) -> Iterator[str]:
    if any(row["quick"] for row in overview(sources)):
        yield "A quick run: small inputs, no evidence. The claims below are judged against the committed records."
    yield "Published figures are marked so. Others measured them on other hardware, and this project has not."


def _html(sources: Sequence[Source], judged: list[dict], root: Path) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
    yield f"<title>PagedKV: evidence</title>\n<style>{_STYLE}</style>\n"
    yield "<h1>PagedKV: what was measured</h1>\n"
    for note in _notes(sources):
        yield f"<p>{html.escape(note)}</p>\n"
    yield f"<h2>What ran</h2>\n<div class='scroll'>{html_table(overview(sources))}</div>"
    yield f"<h2>Claims</h2>\n<p>{html.escape(summary_line(judged))}</p>\n<div class='scroll'>{html_table(judged)}</div>"
    yield f"<h2>What is absent, and why</h2>\n<div class='scroll'>{html_table(absences(sources, root))}</div>"
    for number, source in enumerate(sources):
        provenance = source.record["provenance"]
        yield f"<h2>{html.escape(source.name)} <small>on {html.escape(source.record['hardware']['name'])}</small></h2>\n"
        made_by = f"{provenance['notebook']}, rule {provenance['rule']}, digest {provenance['digest'][:12]}"
        yield f"<p class='note'>{html.escape(made_by)}</p>\n"
        for index, file in enumerate(source.drawn()):
            svg = _inline(file.read_text(encoding="utf-8"), f"f{number}-{index}-")
            yield f"<figure>{svg}<figcaption>{html.escape(file.name)}</figcaption></figure>\n"
        if rows := against_published(source, root):
            yield f"<h3>Published figures</h3>\n<div class='scroll'>{html_table(rows)}</div>"
        for rows in _alike(source.record["rows"]):
            title = f"{len(rows)} rows: {', '.join(columns_of(rows)[:6])} ..."
            yield f"<details><summary>{html.escape(title)}</summary><div class='scroll'>{html_table(rows)}</div></details>\n"
    yield "</html>\n"


def _markdown(sources: Sequence[Source], judged: list[dict], root: Path, folder: Path) -> Iterator[str]:
    yield "# PagedKV: what was measured\n\n" + "\n\n".join(_notes(sources)) + "\n"
    yield f"\n## What ran\n\n{markdown_table(overview(sources))}"
    yield f"\n## Claims\n\n{summary_line(judged)}\n\n{markdown_table(judged)}"
    yield f"\n## What is absent, and why\n\n{markdown_table(absences(sources, root))}"
    for source in sources:
        yield f"\n## {source.name} on {source.record['hardware']['name']}\n"
        for file in source.drawn():
            yield f"\n![{file.stem}]({os.path.relpath(file, folder)})\n"
        if rows := against_published(source, root):
            yield f"\nPublished figures:\n\n{markdown_table(rows)}"


def _alike(rows: Iterable[dict]) -> list[list[dict]]:
    """Rows that have the same fields, together."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    return list(groups.values())


def _inline(svg: str, prefix: str) -> str:
    """An SVG file as an element; its ids get a prefix, because those of several figures would collide."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    return re.sub(r'(url\(|href=")#', rf"\1#{prefix}", svg)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.evidence.report", description="Write the report of a set of records.")
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the HTML file; the Markdown lies beside it")
    parser.add_argument("--root", type=Path, help="the checkout (default: the one around the working directory)")
    options = parser.parse_args(arguments)
    try:
        root = find_root(options.root)
        for path in build(read(options.records, root), options.out, root):
            print(f"report: {path}", flush=True)
    except (records.RecordError, ledger.LedgerError, FileNotFoundError) as error:
        print(f"pagedkv report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
