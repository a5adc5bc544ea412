"""Work in several processes: all that is told comes, and a process that dies is an error."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from thinkfold.cli import processes
from thinkfold.errors import ThinkfoldError


def squares(numbers: list[int], tell: Callable[[int], None]) -> None:
    for number in numbers:
        tell(number * number)


def dies(number: int, tell: Callable[[int], None]) -> None:
    tell(number)
    os._exit(3)


def test_everything_that_is_told_comes() -> None:
    assert sorted(processes.spread(squares, [[1, 2], [], [3]])) == [1, 4, 9]


def sees(number: int, tell: Callable[[tuple[int, str]], None]) -> None:
    tell((number, os.environ.get(processes.VISIBLE, "all")))


def test_each_process_sees_one_gpu_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processes.VISIBLE, raising=False)
    assert sorted(processes.spread(sees, [0])) == [(0, "all")]
    assert sorted(processes.spread(sees, [0, 1, 2], gpus=2)) == [(0, "0"), (1, "1"), (2, "0")]
    monkeypatch.setenv(processes.VISIBLE, "5,7")
    assert sorted(processes.spread(sees, [0, 1], gpus=2)) == [(0, "5"), (1, "7")]


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 0.05)
    with pytest.raises(ThinkfoldError, match="exit code 3"):
        list(processes.spread(dies, [1]))
