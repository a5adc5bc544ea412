"""The statistics of many cores as those of one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from thinkfold.engine.messages import EngineStats

# Of now; the others count since start, and go on counting for cores that have gone.
GAUGES = ("running", "waiting", "pages_total", "pages_by_class", "host_pages", "host_pages_used", "handles")
_WORST = ("kv_quantisation_error",)
_OF_THE_DOOR = ("decisions", "rules_off")  # early stopping is decided in front


def merged(parts: Iterable[EngineStats]) -> EngineStats:
    """Sums, by name where there are names; the worst of errors."""
    every = list(parts)
    total: dict[str, Any] = {}
    for each in fields(EngineStats):
        values = [getattr(part, each.name) for part in every]
        if each.name in _OF_THE_DOOR or not values:
            continue
        if each.name in _WORST:
            total[each.name] = max(values)
        elif isinstance(values[0], dict):
            total[each.name] = {name: sum(v.get(name, 0) for v in values) for name in {n: 0 for v in values for n in v}}
        else:
            total[each.name] = sum(values)
    return EngineStats(**total)


def counters_of(stats: EngineStats) -> EngineStats:
    """What goes on counting once the core has gone."""
    kept = {each.name: getattr(stats, each.name) for each in fields(EngineStats) if each.name not in GAUGES}
    return EngineStats(**kept)
