"""A LangGraph agent of 30 steps with one session: its answers, its budget and its costs, from a live server."""

from __future__ import annotations

from math import prod
from typing import Any

import httpx
import pytest
from conftest import Served
from typing_extensions import TypedDict

from thinkfold.pebble.problem import extract_boxed

graphs = pytest.importorskip("langgraph.graph", reason="langgraph is not installed (group dev)")
langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed (group dev)")

STEPS = 30  # every third one asks the model
TOTAL, FLOOR = 4000, 256
FACTORS = [(7 * step) % 8 + 2 for step in range(STEPS // 3)]
SESSION = {"id": "langgraph", "total_budget": TOTAL}


class State(TypedDict):
    """`products` are the model's answers, `bills` what each call cost, `left` the session's budget after it."""

    question: str
    products: list[int]
    bills: list[dict[str, Any]]
    left: list[int]


def factors(products: list[int]) -> tuple[int, int]:
    """Of the next question."""
    return (products[-1] if products else 0) % 9 + 1, FACTORS[len(products)]


def agent(model: Any, session: httpx.Client) -> Any:
    """Takes the next number, asks the model for a product that hangs on its last answer, looks at its budget."""

    def take(state: State) -> dict[str, Any]:
        return {"question": "What is {} * {}?".format(*factors(state["products"]))}

    def ask(state: State) -> dict[str, Any]:
        reply = model.invoke(state["question"])
        return {
            "products": [*state["products"], int(extract_boxed(reply.text) or -1)],
            "bills": [*state["bills"], reply.response_metadata["token_usage"]],
        }

    def look(state: State) -> dict[str, Any]:
        shown = session.get(f"/v1/thinkfold/sessions/{SESSION['id']}").json()
        return {"left": [*state["left"], shown["remaining"]]}

    graph = graphs.StateGraph(State)
    graph.add_node("take", take)
    graph.add_node("ask", ask)
    graph.add_node("look", look)
    graph.set_entry_point("take")
    graph.add_edge("take", "ask")
    graph.add_edge("ask", "look")
    graph.add_conditional_edges("look", lambda state: "take" if len(state["products"]) < len(FACTORS) else graphs.END)
    return graph.compile()


def test_an_agent_of_30_steps_shares_one_session(pebble: Served) -> None:
    model = langchain.ChatOpenAI(
        model="pebble",
        base_url=f"{pebble.url}/v1",
        api_key="unused",
        max_retries=0,
        temperature=0,
        extra_body={"thinkfold": {"session": SESSION}},
    )
    before = pebble.stats()
    with httpx.Client(base_url=pebble.url, timeout=60) as session:
        steps = list(
            agent(model, session).stream({"products": [], "bills": [], "left": []}, {"recursion_limit": STEPS + 1})
        )
        shown = session.get(f"/v1/thinkfold/sessions/{SESSION['id']}").json()
    after, end = pebble.stats(), steps[-2]["ask"] | steps[-1]["look"]
    right = list[int]()
    for _ in FACTORS:
        right.append(prod(factors(right)))
    assert len(steps) == STEPS and end["products"] == right

    thinking = [bill["completion_tokens_details"]["reasoning_tokens"] for bill in end["bills"]]
    before_each = [TOTAL, *end["left"]]
    assert end["left"] == [TOTAL - sum(thinking[: call + 1]) for call in range(len(FACTORS))]
    assert all(0 < spent <= max(FLOOR, left // 2) for spent, left in zip(thinking, before_each, strict=False))
    assert (shown["calls"], shown["spent"], shown["total_budget"]) == (len(FACTORS), sum(thinking), TOTAL)

    assert after.thinking_tokens - before.thinking_tokens == sum(thinking)
    answers = sum(bill["completion_tokens"] for bill in end["bills"]) - sum(thinking)
    assert after.answer_tokens - before.answer_tokens == answers
    assert after.prompt_tokens - before.prompt_tokens == sum(bill["prompt_tokens"] for bill in end["bills"])
    ours = [bill["thinkfold"] for bill in end["bills"]]
    assert all(bill["tokens"]["thinking"] == spent for bill, spent in zip(ours, thinking, strict=True))
    assert all(bill["kv"]["byte_seconds"] > 0 and bill["time"]["thinking_s"] > 0 for bill in ours)
