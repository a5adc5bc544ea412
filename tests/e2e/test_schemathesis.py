"""The OpenAPI document against the server that tells it: schemathesis asks, the document must have said the answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from conftest import Served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.server.app import build_app

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (group dev)")

EXAMPLES = 20
MESSAGES = [{"role": "user", "content": "q"}]
BASES: dict[str, dict[str, Any]] = {  # what gets past the first checks, and keeps an answer short
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "q", "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "q", "max_output_tokens": 4},
    "/v1/thinkfold/partial": {"prompt": "q", "max_tokens": 4},
    "/v1/thinkfold/prefixes": {"name": "p", "prompt": "q"},
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
# A schema cannot say all that is checked: values, fields that exclude each other.
NOT_HELD = ["positive_data_acceptance"]


def operations() -> list[tuple[str, str]]:
    app = build_app(start=lambda: AsyncEngine.start(EngineConfig()))
    return [(method, path) for path, item in app.state.document()["paths"].items() for method in item]


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The document without room for fields that it does not name."""
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return document


@pytest.mark.parametrize(("method", "path"), operations())
def test_the_server_answers_as_documented(method: str, path: str, served: Served) -> None:
    told = httpx.get(f"{served.url}/openapi.json").json()
    operation = schemathesis.openapi.from_dict(closed(told))[path][method]
    modes = schemathesis.GenerationMode
    cases = operation.as_strategy(generation_mode=modes.POSITIVE)
    if operation.body:
        cases |= operation.as_strategy(generation_mode=modes.NEGATIVE)
    checks = [check for check in schemathesis.checks.CHECKS.get_all() if check.__name__ in NOT_HELD]
    base = BASES.get(path, {})

    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=cases, data=st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        if base and isinstance(case.body, dict) and case.meta.generation.mode is modes.POSITIVE:
            known = sorted(case.body.keys() - base.keys())
            few = data.draw(st.lists(st.sampled_from(known), max_size=2, unique=True)) if known else []
            case.body = {**base, **{name: case.body[name] for name in few}}
            if path in STREAMS and data.draw(st.booleans()):
                case.body |= {"stream": True, "thinkfold": {"events": True}}
        case.call_and_validate(base_url=served.url, excluded_checks=checks, timeout=60)

    ask()
