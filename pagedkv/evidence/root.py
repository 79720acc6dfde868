"""Where the checkout is: records, schemas, claims and sources are all named relative to it."""

from __future__ import annotations

import os
from pathlib import Path

_MARK = Path("workflow") / "schemas" / "record.json"


def find_root(start: str | Path | None = None) -> Path:
    """The nearest folder at or above `start` (default: $PAGEDKV_ROOT, then the working directory, then the
    package's own place) that is a PagedKV checkout. Raises `FileNotFoundError` where there is none."""
    starts = [Path(start)] if start is not None else [Path(p) for p in (os.environ.get("PAGEDKV_ROOT"), Path.cwd(), __file__) if p]
    for begin in starts:
        for folder in (begin.resolve(), *begin.resolve().parents):
            if (folder / _MARK).is_file():
                return folder
    raise FileNotFoundError(f"no PagedKV checkout (a folder with {_MARK}) at or above {starts[0].resolve()}")
