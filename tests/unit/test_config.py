"""Settings and parameters that look right and are not: refused by name where they are built."""

import math
from typing import get_args, get_type_hints

import pytest

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.types import FOLD_PROFILES, AtAnswer, FoldMode, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pipeline_depth", 2),
        ("load_format", "safetensors"),
        ("dtype", "int8"),
        ("stall_timeout_s", 0.0),
        ("watchdog_s", -1.0),
        ("admission_risk", 0.0),
        ("admission_risk", 1.0),
        ("admission_risk", math.nan),
        ("watchdog_s", math.nan),
        ("page_size", 12),
        ("gpu_memory_utilization", math.nan),
        ("max_num_seqs", 0),
        ("max_model_len", 1),
        ("fold_policy", "always"),
        ("fold_profile", "huge"),
        ("fold_entries", -1),
        ("fold_entries", 128),
        ("fold_gate", 1.5),
        ("fold_gate", math.nan),
        ("fold_at_answer", "drop"),
        ("fold_prefer", "speed"),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(field, value):
    with pytest.raises(ParameterError) as caught:
        EngineConfig(**{field: value})
    assert caught.value.field == field


def test_fold_entries_are_held_against_the_chosen_profile():
    name, numbers = EngineConfig(fold_profile="coarse", fold_entries=200).fold_numbers
    assert (name, numbers.entries, numbers.max_segment_tokens) == ("coarse", 200, 4096)
    with pytest.raises(ParameterError, match="fold_entries"):
        EngineConfig(fold_profile="fine", fold_entries=200)


def test_every_profile_can_be_named():
    hints = get_type_hints(EngineConfig)
    assert get_args(get_args(hints["fold_profile"])[0]) == tuple(FOLD_PROFILES)
    assert get_args(hints["fold_policy"]) == tuple(FoldMode)
    assert get_args(hints["fold_at_answer"]) == tuple(AtAnswer)


@pytest.mark.parametrize("at_answer", list(AtAnswer))
def test_thinking_may_leave_at_the_answer_without_any_fold_before(at_answer):
    config = EngineConfig(fold_policy="off", fold_at_answer=at_answer)
    assert (config.fold_policy, config.fold_at_answer) == ("off", at_answer)


def test_segments_are_no_setting_of_their_own_any_more():
    with pytest.raises(TypeError, match="min_segment_tokens"):
        EngineConfig(min_segment_tokens=1)  # type: ignore[call-arg]


def test_one_stop_string_is_not_taken_for_its_letters():
    with pytest.raises(ParameterError, match="stop: must be a sequence"):
        SamplingParams(stop="###")  # type: ignore[arg-type]
