"""The picture and the table of engines, from rows as `thinkfold bench engines` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import engines_picture


def row(engine: str, workload: str, suite: str | None, p50: float, **metrics: float) -> dict[str, Any]:
    versions = {"model": "model"} if suite is None else {"model": "model", "suite": suite}
    return {"case": f"{engine}/{workload}", "metrics": {"p50_s": p50, **metrics}, "versions": versions}


RIGHT = {"accuracy": 0.75, "ci95_low": 0.55, "ci95_high": 0.88}
ROWS = [
    row("thinkfold", "maths", "hard", 9.0, **RIGHT),
    row("thinkfold", "maths", "hard", 16.0, kv_session_bytes=7.1e6, **RIGHT),
    row("thinkfold", "maths", None, 3.0, **RIGHT),
    row("llama.cpp", "maths", "hard", 30.0, **RIGHT),
    row("llama.cpp", "agents", "hard", 1.0),
    row("sglang", "maths", "hard", 0.0)
    | {"metrics": {}, "versions": {"model": "model", "suite": "hard", "reason": "no"}},
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "engines.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


def test_the_newest_row_of_the_suite_counts_and_reasons_stand_in_the_table(rows: Path) -> None:
    found = engines_picture.newest(rows)
    assert len(found) == 4 and found["model", "maths", "thinkfold"] == ROWS[1]
    lines = engines_picture.table(found).splitlines()
    assert "| model | `thinkfold/maths` | 16.00 |  |  |  | 7.10 |  | 0.750 |" in lines
    assert "| model | `sglang/maths` | no |  |  |  |  |  |  |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_engines_with_numbers_are_drawn(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "engines.svg"
    monkeypatch.setattr("sys.argv", ["engines_picture.py", "--rows", str(rows), "--out", str(out)])
    monkeypatch.setitem(engines_picture.matplotlib.rcParams, "svg.fonttype", "none")
    assert engines_picture.main() == 0 and "`thinkfold/maths`" in capsys.readouterr().out
    texts = "|".join(ElementTree.parse(out).getroot().itertext())
    assert "llama.cpp" in texts and "not told" in texts and "SGLang" not in texts
