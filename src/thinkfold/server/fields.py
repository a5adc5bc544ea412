"""Request fields that APIs share, and their way into SamplingParams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from thinkfold.errors import ParameterError
from thinkfold.server.body import StrictModel
from thinkfold.server.contract import Engine
from thinkfold.server.errors import ModelNotFoundError, renamed
from thinkfold.server.folds import FIELD_NAMES, ThinkfoldFields
from thinkfold.server.policy import ThinkingFields, agreed
from thinkfold.server.structured import StructuredOutputs
from thinkfold.types import (
    ControlParams,
    Decision,
    FoldParams,
    Grammar,
    SamplingParams,
    one_decision,
    parse_best_of,
    parse_control,
    parse_search,
    parse_vote,
)

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


class StreamOptions(StrictModel):
    include_usage: bool | None = None


class SharedFields(StrictModel):
    """Fields of every API that generates. Null means not given."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    structured_outputs: StructuredOutputs | None = None
    early_stop: dict[str, Any] | None = None
    early_stop_threshold: dict[str, Any] | None = None
    vote: bool | dict[str, Any] | None = None
    thinkfold: ThinkfoldFields | None = None

    @property
    def wants_events(self) -> bool:
        """Whether a stream tells its folds. Raises ParameterError for events without a stream."""
        wanted = bool(self.thinkfold and self.thinkfold.events)
        if wanted and not self.stream:
            raise ParameterError("thinkfold.events", "needs stream: true")
        return wanted

    def fold_params(self) -> FoldParams | None:
        """What the request asks of folding. Raises ParameterError."""
        return self.thinkfold.fold_params() if self.thinkfold else None

    def control_params(self) -> ControlParams | None:
        """What the request asks of early stopping, None for nothing. Raises ParameterError."""
        given = dict((self.thinkfold.control if self.thinkfold else None) or {})
        for name in ("early_stop", "early_stop_threshold"):
            knobs = getattr(self, name)
            if knobs is not None and given.get(name, knobs) != knobs:
                raise ParameterError(name, f"disagrees with thinkfold.control.{name}")
            given |= {} if knobs is None else {name: knobs}
        try:
            return parse_control(given) if given else None
        except ParameterError as error:
            raise renamed(error, FIELD_NAMES) from None

    def decision(self) -> Decision | None:
        """How the reply is decided over several samples, None for one reply. Raises ParameterError."""
        inside = self.thinkfold.vote if self.thinkfold else None
        given = {name: wish for name, wish in (("vote", self.vote), ("thinkfold.vote", inside)) if wish is not None}
        try:
            return parse_vote(agreed(given))
        except ParameterError as error:
            raise renamed(error, self.vote_names) from None

    @property
    def vote_names(self) -> dict[str, str]:
        """The engine's name of a vote -> the client's, where the object `thinkfold` holds it."""
        return {"vote": "thinkfold.vote"} if self.vote is None and self.thinkfold and self.thinkfold.vote else {}

    @property
    def namespace(self) -> tuple[str, ...]:
        """Labels that keep prefix-cache entries of different owners apart."""
        return namespace_of(self.cache_salt, self.prompt_cache_key)

    def answer_format(self) -> Grammar | None:
        """What the answer must match, in the API's own field for it. Raises ParameterError."""
        return None

    def grammar(self) -> Grammar | None:
        """What the answer must match. Raises ParameterError."""
        own = self.answer_format()
        if self.structured_outputs is None:
            return own
        if own is not None:
            raise ParameterError("structured_outputs", f"goes beside no {own.field.removesuffix('.schema')} but text")
        return self.structured_outputs.answer_grammar()

    def draws(self, defaults: Mapping[str, float | int], *more: str) -> dict[str, Any]:
        """What the request says about drawing tokens, and `more` fields of it, in the engine's terms.

        `defaults` (the model's own) stand in for what is not given.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "seed", *more)
        return {**defaults, **{k: getattr(self, k) for k in names if getattr(self, k) is not None}}


class DecidingFields(SharedFields):
    """Fields of the APIs that answer a conversation, where a verifier or a search may decide."""

    best_of: dict[str, Any] | None = None
    search: dict[str, Any] | None = None

    def decision(self) -> Decision | None:
        return one_decision(super().decision(), parse_best_of(self.best_of), parse_search(self.search))


class RequestFields(ThinkingFields, SharedFields):
    """Fields of chat and legacy completions. Null means not given, except for thinking budgets."""

    n: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_in_thinking: bool | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    # For the operator's own records; they change nothing here.
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with usage. Raises ParameterError for options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "needs stream: true")
        return bool(self.stream_options and self.stream_options.include_usage)

    def output_limit(self) -> int | None:
        """The most tokens of a response."""
        return self.max_tokens

    def sampling_params(self, defaults: Mapping[str, float | int], logprobs: int | None) -> SamplingParams:
        """Checked parameters; `defaults` (the model's own) stand in for what is not given."""
        names = ("n", "repetition_penalty", "presence_penalty", "frequency_penalty")
        names += ("min_tokens", "ignore_eos", "stop_in_thinking")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        _check_unicode("stop", stop)
        return SamplingParams(
            **self.draws(defaults, *names),
            max_tokens=self.output_limit(),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_logit_bias(self.logit_bias or {}),
            logprobs=logprobs,
            grammar=self.grammar(),
        )


def namespace_of(cache_salt: str | None, prompt_cache_key: str | None) -> tuple[str, ...]:
    """The labels of an owner, in the engine's order."""
    labels = (("salt", cache_salt), ("key", prompt_cache_key))
    return tuple(f"{label}={value}" for label, value in labels if value is not None)


def check_model(engine: Engine, asked: str | None) -> str:
    """The served name. Raises ModelNotFoundError for any other."""
    served = engine.config.served_model_name or engine.model.name
    if asked is not None and asked != served:
        raise ModelNotFoundError(asked, served)
    return served


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    bad = next((key for key in given if _TOKEN_ID.fullmatch(key) is None), None)
    if bad is not None:
        raise ParameterError("logit_bias", f"keys must be token ids, got {bad!r:.60}")
    return {int(key): bias for key, bias in given.items()}


def _check_unicode(field: str, texts: Iterable[str]) -> None:
    """Raise ParameterError for a lone surrogate, which JSON can carry and UTF-8 cannot."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise ParameterError(field, "holds a lone surrogate") from None
