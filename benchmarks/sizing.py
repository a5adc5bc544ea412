"""How many cards does a stream of long thinkers need? A fleet on a simulated clock, with step times as measured.

Each card is the real scheduler with its admission and memory (`thinkfold.scheduler.simulation`), in front of them
stands the real router of `thinkfold deploy` with its prediction of KV peaks; between them there is no wire. A step
takes what `thinkfold bench decode` measured for a model of 7B on one card: a line through its rows of several batches
and lengths. Requests are those of the simulator's 7b-32k in units of 64 tokens (a simulated token, page and step
stand for 64 tokens, a page of 64 and 64 steps), they arrive at random (Poisson), and each card's pool is what
`thinkfold plan` finds for it.

`<policy>/<router>/<cards>x<rate>`: `rate` is requests a second for each card, times what a card could serve if it held
as many requests as fit its pool unfolded at their mean length.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thinkfold.cli import rows
from thinkfold.config import EngineConfig
from thinkfold.deploy.fleet.pools import PoolState
from thinkfold.deploy.fleet.replicas import Flight, Replica
from thinkfold.deploy.fleet.router import ROUTERS
from thinkfold.engine.messages import Command, ModelInfo
from thinkfold.engine.planning import Card as Hardware
from thinkfold.engine.planning import Planner
from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.simulation import Simulation, StepTime, Work, percentile
from thinkfold.scheduler.workload import THINKERS_32K
from thinkfold.types import (
    CompletionOutput,
    Costs,
    EngineRequest,
    FinishReason,
    FoldMode,
    FoldPolicy,
    Phase,
    PromptState,
    RequestOutput,
    SamplingParams,
    ThinkingPolicy,
)

LOAD, UNIT = THINKERS_32K, THINKERS_32K.unit
HEADS = 8  # of the simulated memory; folds keep the same number of entries in each
LOOKS = 0.25  # of a unit step's time on one card between two looks of the router at what runs


@dataclass(frozen=True, slots=True)
class Named:
    """A way to a card, of which the router needs the name alone."""

    name: str
    pool: str = "all"

    def send(self, command: Command) -> None:
        raise AssertionError("a simulated card gets no commands")


@dataclass(slots=True)
class Simulated:
    """One card, and what the front knows of it."""

    replica: Replica
    simulation: Simulation
    scheduler: Scheduler
    fed: list[Flight] = field(default_factory=list)


def step_time(path: Path, model: str, hardware: str) -> StepTime:
    """Seconds of a step and of a stored entry that it reads: least squares over the newest row of each batch shape.

    Raises ThinkfoldError where there are fewer than three shapes.
    """
    found: dict[tuple[int, int], float] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name, _, shape = row["case"].partition("/")
        batch, _, length = shape.partition("x")
        if name == model and hardware in row["hardware"] and batch.isdecimal() and length.removesuffix("k").isdecimal():
            found[int(batch), 1024 * int(length.removesuffix("k"))] = row["metrics"]["step_ms"] / 1e3
    if len(found) < 3:
        raise ThinkfoldError(f"{path.name} has {len(found)} shapes of {model} on {hardware}; a line needs three")
    points = [(batch * length, seconds) for (batch, length), seconds in found.items()]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    entry = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return StepTime(step=mean_y - entry * mean_x, token=0.0, entry=entry)


class Fleet:
    """Cards behind one router. `capacity` are the units that a card's pool holds."""

    def __init__(self, cards: int, policy: FoldMode, router: str, capacity: int, times: StepTime, slots: int) -> None:
        self.pool = PoolState("all", EngineConfig(), ROUTERS[router]())
        self._fold = FoldPolicy(policy, entries=LOAD.numbers.entries)
        self._capacity, self._times, self._slots = capacity, times, slots
        self.cards = {name: self._card(name) for name in map(str, range(cards))}
        self.failed = 0

    def _card(self, name: str) -> Simulated:
        kv = KVManager(self._capacity, 1, enable_prefix_caching=False, num_heads=HEADS, reserve_pages=1)
        scheduler = Scheduler(
            kv,
            max_num_seqs=self._slots,
            max_num_batched_tokens=2048,
            fold_counts=lambda entries, tokens: [min(entries, tokens)] * HEADS,
            admission=Admission(kv.capacity, 1),
        )
        simulation = Simulation(
            scheduler,
            fold=self._fold,
            numbers=LOAD.numbers,
            budget=LOAD.budget,
            max_tokens=LOAD.budget + LOAD.answer,
            step_time=self._times.scaled(UNIT),
            on_end=lambda branch: self._ended(name, branch),
        )
        model = ModelInfo("simulated", "simulated", 1 << 20, 1, kv.num_pages, 1, 1, kv.capacity, None, True, True)
        replica = self.pool.replicas[name] = Replica(Named(name), model)
        return Simulated(replica, simulation, scheduler)

    def run(self, work: Sequence[Work]) -> None:
        """All of it, to the end."""
        gap, looked = LOOKS * self._times.scaled(UNIT).seconds(0, 0), 0.0
        for number, item in enumerate(work):
            for card in self.cards.values():
                card.simulation.advance(item.arrival)
            if item.arrival - looked > gap:
                self._look()
                looked = item.arrival
            request = _request(number, item, self._fold)
            flight = Flight(request, "all", self.pool.demand.need(request))
            replica = self.pool.place(flight)
            assert replica is not None, "all cards take requests"
            card = self.cards[replica.name]
            replica.flights[flight.name] = flight
            card.fed.append(flight)
            card.simulation.feed(item)
        for card in self.cards.values():
            card.simulation.advance(float("inf"))

    def _look(self) -> None:
        """What the cores tell as they go: how far each request is."""
        for card in self.cards.values():
            for branch in card.scheduler.running:
                self.pool.demand.progress(card.fed[branch.order].need, _news(branch, None))

    def _ended(self, name: str, branch: Branch) -> None:
        card = self.cards[name]
        flight = card.fed[branch.order]
        del card.replica.flights[flight.name]
        self.failed += branch.error is not None
        output = _news(branch, branch.steering.finish_reason)
        self.pool.demand.progress(flight.need, output)
        self.pool.demand.learn(flight.need, output, [each.need for each in self.pool.flights()])


def _request(number: int, work: Work, fold: FoldPolicy) -> EngineRequest:
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(range(number << 20, (number << 20) + work.prompt)),
        prompt=PromptState(Phase.THINKING, 0, work.prompt),
        sampling=SamplingParams(max_tokens=LOAD.budget + LOAD.answer, seed=0),
        thinking=ThinkingPolicy(True, LOAD.budget, "default"),
        fold=fold,
    )


def _news(branch: Branch, reason: FinishReason | None) -> RequestOutput:
    """As the core would tell it; at its end a request holds about as much as ever."""
    output = CompletionOutput(0, num_output_tokens=len(branch.output_ids), finish_reason=reason)
    held = int(branch.table.kv_len + branch.table.summary.mean_entries)
    costs = Costs(kv_peak_entries=held)
    return RequestOutput(branch.request.request_id, [output], branch.request.thinking, costs, reason is not None)


def measure(case: str, capacity: int, times: StepTime, args: argparse.Namespace) -> dict[str, float]:
    """One fleet under one load."""
    policy, router, cards, rate = parts(case)
    at_once = min(args.slots, capacity // LOAD.mean)
    alone = at_once / (
        (LOAD.mean - LOAD.prompt) * times.scaled(UNIT).seconds(0, at_once * LOAD.mean)
    )  # requests a second, unfolded
    work = [
        item for _, item in zip(range(cards * args.requests), LOAD.work(args.seed, rate * alone * cards), strict=False)
    ]
    fleet, started = Fleet(cards, policy, router, capacity, times, args.slots), time.perf_counter()
    fleet.run(work)
    outcomes = [card.simulation.run() for card in fleet.cards.values()]
    waits = [wait for card in fleet.cards.values() for wait in card.simulation.waits]
    latencies = [took for card in fleet.cards.values() for took in card.simulation.latencies]
    tokens = [UNIT * outcome.output_tokens for outcome in outcomes]
    return {
        "cards": cards,
        "requests": len(work),
        "completed": sum(outcome.completed for outcome in outcomes),
        "failed": sum(outcome.failed for outcome in outcomes),
        "requests_per_s": rate * alone * cards,
        "wait_p50_s": percentile(waits, 0.50),
        "wait_p99_s": percentile(waits, 0.99),
        "latency_p50_s": percentile(latencies, 0.50),
        "latency_p99_s": percentile(latencies, 0.99),
        "running_mean": sum(outcome.running_mean for outcome in outcomes) / cards,
        "busiest_share": max(tokens) * cards / sum(tokens),
        "forced_preemptions": sum(outcome.forced_preemptions for outcome in outcomes),
        "pool_tokens": UNIT * capacity,
        "step_base_ms": times.step * 1e3,
        "step_entry_ns": times.entry * 1e9,
        "real_seconds": time.perf_counter() - started,
    }


def parts(case: str) -> tuple[FoldMode, str, int, float]:
    """Policy, router, cards and rate of a case. Raises ParameterError."""
    try:
        policy, router, load = case.split("/")
        cards, rate = load.split("x")
        found = FoldMode(policy), router, int(cards), float(rate)
    except ValueError:
        raise ParameterError("case", f"must be policy/router/<cards>x<rate>, got {case!r:.80}") from None
    if router not in ROUTERS or found[2] < 1 or not 0.0 < found[3] < 1e6:
        raise ParameterError("case", f"must be policy/router/<cards>x<rate>, got {case!r:.80}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, print and keep their rows."""
    args = parse(argv)
    hardware = Hardware(int(args.gpu_memory * 2**30), 1e12, int(1.5 * 2**30))
    pool = Planner(EngineConfig(model=args.model, max_num_seqs=args.slots), hardware).pool("model")
    times = step_time(args.steps, args.model, args.hardware)
    for case in args.case:
        row = rows.make_row("sizing", case, measure(case, pool.capacity // UNIT, times, args), seed=args.seed)
        if not args.no_record:
            rows.keep(row)
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        print(json.dumps(row) if args.json else f"{case:28} {numbers}", flush=True)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench sizing", description=(__doc__ or "").partition("\n")[0])
    cases = [f"{policy}/affinity/{cards}x0.9" for policy in ("off", "eager") for cards in (1, 8)]
    parser.add_argument("--case", action="append", help="policy/router/<cards>x<rate>; may be repeated")
    parser.add_argument("--requests", type=int, default=150, help="for each card (default: 150)")
    parser.add_argument("--slots", type=int, default=128, help="requests that a card runs at once (default: 128)")
    parser.add_argument("--model", default="7b", help="shape of the model, as in the rows of bench decode")
    parser.add_argument("--gpu-memory", type=float, default=141.0, metavar="GIB", help="of a card (default: 141)")
    parser.add_argument("--hardware", default="H200", help="a word of the hardware in those rows")
    parser.add_argument("--steps", type=Path, default=Path(__file__).parent / "results" / "decode.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    args.case = args.case or cases
    for name in ("requests", "slots"):
        if getattr(args, name) < 1:
            raise ParameterError(name, "must be at least 1")
    for case in args.case:
        parts(case)
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ThinkfoldError as error:
        sys.exit(f"thinkfold bench sizing: {error}")
