"""The command `pagedkv`: hold the claims against their evidence, and say what this machine can run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 where verify finds something wrong, 2 where the command itself cannot do its work."""
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `pagedkv verify | head`: the reader has seen enough; Python's own flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _errors() as error:
        print(f"pagedkv: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagedkv", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    verify = commands.add_parser("verify", help="hold every claim against its evidence (exit 1 if one does not hold)")
    verify.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
    verify.add_argument("--allow-stale", action="store_true", help="list stale evidence, but exit 0 for it")
    verify.set_defaults(run=_verify)

    render = commands.add_parser("render", help="fill the claim markers of README.md from the ledger")
    render.set_defaults(run=_render)

    doctor = commands.add_parser("doctor", help="what this machine can run, and how to get what is missing")
    doctor.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
    doctor.set_defaults(run=_doctor)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)

    for command in (verify, render):
        command.add_argument("--root", type=Path, metavar="DIR", help="the checkout (default: the one around the working directory)")
    return parser


def _verify(options: argparse.Namespace) -> int:
    from pagedkv.evidence import verify
    from pagedkv.evidence.root import find_root

    findings = verify.Verifier(find_root(options.root)).findings()
    print(verify.as_json(findings) if options.json else verify.as_text(findings))
    return verify.exit_status(findings, options.allow_stale)


def _render(options: argparse.Namespace) -> int:
    from pagedkv.evidence import verify
    from pagedkv.evidence.root import find_root

    changed = verify.render(find_root(options.root))
    print(f"rendered {', '.join(changed)}" if changed else "every marker already says what the ledger says")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from pagedkv.evidence import doctor

    findings = doctor.examine()
    print(doctor.as_json(findings) if options.json else doctor.as_text(findings))
    return 0


def _version(options: argparse.Namespace) -> int:
    import pagedkv

    print(pagedkv.__version__)
    return 0


def _errors() -> tuple[type[Exception], ...]:
    """What ends in one line instead of a traceback."""
    from pagedkv.evidence.ledger import LedgerError
    from pagedkv.evidence.record import RecordError
    from pagedkv.evidence.schema import SchemaError

    return (LedgerError, RecordError, SchemaError, FileNotFoundError)


if __name__ == "__main__":
    sys.exit(main())
