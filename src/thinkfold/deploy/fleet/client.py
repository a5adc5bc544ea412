"""A core that is many: takes the engine's commands, gives each to a replica, and tells their news as one core's.

Everything happens on the caller's event loop. Knows nothing of how replicas are started or reached: whoever does
tells of them by `join`, `hear`, `drain` and `lose`.

What becomes of a request whose replica goes: nothing of it was told yet, so it begins again elsewhere with the seed
that it has, or waits for a replica; something was told, so it ends with an error. Nothing is told twice: news count
only from the replica that a request is with.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace

from thinkfold.deploy.fleet.orders import Orders, refusal
from thinkfold.deploy.fleet.pools import PoolState
from thinkfold.deploy.fleet.replicas import Flight, Link, Replica, lost
from thinkfold.deploy.fleet.stats import counters_of, merged
from thinkfold.engine.commands import Answer, Cancel, Extend, Forget, Order
from thinkfold.engine.messages import Abort, Command, Dead, EngineStats, Event, ModelInfo, News, Ready, Stop
from thinkfold.errors import ThinkfoldError
from thinkfold.types import EngineRequest, FinishReason, RequestOutput

_JOIN_S = 10.0


async def _nothing() -> None:
    """There is nothing to close."""


class FleetClient:
    """A `CoreClient` over `pools`; requests whose tier has none go to `default`. `close` ends all links."""

    def __init__(
        self,
        pools: Mapping[str, PoolState],
        default: str,
        on_event: Callable[[Event], None],
        *,
        close: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self.pools = dict(pools)
        self._default = default
        self._on_event = on_event
        self._close_links = close
        self._loop = asyncio.get_running_loop()
        self._flights: dict[str, Flight] = {}
        self._orders = Orders(self.pools, self._flights)
        self._stopped = False

    # --- what the engine asks ---

    def send(self, command: Command) -> None:
        """As a core takes it; may only be called on the loop."""
        if isinstance(command, EngineRequest):
            pool = self.pool_of(command.tier.name)
            self._start(Flight(command, pool.name, pool.demand.need(command)))
        elif isinstance(command, Abort):
            self._abort(command)
        elif isinstance(command, Order):
            self._order(command)
        elif isinstance(command, Stop):
            self._end()

    def stop(self) -> None:
        """End what runs and close all links; to be called off the loop. The cores live on."""

        async def end() -> None:
            self._end()
            await self._close_links()

        with contextlib.suppress(RuntimeError, TimeoutError):  # the loop has closed already, or hangs
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(_JOIN_S)

    def pool_of(self, tier: str) -> PoolState:
        return self.pools.get(tier) or self.pools[self._default]

    def stats(self) -> EngineStats:
        """Of all cores together; what waits for a replica waits."""
        replicas = [replica.stats for pool in self.pools.values() for replica in list(pool.replicas.values())]
        total = merged([*replicas, *(pool.gone for pool in self.pools.values())])
        held = sum(flight.choices for pool in self.pools.values() for flight in list(pool.held))
        return replace(total, waiting=total.waiting + held)

    @property
    def trouble(self) -> str:
        """Which pool has no replica; empty where all have."""
        empty = [pool.name for pool in self.pools.values() if not pool.open]
        return f"no replica of {', '.join(empty)} is ready" if empty else ""

    # --- what links tell ---

    def join(self, link: Link, model: ModelInfo) -> None:
        """A replica is ready. Its name must be new."""
        pool = self.pools[link.pool]
        assert link.name not in pool.replicas, f"{link.name} has joined already"
        replica = pool.replicas[link.name] = Replica(link, model, EngineStats(pages_total=model.num_pages))
        self._ready()
        self._orders.joined(replica)
        held, pool.held = pool.held, []
        for flight in held:
            self._start(flight)

    def hear(self, name: str, event: News) -> None:
        """News of a replica; those of one that has gone count for nothing."""
        replica = self._replica(name)
        if replica is None:
            return
        replica.stats = event.stats
        outputs = [output for output in event.outputs if self._note(replica, output)]
        answers = self._orders.heard(replica, event.answers)
        for answer in answers:
            if answer.error is not None:
                self._refused(answer.call)
        self._on_event(News(outputs, event.stats, answers))

    def drain(self, name: str) -> None:
        """A replica is to go: it ends what it has begun to tell; all else moves."""
        replica = self._replica(name)
        if replica is None or replica.draining:
            return
        replica.draining = True
        self.pools[replica.pool].router.forget_replica(name)
        moving = [flight for flight in replica.flights.values() if flight.can_restart]
        for flight in moving:
            replica.link.send(Abort(flight.name))
        self._restart(replica, moving, "moved")

    def lose(self, name: str, reason: str) -> None:
        """A replica has gone."""
        replica = self._replica(name)
        if replica is None or self._stopped:
            return
        pool = self.pools[replica.pool]
        del pool.replicas[name]
        pool.router.forget_replica(name)
        pool.gone = counters_of(merged([pool.gone, replica.stats]))
        pool.counts["replicas_lost"] += not replica.draining
        answers = self._orders.lost(replica, reason)
        for answer in answers:
            self._refused(answer.call)
        flights = list(replica.flights.values())
        ended = [flight for flight in flights if not flight.can_restart]
        outputs = [flight.ended(FinishReason.ERROR, lost(name, reason)) for flight in ended]
        for flight in ended:
            self._forget(flight)
        pool.counts["failed"] += len(ended)
        self._restart(replica, [flight for flight in flights if flight.can_restart], "restarted")
        self._post(outputs, answers)
        self._ready()

    def tick(self) -> None:
        """A sign of life: while replicas come and go, the fleet lives."""
        self._post()

    # --- inside ---

    def _start(self, flight: Flight) -> None:
        pool = self.pools[flight.pool]
        self._flights[flight.name] = flight
        flight.replica = pool.place(flight)
        if flight.replica is None:
            pool.held.append(flight)
        else:
            self._fly(flight, flight.replica, flight.request)

    def _fly(self, flight: Flight, replica: Replica, command: Command) -> None:
        replica.flights[flight.name] = flight
        replica.link.send(command)

    def _restart(self, replica: Replica, flights: Iterable[Flight], count: str) -> None:
        """Requests of which nothing was told begin again, with the seeds that they have."""
        for flight in flights:
            replica.flights.pop(flight.name)
            self.pools[flight.pool].counts[count] += 1
            self._start(flight)

    def _abort(self, command: Abort) -> None:
        flight = self._flights.get(command.request_id)
        if flight is None:
            return
        if flight.replica is not None:
            flight.replica.link.send(command)
        else:
            self._end_held([flight])

    def _order(self, order: Order) -> None:
        flight = self._flights.get(order.request_id)
        if flight is not None and flight.replica is None and isinstance(order, Cancel):
            self._end_held([flight])
            self._post(answers=[Answer(order.call)])
            return
        if isinstance(order, Forget) and order.session:
            held = [each for pool in self.pools.values() for each in pool.held]
            self._end_held([each for each in held if _is_of(each, order)])
        try:
            self._orders.send(order)
        except ThinkfoldError as error:
            self._post(answers=[refusal(order, error)])
            return
        if isinstance(order, Extend):
            replica = self._orders.owner(order.handle)
            pool = self.pools[replica.pool]
            flight = Flight(order, pool.name, pool.demand.need(order), replica)
            self._flights[order.request_id] = replica.flights[order.request_id] = flight

    def _refused(self, call: int) -> None:
        """An order has failed; if it was to start a request, that will tell no end."""
        for flight in [f for f in self._flights.values() if isinstance(f.request, Extend) and f.request.call == call]:
            self._forget(flight)

    def _note(self, replica: Replica, output: RequestOutput) -> bool:
        """Take note of a request's news; whether they are to be told."""
        flight = self._flights.get(output.request_id)
        if flight is None or flight.replica is not replica:
            return False
        if not output.outputs and not output.finished:
            return False
        flight.note(output)
        demand = self.pools[flight.pool].demand
        demand.progress(flight.need, output)
        for news in output.outputs:
            if news.handle is not None:
                self._orders.keep(news.handle, replica)
        if output.finished:
            self._forget(flight)
            demand.learn(flight.need, output, [each.need for each in self.pools[flight.pool].flights()])
        return True

    def _end_held(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            self._forget(flight)
            self._post([flight.ended(FinishReason.ABORT)])

    def _forget(self, flight: Flight) -> None:
        self._flights.pop(flight.name, None)
        if flight.replica is not None:
            flight.replica.flights.pop(flight.name, None)
        held = self.pools[flight.pool].held
        if flight in held:
            held.remove(flight)

    def _replica(self, name: str) -> Replica | None:
        return next((pool.replicas[name] for pool in self.pools.values() if name in pool.replicas), None)

    def _ready(self) -> None:
        """Tell the engine what all replicas are together; nothing while there is none."""
        models = [replica.model for pool in self.pools.values() for replica in pool.replicas.values()]
        if models and not self._stopped:
            self._loop.call_soon(self._on_event, Ready(whole(models)))

    def _post(self, outputs: Iterable[RequestOutput] = (), answers: Iterable[Answer] = ()) -> None:
        """The engine hears of it after the current callback: it may be in the middle of a command."""
        if not self._stopped:
            self._loop.call_soon(self._on_event, News(list(outputs), EngineStats(), list(answers)))

    def _end(self) -> None:
        if self._stopped:
            return
        for flight in self._flights.values():
            if flight.replica is not None:
                flight.replica.link.send(Abort(flight.name))
        self._stopped = True
        self._loop.call_soon(self._on_event, Dead(""))


def whole(models: Iterable[ModelInfo]) -> ModelInfo:
    """Replicas as one: their pages together, and what the smallest of them can hold in one request."""
    every = list(models)
    return replace(
        every[0],
        max_model_len=max(model.max_model_len for model in every),
        num_pages=sum(model.num_pages for model in every),
        kv_capacity=max(model.kv_capacity for model in every),
    )


def _is_of(flight: Flight, order: Forget) -> bool:
    return isinstance(flight.request, EngineRequest) and flight.request.is_of(order.labels, order.session)
