"""Why a conversation's later turn misses the prefix cache: which of its earlier text is no longer the same.

Texts of conversations are kept in memory, as the prefix cache keeps their tokens; the log never has any. Plain Python,
one thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, NamedTuple

from thinkfold.server.contract import Engine
from thinkfold.server.replies import DriftRecord
from thinkfold.server.turns import NextTurn
from thinkfold.text.messages import Message
from thinkfold.types import RequestOutput

EVENT = "thinkfold.drift"
_OVERHEAD = 256  # bytes of a unit beside its text
_TRACES = 32  # of one conversation: branches, and chats that share a key
LATEST = 5  # drifts that a tenant can look up
KINDS = ("system", "tools", "history")  # as templates write them

logger = logging.getLogger(__name__)


class Owner(NamedTuple):
    """Whose conversation: nothing is compared across tenants or labels. `session` "" is none."""

    tenant: str
    namespace: tuple[str, ...]
    session: str = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """A message or a tool as text; `place` is its index among messages or tools."""

    kind: Literal["system", "tools", "history"]
    role: str
    text: str
    place: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a prompt of `tokens` tokens was rendered from; `history` are the units behind system and tools."""

    units: tuple[Unit, ...]
    history: tuple[Unit, ...]
    tokens: int

    @property
    def size(self) -> int:
        """Bytes, about."""
        return sum(_OVERHEAD + sys.getsizeof(unit.text) for unit in self.units)


@dataclass(frozen=True, slots=True)
class Drift:
    """The first unit that differs, and the first character that does."""

    unit: Unit
    character: int
    same: int  # units before it

    def shown(self, tokens_lost: int) -> DriftRecord:
        """As clients see it."""
        unit = self.unit
        shown: DriftRecord = {"kind": unit.kind, "character": self.character, "tokens_lost": tokens_lost}
        if unit.kind == "tools":
            return {**shown, "tool": unit.place}
        return {**shown, "message": unit.place, "role": unit.role}


def trace_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, tokens: int) -> Trace:
    """The trace of checked messages and of tools as the template gets them."""
    roles = [message.role for message in messages]
    first = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    chat = [
        Unit("system" if i < first else "history", message.role, _text(message), i)
        for i, message in enumerate(messages)
    ]
    written = [json.dumps(tool, ensure_ascii=False) for tool in tools or ()]
    between = [Unit("tools", "", text, i) for i, text in enumerate(written)]
    return Trace((*chat[:first], *between, *chat[first:]), tuple(chat[first:]), tokens)


def drift_between(earlier: Trace, later: Trace) -> Drift | None:
    """The first difference between both; None where one of them begins with the other."""
    for i, (old, new) in enumerate(zip(earlier.units, later.units, strict=False)):
        if old.kind != new.kind:  # one of them has more of what comes first
            return Drift(min(old, new, key=lambda unit: KINDS.index(unit.kind)), 0, i)
        if old != new:
            return Drift(new, 0 if old.role != new.role else _common(old.text, new.text), i)
    return None


def goes_on(earlier: Trace, later: Trace) -> bool:
    """Whether `later` is a later turn of the same conversation: it must hold the last thing that was said, as often.

    So neither a new conversation nor an edited last message passes for one. Beside it the first message must
    be the same or, where that one was edited, the two behind it.
    """
    old, new = earlier.history, later.history
    if not old or new[:-1].count(old[-1]) < old.count(old[-1]):
        return False
    return old[0] == new[0] or (len(old) > 2 and old[1:3] == new[1:3])


class Conversations:
    """The latest traces of each conversation, at most `max_bytes` a tenant; the least recently used go first.

    `count` is told the kind of each drift.
    """

    def __init__(self, count: Callable[[str], None], max_bytes: int = 4 * 1024 * 1024) -> None:
        self.max_bytes = max_bytes
        self._count = count
        self._tenants: dict[str, OrderedDict[tuple[object, ...], list[Trace]]] = {}
        self._used: Counter[str] = Counter()
        self._latest: dict[str, deque[DriftRecord]] = {}

    def take(self, owner: Owner, trace: Trace, cached: int, page_size: int, name: str) -> DriftRecord | None:
        """Keep the trace of an answered prompt, of which `cached` tokens were found; its drift as clients see it.

        A drift that cost less than a page is none, and a prompt beyond the bound is not looked at. `name` is the
        request's, for the log.
        """
        if trace.size > self.max_bytes:
            return None
        mine = self._tenants.setdefault(owner.tenant, OrderedDict())
        key = _key(owner, trace)
        traces = mine.setdefault(key, [])
        mine.move_to_end(key)
        found = [(old, drift_between(old, trace)) for old in traces if goes_on(old, trace)]
        gone, drift = max(found, key=lambda pair: _reach(pair[1]), default=(None, None))
        kept = [old for old in traces if old is not gone and old.units != trace.units][1 - _TRACES :]
        kept.append(trace)
        self._used[owner.tenant] += sum(each.size for each in kept) - sum(each.size for each in traces)
        traces[:] = kept
        self._evict(owner.tenant)
        lost = 0 if gone is None else min(gone.tokens, trace.tokens) - cached
        if drift is None or lost < page_size:
            return None
        shown = drift.shown(lost)
        self._count(drift.unit.kind)
        self._latest.setdefault(owner.tenant, deque(maxlen=LATEST)).append(shown)
        logger.info(json.dumps({"event": EVENT, "request": name, **shown}))
        return shown

    def latest(self, tenant: str) -> list[DriftRecord]:
        """A tenant's latest drifts, the newest first."""
        return list(reversed(self._latest.get(tenant, ())))

    def delete_session(self, tenant: str, session: str) -> int:
        """Forget the conversations of a session, under whatever labels; their number."""
        mine = self._tenants.get(tenant, OrderedDict())
        gone = [key for key in mine if key[1:] == (session,)]
        for key in gone:
            self._used[tenant] -= sum(trace.size for trace in mine.pop(key))
        return len(gone)

    def delete_tenant(self, tenant: str) -> int:
        """Forget all of a tenant's; the number of conversations."""
        self._latest.pop(tenant, None)
        del self._used[tenant]
        return len(self._tenants.pop(tenant, ()))

    def check_integrity(self) -> None:
        """Raise AssertionError if the sizes are wrong or beyond the bound."""
        for tenant, mine in self._tenants.items():
            assert all(0 < len(traces) <= _TRACES for traces in mine.values())
            size = sum(trace.size for traces in mine.values() for trace in traces)
            assert self._used[tenant] == size <= self.max_bytes

    def _evict(self, tenant: str) -> None:
        mine = self._tenants[tenant]
        while self._used[tenant] > self.max_bytes:
            key, traces = next(iter(mine.items()))
            self._used[tenant] -= traces.pop(0).size
            if not traces:
                del mine[key]


async def look_back(
    conversations: Conversations, owner: Owner, engine: Engine, turn: NextTurn, tokens: int, output: RequestOutput
) -> DriftRecord | None:
    """After a reply's last `output`: compare its prompt of `tokens` tokens with the conversation's earlier ones."""
    if output.error is not None or not engine.config.enable_prefix_caching:
        return None
    trace = await asyncio.to_thread(lambda: trace_of(engine.prompts.settled(turn.messages), turn.tools, tokens))
    cached, page_size = output.costs.cached_tokens, engine.model.page_size
    return conversations.take(owner, trace, cached, page_size, output.request_id)


def _key(owner: Owner, trace: Trace) -> tuple[object, ...]:
    """By session, by `prompt_cache_key` (a label), else by the first message."""
    if owner.session:
        return (owner.namespace, owner.session)
    labelled = any(label.startswith("key=") for label in owner.namespace)
    return (owner.namespace,) if labelled else (owner.namespace, trace.history[:1])


def _reach(drift: Drift | None) -> tuple[float, int]:
    """How far an earlier trace is the same."""
    return (inf, 0) if drift is None else (drift.same, drift.character)


def _text(message: Message) -> str:
    """What templates show of a message in later turns: all but its thinking."""
    more = [value for value in (message.name, message.tool_call_id, message.tool_calls) if value]
    text = message.content or ""
    return f"{text}\n{json.dumps(more, ensure_ascii=False)}" if more else text


def _common(a: str, b: str) -> int:
    """Leading characters that are the same."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[: i + 1] != b[: i + 1])
