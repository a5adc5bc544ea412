"""What a request asks of folding, turned into one effective policy. Pure functions.

Knows nothing about segments or pages: when to fold is the planner's and the scheduler's work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.thinking.delimiter import compile_delimiter
from thinkfold.types import FOLD_PROFILES, AtAnswer, FoldMode, FoldParams, FoldPolicy


def resolve_fold(
    params: FoldParams | None,
    *,
    config: EngineConfig,
    thinks: bool,
    selectors: Sequence[str],
    token_id: Callable[[str, str], int],
) -> FoldPolicy:
    """The effective policy, as echoed to the user: the request beats the server's configuration.

    A request that names a profile gets that profile's entries, not the server's number. One that
    says `off` and nothing of `at_answer` keeps all thinking, whatever the server does then. A model
    that does not think has nothing to fold: its policy is off. `selectors` are the names of what
    is there; `token_id(text, field)` is the id of one token, or raises. Raises ParameterError that
    names the request's field (`fold.entries`) or the server's (`fold_entries`), UnsupportedError for
    what this engine cannot honour.
    """
    asked = params or FoldParams()
    selector = _selector(asked.selector, config.fold_selector, selectors)
    profile, entries = _profile(asked, config)
    mode = FoldMode(asked.policy or config.fold_policy) if thinks else FoldMode.OFF
    return FoldPolicy(
        policy=mode,
        profile=profile,
        selector=selector,
        entries=entries,
        gate=config.fold_gate if asked.gate is None else asked.gate,
        at_answer=_at_answer(asked, config) if thinks else AtAnswer.KEEP,
        prefer=asked.prefer or config.fold_prefer,
        delimiter_token=_delimiter("token", asked.delimiter_token, config.fold_delimiter_token, thinks, token_id),
        delimiter_regex=_delimiter(
            "regex", asked.delimiter_regex, config.fold_delimiter_regex, thinks, compile_delimiter
        ),
    )


def _selector(asked: str | None, default: str, names: Sequence[str]) -> str:
    selector = default if asked is None else asked
    if selector not in names:
        field = "fold_selector" if asked is None else "fold.selector"
        raise ParameterError(field, f"there is no {selector!r:.60}, there are {', '.join(names)}")
    return selector


def _delimiter(
    kind: str, asked: str | None, default: str | None, thinks: bool, check: Callable[[str, str], object]
) -> str | None:
    """What else ends a segment; it must be sound, and the model must think."""
    chosen, field = (default, f"fold_delimiter_{kind}") if asked is None else (asked, f"fold.delimiter_{kind}")
    if chosen is not None:
        if not thinks:
            raise UnsupportedError(field, "this model does not think: it has no segments")
        check(chosen, field)
    return chosen


def _profile(asked: FoldParams, config: EngineConfig) -> tuple[str, int]:
    """Name of the profile and entries of a segment; a summary must be smaller than what it stands for."""
    name, numbers = config.fold_numbers
    if asked.profile is not None:
        name, numbers = asked.profile, FOLD_PROFILES[asked.profile]
    entries = numbers.entries if asked.entries is None else asked.entries
    if entries >= numbers.min_segment_tokens:
        raise ParameterError(
            "fold.entries",
            f"must be less than the {numbers.min_segment_tokens} tokens of the shortest segment "
            f"of profile {name}, got {entries}",
        )
    return name, entries


def _at_answer(asked: FoldParams, config: EngineConfig) -> AtAnswer:
    field = "fold_at_answer" if asked.at_answer is None else "fold.at_answer"
    choice = AtAnswer(asked.at_answer or config.fold_at_answer)
    if asked.policy == FoldMode.OFF and asked.at_answer is None:
        return AtAnswer.KEEP  # it wants every bit, and its answer reads all of its thinking
    if choice is AtAnswer.SWAP and not config.swap_space_bytes:
        raise UnsupportedError(field, "swap needs host memory: this engine has none (swap_space_bytes is 0)")
    return choice
