"""How many threads a step on a CPU uses: as many as are free, and one where one is faster.

Every parallel region waits for its last thread. If a busy neighbour holds that thread's core, a
step takes tens of times as long; and for a small step, waking threads costs more than they save.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

CHECK_S = 0.25  # how often to look what others do
SLACK = 0.5  # of a core: whether so much of their work disturbs is found out by trying
MOST_TOKENS = 64  # a step of more tokens is no small one
TRIES = 3  # steps with one thread and with all before the two are compared
PATIENCE = 64  # steps until the slower way is tried again, times how much slower it was
NEWEST = 0.3  # weight of the newest step in a mean
IDLE = ("idle", "iowait", "guest", "guest_nice")  # what psutil counts that is no work, or counts twice


class StepThreads:
    """Chooses for each step of one thread that runs a model, by other processes' load and by time measured.

    `most` threads are never exceeded; 1 leaves the choice to torch. `others` says how many cores'
    worth of work other processes did since its last call.
    """

    def __init__(
        self,
        most: int,
        num_cores: int,
        others: Callable[[], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        use: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._most = most
        self._num_cores = num_cores
        self._others = others
        self._clock = clock
        self._use = use
        self._free = most
        self._checked = clock()
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Run the body with the threads of its choice; afterwards torch has its own number again."""
        if self._most == 1:
            yield
            return
        started = self._clock()
        threads = self._choose(num_tokens, started)
        self._use(threads)
        try:
            yield
        finally:
            self._use(self._most)
        if num_tokens <= MOST_TOKENS:
            self._sizes[num_tokens.bit_length()].note(self._clock() - started, alone=threads == 1)

    def _choose(self, num_tokens: int, now: float) -> int:
        if now - self._checked >= CHECK_S:
            self._checked = now
            self._free = max(1, min(self._most, int(self._num_cores - self._others() + SLACK)))
        if self._free > 1 and num_tokens <= MOST_TOKENS and self._sizes[num_tokens.bit_length()].wants_one():
            return 1
        return self._free


@dataclass(slots=True)
class _Way:
    """Steps of one size done in one way."""

    count: int = 0
    seconds: float = 0.0

    def note(self, seconds: float) -> None:
        self.seconds = seconds if self.count == 0 else self.seconds + NEWEST * (seconds - self.seconds)
        self.count += 1


@dataclass(slots=True)
class _Size:
    """Steps of about the same number of tokens."""

    one: _Way = field(default_factory=_Way)
    many: _Way = field(default_factory=_Way)
    since: int = 0  # steps since the slower way was tried

    def note(self, seconds: float, *, alone: bool) -> None:
        (self.one if alone else self.many).note(seconds)

    def wants_one(self) -> bool:
        """Whether the next step should have one thread, where it could have more."""
        one, many = self.one, self.many
        if min(one.count, many.count) < TRIES:
            return one.count <= many.count
        faster, slower = sorted((one.seconds, many.seconds))
        self.since += 1
        other = self.since * faster >= PATIENCE * slower
        if other:
            self.since = 0
        return (one.seconds <= many.seconds) is not other


def step_threads(*, fixed: bool) -> StepThreads:
    """For steps from this thread: what torch would use, or if not `fixed` at most that many on this process's cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return StepThreads(1 if fixed else torch.get_num_threads(), len(cores), _Others(cores))


class _Others:
    """Work of other processes on some cores, in cores, since the last call."""

    def __init__(self, cores: list[int]) -> None:
        self._cores = cores
        self._before = self._now()

    def __call__(self) -> float:
        before, self._before = self._before, self._now()
        wall, busy, own = (now - then for now, then in zip(self._before, before, strict=True))
        return max(0.0, busy - own) / max(wall, 1e-3)

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of work on the cores by anybody, of work of this process."""
        times = [core for i, core in enumerate(psutil.cpu_times(percpu=True)) if i in self._cores]
        idle = sum(getattr(core, name, 0.0) for core in times for name in IDLE)
        return time.perf_counter(), sum(map(sum, times)) - idle, time.process_time()
