"""One pool of a fleet as it stands: its replicas, who waits for one, and what has been counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from thinkfold.config import EngineConfig
from thinkfold.deploy.fleet.demand import Demand
from thinkfold.deploy.fleet.replicas import Flight, Replica
from thinkfold.deploy.fleet.router import Ask, Place, Router
from thinkfold.engine.messages import EngineStats
from thinkfold.errors import QueueFullError
from thinkfold.types import EngineRequest

MAX_RETRY_S = 60.0


@dataclass(slots=True, eq=False)
class PoolState:
    """`held` wait for a replica; `counts` are of requests by what became of them, `gone` what lost cores counted."""

    name: str
    engine: EngineConfig
    router: Router
    demand: Demand = field(default_factory=Demand)
    replicas: dict[str, Replica] = field(default_factory=dict)
    held: list[Flight] = field(default_factory=list)
    routed: Counter[str] = field(default_factory=Counter)  # by why they went where they went
    counts: Counter[str] = field(default_factory=Counter)  # lost, restarted, moved
    gone: EngineStats = field(default_factory=EngineStats)

    @property
    def open(self) -> list[Replica]:
        """Those that take requests."""
        return [replica for replica in list(self.replicas.values()) if not replica.draining]

    def flights(self) -> Iterator[Flight]:
        """All that runs or waits, as of now: metrics are read from another thread."""
        for replica in list(self.replicas.values()):
            yield from list(replica.flights.values())
        yield from list(self.held)

    def check_room(self, choices: int) -> None:
        """Raise QueueFullError where so many more are too many for the replicas that are there.

        While there is none, as many may wait as behind one.
        """
        unfinished = sum(flight.choices for flight in self.flights())
        at_once = self.engine.max_num_seqs * len(self.open)
        waiting = self.engine.max_waiting * max(1, len(self.open))
        if unfinished and unfinished + choices > at_once + waiting:
            raise QueueFullError(min(MAX_RETRY_S, 1.0 + unfinished / max(1, at_once)))

    def place(self, flight: Flight) -> Replica | None:
        """Where a request that needs nothing but its prompt goes; None: nobody is there."""
        request, replicas = flight.request, self.open
        if not replicas:
            return None
        assert isinstance(request, EngineRequest), "others go where their past is"
        ask = Ask(
            request.prompt_token_ids,
            request.namespace,
            flight.question,
            request.service.session,
            self.demand.entries(flight.need),
        )
        places = [Place(each.name, each.model.kv_capacity - each.predicted(self.demand)) for each in replicas]
        placed = self.router.place(ask, places)
        self.routed[placed.why] += 1
        return self.replicas[placed.name]

    def predicted(self) -> int:
        """KV entries of all that runs and waits, each at its peak."""
        return sum(self.demand.entries(flight.need) for flight in self.flights())

    def capacity(self) -> int:
        """KV entries that the replicas which take requests can hold."""
        return sum(replica.model.kv_capacity for replica in self.open)
