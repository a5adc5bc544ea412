"""Which decision over several samples, or search, runs, and whether its question allows it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from thinkfold.control.verifier import Verifiers
from thinkfold.engine.judging import run_best_of
from thinkfold.engine.last_call import LastCall
from thinkfold.engine.samples import Question, Samples
from thinkfold.engine.searching import Room, run_search
from thinkfold.engine.steering import Steersman
from thinkfold.engine.thoughts import Branching, Thoughts
from thinkfold.engine.voting import run_vote
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.types import BestOfParams, Decision, RequestOutput, SearchParams, ThinkingParams


class Decisions:
    """Runs decisions on one engine; they share its verifiers, and the handles that it keeps."""

    def __init__(
        self,
        engine: Branching,
        steersman: Steersman,
        call: LastCall,
        verifiers: Mapping[str, str] | None = None,
        max_handles: int = 64,
    ) -> None:
        self._engine, self._steersman, self._call = engine, steersman, call
        self._verifiers, self._room = Verifiers(verifiers), Room(max_handles)

    def run(self, asked: Question, how: Decision) -> AsyncGenerator[RequestOutput, None]:
        """Its outputs. Raises ParameterError, UnsupportedError at once for what makes no decision."""
        asked.check(how.field)
        equality, find = self._steersman.equality(), self._verifiers.find
        if isinstance(how, SearchParams):
            _check_search(asked, self._steersman)
            if how.most_held > self._room.size:
                few = f"may hold {how.most_held} states, and the engine keeps {self._room.size} handles"
                raise ParameterError("search.width", few)
            verifier = None if how.verifier is None else find("search.verifier", how.verifier)
            return run_search(Thoughts(self._engine, asked, how, verifier), how, verifier, equality, self._room)
        samples = Samples(self._engine, asked)
        if isinstance(how, BestOfParams):
            return run_best_of(samples, how, find("best_of.verifier", how.verifier), equality)
        if how.equality == "call":
            self._call.check()
        guarded = asked.sampling.grammar is not None or (asked.control is not None and asked.control.task)
        return run_vote(samples, how, self._steersman, self._call, in_flight=not guarded)


def _check_search(asked: Question, steersman: Steersman) -> None:
    """Raise for what a search over steps of thinking cannot honour."""
    thinking = asked.thinking or ThinkingParams()
    if not steersman.can_look:
        raise UnsupportedError("search", "thinking of this model cannot be ended from outside")
    if thinking.enabled is False or thinking.spends_none:
        raise ParameterError("search", "goes over steps of thinking, which this request switches off")
    if asked.sampling.grammar is not None:
        raise ParameterError("search", "goes without an answer that must match")
    if asked.control is not None and asked.control.asks:
        raise ParameterError("search", "goes without early stopping: its steps end by their own rules")
    if asked.service is not None and asked.service.bounded:
        raise ParameterError("search", "goes without deadline_ms and max_cost: bound it by search.max_tokens")
