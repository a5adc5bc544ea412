"""How long from an empty terminal to the first token, and how much memory does an idle server hold?

`thinkfold serve` on the embedded model, in a process of its own on this machine's CPU: seconds until it is ready, until
the first token of a first question, and the resident memory (MB, all its processes) before any question.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import httpx
import psutil

from thinkfold.cli import rows
from thinkfold.errors import ThinkfoldError

PATIENCE = 120.0  # seconds for a start, and for a first token
GRACE = 30.0  # seconds for an orderly end


@dataclass(frozen=True, slots=True)
class Start:
    """One start; seconds count from the command on."""

    ready_s: float
    first_token_s: float
    idle_mb: float


def measure() -> Start:
    """Start a server, look at its memory, ask, stop it. Raises ThinkfoldError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    command = [sys.executable, "-m", "thinkfold", "serve", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            _wait(client, server, started)
            ready, idle = time.monotonic() - started, resident(psutil.Process(server.pid))
            first = _first_token(client) - started
    finally:
        stop(server)
    return Start(ready, first, idle)


def stop(server: subprocess.Popen[bytes], grace: float = GRACE) -> None:
    """End a server; one that has not gone after `grace` seconds is killed, with what it has started."""
    if server.poll() is not None:
        return
    started = psutil.Process(server.pid).children(recursive=True)
    server.terminate()
    try:
        server.wait(grace)
    except subprocess.TimeoutExpired:
        for process in (server, *started):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait()


def resident(process: psutil.Process) -> float:
    """Resident memory of a process and those it has started, in MB of 10⁶ bytes."""
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True))) / 1e6


def _wait(client: httpx.Client, server: subprocess.Popen[bytes], started: float) -> None:
    while time.monotonic() - started < PATIENCE:
        if server.poll() is not None:
            raise ThinkfoldError(f"the server has ended with exit code {server.returncode}")
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise ThinkfoldError(f"the server is not ready after {PATIENCE:.0f} seconds")


def _first_token(client: httpx.Client) -> float:
    """When the first token of a question came."""
    question = {"model": "pebble", "messages": [{"role": "user", "content": "What is 12 * 34?"}], "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=question) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and any(c["delta"].get("reasoning") for c in json.loads(line[6:])["choices"]):
                return time.monotonic()
    raise ThinkfoldError(f"no token came: status {reply.status_code}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep the row: medians of the runs."""
    parser = argparse.ArgumentParser(prog="thinkfold bench start", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the row as JSON")
    parser.add_argument("--no-record", action="store_true", help="do not append the row to benchmarks/results")
    args = parser.parse_args(argv)
    if args.runs < 1:
        parser.error("--runs: must be at least 1")
    runs = [measure() for _ in range(args.runs)]
    names = ("ready_s", "first_token_s", "idle_mb")
    metrics = {name: median(getattr(run, name) for run in runs) for name in names} | {"runs": len(runs)}
    row = rows.make_row("start", "pebble", metrics)
    if not args.no_record:
        rows.keep(row)
    print(json.dumps(row) if args.json else "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
