"""See `pagedkv.bench.validation`. Exit status: 0 if every row is ok, 1 if not."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pagedkv
from pagedkv.bench import validation
from pagedkv.evidence import hardware


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.bench.validation", description="Check every op against its reference.")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--quick", action="store_true", help="a part of the cases")
    parser.add_argument("--part", choices=validation.PARTS, help="only this part")
    parser.add_argument("--output", type=Path, help="write the rows here, as a JSON list")
    arguments = parser.parse_args()
    device = hardware.resolve(arguments.device)
    print(f"{device}: {pagedkv.backend(device)}", flush=True)
    rows = list(validation.sweep(device, arguments.quick, arguments.part))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows))
    failed = validation.failures(rows)
    print(*failed, f"{len(rows)} rows, {len(failed)} not ok", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
