"""What may be asked of a running request, as plain serialisable values, and the core's answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinkfold.types import ThinkingEndReason, Until


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`call` names the answer. `choice` None means every choice that has not ended."""

    call: int
    request_id: str
    choice: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Order):
    """Stop with everything that is held, until `Resume`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Order):
    """Go on after `Pause`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Order):
    """End now. Without `keep_partial` nothing is kept and all tokens count as discarded."""

    keep_partial: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EndThinking(Order):
    """Close thinking now by the budget's own way; `reason` is what the response will say."""

    reason: ThinkingEndReason = ThinkingEndReason.CONTROL


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBudget(Order):
    """Another thinking budget for all choices; -1 is no limit."""

    budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inject(Order):
    """Append tokens that the model has not drawn."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Order):
    """Ask what would follow `token_ids` now: `n` greedy tokens with `logprobs` alternatives each, up to a stop.

    With all that is known it must not be longer than `max_len`.
    """

    token_ids: tuple[int, ...]
    n: int
    max_len: int
    stop: tuple[str, ...] = ()
    logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Order):
    """Keep the state after `at` output tokens (None: all of them) under a handle."""

    at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback(Order):
    """Go back to the state after `at` output tokens."""

    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hash(Order):
    """Name the state by its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend(Order):
    """Start the request `request_id` from a handle: `n` choices, each to the end of a part, or to its own end.

    With `end_thinking` thinking, which must be open, is closed at once for that reason.
    """

    handle: str
    namespace: tuple[str, ...]
    until: Until | None = None
    n: int = 1
    temperature: float | None = None
    seed: int | None = None
    end_thinking: ThinkingEndReason | None = None
    arrival_time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Order):
    """Forget a handle; `request_id` is its name. `namespace` None: whoever's it is."""

    namespace: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(Order):
    """Compute a prefix before it is asked for and pin it under the name `request_id`, for `ttl_s` (None: for good).

    `idle`: for a turn that may never come, so in idle steps only and given up first. `session`: whose turn it is.
    """

    token_ids: tuple[int, ...]
    namespace: tuple[str, ...]
    owner: str = ""
    idle: bool = False
    ttl_s: float | None = None
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPins(Order):
    """What is pinned for an owner."""

    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin(Order):
    """Let go of the owner's pin `request_id`."""

    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget(Order):
    """Let go of all that is kept for `owner` and for namespaces that begin with `labels`.

    With `session` only of what is kept for that one, whose requests are ended.
    """

    owner: str
    labels: tuple[str, ...]
    session: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of the order `call`: a value, or the error to raise."""

    call: int
    value: Any = None
    error: Exception | None = None
