"""Records: `results/<hardware>/<experiment>.json`, what one run of one notebook measured on one device.

A record is written whole or not at all. Its digest covers every value in it, so that a number changed by
hand is found; its `sources` name the files that the numbers depend on, so that a stale one is found too.
The schema is workflow/schemas/record.json.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from pagedkv.evidence import schema
from pagedkv.evidence.root import find_root

SCHEMA_VERSION = 1


class RecordError(Exception):
    """A record cannot be read, written or trusted; the message is one line that names the file."""


def canonical(value: object) -> bytes:
    """The one spelling of a JSON value: sorted keys, no white space, ASCII. Raises `ValueError` for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(record: Mapping) -> str:
    """sha256 over the canonical JSON of everything in a record but the digest itself."""
    provenance = {k: v for k, v in record["provenance"].items() if k != "digest"}
    return hashlib.sha256(canonical({**record, "provenance": provenance})).hexdigest()


def file_hash(path: str | Path) -> str:
    """sha256 of a file's bytes."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


def hashes(paths: Iterable[str | Path], root: Path) -> dict[str, str]:
    """`{path relative to root: sha256}`. Raises `RecordError` for a path that is missing or outside `root`."""
    result = {}
    for path in sorted({str(p) for p in paths}):
        full = (root / path).resolve()
        if not full.is_relative_to(root):
            raise RecordError(f"{path}: a record only names files inside {root}")
        if not full.is_file():
            raise RecordError(f"{path}: named as a source or input, but there is no such file")
        result[full.relative_to(root).as_posix()] = file_hash(full)
    return result


def plain(value: object, where: str = "record") -> object:
    """`value` as JSON types: NumPy and torch scalars and arrays become numbers and lists, tuples lists, paths text.

    Raises `ValueError` for a NaN or an infinity (write None where there is no number) and `TypeError` for
    anything JSON lacks; `where` is named in the message.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a number JSON can hold; write None where there is no value")
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Path):
        return value.as_posix()
    raise TypeError(f"{where}: expected a JSON value, got {type(value).__name__}")


def dumps(record: Mapping) -> str:
    """A record as text: indented, each row on a line of its own so that a diff shows the rows that moved."""
    head = json.dumps({k: v for k, v in record.items() if k != "rows"}, indent=1, allow_nan=False)
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in record["rows"])
    return f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


def validate(record: object, name: str, root: Path | None = None) -> None:
    """Raises `RecordError` that names the first place where `record` departs from the schema."""
    error = _first_error(record, str(root or find_root()))
    if error is not None:
        place = "/".join(str(p) for p in error.absolute_path) or "top level"
        raise RecordError(f"{name}: not a valid record: {place}: {error.message[:200]}")


def read(path: str | Path, root: Path | None = None) -> dict:
    """A record from a file, checked against the schema, its own digest and the form that `write` gives it. Raises `RecordError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{path}: there is no such record") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: corrupt, not JSON ({error})") from None
    validate(record, str(path), root)
    if record["provenance"]["digest"] != digest(record):
        raise RecordError(f"{path}: its digest does not match: a value was changed after the run that measured it")
    if text != dumps(record):  # say a digit too far back to make another float
        raise RecordError(f"{path}: its text is not what a run writes: it was changed after the run that measured it")
    return record


def write(record: Mapping, path: str | Path, root: Path | None = None) -> None:
    """Write a record whole or not at all: a temporary file beside it, fsync, rename, fsync of the folder.

    Adds the digest. Raises `RecordError` for a record that the schema refuses and where the disk or the folder fails.
    """
    record = plain(record)
    record["provenance"]["digest"] = digest(record)
    validate(record, str(path), root)
    write_text(path, dumps(record))


def write_text(path: str | Path, text: str) -> None:
    """Atomic replacement of a text file. Raises `RecordError`, and leaves what was there before untouched."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
        temporary = None
        _sync_folder(path.parent)
    except OSError as error:
        why = "no space left on the device" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"{error.strerror or error}"
        raise RecordError(f"{path}: not written: {why}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def published(experiment: str, root: Path | None = None) -> list[dict]:
    """The rows that others published for an experiment, not measured by this project: to show beside measured ones.

    Every row carries `hardware_name` and `origin` ("published"). Raises `RecordError` where nothing was published.
    """
    root = root or find_root()
    record = read(root / "results" / "published" / f"{experiment}.json", root)
    return [{"origin": "published", "hardware_name": record["hardware"]["name"], **row} for row in record["rows"]]


def _first_error(record: object, root: str):
    return min(schema.validator(root, "record").iter_errors(record), key=lambda e: [str(p) for p in e.absolute_path], default=None)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened (Windows does not)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
