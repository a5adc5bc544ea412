"""Result rows: their shape, what they keep and what they do not tell."""

import json
from pathlib import Path

import pytest

from thinkfold.cli import rows

KEYS = ["bench", "case", "metrics", "hardware", "versions", "commit", "command", "date", "seed"]


def test_row_has_the_shape_of_the_contract() -> None:
    row = rows.make_row("eval", "medium", {"accuracy": 1 / 3, "n": 200}, seed=7, extra_versions={"model": "m"})
    assert list(row) == KEYS
    assert row["metrics"] == {"accuracy": 0.333333, "n": 200}
    assert {"thinkfold", "python", "torch", "transformers", "model"} <= set(row["versions"])
    assert json.loads(json.dumps(row)) == row


def test_rows_are_appended_to_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "checkout", lambda: tmp_path)
    for case in ("a", "b"):
        path = rows.keep({"bench": "eval", "case": case})
    assert path == tmp_path / "benchmarks" / "results" / "eval.jsonl"
    assert [json.loads(line)["case"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_without_a_checkout_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "checkout", lambda: None)
    assert rows.keep({"bench": "eval"}) is None
    assert rows.commit().startswith("v")


def test_command_shows_no_foreign_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["/opt/x/bin/thinkfold", "eval", "--model", "/data/private/m 1", "--data", str(tmp_path / "q" / "d.jsonl")]
    assert rows.command_line(argv) == "thinkfold eval --model 'm 1' --data q/d.jsonl"
    assert rows.command_line(["/x/benchmarks/serve.py", "--json"]) == "python benchmarks/serve.py --json"
