"""How many replicas a pool needs: as many as hold the predicted KV peak of all its requests. Knows no request counts.

A request that thinks for 60,000 tokens is one request, as is one that thinks for 60; what fills a card is KV.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol


class Context(Protocol):
    """What Ray Serve's AutoscalingContext tells: metrics by name and replica, and how many replicas there are to be."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def target_num_replicas(self) -> int: ...


class KVPeakPolicy:
    """An autoscaling policy of Ray Serve, which adds bounds and delays. `target` is the share of KV to be used."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Replicas that are wanted, and no state."""
        metrics = context.aggregated_metrics or {}
        peaks, capacities = metrics.get("kv_peak", {}), metrics.get("kv_capacity", {})
        capacity = sum(capacities.values()) / len(capacities) if capacities else 0.0
        if not capacity:
            return context.target_num_replicas, {}
        return max(1, math.ceil(sum(peaks.values()) / (capacity * self._target))), {}
