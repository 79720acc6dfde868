"""Dump the KV cache of a model over a text: what the rule `model` executes.

`pagedkv.models` fails softly: where there is no dump, its status.json says why and the exit status is 0.
"""

import subprocess
import sys
from pathlib import Path


def main(snakemake) -> int:
    out = Path(snakemake.output[0]).parent
    command = [
        sys.executable,
        "-m",
        "pagedkv.models",
        "--out",
        str(out),
        "--assets",
        "build/downloads",
        "--tokens",
        str(snakemake.params.tokens),
    ]
    for option in ("model", "text"):
        if snakemake.params[option]:
            command += [f"--{option}", snakemake.params[option]]
    with open(snakemake.log[0], "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:
            print(f"[model] {line}", end="", flush=True)
            log.write(line)
        return process.wait()


if "snakemake" in globals():
    sys.exit(main(globals()["snakemake"]))
