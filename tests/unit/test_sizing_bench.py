"""`thinkfold bench sizing`: cards on one simulated clock behind the real router; nothing is lost, lines are lines."""

from __future__ import annotations

import dataclasses
import json
from itertools import islice
from pathlib import Path

import pytest
from test_simulation import NUMBERS, make, make_work

from thinkfold.cli import bench
from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.scheduler.simulation import Simulation, StepTime
from thinkfold.types import FoldMode, FoldPolicy

sizing = bench.load(Path(__file__).parents[2] / "benchmarks" / "sizing.py")
TIMES = StepTime(5e-3, 0.0, 1e-8)


@pytest.mark.parametrize("mode", [FoldMode.OFF, FoldMode.EAGER])
def test_what_is_fed_as_time_goes_by_ends_as_what_was_known_before(mode: FoldMode) -> None:
    work = list(make_work(30, gap=0.4))
    options = {"fold": FoldPolicy(mode, entries=4), "numbers": NUMBERS, "budget": 400, "max_tokens": 410}
    whole = Simulation(make(), work, **options).run()
    ended: list[int] = []
    fed = Simulation(make(), **options, on_end=lambda branch: ended.append(branch.order))
    for item in work:
        fed.advance(item.arrival)
        fed.feed(item)
    fed.advance(float("inf"))
    assert sorted(ended) == list(range(30))
    outcome = fed.run()
    same = ("completed", "failed", "steps", "output_tokens", "folds", "wait_p99_s", "latency_p99_s", "pages_left")
    assert {name: getattr(outcome, name) for name in same} == {name: getattr(whole, name) for name in same}
    assert len(fed.waits) == len(fed.latencies) == 30


def test_time_does_not_run_ahead_of_what_is_asked() -> None:
    first, second = islice(make_work(2, gap=1000.0), 2)
    fed = Simulation(make(), budget=400, max_tokens=410)
    fed.feed(first)
    fed.feed(second)
    fed.advance(0.05)
    assert len(fed.waits) == 1 and not fed.latencies
    fed.advance(999.0)
    assert len(fed.latencies) == 1
    fed.advance(float("inf"))
    assert len(fed.latencies) == 2 and fed.waits == [0.0, 0.0]


@pytest.mark.parametrize(("policy", "router"), [("off", "affinity"), ("eager", "random")])
def test_a_fleet_loses_nothing(policy: str, router: str) -> None:
    fleet = sizing.Fleet(3, FoldMode(policy), router, 2000, TIMES, slots=8)
    work = list(islice(sizing.LOAD.work(1, rate=0.05), 24))
    fleet.run(work)
    outcomes = [card.simulation.run() for card in fleet.cards.values()]
    assert sum(outcome.completed for outcome in outcomes) == 24 and fleet.failed == 0
    assert all(outcome.pages_left == 0 for outcome in outcomes)
    assert not list(fleet.pool.flights()) and sum(fleet.pool.routed.values()) == 24
    assert all(card.fed for card in fleet.cards.values())


def test_requests_go_where_memory_will_be_free() -> None:
    """Of two cards the one that holds nothing gets the next one, and what runs weighs by what it will hold."""
    fleet = sizing.Fleet(2, FoldMode.OFF, "affinity", 4000, TIMES, slots=8)
    works = list(islice(sizing.LOAD.work(2, rate=1.0), 6))
    fleet.run([dataclasses.replace(work, arrival=0.0) for work in works])
    assert [len(card.fed) for card in fleet.cards.values()] == [3, 3]


def rows_of(path: Path, points: dict[str, float], hardware: str = "NVIDIA H200; a CPU") -> Path:
    lines = [
        json.dumps({"case": case, "hardware": hardware, "metrics": {"step_ms": ms}}) for case, ms in points.items()
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_step_times_are_a_line_through_the_newest_rows(tmp_path: Path) -> None:
    points = {f"7b/{batch}x{k}k": 5.0 + 1e-5 * batch * 1024 * k for batch, k in ((32, 4), (16, 16), (64, 1))}
    path = rows_of(tmp_path / "decode.jsonl", {"7b/1x32k/sampled": 99.0, "32b/32x4k": 99.0, **points})
    found = sizing.step_time(path, "7b", "H200")
    assert found.step == pytest.approx(5e-3) and found.entry == pytest.approx(1e-8) and found.token == 0.0
    with pytest.raises(ThinkfoldError, match="0 shapes of 7b on H100"):
        sizing.step_time(path, "7b", "H100")


@pytest.mark.parametrize("case", ["off", "off/affinity/8", "never/affinity/8x1", "off/nearest/8x1", "off/random/0x1"])
def test_a_case_that_is_none_is_refused(case: str) -> None:
    with pytest.raises(ParameterError, match="case: must be policy/router"):
        sizing.main(["--case", case, "--no-record"])


def test_a_row_of_two_cards(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--case", "eager/affinity/2x0.5", "--requests", "4", "--slots", "4", "--json", "--no-record"]
    assert sizing.main(words) == 0
    row = json.loads(capsys.readouterr().out)
    numbers = row["metrics"]
    assert row["case"] == "eager/affinity/2x0.5" and (numbers["completed"], numbers["failed"]) == (8, 0)
    assert numbers["latency_p99_s"] >= numbers["latency_p50_s"] > numbers["wait_p50_s"] >= 0
