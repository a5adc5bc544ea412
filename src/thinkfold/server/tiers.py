"""Tiers as an operator writes them: budgets, shares, fold and control presets, promises (SLO)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from thinkfold.errors import ParameterError
from thinkfold.server.access.keys import ApiKey, KeyTable
from thinkfold.types import MAX_N, ControlParams, FoldMode, FoldParams, Prices, Tier, parse_control
from thinkfold.types.checks import integer

MAX_TIERS = 16  # their names are labels of metrics
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_OWN = ("budget", "weight", "kv_quota")
_KNOWN = (*_OWN, "max_samples", "prefer", "fold", "control", "prices", "slo")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a tier promises, in milliseconds of arrival: first token, first answer text, the end. None is no promise."""

    ttft_ms: int | None = None
    first_answer_ms: int | None = None
    total_ms: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is not None:
                integer(f"slo.{each.name}", getattr(self, each.name), 1)

    @property
    def promises(self) -> dict[str, float]:
        """Seconds by name of the promise."""
        given = {each.name.removesuffix("_ms"): getattr(self, each.name) for each in fields(self)}
        return {name: ms / 1000 for name, ms in given.items() if ms is not None}


@dataclass(frozen=True, slots=True)
class ServedTier:
    """A tier, how its requests fold and stop unless they say otherwise, and what it promises.

    `max_samples` bounds the choices, samples or branches that one request may ask for a prompt; `prices` None are
    the server's.
    """

    tier: Tier
    fold: FoldParams | None = None
    slo: Slo | None = None
    control: ControlParams | None = None
    max_samples: int | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        if self.max_samples is not None:
            integer("max_samples", self.max_samples, 1, MAX_N)

    def check_samples(self, field: str, samples: int) -> None:
        """Raise ParameterError that names `field` for more samples than the tier allows."""
        if self.max_samples is not None and samples > self.max_samples:
            raise ParameterError(field, f"tier {self.tier.name!r} allows {self.max_samples} samples, got {samples}")

    def fold_of(self, asked: FoldParams | None) -> FoldParams | None:
        """What a request that asks for `asked` gets: its own words first, then the tier's."""
        if asked is None or self.fold is None:
            return asked or self.fold
        given = {each.name for each in fields(asked) if getattr(asked, each.name) is not None}
        mine = {each.name: getattr(self.fold, each.name) for each in fields(asked) if each.name not in given}
        if asked.policy == FoldMode.OFF:
            mine.pop("at_answer", None)  # who asks for no folds keeps all thinking
        if asked.profile is not None:
            mine.pop("entries", None)  # they come with the profile
        return replace(asked, **mine)


class TierTable:
    """The tiers of a server and the one of requests whose key has none. Raises ParameterError."""

    def __init__(self, tiers: Mapping[str, ServedTier], default: str) -> None:
        if not tiers:
            raise ParameterError("tiers", "there are none")
        if len(tiers) > MAX_TIERS:
            raise ParameterError("tiers", f"at most {MAX_TIERS}, got {len(tiers)}")
        if default not in tiers:
            raise ParameterError("tiers.default", f"{default!r:.60} is none of {', '.join(tiers)}")
        self.tiers = dict(tiers)
        self.default = default

    def choose(self, asked: str | None, key: ApiKey | None) -> ServedTier:
        """The tier of a request: what it names, else its key's, else the default. Raises ParameterError."""
        mine = [name for name in self.tiers if key is None or not key.tiers or name in key.tiers]
        if asked is not None and asked not in mine:
            raise ParameterError("thinkfold.tier", f"{asked!r:.60} is no tier of yours; there are {', '.join(mine)}")
        home = key.tier if key is not None and key.tier else self.default
        return self.tiers[asked or (home if home in mine else mine[0])]

    def check_keys(self, keys: KeyTable | None) -> None:
        """Raise ParameterError for a key with a tier that is not there."""
        for key in keys.keys if keys is not None else ():
            for name in (*key.tiers, *([key.tier] if key.tier else [])):
                if name not in self.tiers:
                    known = ", ".join(self.tiers)
                    raise ParameterError("api_keys.tier", f"of {key.name}: {name!r:.60} is none of {known}")


def load_tiers(path: str | Path) -> TierTable:
    """The table of a TOML file (see docs/operations.md). Raises ParameterError that names the field."""
    try:
        written = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError("tiers", f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ParameterError("tiers", f"is not valid TOML ({error})") from None
    _known("tiers", written, ("default", "tiers"))
    tables = written.get("tiers")
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ParameterError("tiers", "must hold [tiers.NAME] tables")
    default = written.get("default")
    if not isinstance(default, str):
        raise ParameterError("tiers.default", "must name the tier of requests that name none")
    return TierTable({name: parse_tier(name, table) for name, table in tables.items()}, default)


def parse_tier(name: str, table: Mapping[str, Any]) -> ServedTier:
    """A tier as it is written in a table. Raises ParameterError."""
    where = f"tiers.{name}"
    if _NAME.fullmatch(name) is None:
        raise ParameterError("tiers", f"{name!r:.60} must be 1 to 32 letters, digits, dots, dashes, underscores")
    _known(where, table, _KNOWN)
    if "budget" not in table:
        raise ParameterError(f"{where}.budget", "is missing: a tier says how long its requests may think")
    for part in ("fold", "control", "prices", "slo"):
        if not isinstance(table.get(part, {}), dict):
            raise ParameterError(f"{where}.{part}", "must be a table")
    try:
        tier = Tier(name, **{field: table[field] for field in _OWN if field in table})
        slo = _made(Slo, "slo", table["slo"]) if "slo" in table else None
        control = _control(table["control"]) if "control" in table else None
        prices = _made(Prices, "prices", {"gpu_second": 0.0, **table["prices"]}) if table.get("prices") else None
        return ServedTier(tier, _fold(table), slo, control, table.get("max_samples"), prices)
    except ParameterError as error:
        raise type(error)(f"{where}.{error.field}", error.message) from None


def _fold(table: Mapping[str, Any]) -> FoldParams | None:
    wish = dict(table.get("fold", {}))
    if "prefer" in table:
        if "prefer" in wish:
            raise ParameterError("prefer", "stands in fold, too; give it once")
        wish["prefer"] = table["prefer"]
    return _made(FoldParams, "fold", wish) if wish else None


def _control(table: Mapping[str, Any]) -> ControlParams:
    try:
        return parse_control(table)
    except ParameterError as error:
        raise type(error)(f"control.{error.field.removeprefix('control.')}", error.message) from None


def _made(kind: type[Any], field: str, table: Mapping[str, Any]) -> Any:
    _known(field, table, tuple(each.name for each in fields(kind)))
    return kind(**table)


def _known(field: str, table: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = next((name for name in table if name not in names), None)
    if unknown is not None:
        raise ParameterError(f"{field}.{unknown:.60}", f"there is no such field, there are {', '.join(names)}")
