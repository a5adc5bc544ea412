"""Prefixes that are computed before they are asked for: what starts them, pins them, and lets them go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from thinkfold.engine.commands import Answer, Prefill
from thinkfold.errors import CapacityError, NotFoundError, UnsupportedError
from thinkfold.kv.manager import KVManager
from thinkfold.kv.pins import Pin
from thinkfold.scheduler.ahead import PrefillAhead, Prefix
from thinkfold.types import PinnedPrefix


@dataclass(slots=True)
class _Asked:
    order: Prefill
    deadline: float  # of waiting for an idle step


class Prefixes:
    """`share` of the pool is what the pins of one owner may hold.

    Tokens computed are counted apart: `ahead_tokens` for next turns, `warm_tokens` for those that were asked for.
    """

    def __init__(self, kv: KVManager, ahead: PrefillAhead, clock: Callable[[], float], share: float) -> None:
        self._kv = kv
        self._pins = kv.prefixes.pins
        self._ahead = ahead
        self._clock = clock
        self._limit = int(share * kv.capacity)
        self._asked: dict[int, _Asked] = {}  # by the prefix's id
        self._answers: list[Answer] = []
        self.ahead_tokens = 0
        self.warm_tokens = 0

    def start(self, order: Prefill) -> None:
        """Queue it; its answer, a PinnedPrefix, comes when it is pinned or given up.

        Raises UnsupportedError without a prefix cache, CapacityError for a prefix that one owner may not pin.
        """
        if not self._kv.prefixes.enabled:
            raise UnsupportedError("enable_prefix_caching", "is off: there is nowhere to keep a prefix")
        size = self._kv.page_size
        pages = len(order.token_ids) // size
        if order.idle:
            pages = min(pages, self._limit)
        if pages > self._limit:
            raise CapacityError("prefix", f"takes {pages} pages, and one owner may pin {self._limit} (pin_share)")
        prefix = Prefix(order.request_id, order.namespace, order.token_ids[: pages * size], order.idle, order.session)
        self._asked[id(prefix)] = _Asked(order, self._clock() + (inf if order.ttl_s is None else order.ttl_s))
        self._ahead.add(prefix)

    def sweep(self) -> None:
        """Pin what is computed, and answer for what has ended."""
        for prefix in self._ahead.take():
            order = self._asked.pop(id(prefix)).order
            if order.idle:
                self.ahead_tokens += prefix.computed
            else:
                self.warm_tokens += prefix.computed
            pages = tuple(prefix.table.pages)
            kept = prefix.dropped is None and self._pin(prefix.name, pages, order)
            self._kv.free(prefix.table)
            result = PinnedPrefix(
                name=prefix.name,
                tokens=len(prefix.token_ids) if kept else 0,
                pages=len(pages) if kept else 0,
                ttl_s=order.ttl_s,
                ahead=order.idle,
                computed_tokens=prefix.computed,
                dropped=None if kept else prefix.dropped or "the owner's other pins leave no room (pin_share)",
            )
            self._answers.append(Answer(order.call, result))

    def expire(self) -> bool:
        """Let go of pins whose time is over, and of what has waited as long for an idle step; whether a pin went."""
        now = self._clock()
        late = self._pins.expire(now)
        for prefix in self._ahead:
            if prefix.idle and self._asked[id(prefix)].deadline <= now:
                self._ahead.drop(prefix, "no step was idle in time")
        self.sweep()
        return late

    def pinned(self, owner: str) -> list[PinnedPrefix]:
        """What is pinned for an owner now, oldest first."""
        now = self._clock()
        return [
            PinnedPrefix(
                name=pin.name,
                tokens=len(pin.pages) * self._kv.page_size,
                pages=len(pin.pages),
                ttl_s=None if pin.expires == inf else max(0.0, pin.expires - now),
                ahead=pin.weak,
            )
            for pin in self._pins.of(owner)
        ]

    def drop(self, name: str, owner: str) -> None:
        """Let go of an owner's pin. Raises NotFoundError."""
        found = next((pin for pin in self._pins.of(owner) if pin.name == name), None)
        if found is None:
            raise NotFoundError(f"no prefix {name!r:.100} is pinned")
        self._pins.drop(found)

    def give_up(self, owner: str, session: str = "") -> bool:
        """Compute no more for an owner, or for one session of theirs; False while a step still writes for them."""
        for prefix in self._ahead:
            if self._asked[id(prefix)].order.owner == owner and session in ("", prefix.session):
                self._ahead.forget(prefix)
        self.sweep()
        return not self._ahead.forgetting

    def forget(self, owner: str, labels: tuple[str, ...], session: str = "") -> tuple[int, int]:
        """Let go of an owner's pins and of the idle pages of namespaces that begin with `labels`; how many of each.

        With `session` only of its own.
        """
        pins = [pin for pin in self._pins.of(owner) if session in ("", pin.session)]
        for pin in pins:
            self._pins.drop(pin)
        return len(pins), self._kv.prefixes.forget(labels, session)

    @property
    def answered(self) -> bool:
        """Whether there are answers to take."""
        return bool(self._answers)

    def take(self) -> list[Answer]:
        """Answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def _pin(self, name: str, pages: tuple[int, ...], order: Prefill) -> bool:
        expires = inf if order.ttl_s is None else self._clock() + order.ttl_s
        return self._pins.put(Pin(name, order.owner, pages, expires, order.idle, order.session), self._limit)
