"""What a request says of the agent session that it belongs to, and where a session stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypedDict

from thinkfold.errors import ParameterError
from thinkfold.types.checks import integer

MAX_TOTAL = 1 << 40
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class SessionParams:
    """`total_budget` thinking tokens are for all calls of a session; later calls may leave it out.

    Raises ParameterError.
    """

    id: str
    total_budget: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or _ID.fullmatch(self.id) is None:
            raise ParameterError("session.id", "must be 1 to 128 letters, digits, dots, colons, dashes, underscores")
        if self.total_budget is not None:
            integer("session.total_budget", self.total_budget, 1, MAX_TOTAL)


@dataclass(frozen=True, slots=True)
class SessionState:
    """Where a session stands, in thinking tokens; `cached_answers` of its `calls` were kept answers of plan steps."""

    id: str
    total_budget: int
    spent: int
    remaining: int
    calls: int
    cached_answers: int
    expires_in_s: float


class SessionView(TypedDict):
    """Where an agent session stands, in thinking tokens; `call_budget` is this call's."""

    id: str
    object: Literal["thinkfold.session"]
    total_budget: int
    spent: int
    remaining: int
    call_budget: int
