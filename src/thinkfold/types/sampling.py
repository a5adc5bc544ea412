"""How tokens are drawn and when a response ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinkfold.errors import ParameterError
from thinkfold.types.checks import integer, number
from thinkfold.types.grammar import Grammar

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 64
MAX_N = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a response ends. Raises ParameterError.

    `max_tokens` None means up to the model's length. `seed` None draws a fresh seed.
    `forced_tokens` replaces sampling by a given stream (benchmarks). Stop strings and ids
    act on the answer only, unless `stop_in_thinking`. `grammar` binds the answer, never thinking;
    the answer ends where the grammar allows it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_in_thinking: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    forced_tokens: tuple[int, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        integer("n", self.n, 1, MAX_N)
        number("temperature", self.temperature, 0.0, 2.0)
        number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        integer("top_k", self.top_k, -1, 2**31 - 1)
        number("min_p", self.min_p, 0.0, 1.0)
        number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ParameterError("min_tokens", f"must be at most max_tokens ({self.max_tokens})")
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_stops()
        self._check_logit_bias()
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise ParameterError(name, f"cannot go with {self.grammar.field}: the grammar says where the answer ends")

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            raise ParameterError("stop", f"must be a sequence of strings, got the string {self.stop!r}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ParameterError("stop", "must hold non-empty strings")
        if len(self.stop_token_ids) > MAX_STOP_STRINGS:
            raise ParameterError("stop_token_ids", f"at most {MAX_STOP_STRINGS} ids, got {len(self.stop_token_ids)}")
        for token_id in self.stop_token_ids:
            integer("stop_token_ids", token_id, 0)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            integer("logit_bias", token_id, 0)
            number("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParameterError if an id lies outside `[0, vocab_size)`."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("forced_tokens", self.forced_tokens),
        ):
            bad = next((i for i in ids if not 0 <= i < vocab_size), None)
            if bad is not None:
                raise ParameterError(name, f"token id {bad} is outside the vocabulary of {vocab_size}")
