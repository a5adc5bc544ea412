# pyright: reportMissingImports=false
"""`thinkfold deploy`: replicas behind one door, on Ray Serve."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from thinkfold.cli.fleet_settings import Deployment, check_together, load_deployment
from thinkfold.cli.serve import access_rules, server_options, warm_prefixes
from thinkfold.errors import EngineDeadError, ParameterError

if TYPE_CHECKING:
    from thinkfold.server.access.gate import Access
    from thinkfold.server.prefixes import WarmPrefix
    from thinkfold.server.state import ServerOptions


LOCAL = "127.0.0.1"  # a cluster of this machine alone is for nobody else


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "deploy",
        allow_abbrev=False,
        help="serve with replicas and tiers on Ray Serve",
        description="Reads a YAML file of pools (see docs/scale.md) and serves it, here until a signal, or with "
        "--address on a cluster, where it stays until `serve shutdown`.",
    )
    parser.add_argument("config", metavar="FILE", nargs="+", help="a YAML file; each one is a model of its own")
    parser.add_argument("--address", help="a running cluster, such as auto; without it one is started here")
    parser.add_argument("--check", action="store_true", help="read the files, say what they would start, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve. Raises ParameterError for a file that is wrong, EngineDeadError if the application does not start."""
    found = [load_deployment(path) for path in args.config]
    check_together(found)
    if args.check:
        for pool in (pool for each in found for pool in each.fleet.pools.values()):
            counts, takes = pool.replicas, f"{pool.cpus:g} CPUs and {pool.gpus:g} GPUs each"
            print(f"{pool.name}: {counts.min} to {counts.max} replicas of {pool.engine.model}, {takes}")
        return 0
    with deployed(found, args.address):
        for each in found:
            print(f"thinkfold serves {', '.join(each.fleet.pools)} at {each.fleet.url}", flush=True)
        if args.address is None:
            _wait_for_signal()
    return 0


@contextmanager
def deployed(found: Sequence[Deployment], address: str | None = None) -> Iterator[None]:
    """The applications run. Without an address they end with the context, and Ray with them."""
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise ParameterError("deploy", f"needs {error.name}: pip install 'thinkfold[ray]'") from None
    from thinkfold.deploy.ray_serve.app import build_application

    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local", _node_ip_address=LOCAL, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING
        )
    else:
        ray.init(address)
    try:
        serve.start(http_options={"host": found[0].fleet.host, "port": found[0].fleet.port})
        for each in found:
            application = build_application(each.fleet, partial(services, each))
            try:
                serve.run(application, name=each.fleet.name, route_prefix=each.fleet.prefix)
            except RuntimeError:  # what Serve says of a deployment that does not start; it knows why by itself
                raise EngineDeadError(f"{each.fleet.name} does not start: {_why(each.fleet.name)}") from None
        yield
    finally:
        if address is None:
            serve.shutdown()
            ray.shutdown()


def _why(app: str) -> str:
    """The last word of the deployments that have not started."""
    from ray import serve

    deployments = serve.status().applications[app].deployments.values()
    lines = [line.strip() for each in deployments if each.status != "HEALTHY" for line in each.message.splitlines()]
    ours = [line for line in lines if line.startswith("thinkfold.errors.")]
    return (ours or [line for line in lines if line] or ["see the logs of Ray"])[-1].removeprefix("thinkfold.errors.")


def services(found: Deployment) -> tuple[ServerOptions, Access, Sequence[WarmPrefix]]:
    """What the door goes by, read where it runs. Raises ParameterError."""
    options = replace(server_options(found.serve), tiers=found.fleet.tiers())
    return options, access_rules(found.serve, os.environ), warm_prefixes(found.serve)


def _wait_for_signal() -> None:
    """Until SIGINT or SIGTERM."""
    over = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: over.set())
    while not over.wait(1.0):
        pass
