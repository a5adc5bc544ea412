"""Settings of `thinkfold serve`: flags beat the environment, which beats the file, which beats defaults."""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from thinkfold.cli.engine_flags import hint_of, listed
from thinkfold.cli.profiles import explained, settings_of
from thinkfold.config import ALIASES, EngineConfig, own_names
from thinkfold.errors import ParameterError
from thinkfold.types import Preset, Prices
from thinkfold.types.checks import choice, integer, number

PREFIX = "THINKFOLD_"
SECRETS = ("remote_api_key",)
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How the HTTP side is run. Raises ParameterError.

    `host` is the address to listen on.
    `port` is 0 for any free one.
    `api_keys_file` is a TOML file of hashed API keys (see docs/operations.md); with keys every route needs one.
    `open_routes` answer GET without a key.
    `cors_origins` are the origins whose pages may call; none by default.
    `page` serves the playground and the engine view at `/`; its files need no key, what they show does.
    `max_body_bytes` bounds a request's body.
    `max_header_bytes` bounds a request's headers.
    `drain_s` is how long running requests may go on after a signal, before they get a final error.
    `response_store_bytes` is memory for stored responses, 0 for none.
    `response_ttl_s` is how many seconds a response is stored since it was last used.
    `warm` is a JSON file of prefixes to compute and pin before the server is ready (see docs/api.md).
    `profile` stands in for settings you leave open: agents, maths or chains (see docs/control.md).
    `early_stop` is the preset of requests that ask for none, nor does their tier; exact stops nothing early.
    `tiers` is a TOML file of classes of service (see docs/operations.md).
    `max_sessions` bounds the agent sessions that are known at once.
    `session_ttl_s` is how many seconds an agent session is known since its last call.
    `step_cache_answers` bounds the answers of plan steps that are kept, 0 for none.
    `step_cache_ttl_s` is how many seconds such an answer is kept.
    `engine` openai puts the policy over the OpenAI-compatible server at `base_url` (see docs/remote.md).
    `base_url` is that server's address, such as http://127.0.0.1:8080/v1; `model` is then its tokenizer alone.
    `remote_model` is the name it is asked for; None takes the only one it has.
    `remote_api_key` is the key it asks for; better in the environment than on a command line.
    `remote_timeout_s` of silence end a request to it.
    `log_requests` writes a line of JSON for each request that ends: costs, or also its prompt and reply as text.
    `secret_file` has at least 32 secret bytes that sign and seal thinking; servers that share it accept each other's.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys_file: str | None = None
    open_routes: tuple[str, ...] = ("/health", "/ready")
    cors_origins: tuple[str, ...] = ()
    page: bool = True
    max_body_bytes: int = 64 * 1024 * 1024
    max_header_bytes: int = 32 * 1024
    drain_s: float = 10.0
    response_store_bytes: int = 256 * 1024 * 1024
    response_ttl_s: float = 3600.0
    warm: str | None = None
    secret_file: str | None = None
    profile: Literal["agents", "maths", "chains"] | None = None
    early_stop: Literal["exact", "conservative", "balanced", "aggressive"] = "exact"
    tiers: str | None = None
    max_sessions: int = 10_000
    session_ttl_s: float = 3600.0
    step_cache_answers: int = 4096
    step_cache_ttl_s: float = 3600.0
    engine: Literal["thinkfold", "openai"] = "thinkfold"
    base_url: str | None = None
    remote_model: str | None = None
    remote_api_key: str | None = None
    remote_timeout_s: float = 120.0
    log_requests: Literal["none", "costs", "text"] = "none"

    def __post_init__(self) -> None:
        choice("engine", self.engine, ("thinkfold", "openai"))
        number("remote_timeout_s", self.remote_timeout_s, 0.0, 86_400.0, open_low=True)
        if self.engine == "openai" and self.base_url is None:
            raise ParameterError("base_url", "must say where the server of engine openai is")
        for name in ("base_url", "remote_model", "remote_api_key"):
            if self.engine != "openai" and getattr(self, name) is not None:
                raise ParameterError(name, "belongs to engine openai")
        integer("port", self.port, 0, 65535)
        integer("max_body_bytes", self.max_body_bytes, 1024)
        integer("max_header_bytes", self.max_header_bytes, 1024)
        number("drain_s", self.drain_s, 0.0, 86_400.0)
        integer("response_store_bytes", self.response_store_bytes, 0)
        number("response_ttl_s", self.response_ttl_s, 0, 10**9, open_low=True)
        integer("max_sessions", self.max_sessions, 1)
        integer("step_cache_answers", self.step_cache_answers, 0)
        number("session_ttl_s", self.session_ttl_s, 0, 10**9, open_low=True)
        number("step_cache_ttl_s", self.step_cache_ttl_s, 0, 10**9, open_low=True)
        settings_of(self.profile)
        choice("early_stop", self.early_stop, tuple(Preset))
        choice("log_requests", self.log_requests, ("none", "costs", "text"))
        wrong = next((route for route in self.open_routes if not route.startswith("/")), None)
        if wrong is not None:
            raise ParameterError("open_routes", f"must begin with a slash, got {wrong!r:.60}")


@dataclass(frozen=True, slots=True)
class Resolved:
    """Effective settings and where each came from: flag, environment, file, profile or default.

    `prices` come from the file's table of that name.
    """

    engine: EngineConfig
    serve: ServeSettings
    origins: Mapping[str, str]
    prices: Prices = field(default_factory=Prices)

    def explained(self) -> list[str]:
        """What the profile has set, and why; nothing without one."""
        values = {f.name: getattr(part, f.name) for part in (self.engine, self.serve) for f in fields(part)}
        profile = self.serve.profile
        return [] if profile is None else list(explained(profile, values, self.origins))

    def toml(self) -> str:
        """A file that gives the same settings."""
        lines: list[str] = []
        for settings in (self.engine, self.serve):
            for each in fields(settings):
                value = getattr(settings, each.name)
                if each.name in SECRETS and value is not None:
                    lines.append(f"# {each.name} is not shown  # {self.origins[each.name]}")
                    continue
                text = f"{each.name} = {_toml_value(value)}" if value is not None else f"# {each.name} is automatic"
                lines.append(f"{text}  # {self.origins[each.name]}" if value is not None else text)
        lines += [f"# {line}" for line in self.explained()]
        if self.prices != Prices():
            lines += ["", "[prices]", *(f"{f.name} = {getattr(self.prices, f.name)}" for f in fields(Prices))]
        return "\n".join(lines) + "\n"


def resolve(args: argparse.Namespace, environ: Mapping[str, str]) -> Resolved:
    """The settings of a command line that holds only what was given. Raises ParameterError."""
    sources = {
        "flag": {name: value for name, value in vars(args).items() if name in _home()},
        "environment": _from_environment(environ),
        "file": _from_file(getattr(args, "config", None) or environ.get(f"{PREFIX}CONFIG")),
    }
    prices = _prices(sources["file"].pop("prices", {}))
    profile = next((s["profile"] for s in sources.values() if s.get("profile") is not None), None)
    sources["profile"] = settings_of(profile)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_home(), "default")
    for origin in ("profile", "file", "environment", "flag"):
        values |= sources[origin]
        origins |= dict.fromkeys(sources[origin], origin)
    engine, serve = ({n: v for n, v in values.items() if _home()[n] is cls} for cls in (EngineConfig, ServeSettings))
    return Resolved(EngineConfig(**engine), ServeSettings(**serve), origins, prices)


def _home() -> dict[str, Any]:
    """The class of every setting."""
    return {field.name: cls for cls in (EngineConfig, ServeSettings) for field in fields(cls)}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    home = _home()
    variables = {name: f"{PREFIX}{name.upper()}" for name in (*home, *ALIASES)}
    given = own_names({name: environ[key] for name, key in variables.items() if key in environ})
    return {name: _parsed(home[name], name, text, variables[name]) for name, text in given.items()}


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = own_names(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ParameterError("config", f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ParameterError("config", f"is not valid TOML ({error})") from None
    home = _home()
    for name in table:
        if name not in home and name != "prices":
            close = difflib.get_close_matches(name, home, n=1)
            raise ParameterError(name, f"is no setting{f'; did you mean {close[0]}?' if close else ''} (in {path})")
    tables = {name: table.pop(name) for name in ("prices",) if name in table}
    return tables | {name: checked(home[name], name, value, f"{name} (in {path})") for name, value in table.items()}


def _prices(table: Any) -> Prices:
    """What the operator charges. Raises ParameterError."""
    if not isinstance(table, dict):
        raise ParameterError("prices", "must be a table")
    known = [each.name for each in fields(Prices)]
    unknown = next((name for name in table if name not in known), None)
    if unknown is not None:
        raise ParameterError(f"prices.{unknown}", f"there is no such price, there are {', '.join(known)}")
    return Prices(**({"gpu_second": 0.0, **table} if table else {}))


def _parsed(cls: Any, name: str, text: str, where: str) -> Any:
    """A setting from text."""
    hint = hint_of(cls, name)
    if hint is bool:
        if text.strip().lower() not in _TRUTH:
            raise ParameterError(where, f"must be true or false, got {text!r:.60}")
        return _TRUTH[text.strip().lower()]
    if get_origin(hint) is tuple:
        return listed(text)
    kind = type(get_args(hint)[0]) if get_origin(hint) is Literal else hint
    try:
        return kind(text)
    except ValueError:
        raise ParameterError(where, f"must be {_KINDS[kind]}, got {text!r:.60}") from None


def checked(cls: Any, name: str, value: Any, where: str) -> Any:
    """A setting from a value of TOML or YAML. Raises ParameterError that names `where`."""
    hint = hint_of(cls, name)
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ParameterError(where, "must be a list of strings")
        return tuple(value)
    kind = type(get_args(hint)[0]) if get_origin(hint) is Literal else hint
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ParameterError(where, f"must be {_KINDS[kind]}, got {value!r:.60}")
    return value


_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _toml_value(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
