"""`thinkfold bench page`: its rows hold what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser import needs_browser
from thinkfold.cli import bench

page = bench.load(Path(__file__).parents[2] / "benchmarks" / "page.py")


@needs_browser
def test_rows_of_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--json", "--no-record", "--loads", "1", "--tokens", "2000", "--steps", "5"]) == 0
    paint, thinking = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (paint["case"], thinking["case"]) == ("paint", "thinking/2000")
    assert paint["metrics"]["loads"] == 1 and paint["metrics"]["first_paint_s"] > 0
    told = thinking["metrics"]
    assert told["characters"] > 2000 * 5
    assert 0 < told["scroll_p50_s"] <= told["scroll_p99_s"] <= told["scroll_max_s"]


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        page.main(["--loads", "0"])
    assert "--loads: must be at least 1" in capsys.readouterr().err
