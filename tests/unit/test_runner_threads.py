"""How many threads a step gets: never a core that others use, and one where one is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from thinkfold.runner import threads
from thinkfold.runner.threads import CHECK_S, MOST_TOKENS, PATIENCE, StepThreads


class Machine:
    """A clock that steps move forward, other processes' load, and what torch was told."""

    def __init__(self, most: int, num_cores: int, seconds: Callable[[int, int], float]) -> None:
        self.now = 0.0
        self.busy = 0.0
        self.told: list[int] = []
        self._seconds = seconds
        self.steps = StepThreads(most, num_cores, lambda: self.busy, clock=lambda: self.now, use=self.told.append)

    def run(self, num_tokens: int, count: int) -> list[int]:
        """Threads of `count` steps."""
        used = []
        for _ in range(count):
            with self.steps.step(num_tokens):
                used.append(self.told[-1])
                self.now += self._seconds(num_tokens, used[-1])
        return used


def test_the_faster_way_is_found_for_each_size_and_asked_for_again() -> None:
    machine = Machine(2, 2, lambda tokens, n: 0.007 if tokens < 4 and n == 1 else 0.010 if n == 2 else 0.020)
    machine.run(1, 10)
    machine.run(16, 10)
    small, large = machine.run(1, 3 * PATIENCE), machine.run(16, 3 * PATIENCE)
    assert 1 <= small.count(2) <= 3 and small[-1] == 1
    assert 1 <= large.count(1) <= 3 and large[-1] == 2
    assert machine.told[-1] == 2  # between steps torch has its own number


def test_a_way_that_has_become_slow_is_left() -> None:
    slow = False
    machine = Machine(2, 2, lambda tokens, n: (0.400 if slow else 0.010) if n == 2 else 0.020)
    assert machine.run(8, 20)[-1] == 2
    slow = True
    used = machine.run(8, 40)
    assert used.index(1) <= 3 and set(used[4:]) == {1}


@pytest.mark.parametrize(
    ("busy", "most", "num_cores", "expected"),
    [
        (0.0, 2, 2, 2),
        (0.4, 2, 2, 2),
        (0.6, 2, 2, 1),
        (1.0, 2, 2, 1),
        (9.0, 2, 2, 1),
        (3.0, 16, 16, 13),
        (3.0, 8, 16, 8),
    ],
)
def test_cores_that_others_use_are_left_to_them(busy: float, most: int, num_cores: int, expected: int) -> None:
    machine = Machine(most, num_cores, lambda tokens, n: 1.0 / n)
    machine.busy, machine.now = busy, CHECK_S
    assert machine.run(MOST_TOKENS + 1, 3) == [expected] * 3


def test_the_load_of_others_is_asked_for_now_and_then() -> None:
    machine = Machine(2, 2, lambda tokens, n: CHECK_S / 4)
    machine.busy = 1.0
    used = machine.run(500, 8)
    assert used[0] == 2 and used[-1] == 1
    machine.busy = 0.0
    assert machine.run(500, 8)[-1] == 2


def test_a_failed_step_gives_torch_its_number_back() -> None:
    machine = Machine(4, 4, lambda tokens, n: 0.0)
    machine.busy, machine.now = 4.0, CHECK_S
    with pytest.raises(ZeroDivisionError), machine.steps.step(100):
        raise ZeroDivisionError
    assert machine.told == [1, 4]


def test_one_thread_and_fixed_threads_are_left_alone() -> None:
    machine = Machine(1, 2, lambda tokens, n: 0.0)
    with machine.steps.step(1):
        pass
    assert machine.told == []


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("fixed", [False, True])
def test_in_this_process_torchs_number_is_the_most(three_threads: None, fixed: bool) -> None:
    steps = threads.step_threads(fixed=fixed)
    for tokens in (1, 1, 100):
        with steps.step(tokens):
            assert torch.get_num_threads() == 3 if fixed else 1 <= torch.get_num_threads() <= 3
        assert torch.get_num_threads() == 3


class Core(NamedTuple):
    """What psutil says of a core, in seconds."""

    user: float
    idle: float
    steal: float
    guest: float


def test_others_are_counted_on_own_cores_without_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [Core(10.0, 5.0, 0.0, 0.0)] * 3
    clock, own = 100.0, 7.0
    monkeypatch.setattr(threads.psutil, "cpu_times", lambda percpu: cores)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(threads.time, "process_time", lambda: own)
    others = threads._Others([0, 2])
    cores = [Core(11.5, 5.5, 0.0, 0.0), Core(12.0, 5.0, 0.0, 0.0), Core(11.0, 6.0, 0.5, 0.5)]
    clock, own = 102.0, 8.0
    assert others() == pytest.approx((1.5 + 1.5 - 1.0) / 2)
    clock, own = 103.0, 9.0
    assert others() == 0.0
