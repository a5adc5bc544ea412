"""The last call: a model reads the stripped answers once and says which mean the same. Prompt and parser only.

After universal self-consistency (arXiv 2311.17311), with groups instead of one choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Ask = Callable[[str], str]  # prompt -> the model's reply
MAX_ANSWERS = 16
MAX_CHARS = 400  # of each answer

_GROUP = re.compile(r"^\W*group\s*\w*\W*:[ \t*_]*([\d ,]+)\W*$", re.IGNORECASE | re.MULTILINE)


def prompt_for(answers: Sequence[str]) -> str:
    """The question to ask: answers are numbered from 1 and cut, so that one call is cheap."""
    shown = "\n".join(f"{number}. {' '.join(text.split())[:MAX_CHARS]}" for number, text in enumerate(answers, 1))
    return (
        "Here are answers to one question. Put answers that mean exactly the same into one group. "
        "Different numbers, units, names or conclusions belong to different groups. Every answer is in "
        f"one group.\n\n{shown}\n\n"
        "Reply with one line for each group and nothing else, such as:\nGroup: 1, 3\nGroup: 2"
    )


def read_groups(reply: str, size: int) -> list[list[int]] | None:
    """Groups of indices from 0, those that were not named alone; None for a reply that contradicts itself."""
    groups: list[list[int]] = []
    seen: set[int] = set()
    for numbers in _GROUP.findall(reply):
        group = sorted({int(number) - 1 for number in re.findall(r"\d+", numbers)})
        if not group or group[0] < 0 or group[-1] >= size or seen & set(group):
            return None
        seen |= set(group)
        groups.append(group)
    if not groups:
        return None
    return sorted(groups + [[index] for index in range(size) if index not in seen])
