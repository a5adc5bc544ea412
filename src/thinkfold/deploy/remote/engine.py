"""The engine that the server sees: AsyncEngine over a remote server, refusing by name what that has no way to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any

from thinkfold.config import EngineConfig
from thinkfold.deploy.remote.client import RemoteClient
from thinkfold.deploy.remote.dialect import NO_LOGPROBS
from thinkfold.deploy.remote.http import Remote
from thinkfold.deploy.remote.orders import NEEDS_KV
from thinkfold.engine.async_engine import AsyncEngine, Health
from thinkfold.engine.language import Language
from thinkfold.engine.messages import Event
from thinkfold.engine.samples import Question
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.types import (
    ControlParams,
    Decision,
    FoldMode,
    FoldParams,
    FoldPolicy,
    RequestOutput,
    SamplingParams,
    SearchParams,
    Service,
    ThinkingParams,
    Until,
    VoteParams,
)

# Settings that mean the same over a remote server; all others are about an engine of our own.
SETTINGS = frozenset(
    (
        "model",
        "served_model_name",
        "max_model_len",
        "max_num_seqs",
        "max_waiting",
        "default_thinking_budget",
        "enable_thinking",
        "think_start",
        "think_end",
        "think_force",
        "closing_words",
        "answer_opener",
        "answer_embedder",
        "answer_embedder_model",
        "answer_min_cosine",
        "verifiers",
        "normalize_prompts",
        "fold_profile",
        "fold_delimiter_token",
        "fold_delimiter_regex",
        "stall_timeout_s",
        "watchdog_s",
    )
)


async def start_remote(config: EngineConfig, remote: Remote) -> RemoteEngine:
    """Read the tokenizer of `config.model`, find out what the server can, and put the policy over it.

    Raises ParameterError for a server that cannot be reached or does not fit, and for settings of an engine of
    our own.
    """
    for each in fields(EngineConfig):
        if each.name not in SETTINGS and getattr(config, each.name) != each.default:
            raise ParameterError(each.name, "is a setting of thinkfold's own engine, and the engine is a remote one")
    config = replace(config, fold_policy="off", turn_ahead=False)
    clients: list[RemoteClient] = []

    def connect(language: Language, on_event: Callable[[Event], None]) -> RemoteClient:
        clients.append(RemoteClient(remote, config, language, on_event))
        return clients[0]

    engine = await RemoteEngine.start(config, connect=connect)
    engine.remote = clients[0]
    return engine


class RemoteEngine(AsyncEngine):
    """Build it with `start_remote`."""

    remote: RemoteClient

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        thinking: ThinkingParams | None = None,
        fold: FoldParams | None = None,
        *,
        until: Until | None = None,
        service: Service | None = None,
        control: ControlParams | None = None,
        **more: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncEngine. Raises UnsupportedError for what needs the engine's own KV or what the server cannot do."""
        line, sampling = self.remote.line, sampling or SamplingParams()
        if until is not None:
            raise UnsupportedError("until", NEEDS_KV)
        if service is not None and service.tier.kv_quota < 1.0:
            raise UnsupportedError("tier", f"its kv_quota {NEEDS_KV}")
        line.dialect.check(sampling)
        line.dialect.check_control(control)
        if not line.dialect.prompt_ids:
            await asyncio.to_thread(line.reader.check_prompt, prompt_token_ids)
        if control is not None and control.asks and sampling.logprobs is None and line.dialect.top:
            sampling = replace(sampling, logprobs=0)  # rules read the rows
        outputs = super().generate(prompt_token_ids, sampling, thinking, fold, service=service, control=control, **more)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    def decide(self, question: Question, how: Decision) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncEngine. Raises UnsupportedError for a search: it needs handles; and for weights that nobody tells."""
        if isinstance(how, SearchParams):
            raise UnsupportedError("search", NEEDS_KV)
        if isinstance(how, VoteParams) and how.weights == "confidence":
            if not self.remote.line.dialect.top:
                raise UnsupportedError("vote.weights", NO_LOGPROBS)
            if question.sampling.logprobs is None:
                question = replace(question, sampling=replace(question.sampling, logprobs=0))
        return super().decide(question, how)

    def resolve_fold(self, fold: FoldParams | None) -> FoldPolicy:
        """Off; where segments end may be said. Raises UnsupportedError for any other wish."""
        asked = fold or FoldParams()
        if asked.policy not in (None, FoldMode.OFF):
            raise UnsupportedError("fold.policy", NEEDS_KV)
        for name in ("selector", "entries", "gate", "at_answer", "prefer"):
            if getattr(asked, name) is not None:
                raise UnsupportedError(f"fold.{name}", NEEDS_KV)
        return super().resolve_fold(fold)

    def health(self) -> Health:
        found = super().health()
        if found.ready and self.remote.trouble:
            return Health(alive=True, ready=False, reason=self.remote.trouble)
        return found
