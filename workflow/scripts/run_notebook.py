"""Run one experiment's notebook: what the rule `experiment` executes, once for each device.

The notebook's output lines appear on the terminal as they are printed. The executed notebook is the rule's log, so
it survives a failure; a failing cell ends the rule with the cell's traceback and the notebook's path.
"""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Progress:
    """A text stream that puts a label before each line; papermill copies the notebook's output to it."""

    def __init__(self, stream, label: str):
        self.stream, self.label, self.at_line_start = stream, label, True

    def write(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            self.stream.write(f"[{self.label}] {line}" if self.at_line_start else line)
            self.at_line_start = line.endswith("\n")

    def flush(self) -> None:
        self.stream.flush()


def prepare_environment(root: Path) -> None:
    """What the kernel inherits. Nothing of the user's own Jupyter, IPython or matplotlib set-up reaches a figure."""
    os.environ["PAGEDKV_CACHE_DIR"] = str(root / "build" / "kernels")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        folder = root / "build" / "jupyter" / variable.lower()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(folder)


def execute(notebook: str, executed: str, parameters: dict, label: str) -> None:
    """Run `notebook` and write it, executed, to `executed`. Raises what papermill raises."""
    import papermill
    import zmq
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(AsyncKernelManager):
        """The kernel is this interpreter, whatever kernelspecs are installed on the machine, or none."""

        def __init__(self, **options):
            super().__init__(transport_encryption="auto" if zmq.has("curve") else "disabled", **options)

        @property
        def kernel_spec(self):
            return KernelSpec(**get_kernel_dict())

    papermill.execute_notebook(
        notebook,
        executed,
        parameters=parameters,
        kernel_name="python3",
        language="python",
        kernel_manager_class=ThisInterpreter,
        shutdown_kernel="immediate",  # nothing is left to save, and an interrupt would print an error
        iopub_timeout=300,  # a busy machine takes longer than the default, 4 seconds, to hand over what a cell printed at its end
        progress_bar=False,
        stdout_file=Progress(sys.stdout, label),
        stderr_file=Progress(sys.stderr, label),
    )


def end_with_parent() -> None:
    """End this process, and with it the kernel, when Snakemake is gone.

    A killed Snakemake leaves its jobs behind. One that went on would write its outputs under the run that resumes.
    A shell stands between Snakemake and this process, so the grandparent is watched too.
    """

    def parents() -> tuple[int, int]:
        parent = os.getppid()
        try:
            return parent, int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # no /proc: watch the parent alone
            return parent, 0

    before = parents()

    def watch() -> None:
        while parents() == before:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=watch, daemon=True).start()


def main(snakemake) -> int:
    root = Path.cwd()
    device, experiment = snakemake.wildcards.device, snakemake.wildcards.experiment
    sources = list(snakemake.input.sources)
    notebook, executed = sources[0], snakemake.log.notebook
    end_with_parent()
    prepare_environment(root)
    Path(snakemake.output.figures).mkdir(parents=True, exist_ok=True)
    parameters = {
        "device": device,
        "quick": snakemake.params.quick,
        "record": snakemake.output.record,
        "figures": snakemake.output.figures,
        "rule": experiment,
        "sources": sources,
        "inputs": [*snakemake.input.reads, *snakemake.input.model],
    }
    label = f"{experiment} {device}"
    try:
        execute(notebook, executed, parameters, label)
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).strip()}"
        print(message if sys.stderr.isatty() else _COLOUR.sub("", message), file=sys.stderr)
        print(f"error: {notebook} failed on {device}; as far as it ran: {executed}", file=sys.stderr, flush=True)
        return 1
    if not Path(snakemake.output.record).exists():
        print(f"error: {notebook} ended without a record: does it call experiment.finish()?", file=sys.stderr, flush=True)
        return 1
    return 0


if "snakemake" in globals():
    sys.exit(main(globals()["snakemake"]))
