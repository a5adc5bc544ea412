"""When a vote is settled: probabilities and bounds over counts. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, exp, lgamma, log

MIN_PROBABILITY = 0.95
MIN_SHARE = 0.95
MIN_STAYING = 0.88  # chosen on half of the recorded votes of Pebble's `hard` (docs/control.md)
CROWDED_CLASSES = 3  # of at least this share each make a Dirichlet of the top five replace the Beta
CROWDED_SHARE = 0.15
TOP_CLASSES = 5
CHANGE_BY_STREAK = (0.5, 0.3, 0.2, 0.12, 0.08)  # probability that an answer still changes, by ticks unchanged
FLIP_PENALTY = 0.1
_STEPS = 512


def beta_probability(leader: int, runner_up: int) -> float:
    """Probability that the leader is the likelier of the two, from a uniform prior.

    Adaptive consistency's integral (arXiv 2305.11860) in closed form:
    the sum over j ≤ leader of C(leader + runner_up + 1, j) / 2 ** (leader + runner_up + 1).
    """
    total = leader + runner_up + 1
    return sum(comb(total, j) for j in range(leader + 1)) / 2**total


def dirichlet_probability(votes: Sequence[int]) -> float:
    """Probability that the first class is the likeliest of all, under a uniform Dirichlet prior.

    P(G1 > all other Gi) for independent Gamma(votes + 1) variables, integrated by Simpson's rule;
    for two classes this is `beta_probability`.
    """
    first, others = votes[0] + 1, [vote + 1 for vote in votes[1:]]
    high = first + 12 * first**0.5 + 30
    width = high / _STEPS
    total = 0.0
    for step in range(1, _STEPS + 1):
        x = step * width
        density = exp((first - 1) * log(x) - x - lgamma(first))
        for shape in others:
            density *= _erlang_cdf(shape, x)
        total += density * (1 if step == _STEPS else 4 if step % 2 else 2)
    return min(1.0, total * width / 3)


def leader_probability(votes: Sequence[int]) -> tuple[float, str]:
    """Probability that the class with most votes is the mode, and `beta` or `dirichlet`. `votes` fall."""
    if not votes:
        return 0.0, "beta"
    total = sum(votes)
    if sum(vote >= CROWDED_SHARE * total for vote in votes) >= CROWDED_CLASSES:
        return dirichlet_probability(votes[:TOP_CLASSES]), "dirichlet"
    return beta_probability(votes[0], votes[1] if len(votes) > 1 else 0), "beta"


def staying_probability(votes: Sequence[int], remaining: int) -> float:
    """Probability that the leader also leads when `remaining` more votes are in; half of it for a draw.

    Votes for the leader, the runner-up and all others, under a uniform Dirichlet prior: the Dirichlet-multinomial
    of what is to come. `votes` fall; 1 for none that are to come and a leader ahead.
    """
    leader, runner_up, *others = *votes, 0, 0
    shapes = leader + 1, runner_up + 1, sum(others) + 1
    norm = lgamma(sum(shapes)) - lgamma(sum(shapes) + remaining) + lgamma(remaining + 1) - sum(map(lgamma, shapes))
    total = 0.0
    for more in range(remaining + 1):
        for rival in range(remaining + 1 - more):
            ahead = leader + more - runner_up - rival
            if ahead >= 0:
                come = more, rival, remaining - more - rival
                found = sum(lgamma(a + x) - lgamma(x + 1) for a, x in zip(shapes, come, strict=True))
                total += exp(norm + found) * (1.0 if ahead else 0.5)
    return min(1.0, total)


def settled_by(votes: Sequence[int], remaining: int | None) -> str | None:
    """The rule by which counts settle a vote with `remaining` to come; None for no rule. Votes with weights tell none.

    `beta` or `dirichlet`: the leader is the mode; `likely`: it stays the leader.
    """
    probability, name = leader_probability(votes)
    if probability >= MIN_PROBABILITY:
        return name
    return "likely" if remaining is not None and staying_probability(votes, remaining) >= MIN_STAYING else None


@dataclass(frozen=True, slots=True)
class Leaning:
    """What a running trace would answer now: its class (None for no answer), for how many ticks, and its weight."""

    choice: int | None
    streak: int
    flipped: bool = False  # its last two answers differ from each other and from the one before
    weight: float = 1.0

    @property
    def change(self) -> float:
        """Probability that its final answer is another one."""
        base = CHANGE_BY_STREAK[min(max(self.streak, 1), len(CHANGE_BY_STREAK)) - 1]
        return base + (FLIP_PENALTY if self.flipped else 0.0)


def is_safe_in_flight(finished: Mapping[int, float], running: Sequence[Leaning], leader: int) -> bool:
    """Whether the leader stays ahead of every class, known or not, if running traces change their answers.

    The margin test of MARS (arXiv 2606.12935) with γ = 1: V_L - V_k > Σ q_j c_j with c_j of 2w where j
    votes for L, -w where it votes for k, else w; an unseen challenger has no votes. A leader that is
    not ahead now is not safe, however likely it is to be.
    """
    totals = dict(finished)
    for trace in running:
        if trace.choice is not None:
            totals[trace.choice] = totals.get(trace.choice, 0.0) + trace.weight

    def risk(challenger: int | None) -> float:
        total = 0.0
        for trace in running:
            factor = 2.0 if trace.choice == leader else 1.0
            if challenger is not None and trace.choice == challenger:
                factor = -1.0
            total += trace.change * factor * trace.weight
        return total

    ahead = totals.get(leader, 0.0)
    rivals = [(k, votes) for k, votes in totals.items() if k != leader]
    return all(ahead - votes > max(0.0, risk(k)) for k, votes in rivals) and ahead > risk(None)


def _erlang_cdf(shape: int, x: float) -> float:
    """P(Gamma(shape) ≤ x) for a whole shape."""
    term = total = exp(-x)
    for k in range(1, shape):
        term *= x / k
        total += term
    return max(0.0, 1.0 - total)
