"""A scripted engine with AsyncEngine's face, and a client for apps around it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tiny_tokenizer import QWEN_TEMPLATE, build_tokenizer

from thinkfold.config import EngineConfig
from thinkfold.control.fold_policy import resolve_fold
from thinkfold.engine.messages import EngineStats, ModelInfo
from thinkfold.server.app import build_app
from thinkfold.server.state import ServerOptions
from thinkfold.text.prompts import PromptRenderer
from thinkfold.types import (
    EFFORT_BUDGETS,
    UNLIMITED,
    Clamp,
    CompletionOutput,
    ControlParams,
    Costs,
    FinishReason,
    Fold,
    FoldParams,
    Limits,
    Phase,
    RequestOutput,
    SamplingParams,
    Segment,
    Service,
    ThinkingEndReason,
    ThinkingParams,
    ThinkingPolicy,
    TokenLogprobs,
)

LOOP = ("LOOP",)
EOS = "EOS"
SELECTORS = ("conclusion_attention", "drop")


@dataclass(slots=True)
class StandInHealth:
    alive: bool = True
    ready: bool = True
    reason: str = ""


@dataclass(slots=True)
class Call:
    """What one `generate` was given."""

    prompt: str
    sampling: SamplingParams
    thinking: ThinkingParams
    namespace: tuple[str, ...]
    fold: FoldParams | None = None
    service: Service = field(default_factory=Service)
    control: ControlParams | None = None


@dataclass(slots=True)
class ScriptedEngine:
    """Emits `scripts[branch % len]` token by token; `</think>` closes, `<think>` opens thinking.

    `STOP:x` ends a branch as the stop string `x` does, `CANCEL` and `DISCARD` as an order from outside; after
    `ends_after` tokens the model's length is reached.
    `refuse` is raised at the first `__anext__`; `fail_after` tokens the request fails. `told` has
    segments and folds that come with the news of a branch's n-th token.
    """

    scripts: Sequence[Sequence[str]] = (("w", "</think>", "A", EOS),)
    template: str = QWEN_TEMPLATE
    config: EngineConfig = field(default_factory=lambda: EngineConfig(served_model_name="tiny"))
    max_model_len: int = 4096
    refuse: Exception | None = None
    fail_after: int | None = None
    ends_after: int | None = None
    clamped: tuple[Clamp, ...] = ()
    gate: asyncio.Event | None = None
    order: Sequence[int] | None = None
    told: Mapping[int, Sequence[Segment | Fold]] = field(default_factory=dict)
    state: StandInHealth = field(default_factory=StandInHealth)
    calls: list[Call] = field(default_factory=list)
    running: int = 0
    aborted: int = 0
    stopped: bool = False
    prompts: PromptRenderer = field(init=False)
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = build_tokenizer(self.template)
        self.prompts = PromptRenderer(self.tokenizer, normalize=True)

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(
            "tiny",
            "qwen3",
            self.max_model_len,
            len(self.tokenizer),
            64,
            16,
            1024,
            self.max_model_len,
            "qwen3",
            True,
            True,
        )

    def health(self) -> StandInHealth:
        return self.state

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.running,
            pages_total=64,
            pages_by_class={"thinking": 3, "summary": 2, "cached": 16},
            folds=5,
            folds_refused=1,
            folded_tokens=80,
            swaps=2,
            swapped_bytes=4096,
            pressure={"cached": 7, "fold": 5},
        )

    async def stop(self) -> None:
        self.stopped = True

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        thinking: ThinkingParams,
        fold: FoldParams | None = None,
        *,
        request_id: str | None = None,
        namespace: tuple[str, ...] = (),
        service: Service | None = None,
        control: ControlParams | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt = self.tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        self.calls.append(Call(prompt, sampling, thinking, namespace, fold, service or Service(), control))
        if self.refuse is not None:
            raise self.refuse
        policy = resolve_fold(
            fold, config=self.config, thinks=True, selectors=SELECTORS, token_id=lambda text, field: 0
        )
        service = service or Service()
        limits = Limits(None, self.clamped, service.tier.name, service.deadline_ms, service.max_cost)
        self.running += 1
        finished = False
        branches = [_Branch(self, i, prompt, sampling) for i in range(sampling.n)]
        costs = Costs(prompt_tokens=len(prompt_token_ids), cached_tokens=2, folds=3, folded_tokens=48, folds_refused=1)
        try:
            if self.gate is not None:
                await self.gate.wait()
            for count, turn in enumerate(itertools.chain(self.order or (), itertools.cycle(range(sampling.n)))):
                if branches[turn].out.finish_reason is not None:
                    continue
                await asyncio.sleep(0)
                news = branches[turn].step()
                error = "the row failed" if count == self.fail_after else None
                if error is not None:
                    news.finish_reason = FinishReason.ERROR
                finished = error is not None or all(b.out.finish_reason is not None for b in branches)
                yield RequestOutput(
                    request_id or "r", [news], _policy(thinking), costs, finished, error, policy, limits
                )
                if finished:
                    return
        finally:
            self.running -= 1
            self.aborted += not finished


class _Branch:
    def __init__(self, engine: ScriptedEngine, index: int, prompt: str, sampling: SamplingParams) -> None:
        script = engine.scripts[index % len(engine.scripts)]
        self.loop = tuple(script) == LOOP
        self.script = iter(script)
        self.sampling = sampling
        opened = prompt.rstrip().rfind("<think>") > max(prompt.rfind("</think>"), prompt.rfind("<|im_start|>"))
        self.out = CompletionOutput(index, phase=Phase.THINKING if opened else Phase.ANSWER)
        self.tokenizer = engine.tokenizer
        self.told = engine.told
        self.limits = {sampling.max_tokens, engine.ends_after}

    def step(self) -> CompletionOutput:
        token = "a" if self.loop else next(self.script)
        out = self.out
        phase = None if token in ("<think>", "</think>", EOS) else out.phase
        news = CompletionOutput(out.index, phase=out.phase)
        told = self.told.get(out.num_output_tokens, ())
        news.segments = [one for one in told if isinstance(one, Segment)]
        news.folds = [one for one in told if isinstance(one, Fold)]
        out.num_output_tokens += 1
        if token in ("<think>", "</think>"):
            out.phase = Phase.THINKING if token == "<think>" else Phase.ANSWER
            out.thinking_end_reason = ThinkingEndReason.NATURAL if token == "</think>" else None
        elif token == EOS or token.startswith("STOP:"):
            out.finish_reason = FinishReason.STOP
            news.stop_reason = token.removeprefix("STOP:") if token != EOS else None
        elif token in ("CANCEL", "DISCARD"):
            out.finish_reason = FinishReason.ABORT
            news.discarded = token == "DISCARD"
        elif out.phase is Phase.THINKING:
            news.reasoning = token
            out.num_thinking_tokens += 1
        else:
            news.text = token
        if out.finish_reason is None and out.num_output_tokens in self.limits:
            out.finish_reason = FinishReason.LENGTH
        if out.finish_reason is not None and out.phase is Phase.THINKING:
            out.thinking_end_reason = ThinkingEndReason.UNCLOSED
        if self.sampling.logprobs is not None:
            token_id = self.tokenizer.encode(token)[0]
            top = ((token_id, -0.5), (0, float("-inf")))[: self.sampling.logprobs]
            news.logprobs = [TokenLogprobs(token_id, -0.5, top, phase)]
        for name in ("num_output_tokens", "num_thinking_tokens", "finish_reason", "thinking_end_reason", "phase"):
            setattr(news, name, getattr(out, name))
        return news


def _policy(thinking: ThinkingParams) -> ThinkingPolicy:
    if thinking.enabled is False:
        return ThinkingPolicy(False, 0, "disabled")
    if thinking.thinking_token_budget is not None:
        budget = thinking.thinking_token_budget
        return ThinkingPolicy(True, None if budget == UNLIMITED else budget, "thinking_token_budget")
    if thinking.reasoning_effort is not None:
        return ThinkingPolicy(True, EFFORT_BUDGETS[thinking.reasoning_effort], "reasoning_effort")
    return ThinkingPolicy(True, 16_384, "default")


@asynccontextmanager
async def serving(
    engine: ScriptedEngine | None = None,
    options: ServerOptions | None = None,
    start: Callable[[], Any] | None = None,
    wrap: Callable[[Any], Any] | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app around `engine`; the app's life is entered and left. `wrap` puts something before it."""
    app = build_app(engine, start=start, options=options)
    transport = httpx.ASGITransport(wrap(app) if wrap else app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        if start is None:
            await app.state.thinkfold.slot.loaded()
        yield client


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "q"}], **more}


async def chat(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=chat_body(**more))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended as it should."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@dataclass(slots=True)
class Joined:
    """A choice put together from a stream."""

    reasoning: str = ""
    content: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    thinking_end_reason: str | None = None


def join(chunks: list[dict[str, Any]]) -> dict[int, Joined]:
    joined: dict[int, Joined] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            into = joined.setdefault(choice["index"], Joined())
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            into.reasoning += delta.get("reasoning") or ""
            into.content += delta.get("content") or ""
            if choice["finish_reason"] is not None:
                into.finish_reasons.append(choice["finish_reason"])
                into.thinking_end_reason = choice["thinking_end_reason"]
    return joined


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, at most 200 turns."""
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")
