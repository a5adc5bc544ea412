"""Command-line flags made from the fields of settings classes, so that the two cannot drift."""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinkfold.config import ALIASES, EngineConfig

POSITIONAL = "model"


def add_engine_flags(parser: argparse.ArgumentParser, *, given_only: bool = False) -> None:
    """The flags of EngineConfig."""
    add_flags(parser, EngineConfig, "engine", given_only=given_only)


def add_flags(
    parser: argparse.ArgumentParser,
    settings: Any,
    title: str,
    *,
    given_only: bool = False,
    only: Collection[str] | None = None,
) -> None:
    """One flag a field: its name, type, choices, default and what the docstring says of it.

    With `given_only` the parsed arguments hold no defaults; with `only` there are no flags for other fields.
    """
    group = parser.add_argument_group(title)
    for field in fields(settings):
        if field.name == POSITIONAL or (only is not None and field.name not in only):
            continue
        names = [field.name, *(alias for alias, own in ALIASES.items() if own == field.name)]
        text = sentence(settings, field.name) or f"see {settings.__name__}"
        group.add_argument(
            *("--" + name.replace("_", "-") for name in names),
            dest=field.name,
            default=argparse.SUPPRESS if given_only else field.default,
            help=f"{text} (default: {_shown(field.default)})".replace("%", "%%"),
            **_options(hint_of(settings, field.name)),
        )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags describe. Raises ParameterError."""
    return EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})


def hint_of(settings: Any, name: str) -> Any:
    """The type of a field, without None."""
    hint = get_type_hints(settings)[name]
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    return hint


def _options(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return {"choices": choices, "type": type(choices[0])}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is tuple:
        return {"type": listed, "metavar": "A,B"}
    return {"type": hint, "metavar": {int: "N", float: "X", str: "TEXT"}[hint]}


def listed(text: str) -> tuple[str, ...]:
    """Words parted by commas."""
    return tuple(word for part in text.split(",") if (word := part.strip()))


def sentence(settings: Any, name: str) -> str:
    """What the docstring's sentence that begins with `name` says of it."""
    prose = " ".join((settings.__doc__ or "").split())
    sentences = re.split(r"(?<=\.)\s+(?=`)", prose)
    found = next((s for s in sentences if s.startswith(f"`{name}` ")), "")
    return found.removeprefix(f"`{name}` ").rstrip(".").replace("`", "")


def _shown(default: Any) -> str:
    if default is None or default is MISSING:
        return "automatic"
    if isinstance(default, tuple):
        return ",".join(default) or "none"
    return repr(default) if isinstance(default, str) else str(default)
