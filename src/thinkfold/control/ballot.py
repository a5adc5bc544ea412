"""Counting votes over classes of equal answers, and what one call to a model may join of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinkfold.control.canonical import Kind, form_of
from thinkfold.control.equality import Equality, Rung
from thinkfold.control.judge import MAX_ANSWERS, prompt_for, read_groups


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

    @property
    def is_prose(self) -> bool:
        """Whether its answers are no exact values, which only the call may join to another class."""
        return form_of(self.answer).kind is Kind.TEXT


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
    return Tally(_ordered(classes), sum(answer is None for answer in answers))


def question(found: Tally) -> str | None:
    """What a model is asked about the first classes, in one call; None where its reply could join none."""
    asked = found.classes[:MAX_ANSWERS]
    could_join = len(asked) > 1 and any(one.is_prose for one in asked)
    return prompt_for([one.answer for one in asked]) if could_join else None


def joined(found: Tally, reply: str) -> Tally:
    """The classes with that call's reply: its groups are one class each, except where two exact values differ.

    A reply that is no partition of what was asked changes nothing.
    """
    asked, others = found.classes[:MAX_ANSWERS], found.classes[MAX_ANSWERS:]
    groups = read_groups(reply, len(asked))
    if groups is None:
        return found
    classes = [one for group in groups for one in _as_one([asked[place] for place in group])]
    return Tally(_ordered([*classes, *others]), found.abstained)


def _as_one(same: Sequence[VoteClass]) -> Sequence[VoteClass]:
    exact = [one for one in same if not one.is_prose]
    if len(same) == 1 or len(exact) > 1:
        return same
    members = tuple(sorted(member for one in same for member in one.members))
    weight, is_sure = sum(one.weight for one in same), all(one.is_sure for one in same)
    first = (exact or same)[0]
    return [replace(first, members=members, weight=weight, rung=Rung.CALL, is_sure=is_sure)]


def _ordered(classes: Sequence[VoteClass]) -> tuple[VoteClass, ...]:
    return tuple(sorted(classes, key=lambda one: (-one.weight, -one.count, one.members[0])))
