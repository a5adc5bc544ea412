"""Agent sessions: many calls share one budget of thinking tokens. Plain Python, one thread, one clock."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from thinkfold.errors import NotFoundError, ParameterError, SessionsFullError
from thinkfold.types import RequestOutput, SessionParams, SessionState
from thinkfold.types.session import SessionView

FLOOR = 256  # thinking tokens that a call gets however much its session has spent
_BUSY_RETRY_S = 5.0


@dataclass(slots=True)
class Session:
    """`reserved` tokens are granted to calls that run; `calls` have begun, `hits` of them were cached answers."""

    total: int
    expires: float
    spent: int = 0
    reserved: int = 0
    calls: int = 0
    hits: int = 0
    running: int = 0

    @property
    def remaining(self) -> int:
        """What nobody has spent yet; 0 when calls took their floor of an empty session."""
        return max(0, self.total - self.spent)

    def grant(self, choices: int) -> int:
        """Thinking tokens of each choice of the next call: half of what is left and granted to nobody, or the floor."""
        left = max(0, self.remaining - self.reserved)
        return max(min(FLOOR, self.total), left // 2 // max(1, choices))


class SessionStore:
    """Sessions by (tenant, id), each for `ttl_s` seconds since its last call; at most `most`, the oldest idle one goes.

    A session with a running call stays.
    """

    def __init__(self, most: int = 10_000, ttl_s: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.ttl_s = ttl_s
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def open(self, tenant: str, asked: SessionParams, choices: int) -> SessionCall:
        """A call of a session begins, for so many choices. Close it once.

        Raises ParameterError, and SessionsFullError where all sessions that fit are busy.
        """
        self._evict()
        name, total = asked.id, asked.total_budget
        session = self._sessions.get((tenant, name))
        if session is None:
            if total is None:
                raise ParameterError("session.total_budget", f"session {name!r} begins with it")
            self._make_place()
            session = self._sessions[tenant, name] = Session(total, 0.0)
        elif total not in (None, session.total):
            raise ParameterError(
                "session.total_budget", f"session {name!r} has {session.total}; delete it to begin anew"
            )
        self._touch(tenant, name, session)
        return SessionCall(self, tenant, name, session, choices)

    def show(self, tenant: str, name: str) -> SessionState:
        """Where a session stands. Raises NotFoundError."""
        self._evict()
        session = self._sessions.get((tenant, name))
        if session is None:
            raise NotFoundError(f"there is no session {name!r:.130}")
        left = round(session.expires - self._clock(), 3)
        total, spent, remaining = session.total, session.spent, session.remaining
        return SessionState(name, total, spent, remaining, session.calls, session.hits, left)

    def delete(self, tenant: str, name: str) -> bool:
        """Forget a session; whether there was one. Its running calls are no longer `live`."""
        self._evict()
        return self._sessions.pop((tenant, name), None) is not None

    def delete_tenant(self, tenant: str) -> int:
        """Forget all of a tenant's; their number."""
        mine = [key for key in self._sessions if key[0] == tenant]
        for key in mine:
            del self._sessions[key]
        return len(mine)

    def holds(self, tenant: str, name: str, session: Session) -> bool:
        """Whether that session has not been deleted."""
        return self._sessions.get((tenant, name)) is session

    def touch(self, tenant: str, name: str, session: Session) -> None:
        """A call of the session has ended."""
        if self.holds(tenant, name, session):
            self._touch(tenant, name, session)

    def __len__(self) -> int:
        return len(self._sessions)

    def _touch(self, tenant: str, name: str, session: Session) -> None:
        session.expires = self._clock() + self.ttl_s
        self._sessions.move_to_end((tenant, name))

    def _evict(self) -> None:
        now = self._clock()
        old = [key for key, session in self._sessions.items() if session.expires <= now and not session.running]
        for key in old:
            del self._sessions[key]

    def _make_place(self) -> None:
        if len(self._sessions) >= self.most:
            idle = next((key for key, session in self._sessions.items() if not session.running), None)
            if idle is None:
                raise SessionsFullError(self.most, _BUSY_RETRY_S)
            del self._sessions[idle]


@dataclass(slots=True)
class SessionCall:
    """One running call. `budget` is what each of its choices may think. `close` it once, however it ends."""

    store: SessionStore
    tenant: str
    name: str
    session: Session
    choices: int
    budget: int = 0
    _thought: dict[int, int] = field(default_factory=dict)
    _open: bool = True

    def __post_init__(self) -> None:
        self.budget = self.session.grant(self.choices)
        self.session.reserved += self.budget * self.choices
        self.session.running += 1
        self.session.calls += 1

    @property
    def live(self) -> bool:
        """Whether its session has not been deleted meanwhile."""
        return self.store.holds(self.tenant, self.name, self.session)

    def note(self, prompt: int, output: RequestOutput) -> None:
        """News of one of its prompts; costs are cumulative."""
        self._thought[prompt] = output.costs.thinking_tokens

    async def follow(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a call of one prompt as they come; the call is closed with them, however they end."""
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self.note(0, output)
                    yield output
        finally:
            self.close()

    def view(self) -> SessionView:
        """Where the session stands, this call's thinking so far counted as spent."""
        now = Session(self.session.total, 0.0, self.session.spent + (self._thinking if self._open else 0))
        return {
            "id": self.name,
            "object": "thinkfold.session",
            "total_budget": now.total,
            "spent": now.spent,
            "remaining": now.remaining,
            "call_budget": self.budget,
        }

    def close(self, *, hit: bool = False) -> None:
        """The call has ended: what it thought is spent, what it did not is free again."""
        if not self._open:
            return
        self._open = False
        self.session.reserved -= self.budget * self.choices
        self.session.running -= 1
        self.session.hits += hit
        self.session.spent += self._thinking
        self.store.touch(self.tenant, self.name, self.session)

    @property
    def _thinking(self) -> int:
        return sum(self._thought.values())
