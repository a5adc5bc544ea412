"""Command-line flags made from EngineConfig's fields, so that the two cannot drift."""

from __future__ import annotations

import argparse
import re
import types
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinkfold.config import EngineConfig

ALIASES = {"page_size": ("--block-size",)}
POSITIONAL = "model"


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag a field: its name, type, choices, default and what the docstring says of it."""
    hints = get_type_hints(EngineConfig)
    group = parser.add_argument_group("engine")
    for field in fields(EngineConfig):
        if field.name == POSITIONAL:
            continue
        flag = "--" + field.name.replace("_", "-")
        options = _options(hints[field.name])
        text = _sentence(field.name) or "see EngineConfig"
        group.add_argument(
            flag,
            *ALIASES.get(field.name, ()),
            dest=field.name,
            default=field.default,
            help=f"{text} (default: {_shown(field.default)})".replace("%", "%%"),
            **options,
        )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags describe. Raises ParameterError."""
    return EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})


def _options(hint: Any) -> dict[str, Any]:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return {"choices": choices, "type": type(choices[0])}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, "metavar": {int: "N", float: "X", str: "TEXT"}[hint]}


def _sentence(name: str) -> str:
    """What the docstring's sentence that begins with `name` says of it."""
    prose = " ".join((EngineConfig.__doc__ or "").split())
    sentences = re.split(r"(?<=\.)\s+(?=`)", prose)
    found = next((s for s in sentences if s.startswith(f"`{name}` ")), "")
    return found.removeprefix(f"`{name}` ").rstrip(".").replace("`", "")


def _shown(default: Any) -> str:
    return "automatic" if default is None else repr(default) if isinstance(default, str) else str(default)
