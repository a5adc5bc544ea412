"""Looks at a scheduler after each step and adds up what it holds. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict

from thinkfold.kv.pages import PageClass
from thinkfold.scheduler.scheduler import Scheduler

FORCED = ("swap", "preempt")  # rungs of the pressure ladder that take a branch off the device
SHARE = 0.01  # of the time that a number of sessions must be reached to count


class Watch:
    """Sums over time from its making on. Seconds are the caller's, measured or simulated."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pressure = scheduler.pressure.copy()
        self._folds = scheduler.folds.totals["folds"]
        self._forced = self._count_forced()
        self._fewest = scheduler.kv.num_pages + 1  # sessions that ran when one was forced out
        self._sessions: defaultdict[int, float] = defaultdict(float)  # seconds by number of running branches
        self._held = 0.0  # page seconds
        self._wasted = 0.0  # page seconds of raw thinking under an answer
        self._filled = 0.0  # page seconds that entries would take with no page partly empty
        self.seconds = 0.0

    def tick(self, seconds: float) -> None:
        """A step that lasted `seconds` is about to be collected."""
        scheduler, page_size = self._scheduler, self._scheduler.kv.page_size
        forced = self._count_forced()
        if forced > self._forced:
            self._fewest = min(self._fewest, len(scheduler.running) + forced - self._forced)
            self._forced = forced
        self._sessions[len(scheduler.running)] += seconds
        usage = scheduler.kv.usage()
        self._held += (sum(usage.values()) - usage[PageClass.CACHED] - usage[PageClass.PINNED]) * seconds
        for branch in scheduler.running:
            self._filled += (branch.table.kv_len + branch.table.summary.mean_entries) / page_size * seconds
            start = branch.steering.answer_start
            if start is not None:
                answer = len(branch.token_ids) - branch.num_prompt_tokens - start
                raw = branch.table.kv_len - branch.num_prompt_tokens - answer
                self._wasted += max(0, raw) / page_size * seconds
        self.seconds += seconds

    @property
    def forced(self) -> Counter[str]:
        """Branches taken off the device, by rung."""
        pressure = self._scheduler.pressure
        return Counter({rung: pressure[rung] - self._pressure[rung] for rung in FORCED})

    @property
    def folds(self) -> int:
        return self._scheduler.folds.totals["folds"] - self._folds

    @property
    def running_mean(self) -> float:
        """Running branches, mean over time."""
        return sum(n * s for n, s in self._sessions.items()) / self.seconds if self.seconds else 0.0

    @property
    def safe_sessions(self) -> int:
        """Most branches that ran together, for a hundredth of the time or more, with none forced out at so many."""
        reached, most = 0.0, 0
        for sessions in sorted(self._sessions, reverse=True):
            if sessions < self._fewest:
                reached += self._sessions[sessions]
                if reached >= SHARE * self.seconds:
                    most = max(most, sessions)
        return most

    @property
    def kv_pool_use_mean(self) -> float:
        """Share of the pool's pages that are held, idle cached ones excluded; mean over time."""
        return self._held / (self.seconds * self._scheduler.kv.num_pages) if self.seconds else 0.0

    @property
    def kv_waste_share(self) -> float:
        """Share of the held page seconds that were raw thinking of branches that already answered."""
        return self._wasted / self._held if self._held else 0.0

    @property
    def pages_mean(self) -> float:
        """Pages that are held, idle cached ones excluded; mean over time."""
        return self._held / self.seconds if self.seconds else 0.0

    @property
    def kv_unused_share(self) -> float:
        """Share of the held page seconds in which pages had room that no entry took, for branches that share none."""
        return 1.0 - self._filled / self._held if self._held else 0.0

    def _count_forced(self) -> int:
        return sum(self._scheduler.pressure[rung] for rung in FORCED)
