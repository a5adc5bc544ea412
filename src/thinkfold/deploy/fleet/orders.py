"""Orders find the replica that can carry them out; what all must hear is told to all, and their answers are one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from thinkfold.deploy.fleet.pools import PoolState
from thinkfold.deploy.fleet.recent import Recent
from thinkfold.deploy.fleet.replicas import Flight, Replica, lost
from thinkfold.engine.commands import Answer, Drop, Extend, Forget, ListPins, Order, Prefill, Unpin
from thinkfold.errors import ConflictError, NotFoundError, ThinkfoldError
from thinkfold.types import Handle, PinnedPrefix

UNASKED = -1  # the call of an order whose answer nobody waits for
MOST_HANDLES = 65_536


@dataclass(slots=True, eq=False)
class _Call:
    order: Order
    waiting: set[str]  # replicas that have not answered
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pin:
    order: Prefill
    until: float | None


class Orders:
    """`flights` are the requests under way, by name."""

    def __init__(
        self, pools: Mapping[str, PoolState], flights: Mapping[str, Flight], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools = pools
        self._flights = flights
        self._clock = clock
        self._calls: dict[int, _Call] = {}
        self._handles: Recent[str, Replica] = Recent(MOST_HANDLES)
        self._pins: dict[tuple[str, str], _Pin] = {}

    def send(self, order: Order) -> None:
        """To whom it concerns. Raises ThinkfoldError where nobody can carry it out: that is its answer."""
        replicas = self._audience(order)
        self._calls[order.call] = _Call(order, {replica.name for replica in replicas})
        for replica in replicas:
            replica.link.send(order)

    def owner(self, handle: str) -> Replica:
        """The replica that keeps a state. Raises NotFoundError."""
        replica = self._handles.get(handle)
        if replica is None:
            raise NotFoundError(f"there is no handle {handle!r:.100}")
        return replica

    def keep(self, handle: Handle, replica: Replica) -> None:
        """A replica keeps a state under this handle."""
        self._handles.put(handle.id, replica)

    def heard(self, replica: Replica, answers: Iterable[Answer]) -> list[Answer]:
        """Answers of a replica have come; those of which no more are to come."""
        complete: list[Answer] = []
        for answer in answers:
            call = self._calls.get(answer.call)
            if call is None or replica.name not in call.waiting:
                continue
            if isinstance(answer.value, Handle):
                self.keep(answer.value, replica)
            call.answers.append(answer)
            call.waiting.discard(replica.name)
            complete += self._complete(call)
        return complete

    def joined(self, replica: Replica) -> None:
        """A new replica pins what the others have pinned."""
        for key, pin in list(self._pins.items()):
            left = None if pin.until is None else pin.until - self._clock()
            if left is not None and left <= 0:
                del self._pins[key]
            else:
                replica.link.send(replace(pin.order, call=UNASKED, ttl_s=left))

    def lost(self, replica: Replica, reason: str) -> list[Answer]:
        """A replica has gone, and its handles with it: the answers that will not come."""
        self._handles.drop_where(lambda _, owner: owner is replica)
        complete: list[Answer] = []
        for call in list(self._calls.values()):
            if replica.name in call.waiting:
                call.waiting.discard(replica.name)
                if not call.waiting and not call.answers:
                    call.answers.append(Answer(call.order.call, error=lost(replica.name, reason)))
                complete += self._complete(call)
        return complete

    def _audience(self, order: Order) -> list[Replica]:
        if isinstance(order, Extend):
            return [self.owner(order.handle)]
        if isinstance(order, Drop):
            return [self.owner(order.request_id)]
        if isinstance(order, Prefill) and order.idle:
            return [self._knower(order)]
        if isinstance(order, Prefill | ListPins | Unpin | Forget):
            replicas = [replica for pool in self._pools.values() for replica in pool.replicas.values()]
            if not replicas:
                raise ConflictError("no replica is ready")
            return replicas
        flight = self._flights.get(order.request_id)
        if flight is None:
            raise NotFoundError(f"there is no running response {order.request_id!r:.100}")
        if flight.replica is None:
            raise ConflictError(f"{order.request_id!r:.100} waits for a replica")
        return [flight.replica]

    def _knower(self, order: Prefill) -> Replica:
        """Who has run the conversation whose next turn this is."""
        for pool in self._pools.values():
            found = pool.replicas.get(pool.router.follow(order.namespace, order.token_ids) or "")
            if found is not None and not found.draining:
                return found
        raise ConflictError("no replica knows this conversation")

    def _complete(self, call: _Call) -> list[Answer]:
        if call.waiting:
            return []
        del self._calls[call.order.call]
        answer = _joint(call.order, call.answers)
        if answer.error is None:
            self._remember(call.order)
        return [answer]

    def _remember(self, order: Order) -> None:
        """What follows for replicas to come, and for handles and sessions."""
        if isinstance(order, Prefill) and not order.idle:
            until = None if order.ttl_s is None else self._clock() + order.ttl_s
            self._pins[order.owner, order.request_id] = _Pin(order, until)
        elif isinstance(order, Unpin):
            self._pins.pop((order.owner, order.request_id), None)
        elif isinstance(order, Drop):
            self._handles.drop(order.request_id)
        elif isinstance(order, Forget):
            for pool in self._pools.values():
                pool.router.forget_session(order.labels, order.session)
            if not order.session:
                self._pins = {key: pin for key, pin in self._pins.items() if key[0] != order.owner}


def _joint(order: Order, answers: list[Answer]) -> Answer:
    """One answer of all: an error if there is one, but of those who did not have what was to go."""
    good = [answer.value for answer in answers if answer.error is None]
    if isinstance(order, Unpin) and good:
        return Answer(order.call)
    error = next((answer.error for answer in answers if answer.error is not None), None)
    if error is not None:
        return Answer(order.call, error=error)
    if isinstance(order, ListPins):
        return Answer(order.call, _union(good))
    if isinstance(order, Forget):
        return Answer(order.call, {name: sum(found[name] for found in good) for name in good[0]})
    return Answer(order.call, good[0])


def _union(lists: Iterable[Iterable[PinnedPrefix]]) -> list[PinnedPrefix]:
    """Each pin once."""
    return list({pin.name: pin for pins in lists for pin in pins}.values())


def refusal(order: Order, error: ThinkfoldError) -> Answer:
    """The answer to an order that reaches nobody."""
    return Answer(order.call, error=error)
