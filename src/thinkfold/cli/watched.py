"""A core that measures itself while it runs: what its pool holds and how much it writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from thinkfold.engine.core import EngineCore
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.watch import Watch
from thinkfold.types import RequestOutput


class WatchedCore:
    """Measures from the first step before which `opens(ended requests)` holds until `closes` holds behind one.

    Its means are over seconds, or over steps. `numbers` are there once the window has closed.
    """

    def __init__(
        self, core: EngineCore, opens: Callable[[int], bool], closes: Callable[[int], bool], *, by_steps: bool
    ) -> None:
        self._core = core
        self._opens, self._closes, self._by_steps = opens, closes, by_steps
        self.scheduler: Scheduler = core._scheduler
        self._watch: Watch | None = None
        self._ended = self._tokens = self._first_step = 0
        self._last = 0.0
        self.numbers: dict[str, float] = {}
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def advance(self) -> None:
        if self._watch is None and self._opens(self._ended):
            self._watch, self._first_step, self._tokens = Watch(self.scheduler), self._core.stats().steps, 0
            self._last = time.perf_counter()
        self._core.advance()
        if self._watch is not None and not self.numbers:
            now = time.perf_counter()
            self._watch.tick(1.0 if self._by_steps else now - self._last)
            self._last = now

    def news(self) -> list[RequestOutput]:
        outputs = self._core.news()
        self._ended += sum(output.finished for output in outputs)
        self._tokens += sum(len(branch.token_ids) for output in outputs for branch in output.outputs)
        if self._watch is not None and not self.numbers and self._watch.seconds and self._closes(self._ended):
            self._close(self._watch)
        return outputs

    def _close(self, watch: Watch) -> None:
        self.steps = self._core.stats().steps - self._first_step
        forced = watch.forced
        self.numbers = {
            "safe_sessions": watch.safe_sessions,
            "running_mean": watch.running_mean,
            "forced_preemptions": forced.total(),
            **{f"forced_{rung}": count for rung, count in forced.items()},
            "output_tokens_per_s": self._tokens / watch.seconds,
            "kv_pool_use_mean": watch.kv_pool_use_mean,
            "kv_waste_share": watch.kv_waste_share,
            "kv_unused_share": watch.kv_unused_share,
            "pages_mean": watch.pages_mean,
            "folds": watch.folds,
            "steps": self.steps,
            "seconds": watch.seconds,
        }
