"""Where the final answer stands in a text. Reads the visible answer only, never thinking."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

BOX = "\\boxed{"
END_MARKERS = ("</think>", "</thought>", "</seed:think>", "</mm:think>", "[/THINK]", "◁/think▷")
MAX_LINE = 200  # characters of a reply that is its own answer

_JOINED = re.compile(r"[\s$.]*(?:,|;|and|\\text\{\s*and\s*\}|,\s*and)[\s$]*", re.IGNORECASE)
_PHRASE = re.compile(r"(?:final\s+answer|answer)\s*(?:is|=|:)\s*:?[ \t]*(?:\n[ \t]*)?([^\n]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Extraction:
    """An answer and what gave it away; `answer` None abstains."""

    answer: str | None
    source: Literal["box", "phrase", "line", "none"] = "none"


def extract(text: str) -> Extraction:
    """The final answer of a reply.

    The last `\\boxed{...}`, with those before it that are joined to it by a comma or `and` only;
    an unclosed last box abstains. Else what follows the last "answer is" or "answer:"; else
    the reply itself, if it is a single short line. A raw reply is read behind its last end marker.
    """
    text = _behind_thinking(text)
    boxes = find_boxes(text)
    if boxes is None:
        return Extraction(None)
    if boxes:
        return Extraction(_joined(text, boxes), "box")
    phrases = _PHRASE.findall(text)
    if phrases and (found := _tidy(phrases[-1])):
        return Extraction(found, "phrase")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and len(lines[0]) <= MAX_LINE:
        return Extraction(_tidy(lines[0]) or None, "line")
    return Extraction(None)


def find_boxes(text: str) -> list[tuple[int, int]] | None:
    """Start and end (behind the closing brace) of every `\\boxed{...}`; None if the last one is not closed."""
    found: list[tuple[int, int]] = []
    start = text.find(BOX)
    while start >= 0:
        end = _closing(text, start + len(BOX))
        if end is None:
            return None
        found.append((start, end))
        start = text.find(BOX, end)
    return found


def _closing(text: str, at: int) -> int | None:
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.end()
    return None


def _joined(text: str, boxes: list[tuple[int, int]]) -> str:
    first = len(boxes) - 1
    while first > 0 and _JOINED.fullmatch(text, boxes[first - 1][1], boxes[first][0]):
        first -= 1
    return ", ".join(text[start + len(BOX) : end - 1].strip() for start, end in boxes[first:])


def _behind_thinking(text: str) -> str:
    end = max((at + len(marker) for marker in END_MARKERS if (at := text.rfind(marker)) >= 0), default=0)
    return text[end:]


def _tidy(text: str) -> str:
    text = text.strip().strip("*_`").strip()
    return text[:-1].rstrip("*_` ") if text.endswith(".") else text
