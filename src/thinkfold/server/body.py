"""Request bodies to checked models: size, JSON and fields, off the event loop.

Raises BodyTooLargeError, and ParameterError that names the first wrong field.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.server.errors import BodyTooLargeError, ClientGoneError

_UNION_TAG = re.compile(r"(str|int|float|bool|(list|dict)\[.*|constrained-.*)$")


class StrictModel(BaseModel):
    """Refuses unknown fields, converted types, NaN and infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The body as `model`."""
    too_large = BodyTooLargeError(f"the request body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return await asyncio.to_thread(parse_body, model, b"".join(chunks))


def parse_body(model: type[Model], raw: bytes) -> Model:
    """JSON as `model`."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _first_problem(model, error) from None


def _first_problem(model: type[BaseModel], error: ValidationError) -> ParameterError:
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = problems[0]
    where = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        *outer, name = first["loc"]  # the client's own word, whatever it looks like
        shown = f"{_path(outer)}.{name!s:.100}" if outer else f"{name!s:.100}"
        return ParameterError(shown, f"is not a known field{'' if outer else _suggestion(model, shown)}")
    if first["type"] == "json_invalid":
        what, at, place = first["msg"].removeprefix("Invalid JSON: ").rpartition(" at ")
        if "hex escape" in what:
            what = r"a \u escape is cut short, or one half of a surrogate pair,"
        return ParameterError("body", f"is not valid JSON ({what}{at}{place})")
    if first["type"] == "none_required":
        return UnsupportedError(where, "is not supported by this server")
    same = [p["msg"] for p in problems if p["loc"][:1] == first["loc"][:1] and p["type"] != "none_required"]
    return ParameterError(where, "; or ".join(dict.fromkeys(same)).replace("Input should", "should"))


def _path(loc: Sequence[int | str]) -> str:
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p:.100}" for p in loc if not _is_tag(p))
    return path.removeprefix(".") or "body"


def _is_tag(part: int | str) -> bool:
    return isinstance(part, str) and _UNION_TAG.match(part) is not None


def _suggestion(model: type[BaseModel], name: str) -> str:
    fields: dict[str, Any] = model.model_fields
    close = difflib.get_close_matches(name, fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
