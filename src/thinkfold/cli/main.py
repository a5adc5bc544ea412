"""`thinkfold`: finds the command and runs it. Errors are one line, without a traceback."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from thinkfold import __version__
from thinkfold.errors import ThinkfoldError

COMMANDS = ("serve", "deploy", "ask", "eval", "calibrate", "plan", "bench", "top")
USAGE_ERROR = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Tells an error in one line, not below a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {' '.join(message.split())} ({self.prog} --help says more)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(prog="thinkfold", description="An inference engine for models that think.")
    parser.add_argument("--version", action="version", version=f"thinkfold {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name in COMMANDS:
        import_module(f"thinkfold.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (2 for errors, 130 for Ctrl-C)."""
    args = build_parser().parse_args(argv)
    for out in (sys.stdout, sys.stderr):
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="backslashreplace")  # whatever the terminal's encoding, text gets out
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(import_module(f"thinkfold.cli.{args.command}").run(args))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return USAGE_ERROR
    except (ThinkfoldError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"thinkfold {args.command}: {message}", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
