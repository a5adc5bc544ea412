"""Recording traces with what rules may look at: margins at boundaries, and probes on forks of the running trace.

A probe is a side row in steps that run anyway, as rules take it; it is recorded where it was asked, which is a few
tokens behind its boundary. Kept is what rules can tell apart: sentences where nobody looked only with a margin that
a rule may ask for, token ids only of thinking that goes round in a loop.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from thinkfold.cli.evaluation import Question
from thinkfold.control.facts import KEPT_TOKENS, read_probe
from thinkfold.control.loops import LoopRule, tail_period
from thinkfold.control.probing import PROBE_STOPS, Observer, peeked, probed
from thinkfold.control.replay import Place, Record
from thinkfold.control.rule import AtBoundary, BoundaryKind, Wrote
from thinkfold.control.schedule import MAX_PROBE_TOKENS
from thinkfold.control.trace_confidence import TraceConfidence, window_for
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.language import Language
from thinkfold.errors import ConflictError, NotFoundError, ParameterError
from thinkfold.types import (
    UNLIMITED,
    CompletionOutput,
    FoldParams,
    RequestOutput,
    SamplingParams,
    ThinkingParams,
)

WINDOW_EVERY = 64  # tokens between two recorded windows
LOOP_EVERY = 128  # tokens between two looks for loops
MARGIN_SEEN = 8.0  # nats; no rule asks for a larger margin
DIGITS = 5  # of recorded numbers
NO_FOLD = FoldParams(policy="off")


@dataclass(slots=True)
class _Watched:
    """One choice while it thinks."""

    observer: Observer = field(default_factory=Observer)
    thinking: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    last: int = 0  # thinking tokens where a probe was asked for
    probes: list[asyncio.Task[Place]] = field(default_factory=list)


class Recorder:
    """Asks an engine for samples, and for a probe of each at a boundary, `every` tokens or more apart; 0: none."""

    def __init__(self, engine: AsyncEngine, language: Language, *, every: int) -> None:
        if language.family is None or not language.family.force_ids:
            raise ParameterError("model", "its thinking cannot be ended by force: there is nothing to record")
        self._engine, self._language, self._every = engine, language, every
        self._force = list(language.family.force_ids)
        self._suffix = (*self._force, *language.opener_ids)

    async def record(self, question: Question, sampling: SamplingParams) -> list[Record]:
        """All samples of a question."""
        prompt = list(self._engine.prompts.encode_chat([{"role": "user", "content": question.text}]))
        thinking = ThinkingParams(thinking_token_budget=UNLIMITED)
        name = f"record-{question.index}"
        watched = [_Watched() for _ in range(sampling.n)]
        total: RequestOutput | None = None
        outputs = self._engine.generate(prompt, sampling, thinking, NO_FOLD, request_id=name)
        async with aclosing(outputs):
            async for output in outputs:
                if self._every:
                    for news in output.outputs:
                        self._watch(name, news, watched[news.index], question.judge)
                if total is None:
                    total = output
                else:
                    total.merge(output)
        assert total is not None
        window = window_for([branch.num_output_tokens for branch in total.outputs])
        pairs = zip(total.outputs, watched, strict=True)
        return [await self._sample(question, branch, seen, window) for branch, seen in pairs]

    def _watch(self, name: str, news: CompletionOutput, seen: _Watched, judge: Callable[[str], bool]) -> None:
        """Note the boundaries in the news of a choice, and ask for probes that are due."""
        for one in seen.observer.read(news):
            if isinstance(one, Wrote):
                seen.thinking += one.token_ids
            elif isinstance(one, AtBoundary):
                bare = Place(one.thinking_tokens, str(one.kind), one.margin)
                if bare.at - seen.last >= self._every:
                    seen.last = bare.at
                    before = news.num_output_tokens - news.num_thinking_tokens
                    task = asyncio.create_task(self._probe(name, news.index, bare, before, judge))
                    seen.probes.append(task)
                elif one.kind is not BoundaryKind.SENTENCE or bare.margin <= MARGIN_SEEN:
                    seen.places.append(bare)

    async def _probe(self, name: str, choice: int, bare: Place, before: int, judge: Callable[[str], bool]) -> Place:
        """The place where a probe was asked, with what a peek and a probe say; `bare` where it was dropped."""
        try:
            result = await self._engine.probe(name, self._suffix, MAX_PROBE_TOKENS, PROBE_STOPS, choice)
        except (ConflictError, NotFoundError):
            return bare
        if result.dropped is not None or not result.stats:
            return bare
        at = max(bare.at, result.after - before)
        seen = probed(result, at, self._language.vocabulary)
        answer = read_probe(seen.text)
        return replace(
            bare,
            at=at,
            entropy=peeked(result, at).entropy,
            peek_tokens=len(self._suffix),
            probe=seen.text,
            mean_logprob=seen.mean_logprob,
            probe_tokens=seen.tokens,
            correct=answer is not None and judge(f"\\boxed{{{answer}}}"),
        )

    async def _sample(self, question: Question, branch: CompletionOutput, seen: _Watched, window: int) -> Record:
        """One sample. A probe that came behind the end of thinking says nothing about stopping."""
        asked = [place for place in await asyncio.gather(*seen.probes) if place.at < branch.num_thinking_tokens]
        confidence = TraceConfidence(window)
        windows: list[tuple[int, float]] = []
        for count, stat in enumerate(branch.stats, 1):
            confidence.push(stat.confidence)
            if confidence.full_window is not None and count % WINDOW_EVERY == 0:
                windows.append((count, confidence.full_window))
        return Record(
            index=question.index,
            task=question.task,
            thinking_tokens=branch.num_thinking_tokens,
            output_tokens=branch.num_output_tokens,
            reply=branch.text,
            correct=question.judge(branch.text),
            token_ids=seen.thinking if loops(seen.thinking) else [],
            places=sorted([*seen.places, *asked], key=lambda place: place.at),
            stop_tokens=len(self._force),
            bottom=confidence.bottom if branch.stats else None,
            lowest=confidence.lowest if branch.stats else None,
            windows=windows,
        )


def loops(token_ids: Sequence[int]) -> bool:
    """Whether the rule against loops would fire anywhere."""
    rule = LoopRule()
    ends = range(rule.min_tokens, len(token_ids) + LOOP_EVERY, LOOP_EVERY)
    recent = (token_ids[max(0, end - KEPT_TOKENS) : end] for end in ends)
    return any(tail_period(tail, rule.min_repeats, rule.min_tokens) is not None for tail in recent)


def save(path: Path, records: Iterable[Record]) -> None:
    """One JSON line a record; compressed where the name ends in `.gz`."""
    with _open(path, "wt") as file:
        file.writelines(json.dumps(_rounded(asdict(record)), separators=(",", ":")) + "\n" for record in records)


def load(path: Path) -> Iterator[Record]:
    """Records of a file. Raises ParameterError that names the line."""
    try:
        with _open(path, "rt") as file:
            lines = file.read().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ParameterError("records", f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry: dict[str, Any] = json.loads(line)
            places = [Place(**place) for place in entry.pop("places")]
            windows = [(int(at), float(mean)) for at, mean in entry.pop("windows")]
            yield Record(**entry, places=places, windows=windows)
        except (ValueError, TypeError, KeyError) as error:
            raise ParameterError("records", f"{path}, line {number}: not a record ({error})") from None


def _open(path: Path, mode: Literal["rt", "wt"]) -> TextIO:
    return gzip.open(path, mode, encoding="utf-8") if path.suffix == ".gz" else path.open(mode, encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
