"""`pagedkv verify`: every claim against its record, every record against itself, every number in prose against the ledger.

holds      the record is sound, up to date, and says what is claimed
fails      it does not, or it was tampered with, or the ledger or the prose is wrong
stale      a source that the record depends on changed after the run
missing    the record, or the row in it, is not there
pending    no evidence yet; the ledger says why
published  others measured it; this project has not
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pagedkv.evidence import ledger, prose
from pagedkv.evidence import record as records

STATUSES = ("holds", "fails", "stale", "missing", "pending", "published")
_PUBLISHED = "published"
_JSON_KEYS = ("id", "status", "value", "unit", "expect", "goal", "goal_met", "rule", "evidence")


@dataclass(frozen=True)
class Finding:
    """What verify says of one claim, or of a record or a line of prose (`id` is then its path), with the reason."""

    id: str
    status: str
    reason: str = ""
    value: object = None
    unit: str | None = None
    expect: dict | None = None
    goal: dict | None = None
    goal_met: bool | None = None
    tried: str = ""  # for a goal that is missed
    rule: str | None = None
    evidence: dict | None = None
    format: str | None = None
    is_claim: bool = False


class Verifier:
    """The checks over one checkout. `findings()` lists the claims in the ledger's order, then what else is wrong."""

    def __init__(self, root: Path):
        self.root = root
        self.claims = ledger.load(root)
        self._record = functools.cache(self._read)
        self._hash = functools.cache(self._hash_of)

    def findings(self) -> list[Finding]:
        return [*map(self.claim, self.claims), *self.records(), *self.prose()]

    def claim(self, claim: ledger.Claim) -> Finding:
        status, reason, value = self._judge(claim)
        goal_met = ledger.meets(value, claim.goal) if claim.goal and value is not None else None
        tried = (claim.tried or "") if goal_met is False else ""
        same = {name: getattr(claim, name) for name in ("id", "unit", "expect", "goal", "rule", "evidence", "format")}
        return Finding(status=status, reason=reason, value=value, goal_met=goal_met, tried=tried, is_claim=True, **same)

    def text_of(self, claim_id: str) -> str:
        """A claim's value as prose spells it. Raises `KeyError` for an id that the ledger lacks."""
        claim = next((c for c in self.claims if c.id == claim_id), None)
        if claim is None:
            raise KeyError(claim_id)
        _, _, value = self._judge(claim)
        return "not measured" if value is None else ledger.text(value, claim.format)

    def _judge(self, claim: ledger.Claim) -> tuple[str, str, object]:
        if claim.problem:
            return "fails", f"ledger: {claim.problem}", None
        if claim.pending:
            return "pending", claim.pending, None
        if claim.evidence is None:
            return "missing", "the claim names no evidence and gives no reason (pending) for that", None
        name = claim.evidence["file"]
        record, error = self._record(name)
        if record is None:
            return ("fails" if (self.root / name).exists() else "missing"), error, None
        try:
            value = ledger.value(claim, record)
        except ledger.NoEvidence as problem:
            return "missing", f"{name}: {problem}", None
        except ledger.BadEvidence as problem:
            return "fails", f"{name}: {problem}", None
        is_published = record["kind"] == _PUBLISHED
        if is_published != (claim.kind == _PUBLISHED):
            return "fails", f"a {claim.kind} claim rests on a {record['kind']} record", value
        if claim.rule != record["provenance"]["rule"]:
            return "fails", f"{name} was made by rule {record['provenance']['rule']}, the claim says {claim.rule}", value
        if not ledger.meets(value, claim.expect):
            return "fails", f"{ledger.text(value)} is not {ledger.bounds_text(claim.expect)}", value
        if is_published:
            return "published", record["provenance"]["published"]["source"], value
        moved = self._moved(record)
        return ("stale", f"{name}: {moved}", value) if moved else ("holds", "", value)

    def records(self) -> Iterator[Finding]:
        """What is wrong with records beyond the claims that rest on them, and with the figures beside them."""
        claimed = {c.evidence["file"] for c in self.claims if isinstance(c.evidence, dict) and "file" in c.evidence}
        for path in sorted((self.root / "results").glob("*/*.json")):
            name = path.relative_to(self.root).as_posix()
            record, error = self._record(name)
            if name not in claimed:
                if record is None:
                    yield Finding(name, "fails", error)
                    continue
                if moved := self._moved(record):
                    yield Finding(name, "stale", moved)
            for figure, wanted in (record or {"provenance": {}})["provenance"].get("figures", {}).items():
                drawn = f"figures/{path.parent.name}/{figure}"
                if not (self.root / drawn).is_file():
                    yield Finding(drawn, "missing", f"the run of {name} drew it")
                elif self._hash(drawn) != wanted:
                    yield Finding(drawn, "fails", f"not the figure that the run of {name} drew")

    def prose(self) -> Iterator[Finding]:
        for path in documents(self.root):
            name = path.relative_to(self.root).as_posix()
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                yield Finding(name, "fails", f"cannot be read ({error})")
                continue
            for line, problem in prose.check(text, self.text_of):
                yield Finding(f"{name}:{line}", "fails", problem)

    def _read(self, name: str) -> tuple[dict | None, str]:
        """A record that may serve as evidence, or None and the reason."""
        path = self.root / name
        try:
            record = records.read(path, self.root)
        except records.RecordError as error:
            return None, str(error).replace(f"{self.root}/", "")
        folder = _PUBLISHED if record["kind"] == _PUBLISHED else record["hardware"]["slug"]
        if (path.parent.name, path.stem) != (folder, record["experiment"]):
            return None, f"{name}: holds the record of {folder}/{record['experiment']}"
        if record["kind"] != _PUBLISHED and record["provenance"]["parameters"].get("quick"):
            return None, f"{name}: a quick run, which is no evidence"
        return record, ""

    def _moved(self, record: dict) -> str:
        for path, wanted in record["provenance"]["sources"].items():
            found = self._hash(path)
            if found != wanted:
                return f"{path} {'is gone' if found is None else 'changed after the run'}"
        return ""

    def _hash_of(self, name: str) -> str | None:
        path = self.root / name
        return records.file_hash(path) if path.is_file() else None


def documents(root: Path) -> list[Path]:
    """The Markdown texts whose numbers the ledger backs."""
    return [p for p in (root / "README.md", *sorted((root / "results").glob("**/*.md"))) if p.is_file()]


def render(root: Path) -> list[str]:
    """Fill the claim markers of every document; the names of those that changed. Raises `LedgerError` for an unknown claim,
    `RecordError` for a document that cannot be read or written."""
    verifier, changed = Verifier(root), []
    for path in documents(root):
        name = path.relative_to(root).as_posix()
        try:
            before = path.read_text(encoding="utf-8")
            after = prose.render(before, verifier.text_of)
        except (OSError, UnicodeDecodeError) as error:
            raise records.RecordError(f"{name}: cannot be read ({error})") from None
        except KeyError as error:
            raise ledger.LedgerError(f"{name}: a marker names {error.args[0]}, which the ledger does not have") from None
        if after != before:
            records.write_text(path, after)
            changed.append(name)
    return changed


def exit_status(findings: list[Finding], allow_stale: bool = False) -> int:
    bad = {"fails", "missing"} if allow_stale else {"fails", "missing", "stale"}
    return int(any(f.status in bad for f in findings))


def as_json(findings: list[Finding]) -> str:
    """One object a finding, in the fields of the contract; what is not a claim has its path as `id`. `as_text` has the reasons."""
    return json.dumps([{k: asdict(f)[k] for k in _JSON_KEYS} for f in findings], indent=1)


def as_text(findings: list[Finding]) -> str:
    """A line a finding, the counts, and last the goals that are not met: their distance, what was tried and what limits them."""
    width = max((len(f.id) for f in findings), default=0)
    lines = [f"{f.status:<9}  {f.id:<{width}}  {_details(f)}".rstrip() for f in findings]
    counts = Counter(f.status for f in findings)
    lines += ["", f"{sum(f.is_claim for f in findings)} claims: " + ", ".join(f"{counts[s]} {s}" for s in STATUSES if counts[s])]
    waiting = sum(f.goal is not None and f.value is None for f in findings)
    if waiting:
        lines.append(f"{waiting} goals have no value yet; they are listed above")
    unmet = [f for f in findings if f.goal_met is False]
    if unmet:
        lines += ["", "Goals not met:"]
    for f in unmet:
        lines.append(f"  {f.id:<{width}}  {_amount(f)}, goal {ledger.bounds_text(f.goal)}: {ledger.distance(f.value, f.goal)}")
        lines += textwrap.wrap(f.tried, 130, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _amount(finding: Finding) -> str:
    return " ".join(filter(None, [ledger.text(finding.value, finding.format), finding.unit]))


def _details(finding: Finding) -> str:
    parts = [] if finding.value is None else [_amount(finding)]
    if finding.status == "holds":
        parts.append(f"({ledger.bounds_text(finding.expect)})")
    elif finding.reason:
        parts.append(f"({finding.reason})" if parts else finding.reason)
    if finding.status == "pending" and finding.goal:
        parts.append(f"[goal {ledger.bounds_text(finding.goal)}]")
    return " ".join(parts)
