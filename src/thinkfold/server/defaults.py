"""Sampling defaults that a model's authors wrote into its generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from thinkfold.errors import ParameterError
from thinkfold.types import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(source: str) -> Mapping[str, Any]:
    """The values the file gives, checked; empty without a file. No network.

    `source` is a folder or a hub id that is already in the cache. An explicit
    `do_sample: false` means temperature 0. Raises ParameterError for a value out of range.
    """
    if not source:
        return {}
    path = cached_file(
        source,
        "generation_config.json",
        local_files_only=True,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return {}
    written = json.loads(Path(path).read_text(encoding="utf-8"))
    defaults = {name: written[name] for name in _NAMES if written.get(name) is not None}
    if written.get("do_sample") is False:
        defaults["temperature"] = 0.0
    try:
        SamplingParams(**defaults)
    except ParameterError as error:
        raise ParameterError("model", f"generation_config.json: {error}") from None
    return defaults
