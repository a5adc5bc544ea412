"""Recording traces with what rules may look at: margins at boundaries, and probes taken one request each.

A probe is a request of its own over the trace's tokens so far, the forced end and the opening
of an answer: the same tokens that a probe on a fork would get. A trace's probes come one after the
other, so that each finds the tokens of the one before it in the prefix cache.

Kept is what rules can tell apart: sentences where nobody looked only with a margin that a rule
may ask for, token ids only of thinking that goes round in a loop.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from thinkfold.cli.evaluation import Question
from thinkfold.control.facts import KEPT_TOKENS, read_probe
from thinkfold.control.loops import LoopRule, tail_period
from thinkfold.control.probing import answer_part
from thinkfold.control.replay import Place, Record
from thinkfold.control.rule import BoundaryKind
from thinkfold.control.schedule import MAX_PROBE_TOKENS
from thinkfold.control.trace_confidence import TraceConfidence, window_for
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.language import Language
from thinkfold.errors import ParameterError
from thinkfold.llm import collect
from thinkfold.thinking.tracker import Tracker
from thinkfold.types import (
    UNLIMITED,
    CompletionOutput,
    FoldParams,
    Phase,
    PromptState,
    SamplingParams,
    ThinkingParams,
    TokenStats,
)

TRANSITIONS = ("Wait", "Alternatively", "But wait")
WINDOW_EVERY = 64  # tokens between two recorded windows
LOOP_EVERY = 128  # tokens between two looks for loops
MARGIN_SEEN = 8.0  # nats; no rule asks for a larger margin
DIGITS = 5  # of recorded numbers
NO_FOLD = FoldParams(policy="off")


@dataclass(frozen=True, slots=True)
class Cut:
    """A boundary: `index` output tokens, `at` thinking tokens before it."""

    index: int
    at: int
    kind: BoundaryKind


def boundaries(language: Language, prompt: PromptState, output: Sequence[int]) -> tuple[list[Cut], list[int]]:
    """The strongest boundary at each place of the thinking, and its token ids."""
    assert language.family is not None
    vocabulary, tracker = language.vocabulary, Tracker(language.family, prompt)
    cuts: list[Cut] = []
    thinking: list[int] = []
    before = b""
    for index, token_id in enumerate(output):
        count = tracker.num_thinking_tokens
        tracker.push(token_id)
        if tracker.num_thinking_tokens > count:
            thinking.append(token_id)
        kind = BoundaryKind.SENTENCE if tracker.at_boundary else None
        data = vocabulary.token_bytes(token_id)
        if kind and b"\n\n" in before + data:
            kind = BoundaryKind.PARAGRAPH
        if kind and vocabulary.text(output[index + 1 : index + 6]).lstrip().startswith(TRANSITIONS):
            kind = BoundaryKind.TRANSITION
        if tracker.phase is Phase.THINKING and token_id in language.family.delimiter_ids:
            kind = BoundaryKind.SEGMENT
        if kind and tracker.phase is Phase.THINKING:
            cuts.append(Cut(index + 1, len(thinking), kind))
        before = data[-1:]
    return cuts, thinking


def probed_cuts(cuts: Sequence[Cut], every: int) -> set[int]:
    """Places of `cuts` to look at: at least `every` tokens apart, and the first one that far into thinking."""
    chosen: set[int] = set()
    last = 0
    for place, cut in enumerate(cuts):
        if cut.at - last >= every:
            chosen.add(place)
            last = cut.at
    return chosen


class Recorder:
    """Asks an engine for samples and probes."""

    def __init__(self, engine: AsyncEngine, language: Language, *, every: int) -> None:
        if language.family is None or not language.family.force_ids:
            raise ParameterError("model", "its thinking cannot be ended by force: there is nothing to record")
        self._engine, self._language, self._every = engine, language, every
        self._force = list(language.family.force_ids)
        self._opener = list(language.opener_ids)

    async def record(self, question: Question, sampling: SamplingParams) -> list[Record]:
        """All samples of a question; those whose tokens were not all drawn by the model have no places."""
        prompt = list(self._engine.prompts.encode_chat([{"role": "user", "content": question.text}]))
        thinking = ThinkingParams(thinking_token_budget=UNLIMITED)
        output = await collect(self._engine, prompt, sampling, thinking, NO_FOLD)
        state = self._language.family.prompt_state(prompt)  # pyright: ignore[reportOptionalMemberAccess]
        lengths = [branch.num_output_tokens for branch in output.outputs]
        window = window_for(lengths)
        samples = (self._sample(question, prompt, state, branch, window) for branch in output.outputs)
        return await asyncio.gather(*samples)

    async def _sample(
        self, question: Question, prompt: list[int], state: PromptState, branch: CompletionOutput, window: int
    ) -> Record:
        ids = list(branch.token_ids)
        cuts, thinking = boundaries(self._language, state, ids)
        if not self._every or len(branch.stats) != len(ids):
            cuts = []
        chosen = probed_cuts(cuts, self._every)
        places: list[Place] = []
        for number, cut in enumerate(cuts):
            bare = Place(cut.at, str(cut.kind), _margin(branch.stats, cut.index))
            if number in chosen:
                places.append(await self._probe(prompt + ids[: cut.index], bare, question.judge))
            elif cut.kind is not BoundaryKind.SENTENCE or bare.margin <= MARGIN_SEEN:
                places.append(bare)
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
            token_ids=thinking if places and loops(thinking) else [],
            places=places,
            stop_tokens=len(self._force),
            bottom=confidence.bottom if branch.stats else None,
            lowest=confidence.lowest if branch.stats else None,
            windows=windows,
        )

    async def _probe(self, before: list[int], place: Place, judge: Callable[[str], bool]) -> Place:
        """The place with a peek and a probe: both begin behind the opener."""
        suffix = self._force + self._opener
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_PROBE_TOKENS)
        output = await collect(self._engine, before + suffix, sampling, ThinkingParams(), NO_FOLD)
        branch = output.outputs[0]
        text, used = answer_part(self._language.vocabulary, branch.token_ids)
        logprobs = [stat.logprob for stat in branch.stats[:used]]
        answer = read_probe(text)
        return replace(
            place,
            entropy=branch.stats[0].entropy,
            peek_tokens=len(suffix),
            probe=text,
            mean_logprob=math.fsum(logprobs) / len(logprobs) if logprobs else 0.0,
            probe_tokens=len(suffix) + used,
            correct=answer is not None and judge(f"\\boxed{{{answer}}}"),
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


def _margin(stats: Sequence[TokenStats], index: int) -> float:
    """Of the row behind `index` output tokens; NaN where none was drawn there."""
    return stats[index].margin if index < len(stats) else math.nan
