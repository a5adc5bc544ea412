"""`thinkfold bench accuracy`: every arm meets every question once, in its own order, and is paired by question."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from thinkfold.cli import arms as cli_arms
from thinkfold.cli import bench, processes
from thinkfold.cli.arms import Arm, arms
from thinkfold.cli.evaluation import Result, Sample
from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.types import FoldParams

accuracy = bench.load(Path(__file__).parents[2] / "benchmarks" / "accuracy.py")


def result(index: int, correct: bool, thinking: int, peak: int) -> Result:
    sample = Sample("1", correct, thinking + 10, thinking, "stop", "natural")
    return Result(index, "sums", "?", "1", [sample], correct, peak, 3, None)


def test_arms_are_policy_selector_and_entries() -> None:
    assert arms(["off", "off", "eager", "eager/snap/16", "pressure/drop"]) == [
        Arm("off", FoldParams(policy="off")),
        Arm("off#2", FoldParams(policy="off")),
        Arm("eager", FoldParams(policy="eager")),
        Arm("eager/snap/16", FoldParams(policy="eager", selector="snap", entries=16)),
        Arm("pressure/drop", FoldParams(policy="pressure", selector="drop")),
    ]


@pytest.mark.parametrize("word", ["", "often", "eager/best", "eager/snap/many", "eager/snap/-1"])
def test_what_is_no_arm_is_refused(word: str) -> None:
    with pytest.raises(ParameterError, match="arms"):
        arms([word])


def test_each_arm_asks_every_question_once_in_its_own_order() -> None:
    args = accuracy.parse(["-n", "11", "--offset", "5", "--processes", "3", "--arms", "off", "off", "eager"])
    asked = arms(args.arms)
    cut = accuracy.shards(args, asked)
    assert len(cut) == 3 and all([arm for arm, _ in shard.questions] == asked for shard in cut)
    orders = [[shard.questions[number][1] for shard in cut] for number in range(3)]
    assert all(sorted(chain.from_iterable(order)) == list(range(5, 16)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert accuracy.shards(args, asked) == cut
    few = accuracy.parse(["-n", "2", "--processes", "5"])
    assert len(accuracy.shards(few, asked[:1])) == 2, "no process without a question"


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_arms, "ask", os._exit)  # called with what it does not take: exit code 1
    monkeypatch.setattr(processes, "PATIENCE", 0.05)
    with pytest.raises(ThinkfoldError, match="exit code 1"):
        list(cli_arms.measure(accuracy.shards(accuracy.parse(["-n", "1"]), arms(["off"])), arms(["off"])))


def test_rows_are_paired_with_the_first_arm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = {
        "off": [result(i, i != 1, 9000 if i else 5000, 10_000) for i in range(4)],
        "eager": [result(i, True, 6000, 1500) for i in range(4)],
    }

    def measured(_: Any, asked: Sequence[Arm], __: int) -> Iterator[tuple[Arm, list[Result], float]]:
        for arm in asked:
            yield arm, made[arm.name], 2.0

    monkeypatch.setattr(accuracy, "measure", measured)
    words = ["--arms", "off", "eager", "--no-record", "--json", "--out", str(tmp_path / "answers")]
    assert accuracy.main(words) == 0
    off, eager = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (off["case"], eager["case"]) == ("long/off", "long/eager")
    assert off["metrics"]["accuracy"] == off["metrics"]["accuracy_sums"] == 0.75
    assert eager["metrics"]["diff_points"] == 25.0 and (eager["metrics"]["b"], eager["metrics"]["c"]) == (0, 1)
    assert eager["metrics"]["kv_peak_ratio_long"] == 0.15 and eager["metrics"]["n_long"] == 3
    assert "diff_points" not in off["metrics"]
    assert sorted(path.name for path in (tmp_path / "answers").iterdir()) == ["eager.jsonl", "off.jsonl"]
