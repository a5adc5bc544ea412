"""A problem with an exact answer, and the reading of boxed answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

BOX_START = "\\boxed{"


@dataclass(frozen=True, slots=True)
class Problem:
    """One question of one task family; `data` holds what its checker needs."""

    task: str
    question: str
    answer: str
    data: Mapping[str, Any] = field(default_factory=dict, compare=False)


def extract_boxed(text: str) -> str | None:
    """Content of the last balanced `\\boxed{...}`, or None; an unclosed last box counts as none."""
    start = text.rfind(BOX_START)
    if start < 0:
        return None
    depth = 1
    begin = start + len(BOX_START)
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end].strip()
    return None


def is_evaluation(question: str) -> bool:
    """Whether a question belongs to evaluation; training skips exactly these (one in sixteen)."""
    return blake2b(question.encode(), digest_size=1).digest()[0] % 16 == 0
