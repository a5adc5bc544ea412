"""Where a request goes: to the replica that knows its past, unless its KV would not fit there. Knows no requests.

What binds most comes first: samples of one question, an agent's session, a conversation. Whoever is not
bound goes where most KV will be free by prediction, what is known of the prompt counted as free.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from thinkfold.deploy.fleet.prefixes import KnownPrefixes, Path
from thinkfold.deploy.fleet.recent import Recent

MOST_SESSIONS = 65_536
Why = Literal["sibling", "session", "conversation", "spill", "free", "random"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed: a prompt, whose it is, and the KV entries that it will hold at its peak, by prediction.

    `question` is shared by the samples of one vote; `session` "" is none.
    """

    ids: Sequence[int]
    namespace: tuple[str, ...]
    question: str
    session: str = ""
    entries: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A replica that takes requests, and the KV entries that will be free there by prediction; below 0: too few."""

    name: str
    free: int


@dataclass(frozen=True, slots=True)
class Placed:
    name: str
    why: Why


class Router(Protocol):
    """One of a pool's. `places` are never empty."""

    def place(self, ask: Ask, places: Sequence[Place]) -> Placed:
        """Choose, and remember what follows from it."""
        ...

    def follow(self, namespace: tuple[str, ...], ids: Sequence[int]) -> str | None:
        """Who knows the past of a conversation's next turn, and is to compute it ahead; None: nobody does."""
        ...

    def forget_replica(self, name: str) -> None: ...
    def forget_session(self, labels: tuple[str, ...], session: str) -> None: ...


class AffinityRouter:
    """Build one a pool."""

    def __init__(self, prefixes: KnownPrefixes | None = None) -> None:
        self._prefixes = prefixes or KnownPrefixes()
        self._questions: Recent[tuple[tuple[str, ...], str], str] = Recent(MOST_SESSIONS)
        self._sessions: Recent[tuple[tuple[str, ...], str], str] = Recent(MOST_SESSIONS)

    def place(self, ask: Ask, places: Sequence[Place]) -> Placed:
        path = self._prefixes.path(ask.namespace, ask.ids)
        placed = self._choose(ask, path, {place.name: place for place in places})
        self._questions.put((ask.namespace, ask.question), placed.name)
        if ask.session:
            self._sessions.put((ask.namespace, ask.session), placed.name)
        self._prefixes.record(path, placed.name)
        return placed

    def follow(self, namespace: tuple[str, ...], ids: Sequence[int]) -> str | None:
        path = self._prefixes.path(namespace, ids)
        before = self._prefixes.find(path).before
        if before is not None:
            self._prefixes.record(path, before)
        return before

    def forget_replica(self, name: str) -> None:
        self._prefixes.forget_reader(name)
        for bound in (self._questions, self._sessions):
            bound.drop_where(lambda _, where: where == name)

    def forget_session(self, labels: tuple[str, ...], session: str) -> None:
        """Of namespaces that begin with `labels`; "" is every session."""
        self._sessions.drop_where(lambda key, _: key[0][: len(labels)] == labels and session in ("", key[1]))

    def _choose(self, ask: Ask, path: Path, places: dict[str, Place]) -> Placed:
        question = self._questions.get((ask.namespace, ask.question))
        if question in places:
            return Placed(question, "sibling")
        session = self._sessions.get((ask.namespace, ask.session)) if ask.session else None
        if session in places:
            return Placed(session, "session")
        found = self._prefixes.find(path)
        known = {name: found.tokens.get(name, 0) for name in places}
        before = found.before
        if before in places and places[before].free + known[before] >= ask.entries:
            return Placed(before, "conversation")
        best = max(places.values(), key=lambda place: (place.free + known[place.name], known[place.name]))
        return Placed(best.name, "free" if before not in places or best.name == before else "spill")


class RandomRouter:
    """To compare with: any replica, but samples of one question and sessions stay together."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._bound: Recent[tuple[tuple[str, ...], str], str] = Recent(MOST_SESSIONS)

    def place(self, ask: Ask, places: Sequence[Place]) -> Placed:
        key = (ask.namespace, ask.session or ask.question)
        bound = self._bound.get(key)
        if bound in {place.name for place in places}:
            return Placed(bound, "session" if ask.session else "sibling")
        placed = Placed(self._random.choice(places).name, "random")
        self._bound.put(key, placed.name)
        return placed

    def follow(self, namespace: tuple[str, ...], ids: Sequence[int]) -> str | None:
        return None

    def forget_replica(self, name: str) -> None:
        self._bound.drop_where(lambda _, where: where == name)

    def forget_session(self, labels: tuple[str, ...], session: str) -> None:
        self._bound.drop_where(lambda key, _: key[0][: len(labels)] == labels and session in ("", key[1]))


ROUTERS: dict[str, type[AffinityRouter] | type[RandomRouter]] = {"affinity": AffinityRouter, "random": RandomRouter}
