"""The file of `thinkfold deploy`: YAML in, values out. Every error names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from thinkfold.cli.settings import ServeSettings, checked
from thinkfold.config import EngineConfig, own_names
from thinkfold.deploy.fleet.config import Fleet, Pool, Replicas
from thinkfold.errors import ParameterError
from thinkfold.server.tiers import parse_tier

# Settings of `serve` that stand elsewhere in this file, or mean nothing here (Ray's logs show no line of ours).
_ELSEWHERE = ("host", "port", "drain_s", "max_header_bytes", "tiers", "profile", "engine", "base_url", "log_requests")
_REMOTE = ("remote_model", "remote_api_key", "remote_timeout_s")
_TOP = ("name", "host", "port", "prefix", "routing", "default", "server", "engine", "pools")
_POOL = ("engine", "replicas", "cpus", "gpus", "drain_s")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A fleet, and what its door goes by."""

    fleet: Fleet
    serve: ServeSettings


def load_deployment(path: str) -> Deployment:
    """Read the file. Raises ParameterError, and OSError for one that cannot be read."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ParameterError("config", f"needs {error.name}: pip install 'thinkfold[ray]'") from None
    try:
        written = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParameterError("config", f"is not valid YAML ({' '.join(str(error).split())})") from None
    return parse_deployment(written)


def check_together(found: Sequence[Deployment]) -> None:
    """Raise ParameterError for applications that cannot be behind one address."""
    for name in ("name", "prefix"):
        given = [getattr(each.fleet, name) for each in found]
        twice = next((value for value in given if given.count(value) > 1), None)
        if twice is not None:
            raise ParameterError(name, f"{twice!r:.60} is that of two applications")
    for name in ("host", "port"):
        if len({getattr(each.fleet, name) for each in found}) > 1:
            raise ParameterError(name, "must be the same for applications that are deployed together")


def parse_deployment(written: Any) -> Deployment:
    """The deployment that was written. Raises ParameterError."""
    top = _table("config", written, _TOP)
    names = [each.name for each in fields(ServeSettings) if each.name not in (*_ELSEWHERE, *_REMOTE)]
    serve = ServeSettings(**_values("server", _table("server", top.get("server"), names), ServeSettings))
    shared = EngineConfig(**_engine("engine", top.get("engine")))
    written_pools = top.get("pools")
    if not isinstance(written_pools, Mapping) or not written_pools:
        raise ParameterError("pools", "must hold a table for each tier")
    pools = {str(name): _pool(str(name), table, shared) for name, table in written_pools.items()}
    rest = {name: top[name] for name in ("name", "host", "port", "prefix", "routing") if name in top}
    for name, value in rest.items():
        if not isinstance(value, int if name == "port" else str):
            raise ParameterError(name, f"must be {'an integer' if name == 'port' else 'a string'}, got {value!r:.60}")
    default = top.get("default", next(iter(pools)) if len(pools) == 1 else None)
    if default is None:
        raise ParameterError("default", "must name the pool of requests that name no tier")
    return Deployment(Fleet(pools, str(default), **rest), serve)


def _pool(name: str, written: Any, shared: EngineConfig) -> Pool:
    where = f"pools.{name}"
    table = dict(_table(where, written))
    own = {key: table.pop(key) for key in _POOL if key in table}
    try:
        tier = parse_tier(name, table)
    except ParameterError as error:
        raise type(error)(error.field.replace("tiers", "pools", 1), error.message) from None
    engine = replace(shared, **_engine(f"{where}.engine", own.pop("engine", None)))
    counts = own.pop("replicas", 1)
    if type(counts) is int:
        counts = {"min": counts, "max": counts}
    numbers = _values(where, own, Pool)
    try:
        replicas = _values("replicas", _table("replicas", counts, [each.name for each in fields(Replicas)]), Replicas)
        return Pool(tier, engine, Replicas(**replicas), **numbers)
    except ParameterError as error:
        raise type(error)(f"{where}.{error.field}", error.message) from None


def _engine(where: str, written: Any) -> dict[str, Any]:
    table = own_names(_table(where, written))
    _table(where, table, [each.name for each in fields(EngineConfig)])
    return _values(where, table, EngineConfig)


def _values(where: str, table: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    return {name: checked(cls, name, value, f"{where}.{name}") for name, value in table.items()}


def _table(where: str, written: Any, names: Sequence[str] | None = None) -> Mapping[str, Any]:
    """A table that holds nothing but `names`; one that is left out is empty. Raises ParameterError."""
    if written is None:
        return {}
    if not isinstance(written, Mapping):
        raise ParameterError(where, f"must be a table, got {written!r:.60}")
    unknown = next((name for name in written if names is not None and name not in names), None)
    if names is not None and unknown is not None:
        raise ParameterError(f"{where}.{unknown!s:.60}", f"there is no such field, there are {', '.join(names)}")
    return written
