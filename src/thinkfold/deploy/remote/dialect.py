"""What one remote server understands, and a completion request in its words. Found at start by `probing`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinkfold.engine.abilities import NAMES, Ability
from thinkfold.errors import UnsupportedError
from thinkfold.types import ControlParams, Preset, SamplingParams

SEED_BITS = 31  # of servers that draw with 32
BANNED = -100.0
NO_LOGPROBS = "reads log-probs, and the remote engine gives none"

# What a sampling parameter is called by some servers, with the value that switches it off: servers have defaults
# of their own, so those that they know are always sent.
NEUTRAL: Mapping[str, tuple[str, float | int]] = {
    "top_k": ("top_k", 0),
    "min_p": ("min_p", 0.0),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "repeat_penalty": ("repetition_penalty", 1.0),
    "presence_penalty": ("presence_penalty", 0.0),
    "frequency_penalty": ("frequency_penalty", 0.0),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """`prompt_ids`, `token_ids`: prompts go, and drawn tokens come, as ids; `row_ids`: with log-probs only.

    `top` log-probs come with a token. `all_k` is how it is told that top_k is off. `fields` are sampling fields that it
    takes, by their names there. `extra` goes with every request. `parallel`: it works on several requests at once.
    `native_budget`: it ends thinking by `thinking_token_budget` itself.
    """

    model: str
    max_model_len: int | None = None
    prompt_ids: bool = False
    token_ids: bool = False
    row_ids: bool = False
    top: int = 0
    logit_bias: bool = False
    parallel: bool = False
    native_budget: bool = False
    all_k: int = 0
    fields: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def abilities(self, *, thinks: bool, enforced: bool) -> dict[str, Ability]:
        """What can be done over this server: by itself, by us, or not at all."""
        native = {"streaming": True, "logprobs": self.top > 0, "logit_bias": self.logit_bias}
        native |= {"thinking_budget": self.native_budget, "token_ids": self.token_ids or self.row_ids}
        ours = dict.fromkeys(("token_ids", "inject", "votes", "best_of", "tiers", "sessions", "costs.kv"), True)
        ours |= {"reasoning_split": thinks, "vote.confidence": self.top > 0}
        ours |= dict.fromkeys(("thinking_budget", "end_thinking", "probes", "early_stop.consistency"), enforced)
        read = ("early_stop.margin", "early_stop.entropy", "early_stop.confidence")
        ours |= dict.fromkeys(read, enforced and self.top > 0)
        return {n: "native" if native.get(n) else "emulated" if ours.get(n) else "not available" for n in NAMES}

    def check(self, sampling: SamplingParams) -> None:
        """Raise UnsupportedError for what the server cannot be asked for."""
        for name, neutral in dict(NEUTRAL.values()).items():
            wanted = getattr(sampling, name)
            known = any(own == name and theirs in self.fields for theirs, (own, _) in NEUTRAL.items())
            if wanted != neutral and not (name == "top_k" and wanted == -1) and not known:
                raise _missing(name)
        if sampling.logit_bias and not self.logit_bias:
            raise _missing("logit_bias")
        if sampling.min_tokens and not self.logit_bias:
            raise _missing("min_tokens")
        if sampling.logprobs is not None and not self.top:
            raise _missing("logprobs")
        if sampling.logprobs is not None and sampling.logprobs > self.top:
            raise UnsupportedError("logprobs", f"the remote engine gives {self.top} at most")
        for name in ("ignore_eos", "forced_tokens", "grammar"):
            if getattr(sampling, name):
                raise _missing("response_format" if name == "grammar" else name)

    def check_control(self, control: ControlParams | None) -> None:
        """Raise UnsupportedError for rules that read log-probs where the server gives none."""
        if control is None or self.top:
            return
        if control.preset not in (None, Preset.EXACT):
            raise UnsupportedError("control.preset", NO_LOGPROBS)
        for name in ("entropy", "confidence"):
            if control.early_stop is not None and getattr(control.early_stop, name) is not None:
                raise UnsupportedError(f"early_stop.{name}", NO_LOGPROBS)

    def sampled(self, sampling: SamplingParams) -> dict[str, Any]:
        """The fields that say how tokens are drawn."""
        body: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        for theirs, (own, _) in NEUTRAL.items():
            if theirs in self.fields:
                value = getattr(sampling, own)
                body[theirs] = self.all_k if own == "top_k" and value <= 0 else value
        return body

    def body(self, prompt: str | list[int], max_tokens: int, *, look: bool, **more: Any) -> dict[str, Any]:
        """A request for `max_tokens` behind `prompt`; with `look`, for as many log-probs as there are."""
        most = self.top if look else int(self.row_ids)
        looked: dict[str, Any] = {"logprobs": most} if most else {}
        base = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        return {**base, **looked, **self.extra, **more}


def _missing(field: str) -> UnsupportedError:
    return UnsupportedError(field, "the remote engine cannot be asked for it")
