"""API keys: read from a file of hashes or from the environment, found in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from thinkfold.errors import ParameterError

ENVIRONMENT = "THINKFOLD_API_KEYS"
MIN_KEY_CHARS = 16
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What a caller with this key is and may do. `sha256` is the key's hash, in hex.

    Keys of one `tenant` (default: the name) share cached prefixes and stored responses. `admin`
    opens the admin routes. `tier` is the one of its requests that name none, `tiers` those that they may
    name (default: all). None is no limit.
    """

    name: str
    sha256: str
    tenant: str = ""
    admin: bool = False
    tier: str = ""
    tiers: Sequence[str] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent_thinking: int | None = None

    def __post_init__(self) -> None:
        for field in ("name", "tenant"):
            value = getattr(self, field)
            if not isinstance(value, str) or (_NAME.fullmatch(value) is None and (value or field == "name")):
                raise ParameterError(f"api_keys.{field}", "must be 1 to 64 letters, digits, dots, dashes, underscores")
        if not isinstance(self.sha256, str) or _DIGEST.fullmatch(self.sha256) is None:
            raise ParameterError("api_keys.sha256", f"of {self.name} must be 64 lower-case hexadecimal digits")
        if not isinstance(self.tier, str):
            raise ParameterError("api_keys.tier", f"of {self.name} must be a text")
        if not isinstance(self.tiers, list | tuple) or not all(isinstance(tier, str) for tier in self.tiers):
            raise ParameterError("api_keys.tiers", f"of {self.name} must be a list of texts")
        if self.tier and self.tiers and self.tier not in self.tiers:
            raise ParameterError("api_keys.tier", f"of {self.name} is none of its tiers")
        if not isinstance(self.admin, bool):
            raise ParameterError("api_keys.admin", f"of {self.name} must be true or false")
        for field in ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_thinking"):
            value = getattr(self, field)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ParameterError(f"api_keys.{field}", f"of {self.name} must be an integer of at least 1")

    @property
    def owner(self) -> str:
        """The tenant, by default the key's own name."""
        return self.tenant or self.name


class KeyTable:
    """All keys of a server. Raises ParameterError for a name or a key that is there twice."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        for field in ("name", "sha256"):
            values = [getattr(key, field) for key in keys]
            twice = next((key.name for key in keys if values.count(getattr(key, field)) > 1), None)
            if twice is not None:
                raise ParameterError(f"api_keys.{field}", f"{twice} is there twice")
        self.keys = tuple(keys)

    def find(self, secret: str) -> ApiKey | None:
        """The key of `secret`. Every key is compared, so that time tells nothing."""
        digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found


def load_keys(path: str | None, environ: Mapping[str, str]) -> KeyTable | None:
    """The keys of a TOML file (`[[keys]]` with ApiKey's fields) and of `THINKFOLD_API_KEYS`; None without any.

    The variable holds keys in the clear, parted by commas. Raises ParameterError.
    """
    keys = _from_file(Path(path)) if path else []
    secrets = [secret for part in environ.get(ENVIRONMENT, "").split(",") if (secret := part.strip())]
    for number, secret in enumerate(secrets, 1):
        if len(secret) < MIN_KEY_CHARS:
            raise ParameterError(ENVIRONMENT, f"key {number} has fewer than {MIN_KEY_CHARS} characters")
        keys.append(ApiKey(f"environment-{number}", hashlib.sha256(secret.encode()).hexdigest()))
    if path and not keys:
        raise ParameterError("api_keys_file", "holds no keys")
    return KeyTable(keys) if keys else None


def _from_file(path: Path) -> list[ApiKey]:
    try:
        entries: Any = tomllib.loads(path.read_text(encoding="utf-8")).get("keys", [])
    except OSError as error:
        raise ParameterError("api_keys_file", f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ParameterError("api_keys_file", f"is not valid TOML ({error})") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ParameterError("api_keys_file", "must hold [[keys]] tables")
    known = {field.name for field in fields(ApiKey)}
    for entry in entries:
        unknown = next((name for name in entry if name not in known), None)
        if unknown is not None:
            raise ParameterError(f"api_keys.{unknown}", "is not a known field")
        missing = next((name for name in ("name", "sha256") if name not in entry), None)
        if missing is not None:
            raise ParameterError(f"api_keys.{missing}", "is missing")
    return [ApiKey(**entry) for entry in entries]
