"""Numbers in prose. Each stands in a marker and is drawn from the ledger:

    It takes <!--claim:attention.cuda-nvidia-h200.64x2048.p50_us-->66.2<!--/claim--> us.

`render` fills the markers; `check` finds markers that disagree, and numbers that stand outside one.
The rule for a number: it begins with a digit (after a sign, a point, a bracket). A word that begins with a letter is a name, digits
and all: INT8, sm_75, H200, Q4_1, Llama-3-8B. Not looked at: code blocks, code spans, link targets, HTML tags and comments,
the markers of numbered lists. A version (`3.10`) therefore stands in a code span; a quantity with its unit may not hide in one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

OPEN, CLOSE = "<!--claim:{}-->", "<!--/claim-->"

_FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n]*\n.*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_MARKER = re.compile(r"<!--\s*claim:\s*([^\s>]*?)\s*-->((?:(?!<!--).)*?)<!--\s*/claim\s*-->", re.DOTALL)
_HALF_MARKER = re.compile(r"<!--\s*/?claim.*?-->", re.DOTALL)
_SILENT = (
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"(?<=\])\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)"),  # [text](target "title")
    re.compile(r"^ {0,3}\[[^\]]+\]:\s*\S+.*$", re.MULTILINE),  # [label]: target
    re.compile(r"<?\b[a-z][a-z0-9+.-]*://[^\s>)]+>?", re.IGNORECASE),
    re.compile(r"</?[a-zA-Z][^>]*>"),
    re.compile(r"&#?\w+;"),
    re.compile(r"^[ \t>]*\d+[.)](?=[ \t])", re.MULTILINE),  # a numbered list
)
_WORD = re.compile(r"[^\s()\[\]{}|,;:=/\"'*~<>!?&^]+")
_NUMBER = re.compile(r"[^\w]*_*[0-9]")
_UNIT = r"(?:%|x|×|times|[nuµm]?s|seconds?|minutes?|h|[KMGT]i?B(?:/s)?|bytes|bits?|tokens?(?:/s)?|tok/s|T?FLOP/?s|blocks?)"
_QUANTITY = re.compile(rf"\s*[~≈<>≤≥±+-]*\s*[0-9][0-9.,]*\s*{_UNIT}\s*", re.IGNORECASE)


def check(document: str, text_of: Callable[[str], str]) -> Iterator[tuple[int, str]]:
    """`(line, what is wrong)` of a Markdown text. `text_of(id)` spells a claim's value; `KeyError` for an unknown id."""
    found: list[tuple[int, str]] = []
    masked = _mask(document, _FENCE)
    for span in _CODE.finditer(masked):
        if _QUANTITY.fullmatch(span[2]):
            found.append((span.start(), f"the quantity {span[2].strip()} stands in a code span; it belongs in a claim marker"))
    masked = _mask(masked, _CODE)
    for marker in _MARKER.finditer(masked):
        try:
            expected = text_of(marker[1])
        except KeyError:
            found.append((marker.start(), f"the marker names {marker[1] or 'no claim'}, which the ledger does not have"))
            continue
        written = document[marker.start(2) : marker.end(2)].strip()
        if written != expected:
            found.append((marker.start(), f"the marker of {marker[1]} says {written or 'nothing'}, the ledger says {expected}"))
    masked = _mask(masked, _MARKER)
    found += [(half.start(), f"{half[0]} has no partner") for half in _HALF_MARKER.finditer(masked)]
    for pattern in _SILENT:
        masked = _mask(masked, pattern)
    for word in _WORD.finditer(masked):
        if _NUMBER.match(word[0]):
            found.append((word.start(), f"the number {word[0].rstrip('.')} is backed by no claim"))
    for position, problem in sorted(found):
        yield document.count("\n", 0, position) + 1, problem


def render(document: str, text_of: Callable[[str], str]) -> str:
    """The text with every marker filled. Raises `KeyError` for a marker whose claim the ledger does not have."""
    masked = _mask(_mask(document, _FENCE), _CODE)
    pieces, end = [], 0
    for marker in _MARKER.finditer(masked):
        pieces += [document[end : marker.start()], OPEN.format(marker[1]), text_of(marker[1]), CLOSE]
        end = marker.end()
    return "".join([*pieces, document[end:]])


def _mask(text: str, pattern: re.Pattern) -> str:
    """Matches replaced by blanks, so that positions and lines stay."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
