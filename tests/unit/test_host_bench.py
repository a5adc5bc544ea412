"""`thinkfold bench host`: a whole core and a whole client without a model's arithmetic. Nothing here is about speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinkfold.cli import bench

host = bench.load(Path(__file__).parents[2] / "benchmarks" / "host.py")


def measured(case: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    words = ["--case", case, "--warm", "512", "--steps", "8", "--json", "--no-record"]
    assert host.main(words) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["bench"], row["case"]) == ("host", case)
    return row["metrics"]


def test_a_step_is_planned_packed_and_told_and_its_thinking_folded(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured("step/3", capsys)
    assert found["rows"] == 3 and found["folds"] > 0
    parts = {f"{name}_ms" for name in ("plan", "pack", "collect", "ledger", "accept", "tell")}
    assert parts | {"step_ms", "host_ms", "host_mean_ms", "host_p10_ms", "rows", "folds"} == set(found)
    assert min(found.values()) >= 0


def test_rules_read_what_clients_read_and_look(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured("control/2", capsys)
    assert found["looks"] > 0
    assert {"control_ms", "control_mean_ms", "control_p10_ms"} < set(found)


@pytest.mark.parametrize("words", [["--case", "step"], ["--warm", "8"], ["--steps", "5000"]])
def test_what_it_cannot_measure_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host.main([*words, "--no-record"])
    assert words[0] in capsys.readouterr().err
