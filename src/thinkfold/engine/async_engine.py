"""The asyncio face of the engine: checks requests, hands them to the core, streams outputs."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from thinkfold.config import EngineConfig
from thinkfold.control.embedding import Embedder, configured_embedder
from thinkfold.control.fold_policy import resolve_fold
from thinkfold.engine.answer_grammars import AnswerGrammars
from thinkfold.engine.build import build_core
from thinkfold.engine.client import Build, CoreClient, local_client
from thinkfold.engine.commands import Answer, Extend, Order
from thinkfold.engine.controls import Controls
from thinkfold.engine.decisions import Decisions
from thinkfold.engine.language import Language, load_language
from thinkfold.engine.last_call import LastCall
from thinkfold.engine.limits import Granter, Wish
from thinkfold.engine.messages import Abort, Dead, EngineStats, Event, ModelInfo, Ready
from thinkfold.engine.samples import Question
from thinkfold.engine.steering import Steersman
from thinkfold.engine.stream import Readers
from thinkfold.errors import EngineDeadError, NotFoundError, ParameterError, QueueFullError, ThinkfoldError
from thinkfold.fold import selectors
from thinkfold.text.prompts import PromptRenderer
from thinkfold.types import (
    ControlParams,
    Decision,
    EngineRequest,
    FoldParams,
    FoldPolicy,
    Grammar,
    Phase,
    PromptState,
    RequestOutput,
    SamplingParams,
    Service,
    ThinkingEndReason,
    ThinkingParams,
    Until,
)

Connect = Callable[[Language, Callable[[Event], None]], CoreClient]


@dataclass(frozen=True, slots=True)
class Health:
    """`alive`: the core has not ended. `ready`: it is loaded and its steps advance."""

    alive: bool
    ready: bool
    reason: str = ""


class AsyncEngine(Controls):
    """One model, served to many requests at once. Build it with `await AsyncEngine.start(config)`."""

    def __init__(
        self, config: EngineConfig, prompts: PromptRenderer, language: Language, embedder: Embedder | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.prompts = prompts
        self.family = language.family
        name, near = config.served_model_name or config.model, config.answer_min_cosine
        self._steersman = Steersman(self, self.family, language.opener_ids, name, embedder=embedder, min_cosine=near)
        call = LastCall(prompts, language.family)
        self._decisions = Decisions(self, self._steersman, call, config.verifier_urls, config.max_handles)
        self._token_id = lru_cache(256)(language.single_token)
        self._grammars: AnswerGrammars | None = None
        self._model: ModelInfo | None = None
        self._granter: Granter | None = None
        self._client: CoreClient | None = None
        self._ready = asyncio.Event()
        self._dead: str | None = None
        self._failure: Exception | None = None  # why loading failed, when it was the user's parameter
        self._watch: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()  # set when the engine will not answer again
        self._readers = Readers(self._let_go)
        self._stats = EngineStats()
        self._last_event = time.monotonic()
        self._ids = itertools.count()
        self._selectors = selectors.names()

    @classmethod
    async def start(cls, config: EngineConfig, *, build: Build = build_core, connect: Connect | None = None) -> Self:
        """Read the tokenizer, start the core and load the model in it.

        `build` makes the core, in its own process if the configuration says so; `connect` finds one elsewhere.
        Raises ParameterError or UnsupportedError for a model that cannot be served, and
        EngineDeadError if the core cannot be built.
        """
        language = await asyncio.to_thread(load_language, config)
        embedder = await asyncio.to_thread(configured_embedder, config)
        prompts = PromptRenderer(language.tokenizer, normalize=config.normalize_prompts, markers=language.markers)
        engine = cls(config, prompts, language, embedder)
        engine.resolve_fold(None)  # a default that cannot be honoured is no reason to load a model
        on_event = engine._on_event
        engine._client = connect(language, on_event) if connect else local_client(build, config, on_event)
        try:
            await engine._ready.wait()
            if engine._dead is not None:
                raise engine._failure or EngineDeadError(engine._dead)
        except BaseException:  # the caller may have given up while the model was loading
            await asyncio.to_thread(engine._client.stop)
            raise
        engine._grammars = AnswerGrammars(language, engine.model.vocab_size)
        engine._watch = asyncio.create_task(engine._watchdog())
        return engine

    @property
    def model(self) -> ModelInfo:
        """The loaded model. Raises EngineDeadError before it is loaded."""
        if self._model is None:
            raise EngineDeadError("the model is not loaded")
        return self._model

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        thinking: ThinkingParams | None = None,
        fold: FoldParams | None = None,
        *,
        request_id: str | None = None,
        namespace: tuple[str, ...] = (),
        until: Until | None = None,
        service: Service | None = None,
        control: ControlParams | None = None,
        aside: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request and yield its news; the last output has `finished` set.

        With `until` each choice ends there with a handle, from which `extend` goes on. Rules that
        `control` asks for end the thinking of each choice by themselves. `aside`: see EngineRequest.

        Raises ParameterError, UnsupportedError, CapacityError, QueueFullError or
        EngineDeadError before anything is yielded if the request cannot be accepted, and
        EngineDeadError later if the engine dies. Closing the iterator aborts the request.
        """
        sampling, thinking = sampling or SamplingParams(), thinking or ThinkingParams()
        choices = sampling.n if sampling.temperature == 0.0 else 1  # greedy choices are equal: one is computed
        sampling = replace(sampling, n=1) if choices > 1 else sampling
        wish = Wish(len(prompt_token_ids), sampling.max_tokens, thinking, self.resolve_fold(fold), service or Service())
        request = self._accept(prompt_token_ids, sampling, wish, namespace)
        if sampling.grammar is not None:
            request = await self._with_grammar(request, sampling.grammar)
        request = replace(request, request_id=request_id or request.request_id, until=until, aside=aside)
        outputs = self._follow(request.request_id, request.sampling.n, namespace, lambda: self._start(request))
        steering = self._steersman.begin(request.request_id, control, grammar=sampling.grammar is not None)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if steering is not None:
                        steering.observe(output)
                    yield output.copied(choices)
        finally:
            if steering is not None:
                steering.close()

    def decide(self, question: Question, how: Decision) -> AsyncGenerator[RequestOutput, None]:
        """Ask several samples of a question, or search, and yield the decision's `outcome` as it forms.

        The last output has the reply to show as its one choice, and the costs of all. Samples fork off one prefill;
        they have ids of their own (`-s0`, `-s4` …, one a wave), as parts of a search. Raises what `generate` raises.
        """
        text = question.text or self.prompts.decode(question.prompt)
        return self._decisions.run(replace(question, request_id=question.request_id or self._new_id(), text=text), how)

    async def extend(
        self,
        handle: str,
        until: Until | None = None,
        *,
        n: int = 1,
        temperature: float | None = None,
        seed: int | None = None,
        end_thinking: ThinkingEndReason | None = None,
        request_id: str | None = None,
        namespace: tuple[str, ...] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Go on from a handle, `n` times, to the end of a part or of the response; otherwise like `generate`.

        Outputs hold what is new; their counts are those of the whole response. A part that ends at its boundary has
        `finish_reason` boundary and a `handle` of its own. Without a `seed` one choice goes on as the branch itself
        would have; `end_thinking` closes thinking at once. Raises NotFoundError for a handle that is not there, or of
        another namespace.
        """
        sampling = SamplingParams(n=n, seed=seed, temperature=1.0 if temperature is None else temperature)
        self._check_queue(sampling.n)
        name = request_id or self._new_id()
        order = Extend(
            call=self._next(),
            request_id=name,
            handle=handle,
            namespace=namespace,
            until=until,
            n=n,
            temperature=temperature,
            seed=seed,
            end_thinking=end_thinking,
            arrival_time=time.monotonic(),
        )
        outputs = self._follow(
            name, n, namespace, lambda: self._ask(order, lambda answer: self._unheard_start(name, answer))
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _start(self, request: EngineRequest) -> None:
        self._send(request)

    async def _follow(
        self, name: str, n: int, namespace: tuple[str, ...], start: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start a request and yield its outputs; whoever stops listening aborts it."""
        stream = self._readers.add(name, n, namespace)
        try:
            try:
                await start()
            except ThinkfoldError:
                self._readers.forget(name)  # refused: there is nothing to abort
                raise
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            if self._readers.leave(name, stream):
                self._send(Abort(name))

    def _unheard_start(self, name: str, answer: Answer) -> None:
        """Whoever wanted to start the request has given up meanwhile; one that was refused tells no end."""
        if answer.error is not None:
            self._readers.forget(name)

    async def _with_grammar(self, request: EngineRequest, grammar: Grammar) -> EngineRequest:
        if self._grammars is None:
            raise EngineDeadError("the model is not loaded")
        self._grammars.check_start(request)
        return replace(request, grammar=await self._grammars.compile(grammar))

    def resolve_fold(self, fold: FoldParams | None) -> FoldPolicy:
        """What a request that asks for `fold` gets. Raises ParameterError, UnsupportedError."""
        thinks = self.family is not None
        return resolve_fold(fold, config=self.config, thinks=thinks, selectors=self._selectors, token_id=self._token_id)

    def check_owner(self, request_id: str, namespace: tuple[str, ...]) -> None:
        """Raise NotFoundError unless the request runs and was started with that namespace."""
        if self._readers.namespace(request_id) != namespace:
            raise NotFoundError(f"there is no running response {request_id!r:.100}")

    async def abort(self, request_id: str) -> None:
        """End a running request; its stream gets a final output. Unknown ids are ignored."""
        if self._readers.namespace(request_id) is not None:
            self._send(Abort(request_id))

    def health(self) -> Health:
        """What `/health` and `/ready` say, without waiting."""
        if self._dead is not None:
            return Health(alive=False, ready=False, reason=self._dead or "stopped")
        if self._model is None:
            return Health(alive=True, ready=False, reason="loading the model")
        silent = time.monotonic() - self._last_event
        if self._readers and silent > self.config.stall_timeout_s:
            return Health(alive=True, ready=False, reason=f"no step has finished for {silent:.0f} s")
        return Health(alive=True, ready=True)

    def stats(self) -> EngineStats:
        """The core's latest counters and gauges, and the decisions of early stopping."""
        steersman = self._steersman
        return replace(self._stats, decisions=dict(steersman.decisions), rules_off=steersman.board.off)

    async def stop(self) -> None:
        """End the core; running requests get EngineDeadError."""
        if self._watch is not None:
            self._watch.cancel()
        if self._grammars is not None:
            self._grammars.close()
        if self._client is not None:
            await asyncio.to_thread(self._client.stop)
        await asyncio.to_thread(self._steersman.symbolic.stop)
        self._die("the engine was stopped")

    async def _watchdog(self) -> None:
        """Declare the engine dead if work is stuck for `watchdog_s`."""
        limit = self.config.watchdog_s
        while self._dead is None:
            await asyncio.sleep(min(1.0, limit / 4))
            if self._readers and time.monotonic() - self._last_event > limit:
                self._die(f"no step has finished for {limit:.0f} s")

    def _accept(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        wish: Wish,
        namespace: tuple[str, ...],
    ) -> EngineRequest:
        """Check everything that can be wrong and resolve what was left open."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        model = self.model
        self._check_queue(sampling.n, wish.service)
        _check_prompt(ids, model)
        sampling.check_vocabulary(model.vocab_size)
        limits, policy = self._granter_of(wish.service).grant(wish)
        max_tokens = limits.max_tokens or 1
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        sampling = replace(
            sampling,
            logit_bias=dict(sampling.logit_bias),  # any mapping will do for the user, not for the way to the core
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            seed=seed,
        )
        family = self.family
        prompt = family.prompt_state(ids) if family else PromptState(Phase.ANSWER, 0, len(ids))
        return EngineRequest(
            request_id=self._new_id(),
            prompt_token_ids=tuple(ids),
            prompt=prompt,
            sampling=sampling,
            thinking=policy,
            namespace=namespace,
            arrival_time=time.monotonic(),
            fold=wish.fold,
            limits=limits,
            service=wish.service,
        )

    def _granter_of(self, service: Service) -> Granter:
        assert self._granter is not None, "a loaded model has its limits"
        return self._granter

    def _new_granter(self, model: ModelInfo) -> Granter:
        budget, enabled = self.config.default_thinking_budget, self.config.enable_thinking
        switch = self.prompts.has_thinking_switch
        return Granter(model, self.family, default_budget=budget, default_enabled=enabled, switch=switch)

    def _new_id(self) -> str:
        return f"req-{next(self._ids)}-{secrets.token_hex(4)}"

    def _check_queue(self, branches: int, service: Service | None = None) -> None:
        """Raise QueueFullError where so many more are too many; `service` None goes on from a handle."""
        unfinished = self._readers.choices
        if unfinished and unfinished + branches > self.config.max_num_seqs + self.config.max_waiting:
            raise QueueFullError(retry_after=min(60.0, 1.0 + unfinished / self.config.max_num_seqs))

    def _send(self, command: EngineRequest | Abort | Order) -> None:
        if self._client is None or self._dead is not None:
            raise EngineDeadError(self._dead or "the engine is not started")
        if isinstance(command, EngineRequest) and len(self._readers) == 1:
            self._last_event = time.monotonic()  # silence counts from the first command after idling
        self._client.send(command)

    def _on_event(self, event: Event) -> None:
        self._last_event = time.monotonic()
        if isinstance(event, Ready):
            self._model = event.model
            self._granter = self._new_granter(event.model)
            self._stats.pages_total = event.model.num_pages
            self._ready.set()
        elif isinstance(event, Dead):
            self._failure = event.error
            self._die(event.reason)
        else:
            self._stats = event.stats
            for output in event.outputs:
                self._readers.deliver(output)
            self._hear(event.answers)

    def _die(self, reason: str) -> None:
        if self._dead is None:
            self._dead = reason or "the engine was stopped"
            self._readers.fail(EngineDeadError(self._dead))
            self._fail_calls(EngineDeadError(self._dead))
        self.ended.set()
        self._ready.set()


def _check_prompt(ids: Sequence[int], model: ModelInfo) -> None:
    if not ids:
        raise ParameterError("prompt", "must hold at least one token")
    bad = next((i for i in ids if not isinstance(i, int) or not 0 <= i < model.vocab_size), None)
    if bad is not None:
        raise ParameterError("prompt", f"token id {bad!r} is outside the vocabulary of {model.vocab_size}")
