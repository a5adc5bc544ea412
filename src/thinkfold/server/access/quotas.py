"""How much each key has used, and whether it may go on. Plain numbers and one clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from typing_extensions import TypedDict

from thinkfold.server.access.errors import RateLimitError
from thinkfold.server.access.keys import ApiKey
from thinkfold.types import RequestOutput

_BUSY_RETRY_S = 5.0


class Bucket:
    """A token bucket: holds `size` at most, refills in `seconds`. May go below zero: what was used is owed."""

    def __init__(self, size: int, seconds: float, clock: Callable[[], float]) -> None:
        self._size = size
        self._rate = size / seconds
        self._clock = clock
        self._left = float(size)
        self._then = clock()

    @property
    def left(self) -> float:
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._then) * self._rate)
        self._then = now
        return self._left

    def take(self, amount: float) -> None:
        self._left = self.left - amount

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there, 0 if it is."""
        return max(0.0, (amount - self.left) / self._rate)


@dataclass(slots=True)
class Usage:
    """What one key uses and has used."""

    requests: int = 0
    tokens: int = 0
    refused: int = 0
    thinking: int = 0  # choices that run now and may think
    buckets: dict[str, Bucket] = field(default_factory=dict)


class KeyUsage(TypedDict):
    """What one key has used, for an operator. `left` is what its limits leave it, by their names."""

    name: str
    tenant: str
    admin: bool
    left: dict[str, int]
    requests: int
    tokens: int
    refused: int
    thinking: int


class Quotas:
    """Holds every key to its limits. Keys come from a bounded table."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, Usage] = {}

    def usage(self, key: ApiKey) -> Usage:
        """The running account of a key."""
        if key.name not in self._usage:
            spans = {"requests_per_minute": 60.0, "tokens_per_minute": 60.0, "tokens_per_day": 86_400.0}
            sizes = {name: getattr(key, name) for name in spans}
            buckets = {n: Bucket(size, spans[n], self._clock) for n, size in sizes.items() if size is not None}
            self._usage[key.name] = Usage(buckets=buckets)
        return self._usage[key.name]

    def count_request(self, key: ApiKey) -> None:
        """One HTTP request of `key`. Raises RateLimitError."""
        usage = self.usage(key)
        self._check(key, usage, "requests_per_minute", 1.0)
        if "requests_per_minute" in usage.buckets:
            usage.buckets["requests_per_minute"].take(1.0)
        usage.requests += 1

    def lease(self, key: ApiKey, thinking: int) -> Lease:
        """A generation of `thinking` choices that may think begins. Raises RateLimitError."""
        usage = self.usage(key)
        for name in ("tokens_per_minute", "tokens_per_day"):
            self._check(key, usage, name, 1.0)
        most = key.concurrent_thinking
        if most is not None and thinking and usage.thinking + thinking > most:
            usage.refused += 1
            raise RateLimitError("concurrent_thinking", most, _BUSY_RETRY_S)
        return Lease(usage, thinking)

    def _check(self, key: ApiKey, usage: Usage, name: str, amount: float) -> None:
        wait = usage.buckets[name].wait_s(amount) if name in usage.buckets else 0.0
        if wait > 0.0:
            usage.refused += 1
            raise RateLimitError(name, getattr(key, name), wait)

    def report(self, keys: tuple[ApiKey, ...]) -> list[KeyUsage]:
        """What every key has used, for an operator; nothing of a key's secret."""
        rows: list[KeyUsage] = []
        for key in keys:
            usage = self.usage(key)
            left = {name: round(bucket.left) for name, bucket in usage.buckets.items()}
            rows.append(
                {
                    "name": key.name,
                    "tenant": key.owner,
                    "admin": key.admin,
                    "left": left,
                    "requests": usage.requests,
                    "tokens": usage.tokens,
                    "refused": usage.refused,
                    "thinking": usage.thinking,
                }
            )
        return rows


class Lease:
    """One running generation of a key. `close` it once, however it ends: then it pays its tokens."""

    def __init__(self, usage: Usage | None, thinking: int) -> None:
        self._usage = usage
        self._thinking = thinking
        self._tokens: dict[int, int] = {}
        self._counted: tuple[Counter[str], str] | None = None
        if usage is not None:
            usage.thinking += thinking

    def note(self, prompt: int, output: RequestOutput) -> None:
        """News of one of its prompts; costs are cumulative."""
        costs = output.costs
        self._tokens[prompt] = costs.prompt_tokens + costs.thinking_tokens + costs.answer_tokens

    def count(self, running: Counter[str], tenant: str) -> None:
        """Be one of the tenant's `running` generations until the end."""
        self._counted = running, tenant
        running[tenant] += 1

    def close(self) -> None:
        counted, self._counted = self._counted, None
        if counted is not None:
            running, tenant = counted
            running[tenant] -= 1
            if not running[tenant]:
                del running[tenant]
        usage, self._usage = self._usage, None
        if usage is None:
            return
        tokens = sum(self._tokens.values())
        usage.thinking -= self._thinking
        usage.tokens += tokens
        for name in ("tokens_per_minute", "tokens_per_day"):
            if name in usage.buckets:
                usage.buckets[name].take(tokens)
