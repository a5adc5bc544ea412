"""`thinkfold bench start`: the row holds medians, and a reply without a token is an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from thinkfold.cli import bench
from thinkfold.errors import ThinkfoldError

start = bench.load(Path(__file__).parents[2] / "benchmarks" / "start.py")


def test_the_row_holds_medians(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = iter([start.Start(3.0, 4.0, 600.0), start.Start(1.0, 9.0, 650.0), start.Start(2.0, 5.0, 500.0)])
    monkeypatch.setattr(start, "measure", lambda: next(runs))
    assert start.main(["--json", "--no-record"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics == {"ready_s": 2.0, "first_token_s": 5.0, "idle_mb": 600.0, "runs": 3}


def test_memory_is_that_of_all_processes() -> None:
    own = psutil.Process(os.getpid())
    assert start.resident(own) >= 0.9 * own.memory_info().rss / 1e6 > 1.0


@pytest.mark.parametrize(
    ("body", "found"), [('data: {"choices": [{"delta": {"reasoning": "1"}}]}\n', True), ("", False)]
)
def test_a_reply_without_a_token_is_an_error(body: str, found: bool) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=": hello\n" + body))
    with httpx.Client(base_url="http://test", transport=transport) as client:
        if found:
            assert start._first_token(client) > 0.0
        else:
            with pytest.raises(ThinkfoldError, match="no token came: status 200"):
                start._first_token(client)


DEAF = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20); print('alive')"])
print("ready", flush=True)
child.wait()
"""


def test_a_server_that_does_not_end_is_killed_with_its_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        start.stop(server, grace=0.05)
        assert server.returncode == -signal.SIGKILL
        assert server.stdout.read() == b"", "what it has started still writes"


def test_a_server_that_has_ended_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as server:
        server.wait()
        start.stop(server)
        assert server.returncode == 0
