"""A prefix of prompts that is computed before it is asked for, and kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """`tokens` are kept, whole KV `pages` of them, for `ttl_s` more seconds (None: for good) or until memory is short.

    `ahead`: made for a next turn, so it is the first to go. `computed_tokens` went through the model for it; of one
    that was not kept, `dropped` says why.
    """

    name: str
    tokens: int
    pages: int
    ttl_s: float | None
    ahead: bool = False
    computed_tokens: int = 0
    dropped: str | None = None
