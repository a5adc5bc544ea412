"""What `/metrics` tells of a fleet beside what it tells of one engine."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from thinkfold.deploy.fleet.client import FleetClient

_COUNTED = ("replicas_lost", "failed", "restarted", "moved")


class FleetCollector(Collector):
    """Reads the pools when they are asked for."""

    def __init__(self, fleet: FleetClient) -> None:
        self._fleet = fleet

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        text = "Replicas of a pool, and how many of them drain"
        replicas = GaugeMetricFamily("thinkfold_pool_replicas", text, labels=["pool", "state"])
        text = "Predicted KV peak of a pool's requests, as a share of what its replicas hold"
        peak = GaugeMetricFamily("thinkfold_pool_kv_peak", text, labels=["pool"])
        text = "Requests that wait for a replica of a pool"
        held = GaugeMetricFamily("thinkfold_pool_held", text, labels=["pool"])
        text = "KV pages of a replica that requests hold, as a share"
        use = GaugeMetricFamily("thinkfold_replica_kv_use", text, labels=["pool", "replica"])
        text = "Requests by pool and by why they went to their replica"
        routed = CounterMetricFamily("thinkfold_pool_routed", text, labels=["pool", "why"])
        text = "Lost replicas of a pool, and requests that failed, began again or moved because of one"
        events = CounterMetricFamily("thinkfold_pool_events", text, labels=["pool", "event"])
        for pool in list(self._fleet.pools.values()):
            every = list(pool.replicas.values())
            draining = sum(replica.draining for replica in every)
            replicas.add_metric([pool.name, "open"], len(every) - draining)
            replicas.add_metric([pool.name, "draining"], draining)
            peak.add_metric([pool.name], pool.predicted() / max(1, pool.capacity()))
            held.add_metric([pool.name], len(pool.held))
            for replica in every:
                pages = replica.stats.kv_pages
                use.add_metric([pool.name, replica.name.rpartition("/")[2]], pages.held / max(1, pages.total))
            for why, count in list(pool.routed.items()):
                routed.add_metric([pool.name, why], count)
            for event in _COUNTED:
                events.add_metric([pool.name, event], pool.counts[event])
        yield from (replicas, peak, held, use, routed, events)
