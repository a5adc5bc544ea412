"""`/metrics`: the engine's own counters, and latencies as clients see them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from thinkfold.engine.messages import EngineStats
from thinkfold.server.contract import EngineSlot
from thinkfold.server.tiers import Slo
from thinkfold.types import CompletionOutput, RequestOutput, ThinkingPolicy, VoteState

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_LENGTHS = (64, 256, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
# Field of EngineStats -> help. Names are thinkfold_<field>.
_GAUGES = {
    "running": "Requests in the batch",
    "waiting": "Requests in the queue",
    "handles": "Kept states of branches",
    "pages_total": "Pages of the KV pool",
    "kv_quantisation_error": "Error of the worst layer's attention with fp8 KV, measured at start; 0 where it was not",
    "host_pages": "Pages of the host tier",
    "host_pages_used": "Pages of the host tier that hold something",
}
_COUNTERS = {
    "steps": "Engine steps",
    "generated_tokens": "Tokens drawn, counted as they come",
    "preemptions": "Forced preemptions",
    "prefix_queried_tokens": "Prompt tokens looked up in the prefix cache",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache",
    "prompt_tokens": "Prompt tokens of accepted requests",
    "computed_prompt_tokens": "Prompt tokens that were computed",
    "thinking_tokens": "Tokens generated inside thinking",
    "answer_tokens": "Tokens generated outside thinking",
    "discarded_tokens": "Tokens generated and thrown away",
    "probe_tokens": "Tokens computed for probes on the side",
    "ahead_tokens": "Tokens computed ahead of a chat's next turn; no request pays for them",
    "warm_tokens": "Tokens computed for pinned prefixes",
    "folds": "Spans of thinking that were folded",
    "folds_refused": "Spans of thinking that the gate kept raw",
    "folded_tokens": "Thinking tokens whose KV was replaced by a summary",
    "quantised": "Spans of thinking that were kept whole in fewer bits",
    "quantised_tokens": "Thinking tokens whose KV was kept in fewer bits",
    "swaps": "Moves of KV to host memory",
    "swapped_bytes": "Bytes of KV moved to host memory",
    "recomputed_tokens": "Tokens computed again after a preemption",
    "kv_byte_seconds": "Bytes of KV that finished requests held, times how long",
}

router = APIRouter()


class ServerMetrics:
    """A registry of one app; several apps may live in one process."""

    def __init__(self, slot: EngineSlot, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(slot))
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self.answer = self._histogram("time_to_first_answer_token_seconds", "Arrival to first answer text", _SECONDS)
        self.tpot = self._histogram("time_per_output_token_seconds", "Mean gap between tokens", _TOKEN_SECONDS)
        self.queue = self._histogram("queue_seconds", "Arrival to the first computed token", _SECONDS)
        thought = "Thinking of a choice, by its tier and its end"
        self.length = self._histogram("thinking_length_tokens", thought, _LENGTHS, "tier", "reason")
        self.budget = self._histogram("thinking_budget_use", "Share of its budget that a choice thought", _SHARES)
        self.fold_error = self._histogram("fold_error", "Estimated errors of folds and refused folds", _ERRORS)
        self.freed = self._counter("fold_pages_freed", "KV pages that folds gave back")
        self.votes = self._counter("votes", "Finished votes, by what settled them", "rule")
        self.vote_rounds = self._counter("vote_rounds", "Waves of samples that votes have started")
        self.errors = self._counter("errors", "Error replies by status", "status")
        self.slo_requests = self._counter("slo_requests", "Requests of tiers with promises", "tier", "slo")
        self.slo_misses = self._counter("slo_misses", "Promises not kept, by promise", "tier", "promise")
        drift = "Later turns whose earlier text had changed, by what changed first"
        self.drift = self._counter("prefix_drift", drift, "kind")
        self.limited = self._counter("rate_limited", "Requests beyond a limit of their key, by limit", "limit")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"thinkfold_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"thinkfold_{name}", text, labels, registry=self.registry)

    def timer(self, tier: str = "", slo: Slo | None = None) -> RequestTimer:
        """Starts now. What `slo` promises the request's tier is looked at when it ends."""
        return RequestTimer(self, tier, slo or Slo())


class RequestTimer:
    """Latencies of one request, and what its choices thought and folded."""

    def __init__(self, metrics: ServerMetrics, tier: str, slo: Slo) -> None:
        self._metrics = metrics
        self._tier = tier
        self._slo = slo
        self._start = metrics.clock()
        self._first: float | None = None
        self._answer: float | None = None
        self._sampled = 0  # samples of a vote that have started

    def observe(self, output: RequestOutput) -> None:
        """Take note of news of the request."""
        now = self._metrics.clock()
        if self._first is None and any(o.num_output_tokens for o in output.outputs):
            self._first = now
            self._metrics.ttft.observe(now - self._start)
        if self._answer is None and any(o.text for o in output.outputs):
            self._answer = now
            self._metrics.answer.observe(now - self._start)
        for choice in output.outputs:
            self._count(choice, output.policy)
        if isinstance(output.outcome, VoteState):
            self._count_vote(output.outcome, finished=output.finished)
        if output.finished:
            self._metrics.queue.observe(output.costs.queue_s)

    def _count(self, choice: CompletionOutput, policy: ThinkingPolicy) -> None:
        for fold in choice.folds:
            self._metrics.freed.inc(0 if fold.refused else max(0, fold.pages_freed))
            if not math.isnan(fold.error):
                self._metrics.fold_error.observe(fold.error)
        if choice.finish_reason is not None and choice.thinking_end_reason is not None:
            thought = choice.num_thinking_tokens
            self._metrics.length.labels(self._tier, str(choice.thinking_end_reason)).observe(thought)
            if policy.budget:
                self._metrics.budget.observe(thought / policy.budget)

    def _count_vote(self, vote: VoteState, *, finished: bool) -> None:
        if vote.started > self._sampled:
            self._sampled = vote.started
            self._metrics.vote_rounds.inc()
        if finished and vote.rule is not None:
            self._metrics.votes.labels(vote.rule).inc()

    def finish(self, tokens_per_choice: int) -> None:
        """The reply is complete; `tokens_per_choice` of its longest choice."""
        now = self._metrics.clock()
        if self._first is not None and tokens_per_choice > 1:
            self._metrics.tpot.observe((now - self._first) / (tokens_per_choice - 1))
        took = {"ttft": self._first, "first_answer": self._answer, "total": now}
        promises = self._slo.promises
        late = [name for name, limit in promises.items() if (took[name] or now) - self._start > limit]
        self._settle(late)

    def miss(self) -> None:
        """The request failed: it kept no promise."""
        self._settle(list(self._slo.promises))

    def _settle(self, late: list[str]) -> None:
        if not self._slo.promises:
            return
        for name in late:
            self._metrics.slo_misses.labels(self._tier, name).inc()
        self._metrics.slo_requests.labels(self._tier, "missed" if late else "met").inc()


class _EngineCollector(Collector):
    """Reads the engine's statistics when they are asked for."""

    def __init__(self, slot: EngineSlot) -> None:
        self._slot = slot

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        engine = self._slot.engine
        health = engine.health() if engine is not None else None
        ready = health is not None and health.ready
        yield GaugeMetricFamily("thinkfold_ready", "1 while steps advance", value=int(ready))
        if engine is not None:
            yield from _engine_metrics(engine.stats())


def _engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    for name, text in _GAUGES.items():
        yield GaugeMetricFamily(f"thinkfold_{name}", text, value=getattr(stats, name))
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"thinkfold_{name}", text, value=getattr(stats, name))
    yield _labelled(GaugeMetricFamily("thinkfold_pages", "Pages in use", labels=["class"]), stats.pages_by_class)
    use = stats.kv_pages
    total = max(1, use.total)
    yield GaugeMetricFamily("thinkfold_kv_use", "Share of pages that requests hold", value=use.held / total)
    idle = "Share of pages that only the prefix cache holds, pinned ones too; whoever needs them gets them"
    yield GaugeMetricFamily("thinkfold_kv_cached", idle, value=use.cached / total)
    rate = stats.prefix_hit_tokens / max(1, stats.prefix_queried_tokens)
    yield GaugeMetricFamily("thinkfold_prefix_hit_rate", "Found share of looked-up prompt tokens", value=rate)
    finished = CounterMetricFamily("thinkfold_requests", "Finished choices", labels=["finish_reason"])
    yield _labelled(finished, stats.requests_by_reason)
    ended = CounterMetricFamily("thinkfold_thinking_ends", "Why thinking ended", labels=["reason"])
    yield _labelled(ended, stats.thinking_by_reason)
    stops = CounterMetricFamily("thinkfold_stop_decisions", "Decisions to end thinking", labels=["rule", "outcome"])
    for labels, value in stats.decisions.items():
        stops.add_metric(labels, value)
    yield stops
    off = GaugeMetricFamily("thinkfold_stop_rules_off", "Rules that shadow mode switched off", labels=["rule", "task"])
    for labels in stats.rules_off:
        off.add_metric(labels, 1)
    yield off
    rungs = CounterMetricFamily("thinkfold_pressure", "Rungs of the pressure ladder taken", labels=["rung"])
    yield _labelled(rungs, stats.pressure)


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, values: dict[str, int]
) -> GaugeMetricFamily | CounterMetricFamily:
    for label, value in values.items():
        family.add_metric([str(label)], value)
    return family


@router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
async def metrics(request: Request) -> Response:
    """Metrics as Prometheus text."""
    registry = request.app.state.thinkfold.metrics.registry
    return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)
