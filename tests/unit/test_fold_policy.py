"""What a request asks of folding and what it gets: who beats whom, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from thinkfold.config import EngineConfig
from thinkfold.control.fold_policy import resolve_fold
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.fold import selectors
from thinkfold.types import FOLD_PROFILES, AtAnswer, FoldMode, FoldParams, FoldPolicy

NAMES = ("conclusion_attention", "drop")


def token_id(text: str, field: str) -> int:
    if len(text) != 1:
        raise ParameterError(field, "must be one token")
    return ord(text)


def resolve(params: FoldParams | None = None, *, thinks: bool = True, **config: Any) -> FoldPolicy:
    return resolve_fold(params, config=EngineConfig(**config), thinks=thinks, selectors=NAMES, token_id=token_id)


def test_nothing_asked_gives_the_configuration() -> None:
    config = {"fold_policy": "eager", "fold_profile": "fine", "fold_selector": "drop", "fold_entries": 7}
    policy = resolve(fold_gate=0.25, fold_prefer="queue", fold_at_answer="recycle", **config)
    assert policy == FoldPolicy(FoldMode.EAGER, "fine", "drop", 7, 0.25, AtAnswer.RECYCLE, "queue")
    assert policy.numbers.max_segment_tokens == 512 and policy.numbers.entries == 7


@pytest.mark.parametrize(
    ("config", "profile"),
    [
        ({}, "pebble"),
        ({"model": "some/model"}, "default"),
        ({"model": "some/model", "fold_profile": "pebble"}, "pebble"),
    ],
)
def test_the_profile_follows_the_model(config: dict[str, Any], profile: str) -> None:
    policy = resolve(**config)
    assert (policy.profile, policy.entries) == (profile, FOLD_PROFILES[profile].entries)
    assert policy.policy is FoldMode.PRESSURE


def test_the_request_beats_the_configuration_field_by_field() -> None:
    asked = FoldParams("off", "coarse", "drop", 9, 0.5, "keep", "queue")
    assert resolve(asked, fold_policy="eager", fold_entries=5, fold_at_answer="recycle") == FoldPolicy(
        FoldMode.OFF, "coarse", "drop", 9, 0.5, AtAnswer.KEEP, "queue"
    )
    assert resolve(FoldParams(gate=0.0), fold_gate=0.5).gate == 0.0
    assert resolve(FoldParams(entries=0), fold_entries=5).entries == 0


def test_a_named_profile_brings_its_own_entries() -> None:
    assert resolve(FoldParams(profile="default"), fold_entries=5).entries == 64
    assert resolve(FoldParams(policy="eager"), fold_entries=5).entries == 5


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"selector": "dorp"}, "fold.selector"),
        ({"selector": ""}, "fold.selector"),
        ({"entries": 128}, "fold.entries"),
        ({"entries": 256, "profile": "default"}, "fold.entries"),
        ({"at_answer": "swap"}, "fold.at_answer"),
        ({"at_answer": "swap", "policy": "off"}, "fold.at_answer"),
        ({"delimiter_token": "two"}, "fold.delimiter_token"),
        ({"delimiter_token": ""}, "fold.delimiter_token"),
        ({"delimiter_regex": "("}, "fold.delimiter_regex"),
        ({"delimiter_regex": ""}, "fold.delimiter_regex"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_the_requests_name(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        resolve(FoldParams(**asked))
    assert caught.value.field == field


def test_a_wrong_selector_names_those_that_exist() -> None:
    with pytest.raises(ParameterError, match="conclusion_attention, drop"):
        resolve(FoldParams(selector="nothing"))
    with pytest.raises(ParameterError, match="fold_selector: there is no 'nothing'"):
        resolve(fold_selector="nothing")
    assert set(NAMES) <= set(selectors.names())


def test_entries_just_below_the_shortest_segment_are_allowed() -> None:
    assert resolve(FoldParams(entries=127)).entries == 127


def test_swap_needs_host_memory_and_says_so() -> None:
    with pytest.raises(UnsupportedError, match="swap_space_bytes"):
        resolve(fold_at_answer="swap")
    for mode in FoldMode:
        asked = FoldParams(policy=mode, at_answer="swap")
        assert resolve(asked, swap_space_bytes=1 << 20).at_answer is AtAnswer.SWAP


@pytest.mark.parametrize("at_answer", list(AtAnswer))
def test_without_folding_thinking_may_leave_at_the_answer(at_answer: AtAnswer) -> None:
    host = {"swap_space_bytes": 1 << 20}
    by_request = resolve(FoldParams(policy="off", at_answer=at_answer), **host)
    by_server = resolve(fold_policy="off", fold_at_answer=at_answer, **host)
    for policy in (by_request, by_server):
        assert (policy.policy, policy.at_answer) == (FoldMode.OFF, at_answer)


@pytest.mark.parametrize("server", list(FoldMode))
@pytest.mark.parametrize("at_answer", ["recycle", "swap"])
def test_a_request_that_says_off_and_no_more_keeps_every_bit(server: FoldMode, at_answer: str) -> None:
    config = {"fold_policy": server, "fold_at_answer": at_answer, "swap_space_bytes": 1 << 20}
    policy = resolve(FoldParams(policy="off"), **config)
    assert (policy.policy, policy.at_answer) == (FoldMode.OFF, AtAnswer.KEEP)
    assert resolve(FoldParams(gate=0.5), **config).at_answer == at_answer


def test_the_requests_delimiters_beat_the_servers() -> None:
    config = {"fold_delimiter_token": ".", "fold_delimiter_regex": "Wait"}
    policy = resolve(**config)
    assert (policy.delimiter_token, policy.delimiter_regex) == (".", "Wait")
    policy = resolve(FoldParams(delimiter_regex="Hm"), **config)
    assert (policy.delimiter_token, policy.delimiter_regex) == (".", "Hm")
    for wrong in ({"fold_delimiter_token": "two"}, {"fold_delimiter_regex": "(?=x)"}):
        with pytest.raises(ParameterError) as caught:
            resolve(**wrong)
        assert caught.value.field == next(iter(wrong))


@pytest.mark.parametrize("kind", ["token", "regex"])
def test_a_model_that_does_not_think_has_no_segments_to_end(kind: str) -> None:
    for asked, config in ((None, {f"fold_delimiter_{kind}": "x"}), (FoldParams(**{f"delimiter_{kind}": "x"}), {})):
        with pytest.raises(UnsupportedError, match="does not think"):
            resolve(asked, thinks=False, **config)


def test_a_model_that_does_not_think_has_nothing_to_fold() -> None:
    policy = resolve(FoldParams(policy="eager", at_answer="recycle"), thinks=False)
    assert (policy.policy, policy.at_answer) == (FoldMode.OFF, AtAnswer.KEEP)
    with pytest.raises(ParameterError, match=r"fold\.selector"):
        resolve(FoldParams(selector="nothing"), thinks=False)
