"""`thinkfold bench fold_step` folds what it says, on a small shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from thinkfold.cli import bench
from thinkfold.errors import ParameterError

fold_step = bench.load(Path(__file__).parents[2] / "benchmarks" / "fold_step.py")
CASE = "64to16/2x2x2x16"


def test_a_fold_ends_in_its_table_and_its_blocks() -> None:
    cpu = torch.device("cpu")
    made = fold_step.Slot.of(fold_step.Shape.parse(CASE), 16, "conclusion_attention", cpu)
    assert 0.0 < float(made.judge()) < 1.0
    made.folder.commit(made.commit)
    with pytest.raises(KeyError):  # it is gone with the commit
        made.folder.commit(made.commit)


def test_a_row_has_both_halves_and_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--case", CASE, "--runs", "1", "--device", "cpu", "--json", "--no-record"]
    assert fold_step.main(options) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["case"] == CASE
    assert min(row["metrics"].values()) > 0
    assert {"prepare_device_ms", "prepare_host_ms", "commit_device_ms", "commit_host_ms", "floor_ms"} == set(
        row["metrics"]
    )


@pytest.mark.parametrize("case", ["512", "512to32", "512to32/4x4", "atob/1x1x1x1"])
def test_a_case_that_is_none_is_refused(case: str) -> None:
    with pytest.raises(ParameterError, match="case"):
        fold_step.Shape.parse(case)
