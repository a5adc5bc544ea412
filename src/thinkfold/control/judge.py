"""The last call: a model reads the stripped answers once and says which mean the same. Prompt and parser only.

After universal self-consistency (arXiv 2311.17311), with groups instead of one choice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_ANSWERS = 16
MAX_CHARS = 400  # of each answer; a longer one is cut in its middle, as conclusions stand at the end

_GROUP = re.compile(r"\W*group\s*\w*\W*:[ *_]*(\d{1,3}(?: *, *\d{1,3})*)\W*", re.IGNORECASE)


def prompt_for(answers: Sequence[str]) -> str:
    """The question to ask: answers are numbered from 1 and cut, so that one call is cheap."""
    shown = "\n".join(f"{number}. {_cut(' '.join(text.split()))}" for number, text in enumerate(answers, 1))
    return (
        "Here are answers to one question. Put answers that mean exactly the same into one group. "
        "Different numbers, units, names or conclusions belong to different groups. Every answer is in "
        f"one group.\n\n{shown}\n\n"
        "Reply with one line for each group and nothing else, such as:\nGroup: 1, 3\nGroup: 2"
    )


def read_groups(reply: str, size: int) -> list[list[int]] | None:
    """Groups of indices from 0; None for a reply that is anything but lines of groups with every answer in one."""
    groups: list[list[int]] = []
    for line in filter(str.strip, reply.splitlines()):
        found = _GROUP.fullmatch(line.strip())
        if found is None:
            return None
        groups.append(sorted(int(number) - 1 for number in found.group(1).split(",")))
    named = sorted(index for group in groups for index in group)
    return sorted(groups) if named == list(range(size)) else None


def _cut(text: str) -> str:
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[:half]} … {text[-half:]}"
