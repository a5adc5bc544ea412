"""Writes docs/reference from the code: settings, commands, metrics, HTTP API and families of thinking models."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from enum import StrEnum
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, Literal, cast, get_args, get_origin

from fastapi.routing import APIRoute
from pydantic import BaseModel

from thinkfold.cli.engine_flags import hint_of, sentence
from thinkfold.cli.main import build_parser
from thinkfold.cli.settings import PREFIX, ServeSettings
from thinkfold.config import ALIASES, EngineConfig
from thinkfold.engine.messages import EngineStats
from thinkfold.fold import selectors
from thinkfold.kv.pages import PageClass
from thinkfold.server import app, drift
from thinkfold.server.contract import EngineSlot
from thinkfold.server.errors import KINDS
from thinkfold.server.folds import ThinkfoldFields
from thinkfold.server.metrics import ServerMetrics
from thinkfold.server.openapi import body_model
from thinkfold.thinking.specs import SPECS
from thinkfold.types import EFFORT_BUDGETS, FOLD_PROFILES, AtAnswer, FinishReason, FoldMode, ThinkingEndReason

OUT = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/reference.py (`make reference`) from the code; a test compares. Do not edit. -->"
VALUES: dict[str, Iterable[object]] = {  # of texts that are checked behind the body
    "thinkfold.fold.policy": FoldMode,
    "thinkfold.fold.profile": FOLD_PROFILES,
    "thinkfold.fold.selector": selectors.names(),
    "thinkfold.fold.at_answer": AtAnswer,
    "thinkfold.fold.prefer": ("fold", "queue"),
}


def pages() -> dict[str, str]:
    """Text of every reference page by its file name."""
    made = {"config": config(), "cli": cli(), "metrics": metrics(), "api": api(), "families": families()}
    return {f"{name}.md": f"{NOTE}\n\n{text.strip()}\n" for name, text in made.items()}


def main() -> int:
    """Write the pages."""
    OUT.mkdir(exist_ok=True)
    for name, text in pages().items():
        (OUT / name).write_text(text)
        print(f"docs/reference/{name}")
    return 0


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("\n", " ").replace("|", "\\|")


def code(values: Iterable[object]) -> str:
    """Values as code, parted by commas."""
    return ", ".join(f"`{value}`" for value in values)


# --- settings ---------------------------------------------------------------------------------------------------------


def config() -> str:
    efforts = [(f"`{name}`", "no limit" if n < 0 else n) for name, n in EFFORT_BUDGETS.items()]
    return f"""# Settings

A setting `max_num_seqs` is the keyword of `EngineConfig` and `LLM`, the flag `--max-num-seqs` of `thinkfold serve`,
the environment variable `{PREFIX}MAX_NUM_SEQS` and a line of the TOML file; [operations](../operations.md#settings)
says which wins. A switch such as `enforce_eager` is `--enforce-eager` and `--no-enforce-eager`. Sizes are in bytes,
times in seconds.

## Engine

{_settings(EngineConfig)}

## Server

Of `thinkfold serve` only.

{_settings(ServeSettings)}

## Fold profiles

The numbers behind `fold_profile`, in tokens; `entries` are kept of a segment in each KV head, on average.

{_profiles()}

## Effort

`reasoning_effort` and `--depth`, as thinking tokens.

{table(["effort", "thinking tokens"], efforts)}
"""


def _settings(cls: Any) -> str:
    rows = []
    for field in fields(cls):
        others = [alias for alias, own in ALIASES.items() if own == field.name]
        more = f" Also called {code(others)}." if others else ""
        meaning = sentence(cls, field.name).removesuffix(".")
        rows.append((f"`{field.name}`", _kind(hint_of(cls, field.name)), _default(field.default), f"{meaning}.{more}"))
    return table(["setting", "values", "default", "meaning"], rows)


def _default(value: object) -> str:
    if value is None:
        return "automatic"
    if isinstance(value, tuple):
        return code(value) or "none"
    if isinstance(value, bool):
        return code([str(value).lower()])
    return f"`{value}`" if value != "" else "empty"


def _profiles() -> str:
    names = list(asdict(FOLD_PROFILES["default"]))
    rows = [(f"`{name}`", *asdict(profile).values()) for name, profile in FOLD_PROFILES.items()]
    return table(["profile", *(f"`{name}`" for name in names)], rows)


# --- commands ---------------------------------------------------------------------------------------------------------


def cli() -> str:
    parser = build_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    helps = {choice.dest: choice.help for choice in commands._choices_actions}
    parts = ["# Command line", f"`thinkfold COMMAND`, one of {code(commands.choices)}. Errors are one line and code 2."]
    for name, command in commands.choices.items():
        parts += [f"## thinkfold {name}", f"{_sentence(helps[name])} {_description(command)}".strip()]
        for group in command._action_groups:
            rows = [_flag(action) for action in group._group_actions if action.dest != "help"]
            if rows:
                title = (
                    "" if group.title in ("positional arguments", "options") else f"**{_sentence(group.title)}**\n\n"
                )
                parts.append(title + table(["argument", "values", "meaning"], rows))
    return "\n\n".join(parts)


def _sentence(text: object) -> str:
    words = str(text or "").strip()
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"


def _description(parser: argparse.ArgumentParser) -> str:
    text = " ".join((parser.description or "").split())
    return "" if text.startswith("`thinkfold ") else text


def _flag(action: argparse.Action) -> tuple[str, str, str]:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    values = code(action.choices) if action.choices else metavar if action.option_strings and action.nargs != 0 else ""
    if action.option_strings and not values and action.nargs != 0:
        values = (
            getattr(action.type, "__name__", "text").replace("int", "N").replace("float", "X").replace("Path", "FILE")
        )
    names = code(action.option_strings) or f"`{action.dest}`"
    assert "%(" not in (action.help or ""), action.dest
    text = (action.help or "").replace("%%", "%")
    if text.startswith("one of: "):  # scripts of a checkout come and go
        text = "one of the [benchmarks](../../benchmarks/README.md)"
    return names, values, text


# --- metrics ----------------------------------------------------------------------------------------------------------


def metrics() -> str:
    labels = {
        "reason": ThinkingEndReason,
        "finish_reason": FinishReason,
        "class": PageClass,
        "kind": drift.KINDS,
    }
    rows = [(f"`{label}`", code(values)) for label, values in labels.items()]
    return f"""# Metrics

What `GET /metrics` tells, as Prometheus text. A histogram has `_bucket`, `_sum` and `_count`. A board and alert rules
lie in [deploy/observability](../../deploy/observability); [operations](../operations.md#what-to-watch) says where to
look.

{table(["metric", "kind", "labels", "meaning"], _families())}

## Labels

{table(["label", "values"], rows)}

`status` is an HTTP status, `limit` a limit of a key, `rung` a rung of the pressure ladder ([glossary](../glossary.md)).
"""


def _families() -> list[tuple[str, str, str, str]]:
    example: dict[str, Any] = {f.name: {"x": 0} for f in fields(EngineStats) if str(f.type).startswith("dict")}
    example |= {"decisions": {("x", "x"): 0}, "rules_off": [("x", "x")]}
    engine = SimpleNamespace(health=lambda: SimpleNamespace(ready=True), stats=lambda: EngineStats(**example))
    server = ServerMetrics(cast(EngineSlot, SimpleNamespace(engine=engine)))
    for metric in vars(server).values():  # a labelled metric is told once it has been counted
        if names := getattr(metric, "_labelnames", ()):
            metric.labels(*("x" for _ in names))
    found = []
    for family in server.registry.collect():
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found.append((f"`{name}`", family.type, code(labels), f"{family.documentation}."))
    return found


# --- HTTP API ---------------------------------------------------------------------------------------------------------


def api() -> str:
    models = {route.path: model for _, route in _routes() if (model := body_model(route))}
    bodies = [_model(model, f"### {path}") for path, model in models.items()]
    nested = [_model(model, f"### {_title(model)}") for model in _nested(models.values())]
    routes = [(f"`{method}`", f"`{route.path}`", _first(route.endpoint.__doc__)) for method, route in _routes()]
    errors = [(status, f"`{name}`", type_, _doc(kind)) for kind, status, type_, name in KINDS if name]
    return f"""# HTTP API

Every route, every field and every error. [API](../api.md) says what they mean and how they work together.

## Routes

{table(["method", "path", ""], routes)}

## Request bodies

Unknown fields are refused. *refused* marks fields that are known and not supported: only null is taken.

{_join(bodies)}

## The `thinkfold` object

In every body that generates: `"thinkfold": {{"fold": {{"policy": "eager"}}, "events": true}}`.

{_doc(ThinkfoldFields)}

{table(["field", "values"], _flat(ThinkfoldFields, "thinkfold"))}

## Objects

{_join(nested)}

## Errors

{table(["status", "code", "type", "when"], errors)}
"""


def _routes() -> list[tuple[str, APIRoute]]:
    """Every route by its methods."""
    routers = [part.router for part in vars(app).values() if inspect.ismodule(part) and hasattr(part, "router")]
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    found = [(method, route) for route in routes for method in route.methods or ()]
    return sorted(found, key=lambda pair: (pair[1].path, pair[0]))


def _join(parts: Iterable[str]) -> str:
    return "\n\n".join(parts)


def _model(model: type[BaseModel], heading: str) -> str:
    rows = [
        (f"`{field.alias or name}`", _kind(field.annotation), "required" if field.is_required() else "")
        for name, field in model.model_fields.items()
    ]
    return _join(part for part in (heading, _doc(model), table(["field", "values", ""], rows)) if part)


def _flat(model: type[BaseModel], prefix: str) -> list[tuple[str, str]]:
    """Fields of a model and of those within it, by their whole paths."""
    rows = []
    for name, field in model.model_fields.items():
        path = f"{prefix}.{field.alias or name}"
        inner = _models_in(field.annotation)
        rows += (
            _flat(inner[0], path) if inner else [(f"`{path}`", code(VALUES.get(path, ())) or _kind(field.annotation))]
        )
    return rows


def _nested(models: Iterable[type[BaseModel]]) -> list[type[BaseModel]]:
    """Models that are fields of others, each once, in the order in which they are met."""
    found: dict[type[BaseModel], None] = {}
    for model in models:
        for field in model.model_fields.values():
            for inner in _models_in(field.annotation):
                if inner is not ThinkfoldFields:
                    found |= dict.fromkeys([inner, *_nested([inner])])
    return list(found)


def _models_in(hint: Any) -> list[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [model for part in get_args(hint) for model in _models_in(part)]


def _title(model: type[BaseModel]) -> str:
    """Its name, with the API that it belongs to alone."""
    api = model.__module__.split(".")[-2]
    return model.__name__ if api == "server" else f"{model.__name__} ({api})"


def _doc(cls: type) -> str:
    """The first paragraph of a class's own docstring."""
    return _first(cls.__dict__.get("__doc__"))


def _first(doc: str | None) -> str:
    return " ".join((doc or "").split("\n\n")[0].split())


_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "object", Any: "anything"}


def _kind(hint: Any) -> str:
    """A type in words."""
    if hint in (None, NoneType):
        return "*refused*"
    if isinstance(hint, type) and issubclass(hint, ThinkfoldFields):
        return "[object](#the-thinkfold-object)"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        anchor = _title(hint).lower().replace(" ", "-").replace("(", "").replace(")", "")
        return f"[{hint.__name__}](#{anchor})"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return code(hint)
    if get_origin(hint) is Literal:
        return code(str(v).lower() if isinstance(v, bool) else v for v in get_args(hint) if v is not None)
    if get_origin(hint) in (list, tuple):
        return f"list of {_kind(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "object"
    if get_origin(hint) is not None:
        parts = [_kind(part) for part in get_args(hint) if part is not NoneType]
        return " or ".join(dict.fromkeys(parts))
    return _WORDS[hint]


# --- families ---------------------------------------------------------------------------------------------------------


def families() -> str:
    rows = [
        (
            f"`{s.name}`",
            code(map(_shown, s.starts)),
            code(map(_shown, s.ends)),
            code(s.implicit_ends),
            f"`{_shown(s.force)}`",
            _evidence(s),
        )
        for s in SPECS
    ]
    head = ["family", "thinking opens", "and ends", "also ends at", "forced end", "applies if"]
    return f"""# Families of thinking models

How models mark their thinking. The first row that applies is taken: the chat template must hold one of its start or end
markers, and what the last column says. A model of no row does not think, unless `--think-start` and `--think-end` say
how; [how to add a family](../how-to/add-a-family.md).

{table(head, rows)}
"""


def _shown(marker: str) -> str:
    return marker.replace("\n", "\\n")


def _evidence(spec: Any) -> str:
    needed = (*spec.signs, *spec.evidence)
    parts = [f"the template holds {code(needed)}"] if needed else []
    parts += [f"the model's type begins with {code(spec.model_types)}"] if spec.model_types else []
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
