"""Counting votes over classes of equal answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinkfold.control.equality import Equality, Rung


@dataclass(frozen=True, slots=True)
class VoteClass:
    """One class of a vote. `members` index the answers that were counted."""

    answer: str
    members: tuple[int, ...]
    representative: int
    weight: float
    rung: Rung
    is_sure: bool  # no later answer can take members from it or join it to another class

    @property
    def count(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class Tally:
    """Classes by weight, then count, then first member; answers that are None abstained."""

    classes: tuple[VoteClass, ...]
    abstained: int

    @property
    def counts(self) -> list[int]:
        """Votes of each class, most first."""
        return sorted((found.count for found in self.classes), reverse=True)

    @property
    def share(self) -> float:
        """The leader's share of the weight; 0 without votes."""
        total = sum(found.weight for found in self.classes)
        return self.classes[0].weight / total if total > 0 else 0.0

    def class_of(self, index: int) -> int | None:
        """Place of the class that holds an answer."""
        return next((place for place, found in enumerate(self.classes) if index in found.members), None)

    def lossless(self, remaining: int) -> bool:
        """Whether `remaining` further votes of weight 1 cannot change the winner, whatever they say.

        Classes that a later answer may still join to another one (decimals, units, formulas, prose)
        count as if they all stood behind the strongest rival.
        """
        if not self.classes or not self.classes[0].is_sure:
            return False
        rivals = self.classes[1:]
        strongest = max((found.count for found in rivals if found.is_sure), default=0)
        unsure = sum(found.count for found in rivals if not found.is_sure)
        return self.classes[0].count - strongest - unsure > remaining


def tally(answers: Sequence[str | None], weights: Sequence[float], equality: Equality) -> Tally:
    """Count the answers. Every weight is positive and finite."""
    found = equality.partition(answers)
    classes = [
        VoteClass(
            one.answer, one.members, one.representative, sum(weights[i] for i in one.members), one.rung, one.is_sure
        )
        for one in found.classes
    ]
    classes.sort(key=lambda one: (-one.weight, -one.count, one.members[0]))
    return Tally(tuple(classes), sum(answer is None for answer in answers))
