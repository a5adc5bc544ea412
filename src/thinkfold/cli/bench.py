"""`thinkfold bench NAME`: run one script of the checkout's benchmarks folder."""

from __future__ import annotations

import argparse
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from thinkfold.cli import rows
from thinkfold.errors import ParameterError, ThinkfoldError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the command line."""
    parser = subparsers.add_parser(
        "bench", allow_abbrev=False, help="run a benchmark of the checkout", description=__doc__
    )
    parser.add_argument("name", help=f"one of: {', '.join(sorted(scripts())) or 'none (this is not a checkout)'}")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark, such as --json or --help")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `main(options)` of the script and return its exit code. Raises ThinkfoldError without a checkout."""
    known = scripts()
    if not known:
        raise ThinkfoldError("benchmarks are part of the repository, not of the package: run this from a checkout")
    if args.name not in known:
        raise ParameterError("bench", f"there is no benchmark {args.name!r}, there are {', '.join(sorted(known))}")
    return load(known[args.name]).main(args.options)


def scripts() -> dict[str, Path]:
    """Benchmarks of the checkout by name; empty for an installed wheel."""
    root = rows.checkout()
    return {} if root is None else {path.stem: path for path in (root / "benchmarks").glob("[a-z]*.py")}


def load(path: Path) -> Any:
    """Import a script that is part of no package."""
    spec = spec_from_file_location(f"benchmarks.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
