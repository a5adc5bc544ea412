"""Whether one more branch may start: the batch is looked at until the last predicted end. No torch.

Every running branch grows by a token a step and returns its memory when it ends; when that is, is known
as a distribution only. A branch is admitted if at no later step the batch outgrows the pool with more than
a small probability, which Chernoff's bound (1952) tells for a sum of independent branches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log

from thinkfold.fold.estimate import FoldShape, middle
from thinkfold.kv.pages import PageClass
from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.forecast import LengthForecast
from thinkfold.types import FoldMode, FoldPolicy, FoldProfile, Phase

RISK = 0.02  # of outgrowing the pool at the worst step, where nothing else is said
LOOKS = 16  # steps at which the batch is looked at, beside those
CERTAIN = 0.5  # at which a branch ends that more likely than not runs until then
EXACT = 8  # so many raw branches that may have ended are reckoned with one by one: a bound would cost sessions
TILTS = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 2.0)  # parameters of the bound, in 1 / capacity
QUARTERS = (0.125, 0.375, 0.625, 0.875)  # an answer's length is one of four
PATIENCE = 32  # plans before a refused branch is looked at again, unless the batch has changed
PRIOR_SPANS = 4  # the profile counts as so many folded spans
SWING = 0.33  # variance of what is open, in squared spans: 1/12 at any time, more for the worst moment of many
OPENING = 4  # output tokens within which thinking may still begin


@dataclass(frozen=True, slots=True)
class Life:
    """A branch as the forecast sees it.

    `entries` now, of them `fixed` that no fold takes; `thought` tokens so far; at most `limit` more.
    `ends` says how likely it outlives so many more tokens (see `Admission`).
    """

    entries: float
    fixed: float
    thought: int
    answered: int
    answering: bool
    limit: int
    budget: float
    answers: tuple[int, ...]
    numbers: FoldProfile | None  # None where folds are not counted on
    tier: str = ""

    def entries_in(self, steps: float, shape: FoldShape) -> tuple[float, float]:
        """Stored entries after `steps` more tokens if it still runs: mean and variance."""
        raw, numbers = self.entries + steps, self.numbers
        if numbers is None:
            return raw, 0.0
        thought = self.thought if self.answering else self.thought + steps
        folded = self.fixed + (steps if self.answering else 0) + shape.entries(numbers, thought)
        return (raw, 0.0) if raw <= folded else (folded, SWING * shape.span**2)


class Admission:
    """Learns how long requests of each tier think and answer, and predicts what a batch will hold."""

    def __init__(self, capacity: int, page_size: int, risk: float = RISK) -> None:
        """`capacity` in entries: the pool without its reserve. `risk` of outgrowing it, between 0 and 1."""
        self._risk = risk
        self._capacity = capacity
        self._page_size = page_size
        self._thinking: defaultdict[str, LengthForecast] = defaultdict(LengthForecast)  # by tier
        self._answers: defaultdict[str, LengthForecast] = defaultdict(LengthForecast)
        self._refused_within: dict[str, tuple[tuple[int, int], int]] = {}  # the same for quotas, by tier
        self._refused: tuple[int, int] | None = None  # (order, running) of the last refusal
        self._patience = 0
        self._spans = 0  # closed spans of ended branches that were folded or refused,
        self._span_tokens = 0  # their tokens,
        self._refused_tokens = 0  # and of these the refused ones

    def admits(self, branch: Branch, running: Sequence[Branch], usage: Mapping[PageClass, int]) -> bool:
        """Whether the pool will hold `running` and `branch` until the last of them ends.

        `usage` are the held pages of now: with shared prefixes fewer than the running branches have in sum.
        """
        if not running:
            return True
        question = (branch.order, len(running))
        if question == self._refused and self._patience > 0:
            self._patience -= 1
            return False
        lives = [self._life(b) for b in running]
        held = sum(usage.values()) - usage[PageClass.CACHED] - usage[PageClass.PINNED]
        stored = sum(b.table.kv_len + b.table.summary.mean_entries for b in running)
        overlap = max(0.0, stored - held * self._page_size)
        lives += [self._life(b) for b in (branch, *branch.waiting_children())]
        if self.fits(lives, self._shape(running), overlap):
            self._refused = None
            return True
        self._refused, self._patience = question, PATIENCE
        return False

    def admits_within(self, branch: Branch, rivals: Sequence[Branch], pages: int) -> bool:
        """Whether its tier's quota of `pages` will hold the branch and its running `rivals` until the last ends."""
        if not rivals:
            return True
        tier, question = branch.request.tier.name, (branch.order, len(rivals))
        refused, patience = self._refused_within.get(tier, (None, 0))
        if question == refused and patience > 0:
            self._refused_within[tier] = (question, patience - 1)
            return False
        lives = [self._life(b) for b in (*rivals, branch, *branch.waiting_children())]
        if self.fits(lives, self._shape(rivals), capacity=pages * self._page_size):
            self._refused_within.pop(tier, None)
            return True
        self._refused_within[tier] = (question, PATIENCE)
        return False

    def fits(self, lives: Sequence[Life], shape: FoldShape, overlap: float = 0.0, capacity: int | None = None) -> bool:
        """Whether the risk is small at every step; `overlap` entries are counted more than once.

        `capacity` in entries, of the whole pool without it.
        """
        room = self._capacity if capacity is None else capacity
        ends = [self._last(life) - 1 for life in lives]  # then it may still run
        looks = {max(ends) * i / LOOKS for i in range(LOOKS + 1)}
        looks.update(end for life, end in zip(lives, ends, strict=True) if self.alive(life, end) > CERTAIN)
        return all(self._is_safe(lives, shape, (room, overlap), steps) for steps in sorted(looks))

    def alive(self, life: Life, steps: float) -> float:
        """Probability that a branch runs on after `steps` more tokens."""
        if steps >= life.limit:
            return 0.0
        if life.answering:
            return self._answers[life.tier].survival(life.answered + steps, life.answered)
        total = 0.0
        for answer in life.answers:
            thought = life.thought + steps - answer
            if thought < life.budget:
                total += self._thinking[life.tier].survival(thought, life.thought)
        return total / len(life.answers)

    def _last(self, life: Life) -> float:
        """More tokens than it will write by all that is known."""
        if life.answering:
            return min(life.limit, self._answers[life.tier].last(life.answered) - life.answered)
        thinking = min(life.budget, self._thinking[life.tier].last(life.thought)) - life.thought
        return min(life.limit, thinking + max(life.answers))

    def answer_tokens(self, tier: str, share: float) -> int | None:
        """Tokens that `share` of the tier's answers did not exceed; None where none has ended by itself.

        A tier without answers borrows the longest of the others'.
        """
        known = {name: tokens for name, seen in self._answers.items() if (tokens := seen.quantile(share)) is not None}
        return known.get(tier, max(known.values(), default=None))

    def learn(self, branch: Branch, running: Sequence[Branch]) -> None:
        """`branch` has ended by itself."""
        steering, tier = branch.steering, branch.request.tier.name
        output = len(branch.token_ids) - branch.num_prompt_tokens
        start, limit = steering.answer_start, branch.request.sampling.max_tokens
        budget = branch.request.thinking.budget
        cut = limit is not None and output >= limit
        alike = [b for b in running if b.request.tier.name == tier]
        if start is not None:
            thinkers = [_thought(b) for b in alike if b.steering.phase is Phase.THINKING]
            self._thinking[tier].end(start, thinkers, cut=budget is not None and start >= 0.9 * budget)
        if steering.phase is Phase.ANSWER:
            self._answers[tier].end(output - (start or 0), [_answered(b) for b in alike if _answers(b)], cut=cut)
        spans, tokens, refused = _count_spans([branch])
        self._spans += spans
        self._span_tokens += tokens
        self._refused_tokens += refused
        self._refused = None

    def _is_safe(self, lives: Sequence[Life], shape: FoldShape, space: tuple[float, float], steps: float) -> bool:
        """Whether the lives outgrow a `space` after `steps` more tokens with no more than the risk allowed.

        It is a capacity, and what of it is counted more than once.
        """
        capacity, overlap = space
        terms, mean, most = [], 0.0, 0.0
        for life in lives:
            alive = self.alive(life, steps)
            if alive > 0.0:
                entries, variance = life.entries_in(steps, shape)
                entries += self._page_size  # its last page, and one that is still read
                terms.append((alive, entries, variance))
                mean += alive * entries
                most += entries + (6 * variance) ** 0.5
        room = capacity + overlap * sum(alive for alive, _, _ in terms) / len(lives)
        if most <= room:
            return True
        if mean >= room:
            return False
        uncertain = [(alive, entries) for alive, entries, _ in terms if alive < 1.0]
        if len(uncertain) <= EXACT and not any(variance for _, _, variance in terms):
            certain = sum(entries for alive, entries, _ in terms if alive >= 1.0)
            return _exceeds(sorted(uncertain, key=lambda term: -term[1]), room - certain) <= self._risk
        return any(_log_bound(terms, room, tilt) <= log(self._risk) for tilt in TILTS)

    def _life(self, branch: Branch) -> Life:
        request, planner, summary = branch.request, branch.folding, branch.table.summary
        output = len(branch.token_ids) - branch.num_prompt_tokens
        thought, answered = _thought(branch), _answered(branch)
        missing = max(0, len(branch.token_ids) - branch.num_computed_tokens - 1)  # a prompt, or what was preempted
        entries = branch.table.kv_len + summary.mean_entries + missing
        if branch.slot < 0 and not branch.table.swapped:
            entries = float(len(branch.token_ids))
        fixed = branch.num_prompt_tokens + answered + (planner.refused[1] if planner is not None else 0)
        budget = inf if request.thinking.budget is None else float(request.thinking.budget)
        answers = self._answers[request.tier.name]
        known = [answers.quantile(share) for share in QUARTERS] if answers.known else []
        longest = max((n for n in known if n is not None), default=request.thinking.answer_reserve)
        return Life(
            entries=entries,
            fixed=fixed,
            thought=thought,
            answered=answered,
            answering=_answers(branch),
            limit=max(1, (request.sampling.max_tokens or self._capacity) - output),
            budget=max(budget, thought + 1),
            answers=tuple(longest if n is None else n for n in known) or (longest,),
            numbers=planner.numbers if planner is not None and _counts_on_folds(planner.policy) else None,
            tier=request.tier.name,
        )

    def _shape(self, running: Sequence[Branch]) -> FoldShape:
        """How folds have gone so far; the profiles of those that run stand in for what is not known."""
        spans, tokens, refused = _count_spans(running)
        middles = [middle(b.folding.numbers) for b in running if b.folding is not None]
        prior = sum(middles) / len(middles) if middles else 1.0
        spans, tokens, refused = spans + self._spans, tokens + self._span_tokens, refused + self._refused_tokens
        return FoldShape((tokens + PRIOR_SPANS * prior) / (spans + PRIOR_SPANS), refused / tokens if tokens else 0.0)


def entries_to_come(branch: Branch) -> int:
    """Entries that a branch without memory holds once its known tokens are computed; eager folds happen on the way."""
    known, planner = len(branch.token_ids), branch.folding
    if planner is None or planner.policy.policy is not FoldMode.EAGER:
        return known
    thought = _thought(branch)
    folded = FoldShape.most(planner.numbers).entries(planner.numbers, thought)
    return min(known, known - thought + ceil(folded))


def _exceeds(terms: Sequence[tuple[float, float]], room: float) -> float:
    """Probability that a sum exceeds `room` of which each term is there with a probability; largest terms first."""
    if room < 0.0:
        return 1.0
    if sum(entries for _, entries in terms) <= room:
        return 0.0
    (alive, entries), rest = terms[0], terms[1:]
    return alive * _exceeds(rest, room - entries) + (1.0 - alive) * _exceeds(rest, room)


def _log_bound(terms: Sequence[tuple[float, float, float]], room: float, tilt: float) -> float:
    """Logarithm of a bound of the probability that a sum exceeds `room`; for any `tilt` it holds.

    Each term is there with a probability and then has a mean and a variance.
    """
    theta, bound = tilt / room, -tilt
    for alive, mean, variance in terms:
        bound += log(1.0 - alive + alive * exp(min(700.0, theta * mean + theta * theta * variance / 2)))
    return bound


def _counts_on_folds(policy: FoldPolicy) -> bool:
    return policy.policy is not FoldMode.OFF and policy.prefer == "fold"


def _count_spans(branches: Sequence[Branch]) -> tuple[int, int, int]:
    """Spans that were folded or refused, their tokens, and tokens of the refused ones."""
    spans = tokens = refused = 0
    for branch in branches:
        planner = branch.folding
        if planner is not None:
            kept, raw = planner.refused
            spans += len(planner.folded) + kept
            tokens += planner.folded_tokens + raw
            refused += raw
    return spans, tokens, refused


def _answers(branch: Branch) -> bool:
    """Whether it writes its answer; a model that opens its thinking itself has not begun one by that."""
    opens = branch.request.thinking.enabled and branch.steering.answer_start is None
    output = len(branch.token_ids) - branch.num_prompt_tokens
    return branch.steering.phase is Phase.ANSWER and not (opens and output < OPENING)


def _thought(branch: Branch) -> int:
    """Thinking tokens so far, the answer's excluded."""
    output = len(branch.token_ids) - branch.num_prompt_tokens
    start = branch.steering.answer_start
    if start is not None:
        return start
    return output if branch.steering.phase is Phase.THINKING else 0


def _answered(branch: Branch) -> int:
    """Answer tokens so far."""
    return len(branch.token_ids) - branch.num_prompt_tokens - _thought(branch)
