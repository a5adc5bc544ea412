"""What was released and may still be read: it waits until a launched step has finished."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Quarantine(Generic[T]):
    """Released things by the step that uses them last."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[T]] = {}
        self._finished_step = -1
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for things in self._waiting.values():
            yield from things

    def hold(self, thing: T, after_step: int) -> bool:
        """Keep `thing` until `after_step` has finished; False if it has and nothing is kept."""
        if after_step <= self._finished_step:
            return False
        self._waiting.setdefault(after_step, []).append(thing)
        self._size += 1
        return True

    def finish_step(self, step: int) -> list[T]:
        """`step` has finished: what waited for it or an earlier one, in order of release."""
        self._finished_step = max(self._finished_step, step)
        due = [s for s in self._waiting if s <= self._finished_step]
        free = [thing for s in sorted(due) for thing in self._waiting.pop(s)]
        self._size -= len(free)
        return free
