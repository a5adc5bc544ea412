"""The client without a server: what it refuses by itself, and that its two forms are one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest

from thinkfold import client as module
from thinkfold.client import AsyncClient, Branch, Client
from thinkfold.client.values import Owner, begin, order, response_id, with_decision, with_session
from thinkfold.errors import ParameterError
from thinkfold.types import (
    BestOfParams,
    SearchParams,
    SessionParams,
    Until,
    VoteParams,
    parse_best_of,
    parse_search,
    parse_vote,
)

TWINS = ("Client", "Running", "Branch", "Session")


def own(kind: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(f) for name, f in vars(kind).items() if inspect.isfunction(f)}


@pytest.mark.parametrize("name", TWINS)
def test_both_forms_have_the_same_methods(name: str) -> None:
    sync, twin = own(getattr(module, name)), own(getattr(module, f"Async{name}"))
    assert sync.keys() == twin.keys()
    for method, signature in sync.items():
        assert str(signature) == str(twin[method]).replace("Async", ""), method


def test_without_openai_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['openai'] = None\nimport thinkfold\nthinkfold.Client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.strip().endswith(
        "ImportError: thinkfold.Client needs the package openai: pip install 'thinkfold[client]'"
    )


@pytest.mark.parametrize(
    "response",
    [
        "r-1",
        SimpleNamespace(id="r-1"),
        SimpleNamespace(type="response.created", response=SimpleNamespace(id="r-1")),
        SimpleNamespace(type="message_start", message=SimpleNamespace(id="r-1")),
    ],
)
def test_a_response_is_known_by_whatever_tells_its_id(response: object) -> None:
    assert response_id(response) == "r-1"


@pytest.mark.parametrize("response", [None, "", 7, SimpleNamespace(type="ping")])
def test_what_tells_no_id_is_refused(response: object) -> None:
    with pytest.raises(ParameterError, match=r"^response: must be an id"):
        response_id(response)


def test_calls_carry_labels_and_leave_out_what_is_not_given() -> None:
    call = order("a/b", Owner("acme"), "inject", text="x", choice=None)
    assert call.path == "/thinkfold/responses/a%2Fb/control"
    assert call.body == {"action": "inject", "text": "x", "cache_salt": "acme"}
    assert begin(Owner(), Until("segment"), {"prompt": "p"}).body["until"]["at"] == "segment"
    with pytest.raises(ParameterError, match=r"^handle: "):
        begin(Owner(), None, {"handle": "h"})
    wish = {"metadata": {}, "thinkfold": {"tier": "deep"}}
    body = with_session(SessionParams("s", 9), wish)
    assert body == {"metadata": {}, "thinkfold": {"tier": "deep", "session": {"id": "s", "total_budget": 9}}}
    with pytest.raises(ParameterError, match=r"^extra_body\.thinkfold\.session"):
        with_session(SessionParams("s"), body)


def test_decisions_are_what_the_server_takes() -> None:
    vote = with_decision(VoteParams(6, stop="exact"), {"metadata": {}})
    assert parse_vote(vote.pop("vote")) == VoteParams(6, stop="exact") and vote == {"metadata": {}}
    best = with_decision(BestOfParams("judge", reads="steps"), None)["best_of"]
    assert parse_best_of(best) == BestOfParams("judge", reads="steps")
    search = with_decision(SearchParams("tree", 3, max_tokens=4000), None)["search"]
    assert parse_search(search) == SearchParams("tree", 3, max_tokens=4000)
    for verifier in (lambda question, judged: [1.0], "http://127.0.0.1:9/score"):
        with pytest.raises(ParameterError, match=r"^best_of\.verifier: must be the name"):
            with_decision(BestOfParams(verifier), None)
    with pytest.raises(ParameterError, match=r"^extra_body\.vote: "):
        with_decision(VoteParams(), {"vote": True})


def test_wrong_values_are_refused_before_a_call() -> None:
    with Client("http://127.0.0.1:9/v1") as client:
        for name, total, field in (("a b", 9, "id"), ("a", 0, "total_budget")):
            with pytest.raises(ParameterError, match=rf"^session\.{field}: "):
                client.session(name, total)
        branch = Branch(client, Owner(), None, None, None, {})
        for refused in (branch.extend, branch.rollback):
            with pytest.raises(ParameterError):
                refused()
        branch.release()
    assert AsyncClient("http://127.0.0.1:9/v1").api_key == "unused"
