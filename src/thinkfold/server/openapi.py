"""`/openapi.json`: every route with its body, replies and errors, from the types that the routes themselves use."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from thinkfold import __version__
from thinkfold.server.access.gate import ADMIN, Access
from thinkfold.server.errors import ErrorReply
from thinkfold.server.routing import EVENTS, LAST

PATH = "/openapi.json"
_REFERENCES = "#/components/schemas/{model}"
_JSON = "application/json"
_ALWAYS = (429, 431)  # a key's rate, the size of headers
_WITH_ENGINE = (400, 500, 503)
_WITH_BODY = (413,)
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_ABOUT = (
    "Unknown fields are refused. Values are also checked for what a schema cannot say: an error names the field that "
    "is wrong."
)

router = APIRouter()


@router.get(PATH)
async def show(request: Request) -> dict[str, Any]:
    """This document."""
    return request.app.state.document()


class _Use(NamedTuple):
    """A type somewhere in the document. `mode` says whether clients write it or read it."""

    type: Any
    mode: JsonSchemaMode


class Document:
    """The document of some `routers`. `errors` are shapes of errors by the beginnings of their routes' paths.

    `public` are paths that need no key.
    """

    def __init__(
        self, routers: Iterable[APIRouter], access: Access, errors: Mapping[str, Any], public: Sequence[str]
    ) -> None:
        self._routes = [route for each in routers for route in each.routes if isinstance(route, APIRoute)]
        self._access = access
        self._errors = errors
        self._public = {*public, *access.open_routes}
        self._schemas: dict[_Use, dict[str, Any]] = {}
        self._made: dict[str, Any] | None = None

    def __call__(self) -> dict[str, Any]:
        """The document, made once."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> dict[str, Any]:
        uses = dict.fromkeys(use for route in self._routes for use in self._uses(route))
        adapters: list[tuple[_Use, JsonSchemaMode, TypeAdapter[Any]]] = [
            (use, use.mode, TypeAdapter(use.type)) for use in uses
        ]
        schemas, shared = TypeAdapter.json_schemas(adapters, ref_template=_REFERENCES)
        self._schemas = {use: schema for (use, _), schema in schemas.items()}
        paths: dict[str, dict[str, Any]] = {}
        for route in sorted(self._routes, key=lambda route: route.path_format):
            for method in sorted(route.methods or ()):
                paths.setdefault(route.path_format, {})[method.lower()] = self._operation(route, method)
        return {
            "openapi": "3.1.0",
            "info": {"title": "thinkfold", "version": __version__, "description": _ABOUT},
            "paths": paths,
            "components": {"schemas": shared.get("$defs", {}), "securitySchemes": _SECURITY},
            "security": [{name: []} for name in _SECURITY] if self._access.keys is not None else [],
        }

    def _uses(self, route: APIRoute) -> Iterable[_Use]:
        body = body_model(route)
        if body is not None:
            yield _Use(body, "validation")
        yield _Use(self._error(route), "serialization")
        for answer in self._answers(route).values():
            yield from (_Use(answer[kind], "serialization") for kind in ("model", EVENTS) if kind in answer)

    def _error(self, route: APIRoute) -> Any:
        return next((shape for start, shape in self._errors.items() if route.path.startswith(start)), ErrorReply)

    def _answers(self, route: APIRoute) -> dict[int, dict[str, Any]]:
        """What the route itself declares, by status."""
        declared: dict[int, dict[str, Any]] = {int(status): dict(answer) for status, answer in route.responses.items()}
        if route.response_model is not None:
            declared[200] = {"model": route.response_model}
        return declared

    def _operation(self, route: APIRoute, method: str) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "operationId": re.sub(r"\W+", "_", f"{method.lower()}{route.path_format}").strip("_"),
            "summary": " ".join((inspect.getdoc(route.endpoint) or "").split("\n\n")[0].split()),
        }
        parameters = [*_parameters(route)]
        if parameters:
            operation["parameters"] = parameters
        body = body_model(route)
        if body is not None:
            schema = self._schema(body, "validation")
            operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
        if route.path in self._public:
            operation["security"] = []
        operation["responses"] = {str(status): self._response(route, status) for status in self._statuses(route)}
        return operation

    def _statuses(self, route: APIRoute) -> list[int]:
        found = {200, *self._answers(route), *_ALWAYS}
        if route.path not in self._public and self._access.keys is not None:
            found.add(401)
        if f"{route.path}/".startswith(f"{ADMIN}/"):
            found.add(403)
        if route.path.startswith("/v1/") or body_model(route) is not None:
            found.update(_WITH_ENGINE)
        if body_model(route) is not None:
            found.update(_WITH_BODY)
        return sorted(found)

    def _response(self, route: APIRoute, status: int) -> dict[str, Any]:
        answer = self._answers(route).get(status, {})
        described = {"description": HTTPStatus(status).phrase}
        if status >= 400 and "model" not in answer:
            return {**described, "content": {_JSON: {"schema": self._schema(self._error(route))}}}
        content = dict(answer.get("content", {}))
        if "model" in answer:
            content[_JSON] = {"schema": self._schema(answer["model"])}
        if EVENTS in answer:
            data = {"type": "string", "contentMediaType": _JSON, "contentSchema": self._schema(answer[EVENTS])}
            if answer[LAST]:
                data = {"anyOf": [data, {"const": answer[LAST]}]}
            fields = {"data": data, "event": {"type": "string"}}
            content["text/event-stream"] = {
                "itemSchema": {"type": "object", "required": ["data"], "properties": fields}
            }
        return {**described, "content": content} if content else described

    def _schema(self, type_: Any, mode: JsonSchemaMode = "serialization") -> dict[str, Any]:
        return self._schemas[_Use(type_, mode)]


def body_model(route: APIRoute) -> type[BaseModel] | None:
    """The model that the route's body is read as (see `routing.body_of`)."""
    found = [inspect.get_annotations(each.call).get("return") for each in route.dependant.dependencies if each.call]
    return next((model for model in found if isinstance(model, type) and issubclass(model, BaseModel)), None)


def _parameters(route: APIRoute) -> Iterable[dict[str, Any]]:
    """All are texts."""
    for place, fields in (("path", route.dependant.path_params), ("query", route.dependant.query_params)):
        for field in fields:
            given = {"name": field.alias, "in": place, "schema": {"type": "string"}}
            yield given | ({"required": True} if place == "path" else {})
