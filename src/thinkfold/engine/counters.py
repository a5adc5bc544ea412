"""What the scheduler counts, in the words of EngineStats."""

from __future__ import annotations

from typing import Any

from thinkfold.scheduler.scheduler import Scheduler


def counters(scheduler: Scheduler) -> dict[str, Any]:
    """Fields of EngineStats."""
    pressure = scheduler.pressure
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "pages_by_class": {str(c): n for c, n in scheduler.kv.usage().items()},
        "host_pages": scheduler.kv.host_pages,
        "host_pages_used": scheduler.kv.host_usage(),
        "preemptions": scheduler.num_preemptions,
        "pressure": {**pressure, "pin": scheduler.kv.prefixes.pins.revoked},
        "swaps": pressure["swap"] + pressure["swap_parked"] + scheduler.folds.totals["offloads"],
        "folds": scheduler.folds.totals["folds"],
        "folds_refused": scheduler.folds.totals["refused"],
        "folded_tokens": scheduler.folds.totals["folded_tokens"],
        "quantised": scheduler.folds.totals["quantised"],
        "quantised_tokens": scheduler.folds.totals["quantised_tokens"],
        "prefix_queried_tokens": scheduler.prefix_queried_tokens,
        "prefix_hit_tokens": scheduler.prefix_hit_tokens,
    }
