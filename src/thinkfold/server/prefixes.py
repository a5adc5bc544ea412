"""`/v1/thinkfold/prefixes`: system and few-shot text that is computed and pinned before the first request.

A prefix belongs to its tenant, and is found by requests of its labels (`cache_salt`, `prompt_cache_key`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from thinkfold.errors import ParameterError, RequestFailedError, UnsupportedError
from thinkfold.server.body import StrictModel, parse_body
from thinkfold.server.contract import Engine, Warmable
from thinkfold.server.fields import check_model, namespace_of
from thinkfold.server.routing import body_of, statuses
from thinkfold.server.state import owned_by, state_of, tenant_of
from thinkfold.types import PinnedPrefix
from thinkfold.types.checks import number

router = APIRouter()
_MOST_NAME = 100


class PrefixRequest(StrictModel):
    """One of `messages` and `prompt`. `ttl_s` null is for good; memory that requests need is given up in any case."""

    name: str
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    ttl_s: float | int | None = None
    model: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """Raise ParameterError for what needs no model to be seen."""
        if not 0 < len(self.name) <= _MOST_NAME or "/" in self.name:
            raise ParameterError("name", f"must have 1 to {_MOST_NAME} characters and no slash, got {self.name!r:.60}")
        if (self.messages is None) == (self.prompt is None):
            raise ParameterError("messages", "give either messages or prompt")
        if self.prompt is not None and self.tools is not None:
            raise ParameterError("tools", "go with messages")
        if self.messages and self.messages[-1].get("role") in ("user", "tool"):
            raise ParameterError("messages", "a prefix ends where a user's message would follow")
        if self.ttl_s is not None:
            number("ttl_s", self.ttl_s, 0, 10**9, open_low=True)

    def encode(self, engine: Engine) -> list[int]:
        """The tokens that every such prompt begins with. Raises ParameterError."""
        check_model(engine, self.model)
        if self.messages is not None:
            return engine.prompts.encode_history(self.messages, tools=self.tools)
        return engine.prompts.encode_text(self.prompt or "", limit=engine.model.max_prompt_len)


class WarmPrefix(PrefixRequest):
    """An entry of the file of `serve --warm`: also says whose it is."""

    tenant: str = ""


class WarmFile(StrictModel):
    prefixes: list[WarmPrefix]


class Prefix(TypedDict):
    """A pinned prefix: whole KV `pages` of its `tokens`, of which `computed_tokens` went through the model for it.

    `ahead`: made for a conversation's next turn.
    """

    name: str
    object: Literal["thinkfold.prefix"]
    tokens: int
    pages: int
    ttl_s: float | None
    ahead: bool
    computed_tokens: int


class PrefixList(TypedDict):
    object: Literal["list"]
    data: list[Prefix]


class DeletedPrefix(TypedDict):
    name: str
    object: Literal["thinkfold.prefix"]
    deleted: bool


@router.post("/v1/thinkfold/prefixes", responses=statuses(404))
async def pin(request: Request, body: Annotated[PrefixRequest, body_of(PrefixRequest)]) -> Prefix:
    """Prefill and pin a prefix for the caller's tenant."""
    state = state_of(request)
    engine = state.slot.require()
    body.check()
    return _shown(await _pin(engine, body, tenant_of(request)))


@router.get("/v1/thinkfold/prefixes")
async def pinned(request: Request) -> PrefixList:
    """The pinned prefixes of the caller's tenant."""
    engine = warmable(state_of(request).slot.require())
    return {"object": "list", "data": [_shown(one) for one in await engine.pinned(tenant_of(request))]}


@router.delete("/v1/thinkfold/prefixes/{name}", responses=statuses(404))
async def unpin(request: Request, name: str) -> DeletedPrefix:
    """Unpin a prefix of the caller's tenant; its pages become cached ones."""
    await warmable(state_of(request).slot.require()).unpin(name, tenant_of(request))
    return {"name": name, "object": "thinkfold.prefix", "deleted": True}


def warmable(engine: Engine) -> Warmable:
    """Raises UnsupportedError where nothing can be computed ahead."""
    if not isinstance(engine, Warmable):
        raise UnsupportedError("name", "this engine pins no prefixes")
    return engine


def read_warm_file(path: str) -> list[WarmPrefix]:
    """The prefixes of a JSON file. Raises ParameterError that says where it is wrong."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ParameterError("warm", f"cannot read {path}: {error.strerror}") from None
    try:
        prefixes = parse_body(WarmFile, raw).prefixes
    except ParameterError as error:
        raise ParameterError("warm", f"{path}: {error}") from None
    seen: set[tuple[str, str]] = set()
    for index, prefix in enumerate(prefixes):
        try:
            prefix.check()
        except ParameterError as error:
            raise ParameterError("warm", f"{path}: prefixes[{index}].{error}") from None
        if (prefix.tenant, prefix.name) in seen:
            raise ParameterError("warm", f"{path}: prefixes[{index}].name: {prefix.name!r:.60} is there already")
        seen.add((prefix.tenant, prefix.name))
    return prefixes


async def warm(engine: Engine, prefixes: Sequence[WarmPrefix]) -> list[PinnedPrefix]:
    """Compute and pin all of them. Raises ParameterError or RequestFailedError for the first that cannot be."""
    return [await _pin(engine, prefix, prefix.tenant) for prefix in prefixes]


async def _pin(engine: Engine, body: PrefixRequest, tenant: str) -> PinnedPrefix:
    ids = await asyncio.to_thread(body.encode, engine)
    namespace = owned_by(tenant, namespace_of(body.cache_salt, body.prompt_cache_key))
    pinned = await warmable(engine).prefill(body.name, ids, namespace, owner=tenant, ttl_s=body.ttl_s)
    if pinned.dropped is not None:
        raise RequestFailedError(f"the prefix {body.name!r} was not pinned: {pinned.dropped}")
    return pinned


def _shown(prefix: PinnedPrefix) -> Prefix:
    return {
        "name": prefix.name,
        "object": "thinkfold.prefix",
        "tokens": prefix.tokens,
        "pages": prefix.pages,
        "ttl_s": prefix.ttl_s,
        "ahead": prefix.ahead,
        "computed_tokens": prefix.computed_tokens,
    }
