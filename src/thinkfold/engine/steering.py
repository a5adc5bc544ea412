"""Runs the rules that stop thinking on live responses: news in, looks and orders out.

Everything happens on the side of the client: looks and orders are those that anybody may give.
A response whose reader is slow is steered as slowly.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Protocol

from thinkfold.control.early_stop import EarlyStopping, Guards
from thinkfold.control.embedding import Embedder
from thinkfold.control.equality import MIN_COSINE, Equality
from thinkfold.control.extract import extract
from thinkfold.control.probing import PROBE_STOPS, Observer, peeked, probed
from thinkfold.control.rule import Action, EndThinking, Observation, Peek, Probe, Probed
from thinkfold.control.shadow import Scoreboard
from thinkfold.control.symbolic import Symbolic
from thinkfold.errors import ConflictError, NotFoundError, ThinkfoldError, UnsupportedError
from thinkfold.thinking.family import Family
from thinkfold.types import CompletionOutput, ControlParams, ProbeResult, RequestOutput, ThinkingEndReason

logger = logging.getLogger(__name__)


class Steered(Protocol):
    """What steering needs of an engine."""

    async def peek(
        self, request_id: str, token_ids: tuple[int, ...] = (), choice: int | None = None
    ) -> ProbeResult: ...

    async def probe(
        self, request_id: str, token_ids: tuple[int, ...], n: int, stop: tuple[str, ...] = (), choice: int | None = None
    ) -> ProbeResult: ...

    async def end_thinking(
        self, request_id: str, choice: int | None = None, *, reason: ThinkingEndReason = ThinkingEndReason.CONTROL
    ) -> None: ...


class Steersman:
    """Early stopping of one engine: what all its responses share.

    `decisions` counts by rule and outcome: `stopped`, or `late` where thinking had just ended by itself;
    of rules in shadow mode `agreed` or `disagreed`.
    """

    def __init__(
        self,
        engine: Steered,
        family: Family | None,
        opener_ids: tuple[int, ...],
        model: str,
        *,
        embedder: Embedder | None = None,
        min_cosine: float = MIN_COSINE,
    ) -> None:
        self.engine = engine
        self.board = Scoreboard()
        self.decisions: Counter[tuple[str, str]] = Counter()
        self.model = model
        self.symbolic = Symbolic()
        self._embedder, self._min_cosine = embedder, min_cosine
        self._family = family
        self._suffix = (*family.force_ids, *opener_ids) if family else ()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def can_look(self) -> bool:
        """Whether probes can be taken and thinking be ended."""
        return self._family is not None and bool(self._family.force_ids)

    def equality(self) -> Equality:
        """A relation of its own for one vote or choice, with the helpers that all share."""
        return Equality(self.symbolic, self._embedder, min_cosine=self._min_cosine)

    def begin(self, request_id: str, params: ControlParams | None, *, grammar: bool) -> Steering | None:
        """Steer a request that is about to start; None where it asks for nothing. Raises UnsupportedError."""
        if params is None or not params.asks:
            return None
        if not self.can_look:
            raise UnsupportedError("control", "thinking of this model cannot be ended from outside")
        return Steering(self, request_id, params, Guards(params.task == "tools", grammar, params.task == "code"))

    async def look(self, name: str, choice: int, action: Peek | Probe, at: int) -> Observation | None:
        """Carry out a look; None if it was dropped or the response has ended."""
        assert self._family is not None
        try:
            if isinstance(action, Peek):
                result = await self.engine.peek(name, self._suffix, choice)
            else:
                result = await self.engine.probe(name, self._suffix, action.max_tokens, PROBE_STOPS, choice)
        except (ConflictError, NotFoundError):
            return None
        if result.dropped is not None or not result.stats:
            return None
        return peeked(result, at) if isinstance(action, Peek) else probed(result, at, self._family.vocabulary)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def note(self, request_id: str, choice: int, rule: str, outcome: str, **more: Any) -> None:
        """Count a decision, and one line for the operator: a JSON object."""
        self.decisions[rule, outcome] += 1
        logger.info(json.dumps({"stop": request_id, "choice": choice, "rule": rule, "outcome": outcome, **more}))


class _Choice:
    def __init__(self, index: int, rules: EarlyStopping) -> None:
        self.index = index
        self.rules = rules
        self.observer = Observer()
        self.reply: list[str] = []
        self.thinking_tokens = 0


class Steering:
    """One request under rules. `observe` its outputs in order, then `close`."""

    def __init__(self, steersman: Steersman, request_id: str, params: ControlParams, guards: Guards) -> None:
        self._steersman = steersman
        self._request_id = request_id
        self._params, self._guards = params, guards
        self._choices: dict[int, _Choice] = {}
        self._inbox: asyncio.Queue[tuple[_Choice, Observation | None]] = asyncio.Queue()  # None: the choice has ended
        self._looks: set[asyncio.Task[None]] = set()
        self._worker = steersman.spawn(self._work())

    def observe(self, output: RequestOutput) -> None:
        """News of the request; what follows from it happens in the background."""
        for news in output.outputs:
            choice = self._choices.get(news.index)
            if choice is None or news.restart is not None:
                choice = self._choices[news.index] = _Choice(news.index, self._rules())
            for seen in choice.observer.read(news):
                self._inbox.put_nowait((choice, seen))
            if self._params.shadow:
                self._keep(choice, news)

    def close(self) -> None:
        """Nothing more will be observed. In shadow mode verdicts are still reached, in the background."""
        for look in self._looks:
            look.cancel()
        if not self._params.shadow:
            self._worker.cancel()
        else:
            self._steersman.spawn(self._end_after_verdicts())

    def _rules(self) -> EarlyStopping:
        off = self._steersman.board.switched_off(self._steersman.model, self._params.task or "")
        return EarlyStopping(self._params, self._guards, switched_off=off, equality=self._steersman.equality())

    def _keep(self, choice: _Choice, news: CompletionOutput) -> None:
        """Shadow mode: what the choice has written, for the verdict at its end."""
        choice.thinking_tokens = news.num_thinking_tokens
        choice.reply.append(news.text)
        if news.finish_reason is not None and not news.discarded:
            self._inbox.put_nowait((choice, None))

    async def _work(self) -> None:
        """One observation after the other; comparing answers may take long, so it is done in a thread."""
        while True:
            choice, seen = await self._inbox.get()
            try:
                if seen is None:
                    await self._judge(choice)
                else:
                    await self._follow(choice, seen)
            except ThinkfoldError:
                pass  # the engine has died: the response's reader is told
            except Exception:  # a rule that fails steers no longer, and the response goes on
                logger.exception("early stopping of %s failed", self._request_id)
                return
            finally:
                self._inbox.task_done()

    async def _follow(self, choice: _Choice, seen: Observation) -> None:
        slow = isinstance(seen, Probed)
        actions = await asyncio.to_thread(_observe, choice.rules, seen) if slow else choice.rules.observe(seen)
        for action in actions:
            if isinstance(action, EndThinking):
                await self._end(choice, action)
            else:
                look = self._steersman.spawn(self._look(choice, action))
                self._looks.add(look)
                look.add_done_callback(self._looks.discard)

    async def _look(self, choice: _Choice, action: Peek | Probe) -> None:
        at = choice.rules.facts.thinking_tokens
        try:
            seen = await self._steersman.look(self._request_id, choice.index, action, at)
        except ThinkfoldError:
            return  # as above
        if seen is not None and self._choices[choice.index] is choice:
            self._inbox.put_nowait((choice, seen))

    async def _end(self, choice: _Choice, action: EndThinking) -> None:
        outcome = "stopped"
        try:
            reason = ThinkingEndReason(action.rule)
            await self._steersman.engine.end_thinking(self._request_id, choice.index, reason=reason)
        except (ConflictError, NotFoundError):
            outcome = "late"
        at = choice.rules.facts.thinking_tokens
        self._steersman.note(self._request_id, choice.index, action.rule, outcome, at=at, why=action.why)

    async def _judge(self, choice: _Choice) -> None:
        """Shadow mode: what the rules would have done, against the answer that came."""
        answer = extract("".join(choice.reply)).answer
        steersman, task = self._steersman, self._params.task or ""
        for verdict in await asyncio.to_thread(choice.rules.finish, answer, choice.thinking_tokens):
            rule, outcome = verdict.stop.rule, "agreed" if verdict.agreed else "disagreed"
            more = {"at": verdict.stop.thinking_tokens, "saved": verdict.saved_tokens, "why": verdict.stop.why}
            steersman.note(self._request_id, choice.index, rule, outcome, **more)
            if steersman.board.record(rule, steersman.model, task, verdict.agreed):
                logger.warning("rule %s is off: it disagreed too often with the answers that came", rule)

    async def _end_after_verdicts(self) -> None:
        joined = asyncio.ensure_future(self._inbox.join())
        await asyncio.wait({joined, self._worker}, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        self._worker.cancel()


def _observe(rules: EarlyStopping, seen: Observation) -> list[Action]:
    actions = rules.observe(seen)
    rules.facts.classes()  # so that no later rule has to compare answers
    return actions
