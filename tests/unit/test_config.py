"""Settings and parameters that look right and are not: refused by name where they are built."""

import math

import pytest

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.types import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pipeline_depth", 2),
        ("load_format", "safetensors"),
        ("dtype", "int8"),
        ("stall_timeout_s", 0.0),
        ("watchdog_s", -1.0),
        ("watchdog_s", math.nan),
        ("page_size", 12),
        ("gpu_memory_utilization", math.nan),
        ("max_num_seqs", 0),
        ("max_model_len", 1),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(field, value):
    with pytest.raises(ParameterError) as caught:
        EngineConfig(**{field: value})
    assert caught.value.field == field


def test_one_stop_string_is_not_taken_for_its_letters():
    with pytest.raises(ParameterError, match="stop: must be a sequence"):
        SamplingParams(stop="###")  # type: ignore[arg-type]
