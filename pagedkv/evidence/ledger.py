"""The ledger, workflow/claims.yaml: what this project claims, where the evidence lies, and what it aims at.

A list of claims (schema: workflow/schemas/claim.json):

    - id: attention.cuda-nvidia-h200.64x2048.p50_us
      statement: INT8 paged decode, 64 sequences of 2,048 tokens
      kind: measured                    # measured | exact (arithmetic) | published (others measured it)
      rule: attention                   # what makes the record
      unit: us
      evidence:                         # exactly one row, or several and `reduce: min|max|mean|sum|count`;
        file: results/cuda-nvidia-h200/attention.json
        where: {shape: 64x2048, op: quant_paged_attention}
        field: p50_us                   # `over: {where, field, reduce}` divides by another value of the same file
      expect: {max: 70}                 # what is claimed: min, max, equals
      goal: {max: 66}                   # optional: what is aimed at
      tried: ...                        # optional: where it is missed, what was tried and what limits it
    - id: ...
      pending: not measured yet         # instead of evidence
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from pagedkv.evidence import schema

_REDUCE = {"min": min, "max": max, "mean": statistics.fmean, "sum": sum, "count": len}


class LedgerError(Exception):
    """The ledger cannot be read; the message is one line."""


class NoEvidence(Exception):
    """The record or the row that a claim names is not there."""


class BadEvidence(Exception):
    """The record is there, but does not give the claim a value."""


@dataclass(frozen=True)
class Claim:
    """One entry; `problem` says what the schema finds wrong with it."""

    id: str
    statement: str = ""
    kind: str = "measured"
    rule: str | None = None
    unit: str | None = None
    format: str | None = None
    evidence: Mapping | None = None
    expect: Mapping | None = None
    goal: Mapping | None = None
    tried: str | None = None
    pending: str | None = None
    problem: str | None = None


def path(root: Path) -> Path:
    return root / "workflow" / "claims.yaml"


def load(root: Path) -> list[Claim]:
    """Every claim in order; entries that the schema refuses, and ids used twice, carry a `problem`.

    Raises `LedgerError` where the file is missing or is not a YAML list.
    """
    file = path(root)
    try:
        entries = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise LedgerError(f"{file}: there is no ledger") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"{file}: cannot be read ({error})") from None
    except Exception as error:  # YAMLError; and PyYAML lets out whatever a value that its tag forbids (2026-13-01, !!bool x) sets off
        raise LedgerError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, list):
        raise LedgerError(f"{file}: expected a list of claims, got {type(entries).__name__}")
    validator = schema.validator(str(root), "claim")
    claims, seen = [], set()
    for number, entry in enumerate(entries, 1):
        problem = next(_problems(validator, entry), None)
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            claims.append(Claim(id=f"entry {number}", problem=problem or "not a claim"))
            continue
        if entry["id"] in seen:
            problem = "this id is used by another claim too"
        seen.add(entry["id"])
        known = {k: v for k, v in entry.items() if k in Claim.__dataclass_fields__}
        claims.append(Claim(**{**known, "problem": problem}))
    return claims


def value(claim: Claim, record: Mapping) -> object:
    """What the record says for a claim. Raises `NoEvidence` or `BadEvidence`, saying what is amiss."""
    top = _select(record, claim.evidence)
    over = claim.evidence.get("over")
    if over is None:
        return top
    bottom = _select(record, over)
    if not all(isinstance(v, (int, float)) for v in (top, bottom)) or bottom == 0:
        raise BadEvidence(f"cannot divide {top!r} by {bottom!r}")
    return top / bottom


def meets(value: object, bounds: Mapping) -> bool:
    """Whether a value lies within `min`, `max` and `equals`, as far as they are given. A value of another type does not."""
    try:
        return (
            ("min" not in bounds or value >= bounds["min"])
            and ("max" not in bounds or value <= bounds["max"])
            and ("equals" not in bounds or value == bounds["equals"])
        )
    except TypeError:
        return False


def distance(value: object, bounds: Mapping) -> str:
    """How far a value is from bounds that it misses, in words."""
    if isinstance(value, (int, float)):
        for bound, short in (("min", "short"), ("max", "over"), ("equals", "off")):
            target = bounds.get(bound)
            if not isinstance(target, (int, float)) or meets(value, {bound: target}):
                continue
            gap = abs(value - target)
            return f"{100 * gap / abs(target):.1f} % {short}" if target else f"{text(gap)} {short}"
    return "not that value"


def bounds_text(bounds: Mapping | None) -> str:
    words = {"min": "at least", "max": "at most", "equals": "exactly"}
    return " and ".join(f"{words[k]} {v}" for k, v in (bounds or {}).items())


def text(value: object, format: str | None = None) -> str:
    """A value as prose spells it: `format` where the claim gives one, else three significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if format is not None:
        return f"{value:{format}}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def _select(record: Mapping, selector: Mapping) -> object:
    where, field, reduce = selector.get("where") or {}, selector["field"], selector.get("reduce")
    rows = [row for row in record["rows"] if all(k in row and row[k] == v for k, v in where.items())]
    described = ", ".join(f"{k}={v}" for k, v in where.items()) or "no condition"
    if not rows:
        raise NoEvidence(f"the record has no row with {described}")
    values = [row[field] for row in rows if row.get(field) is not None]
    if not values:
        raise NoEvidence(f"the row with {described} has no {field}")
    if reduce is not None:
        if reduce != "count" and not all(isinstance(v, (int, float)) for v in values):
            raise BadEvidence(f"cannot take the {reduce} of a {field} that is not a number")
        return _REDUCE[reduce](values)
    if len(rows) > 1:
        raise BadEvidence(f"{len(rows)} rows have {described}; a claim rests on one, or says how to reduce them")
    return values[0]


def _problems(validator, entry: object) -> Iterator[str]:
    for error in sorted(validator.iter_errors(entry), key=lambda e: [str(p) for p in e.absolute_path]):
        if error.validator == "not":
            yield "both evidence and pending: a claim has the one or the other"
        elif error.validator == "dependentRequired":
            yield "evidence without expect: say what is claimed"
        else:
            place = ".".join(str(p) for p in error.absolute_path)
            yield f"{place + ': ' if place else ''}{error.message[:160]}"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML that refuses a key given twice: the second would silently replace the first."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"a key is a {type(key).__name__}", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
