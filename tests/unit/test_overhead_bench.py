"""`thinkfold bench overhead`: how late tokens are, when that is falling behind, and each case on a few streams."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from thinkfold.cli import bench
from thinkfold.errors import ThinkfoldError
from thinkfold.types import FinishReason

overhead = bench.load(Path(__file__).parents[2] / "benchmarks" / "overhead.py")


def came(lag_of: list[float]) -> Any:
    """One token in each tenth of a second, so late."""
    arrivals = overhead.Arrivals()
    for i, lag in enumerate(lag_of):
        now = 100.0 + i / 10
        arrivals.take(b'data: {"reasoning":"%d "}\n\n' % round((now - lag) * 1e6), now)
    return arrivals


@pytest.mark.parametrize(("last", "behind"), [(0.04, 0), (0.08, 0), (0.2, 1)])
def test_a_growing_lag_is_falling_behind(last: float, behind: int) -> None:
    found = came([0.04] * 30 + [last] * 10).metrics(100.0, 4.0)
    assert found["falls_behind"] == behind
    assert found["lag_growth_s"] == pytest.approx(last - 0.04)
    assert (found["tokens_per_s"], found["lag_p50_s"]) == (10.0, pytest.approx(0.04))
    assert found["lag_max_s"] == found["lag_p99_s"] == pytest.approx(last)


def test_what_came_outside_the_time_does_not_count() -> None:
    assert came([9.0] * 5 + [0.04] * 8 + [9.0] * 5).metrics(100.5, 0.8)["lag_max_s"] == pytest.approx(0.04)
    with pytest.raises(ThinkfoldError, match="no token came"):
        came([0.04] * 3).metrics(100.0, 4.0)


def test_tokens_are_made_by_the_clock_however_late_they_are_told() -> None:
    thinker = overhead.Thinker("r", 4, began=10.0)
    thinker.tell(10.05, rate=50.0)
    assert thinker.stream.pending.outputs[0].reasoning == "10000000 10020000 10040000 "
    thinker.tell(19.0, rate=50.0)
    thinker.tell(20.0, rate=50.0)
    output = thinker.stream.pending
    assert output.finished and output.outputs[0].finish_reason is FinishReason.LENGTH
    assert output.outputs[0].reasoning.split()[3:] == ["10060000"]


def test_streams_and_health_of_a_server_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "SETTLE_S", 0.2)
    words = ["--case", "streams", "--case", "health", "--streams", "3", "--posters", "1", "--seconds", "2"]
    assert overhead.main([*words, "--json", "--no-record"]) == 0
    streams, health = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (streams["case"], health["case"]) == ("streams/3x50", "health/20mb")
    assert streams["metrics"]["offered_per_s"] == 150.0 and streams["metrics"]["tokens_per_s"] > 0.0
    assert health["metrics"]["refused_per_s"] > 0.0
    assert 0.0 < health["metrics"]["health_p50_s"] <= health["metrics"]["health_p99_s"]


def test_the_floor_sends_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is told once, in its order, as the microsecond in which it was due: 20 ms apart."""

    async def floor() -> Any:
        server, arrivals, port = asyncio.create_task(overhead.serve(50.0, 0.04, bare=True)), overhead.Arrivals(), ""
        while not port:
            await asyncio.sleep(0.02)
            port = capsys.readouterr().out
        reader = asyncio.create_task(overhead._read(int(port), 10**6, arrivals))
        while arrivals.events < 4:
            await asyncio.sleep(0.02)
        reader.cancel()
        server.cancel()
        return arrivals

    came = asyncio.run(asyncio.wait_for(floor(), 60))
    due = [at - lag for at, lag in zip(came.at, came.lag, strict=True)]
    assert [b - a for a, b in pairwise(due)] == pytest.approx([0.02] * (len(due) - 1), abs=1e-5)
    assert min(came.lag) >= 0.0 and len(due) > came.events
