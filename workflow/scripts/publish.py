"""Copy this machine's records and figures to where they are committed: what the rule `publish` executes.

Only `results/<hardware>/` and `figures/<hardware>/` of the hardware that the records name are touched, and the claim
markers in prose that draw on them. A committed record that has a model's rows stays where this run could not have the model.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))  # the package of this checkout, installed or not

from pagedkv.evidence import ledger, verify
from pagedkv.evidence import record as records

MODEL = "build/model/status.json"


def lost(record: dict, committed: Path, root: Path) -> str | None:
    """Why `record` lacks the rows of a model that the committed record has; None where it lacks none."""
    if MODEL not in record["provenance"]["inputs"] or not committed.is_file():
        return None
    status = json.loads((root / MODEL).read_text(encoding="utf-8"))
    if status["available"]:
        return None
    try:
        before = _absent(records.read(committed, root))
    except records.RecordError:  # nothing to keep
        return None
    reason = status["reason"].replace(f"{root}/", "")
    return reason if any(why == reason and what not in [known for known, _ in before] for what, why in _absent(record)) else None


def _absent(record: dict) -> list[tuple[dict, str]]:
    rows = [row for row in record["rows"] if row.get("status") == "absent"]
    return [({name: value for name, value in row.items() if name not in ("status", "reason")}, row.get("reason")) for row in rows]


def publish(paths: list[Path], root: Path) -> list[Path]:
    """The files written. Raises `RecordError` for a record that is corrupt, quick, or at odds with its figures."""
    drawn: dict[Path, Path] = {}
    contents: dict[Path, str] = {}
    for path in paths:
        record = records.read(path, root)
        if record["provenance"]["parameters"].get("quick"):
            raise records.RecordError(f"{path}: a quick run's numbers are not evidence")
        slug, experiment = record["hardware"]["slug"], record["experiment"]
        committed = root / "results" / slug / f"{experiment}.json"
        if reason := lost(record, committed, root):
            print(f"{committed.relative_to(root)} stays as it is, with the model's rows: this run has none ({reason})", flush=True)
            continue
        contents[committed] = path.read_text(encoding="utf-8")
        for name, expected in record["provenance"].get("figures", {}).items():
            source, target = path.parent / "figures" / path.stem / name, root / "figures" / slug / name
            if records.file_hash(source) != expected:
                raise records.RecordError(f"{source}: not the figure that the run of {path} drew")
            if target in drawn:
                raise records.RecordError(f"{source}: another experiment draws a figure of that name, {drawn[target]}")
            drawn[target] = source
            contents[target] = source.read_text(encoding="utf-8")
    for target, text in contents.items():  # only now: all of it is sound
        records.write_text(target, text)
    return list(contents)


def main(snakemake) -> int:
    root = Path.cwd()
    try:
        written = publish([Path(p) for p in snakemake.input.records], root)
        rendered = verify.render(root)
    except (records.RecordError, ledger.LedgerError, OSError) as error:
        print(f"error: {error} (a damaged file under build/ is made again once it is deleted)", file=sys.stderr, flush=True)
        return 1
    folders = sorted({p.parent.relative_to(root).as_posix() for p in written})
    print(f"published {len(written)} files into {', '.join(folders)}", flush=True)
    if rendered:
        print(f"claim markers filled in {', '.join(rendered)}", flush=True)
    Path(snakemake.output[0]).touch()
    return 0


if "snakemake" in globals():
    sys.exit(main(globals()["snakemake"]))
