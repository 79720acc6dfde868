"""Rows as tables: Markdown for notebooks and the report, HTML for the report, measured beside published."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence


def columns_of(rows: Iterable[Mapping]) -> list[str]:
    """Every field that a row has, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def cell(value: object) -> str:
    """A value for a reader: four significant digits, thousands separated, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3e}"


def markdown_table(rows: Sequence[Mapping], columns: Sequence[str] | None = None) -> str:
    """A GitHub-style table, numbers to the right; `columns` chooses and orders the fields (default: all)."""
    columns = list(columns) if columns is not None else columns_of(rows)
    numeric = [_is_numeric(rows, name) for name in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("---:" if n else "---" for n in numeric) + "|"]
    lines += ["| " + " | ".join(_escape(cell(row.get(name))) for name in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def html_table(rows: Sequence[Mapping], columns: Sequence[str] | None = None) -> str:
    """The same in HTML; a column of numbers has the class `n`."""
    columns = list(columns) if columns is not None else columns_of(rows)
    kinds = [' class="n"' if _is_numeric(rows, name) else "" for name in columns]
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{html.escape(cell(row.get(name)))}</td>" for name, kind in zip(columns, kinds, strict=True))
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def beside(measured: Iterable[Mapping], published: Iterable[Mapping], on: Sequence[str], fields: Sequence[str]) -> list[dict]:
    """A row for each measured one: `on`, then each of `fields` followed by `<field> (published)`.

    The published row is the one that agrees in all of `on`; where there is none, or it lacks a field, the published
    cell is None. A column of published figures that would be empty throughout is left out.
    """
    others = {tuple(row.get(name) for name in on): row for row in published}
    rows = []
    for row in measured:
        key = tuple(row.get(name) for name in on)
        joined = dict(zip(on, key, strict=True))
        for field in fields:
            joined[field] = row.get(field)
            joined[f"{field} (published)"] = others.get(key, {}).get(field)
        rows.append(joined)
    empty = {name for name in columns_of(rows) if name.endswith(" (published)") and all(row[name] is None for row in rows)}
    return [{name: value for name, value in row.items() if name not in empty} for row in rows]


def _is_numeric(rows: Sequence[Mapping], name: str) -> bool:
    values = [row[name] for row in rows if row.get(name) is not None]
    return bool(values) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
