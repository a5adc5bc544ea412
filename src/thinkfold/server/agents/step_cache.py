"""Finished answers of plan steps, for agents that ask the same again. Plain Python, one thread, one clock.

Only what a client was shown is kept, and only the answer: no thinking, no KV, no tokens.
"""

from __future__ import annotations

import hashlib
import re
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from thinkfold.types import Limits, Outcome
from thinkfold.types.fold import FoldPolicy
from thinkfold.types.thinking import ThinkingPolicy

MAX_ANSWER_CHARS = 65_536
_NUMBER = re.compile(r"^(?:[-*•]\s+|(?:step\s+)?\d{1,4}[.):]\s+)+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer and the policies it was made under; `made` on the cache's clock."""

    text: str
    stop_reason: str | int | None
    thinking: ThinkingPolicy
    fold: FoldPolicy
    limits: Limits
    made: float
    outcome: Outcome | None = None  # of a vote
    session: str = ""  # whose call made it


class StepCache:
    """At most `most` answers, each for `ttl_s` seconds; the least recently used goes first.

    Keys are those of `key_of`, each of one tenant.
    """

    def __init__(self, most: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.ttl_s = ttl_s
        self.clock = clock
        self._answers: OrderedDict[tuple[str, str], Answer] = OrderedDict()

    def get(self, key: tuple[str, str]) -> Answer | None:
        """The answer kept for a key that is not too old."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        if answer.made + self.ttl_s <= self.clock():
            del self._answers[key]
            return None
        self._answers.move_to_end(key)
        return answer

    def put(self, key: tuple[str, str], answer: Answer) -> None:
        """Keep an answer in place of an older one; empty and very long ones are not kept."""
        if not 0 < len(answer.text) <= MAX_ANSWER_CHARS or self.most < 1:
            return
        self._answers[key] = answer
        self._answers.move_to_end(key)
        while len(self._answers) > self.most:
            self._answers.popitem(last=False)

    def delete_tenant(self, tenant: str) -> int:
        """Forget all of a tenant's; their number."""
        mine = [key for key in self._answers if key[0] == tenant]
        for key in mine:
            del self._answers[key]
        return len(mine)

    def delete_session(self, tenant: str, session: str) -> int:
        """Forget the answers that a session's calls have made; their number."""
        mine = [key for key, answer in self._answers.items() if (key[0], answer.session) == (tenant, session)]
        for key in mine:
            del self._answers[key]
        return len(mine)

    def __len__(self) -> int:
        return len(self._answers)


def key_of(tenant: str, step: str, *parameters: object) -> tuple[str, str]:
    """One key for everything that an answer may depend on and the client wants it to: no part can pass for another."""
    parts = [normalised(step), *map(repr, parameters)]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return tenant, digest.hexdigest()


def normalised(step: str) -> str:
    """A plan step without what writers vary: its number or bullet, blanks, a final full stop. Case stays."""
    text = " ".join(unicodedata.normalize("NFC", step).split())
    return _NUMBER.sub("", text).removesuffix(".").rstrip()
