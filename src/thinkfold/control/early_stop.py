"""All rules of one branch together: guard rails, order, shadow mode. One observation in, actions out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from thinkfold.control.equality import Equality
from thinkfold.control.facts import Facts
from thinkfold.control.presets import rules_for
from thinkfold.control.rule import Action, EndThinking, Observation, Probe, Probed, Rule
from thinkfold.control.schedule import MAX_PROBE_TOKENS
from thinkfold.control.shadow import ShadowVerdict, WouldStop
from thinkfold.types import ControlParams

UNGUARDED = frozenset({"loop"})  # a loop is one with tools and grammars, too
BLIND_PROBES = 2  # the first probes; without an answer in them there is nothing to compare


@dataclass(frozen=True, slots=True)
class Guards:
    """What a request declares that makes early answers worthless or unreadable."""

    tools: bool = False
    grammar: bool = False
    code: bool = False

    @property
    def reason(self) -> str | None:
        """Why rules are off; None if they are on."""
        return next((name for name in ("tools", "grammar", "code") if getattr(self, name)), None)


class EarlyStopping:
    """The rules of one branch. Feed `observe`, carry out what it returns; it is silent after EndThinking.

    `switched_off` are names of rules that disagreed too often (`control.shadow.Scoreboard`).
    """

    def __init__(
        self,
        params: ControlParams,
        guards: Guards | None = None,
        *,
        switched_off: Collection[str] = (),
        equality: Equality | None = None,
    ) -> None:
        chosen = rules_for(params)
        self._rules = tuple(rule for rule in chosen.rules if rule.name not in switched_off)
        self._look = chosen.look
        self._shadow = params.shadow
        self._would: dict[str, WouldStop] = {}
        self.facts = Facts(equality or Equality())
        self.off_reason = (guards or Guards()).reason
        self.stopped: EndThinking | None = None

    def observe(self, seen: Observation) -> list[Action]:
        """What to do now: an EndThinking alone, or at most one look."""
        if self.stopped is not None:
            return []
        self.facts.record(seen)
        if isinstance(seen, Probed):
            self._read_probe(seen)
        ends = [action for rule in self._asked() if isinstance(action := rule.decide(seen, self.facts), EndThinking)]
        if ends and not self._shadow:
            self.stopped = ends[0]
            return [ends[0]]
        look = self._note(ends) or self._look_around(seen)
        if look is None:
            return []
        self.facts.note(look)
        return [look]

    def finish(self, answer: str | None, thinking_tokens: int) -> list[ShadowVerdict]:
        """Shadow mode at the end of the branch: each rule that would have stopped against the real answer.

        A rule whose early answer was never seen has no verdict; one that abstained then disagrees.
        """
        verdicts = []
        for stop in self._would.values():
            if not stop.answered:
                continue
            agreed = stop.answer is not None and answer is not None and self.facts.equality.same(stop.answer, answer)
            verdicts.append(ShadowVerdict(stop, max(0, thinking_tokens - stop.thinking_tokens), agreed))
        return verdicts

    def _asked(self) -> list[Rule]:
        """Rules that may still decide something; in shadow mode each does so once."""
        return [
            rule
            for rule in self._rules
            if (self.off_reason is None or rule.name in UNGUARDED) and rule.name not in self._would
        ]

    def _read_probe(self, seen: Probed) -> None:
        """Switch off what cannot see answers; give a shadow stop that waits for one its answer."""
        probes = self.facts.probes
        if len(probes) == BLIND_PROBES and all(probe.answer is None for probe in probes):
            self.off_reason = self.off_reason or "no answers"
        for name, stop in self._would.items():
            if not stop.answered and seen.thinking_tokens >= stop.thinking_tokens:
                self._would[name] = stop.with_answer(probes[-1].answer)

    def _note(self, ends: list[EndThinking]) -> Probe | None:
        """Shadow mode: remember who would stop here, and ask for the answer it would have given."""
        for end in ends:
            stop = WouldStop(end.rule, end.why, self.facts.thinking_tokens)
            last = self.facts.probes[-1] if self.facts.probes else None
            known = last is not None and last.thinking_tokens == stop.thinking_tokens
            self._would[end.rule] = stop.with_answer(last.answer) if known and last else stop
        return Probe(MAX_PROBE_TOKENS) if any(not self._would[end.rule].answered for end in ends) else None

    def _look_around(self, seen: Observation) -> Action | None:
        if self._look is None or self.off_reason is not None:
            return None
        return self._look.decide(seen, self.facts)
