"""`thinkfold top`: the engine of a running server in a terminal."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from thinkfold.cli.engine_client import API_KEY, EngineClient
from thinkfold.errors import ParameterError, ThinkfoldError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch the engine of a running server",
        description=f"KV memory by class, requests, throughput and the pressure ladder. A key comes from {API_KEY}.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (default: 1)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show until `q`. Raises ThinkfoldError if the server does not answer at first."""
    if not 0.1 <= args.interval <= 3600:
        raise ParameterError("interval", f"must be in [0.1, 3600] seconds, got {args.interval}")
    if find_spec("textual") is None:
        raise ThinkfoldError('needs the package textual: pip install "thinkfold[top]"')
    from thinkfold.cli.top_screen import TopApp

    client = EngineClient(args.url)
    TopApp(client.read, client.read(), client.url, args.interval).run()
    return 0
