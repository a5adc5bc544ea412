"""A later turn that misses the prefix cache is told which of its earlier text changed; nothing else is called drift."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from server_stand_in import ScriptedEngine, events, serving
from test_server_access import RIGHT, WRONG, bearer, guarded, key

from thinkfold.config import EngineConfig
from thinkfold.server.access.gate import Access
from thinkfold.server.access.keys import KeyTable
from thinkfold.server.drift import LATEST, Conversations, Owner, trace_of
from thinkfold.text.messages import Markers, parse_messages

PAGE = 16
TENANT = Owner("t", ())
LONG = "You are a careful helper. " * 8
SYSTEM = f"{LONG}It is 10:31. {LONG}"
Chat = list[tuple[str, str]]
FIRST: Chat = [("system", SYSTEM), ("user", "What is a fold?")]
SECOND: Chat = [*FIRST, ("assistant", "A summary."), ("user", "And a page?")]
THIRD: Chat = [*SECOND, ("assistant", "Sixteen tokens."), ("user", "Thanks.")]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "abc"]


def messages(chat: Chat) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in chat]


def changed(chat: Chat, place: int, old: str, new: str) -> Chat:
    role, content = chat[place]
    assert old in content
    return [*chat[:place], (role, content.replace(old, new)), *chat[place + 1 :]]


class Kept:
    """A store, and one request after the other: all of a prompt's 100 tokens are lost unless told otherwise."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.kinds: list[str] = []
        self.store = Conversations(self.kinds.append, max_bytes)

    def ask(self, chat: Chat, tools: Any = None, *, cached: int = 0, owner: Owner = TENANT) -> dict[str, Any] | None:
        trace = trace_of(parse_messages(messages(chat), Markers()), tools, 100)
        shown = self.store.take(owner, trace, cached, PAGE, "r")
        self.store.check_integrity()
        return shown


def test_a_changed_system_prompt_is_found_at_its_character() -> None:
    kept = Kept()
    assert kept.ask(FIRST) is None and kept.ask(SECOND) is None
    place = SYSTEM.index("10:31") + 3
    found = kept.ask(changed(THIRD, 0, "10:31", "10:45"))
    assert found == {
        "kind": "system",
        "message": 0,
        "role": "system",
        "character": place,
        "tokens_lost": 100,
    }
    assert kept.kinds == ["system"]
    assert kept.ask([*changed(THIRD, 0, "10:31", "10:45"), ("assistant", "!"), ("user", "?")]) is None, "once"


def test_a_system_prompt_that_is_longer_or_gone() -> None:
    kept = Kept()
    kept.ask(FIRST)
    found = kept.ask(changed(SECOND, 0, SYSTEM, SYSTEM + "More."))
    assert found is not None and found["character"] == len(SYSTEM)
    gone = kept.ask(THIRD[1:])
    assert gone is not None and (gone["kind"], gone["message"], gone["character"]) == ("system", 0, 0)


@pytest.mark.parametrize(
    ("tools", "place"), [([TOOLS[0], TOOLS[2], TOOLS[1]], 1), (TOOLS[:2], 2), ([*TOOLS, TOOLS[0]], 3), (None, 0)]
)
def test_other_tools_are_found(tools: Any, place: int) -> None:
    kept = Kept()
    kept.ask(FIRST, TOOLS)
    found = kept.ask(SECOND, tools)
    assert found is not None and (found["kind"], found["tool"]) == ("tools", place)
    assert kept.kinds == ["tools"]


@pytest.mark.parametrize("place", [0, 1, 15, 16, 17, len(LONG) - 1])
@pytest.mark.parametrize("edit", ["\U0001f642", "", "xy"], ids=["other", "gone", "more"])
def test_every_character_is_found_exactly(place: int, edit: str) -> None:
    kept = Kept()
    kept.ask([("system", LONG), *FIRST[1:]])
    found = kept.ask([("system", LONG[:place] + edit + LONG[place + 1 :]), *SECOND[1:]])
    assert found is not None and found["character"] == place


def test_the_latest_are_kept_for_their_tenant() -> None:
    kept = Kept()
    told = []
    for place in range(LATEST + 1):
        owner = Owner("t", (), f"job-{place}")
        kept.ask(FIRST, owner=owner)
        told.append(kept.ask(changed(SECOND, 0, SYSTEM, SYSTEM[:place]), owner=owner))
    assert [record["character"] for record in told if record] == list(range(LATEST + 1))
    assert kept.store.latest("t") == told[:0:-1] and kept.store.latest("u") == []
    kept.store.delete_tenant("t")
    assert kept.store.latest("t") == []


def test_an_edited_history_is_found() -> None:
    kept = Kept()
    kept.ask(SECOND)
    found = kept.ask(changed(THIRD, 2, "A summary.", "A summary of KV. "))
    assert found is not None
    assert (found["kind"], found["message"], found["role"]) == ("history", 2, "assistant")
    assert kept.ask([*THIRD[:1], *THIRD[3:], ("assistant", "."), ("user", "Go on.")]) is None, "by its first message"
    by_session = Owner("t", (), "job")
    kept.ask(SECOND, owner=by_session)
    edited = kept.ask(changed(THIRD, 1, "fold", "Fold"), owner=by_session)
    assert edited is not None and (edited["kind"], edited["message"]) == ("history", 1)


@pytest.mark.parametrize("owner", [Owner("t", ()), Owner("t", ("key=k",)), Owner("t", (), "job")])
def test_new_conversations_and_branches_are_no_drift(owner: Owner) -> None:
    kept = Kept()
    asked = [
        FIRST,
        [("system", "Another role."), *FIRST[1:]],  # two personas, one question
        SECOND,
        [("system", "Another role."), *SECOND[1:]],
        changed(SECOND, 3, "page", "block"),  # an edited last message
        changed(SECOND, 0, "10:31", "10:45"),  # asked again, at another time: no later turn
        THIRD,
        changed(FIRST, 1, "fold", "tier"),  # an edited first message
        [*FIRST, ("assistant", "Another answer."), ("user", "Continue.")],
        [*FIRST, ("assistant", "Another answer."), ("user", "Continue."), ("assistant", "1"), ("user", "Continue.")],
        [*FIRST, ("assistant", "Another answer."), ("user", "Continue."), ("assistant", "2"), ("user", "Continue.")],
        [("user", "What is a fold?")],
    ]
    assert [kept.ask(chat, owner=owner) for chat in asked] == [None] * len(asked)


def test_what_was_found_in_the_cache_is_not_lost() -> None:
    for cached, lost in ((100 - PAGE, PAGE), (100 - PAGE + 1, None)):
        kept = Kept()
        kept.ask(FIRST)
        found = kept.ask(changed(SECOND, 0, "10:31", "10:45"), cached=cached)
        assert (found and found["tokens_lost"]) == lost


def test_an_evicted_prefix_whose_text_is_the_same_is_no_drift() -> None:
    kept = Kept()
    kept.ask(FIRST, TOOLS)
    assert kept.ask(SECOND, TOOLS) is None and kept.kinds == []


def test_tenants_labels_and_sessions_see_their_own_only() -> None:
    drifted = changed(SECOND, 0, "10:31", "10:45")
    owners = [Owner("t", ()), Owner("u", ()), Owner("t", ("salt=s",)), Owner("t", ("key=k",)), Owner("t", (), "job")]
    kept = Kept()
    kept.ask(FIRST, owner=owners[0])
    assert [kept.ask(drifted, owner=owner) for owner in owners[1:]] == [None] * 4
    assert kept.ask(drifted, owner=owners[0]) is not None
    assert (kept.store.delete_tenant("t"), kept.store.delete_tenant("t"), kept.store.delete_tenant("u")) == (4, 0, 1)
    assert kept.ask(changed(THIRD, 0, "10:31", "10:59")) is None, "it was forgotten"


def test_a_deleted_session_is_forgotten() -> None:
    kept = Kept()
    owners = [Owner("t", (), "job"), Owner("t", ("salt=s",), "job"), Owner("t", (), "other"), Owner("u", (), "job")]
    for owner in owners:
        kept.ask(FIRST, owner=owner)
    kept.store.delete_session("t", "job")
    kept.store.delete_session("nobody", "job")
    kept.store.check_integrity()
    drifted = [kept.ask(changed(SECOND, 0, "10:31", "10:45"), owner=owner) is not None for owner in owners]
    assert drifted == [False, False, True, True]


def test_the_store_is_bounded_for_each_tenant() -> None:
    kept = Kept(max_bytes=8000)
    other = Owner("u", ())
    kept.ask(FIRST, owner=other)
    for i in range(100):
        kept.ask(changed(FIRST, 1, "fold", f"fold {i}"))
    assert kept.ask(changed(changed(SECOND, 0, "10:31", "10:45"), 1, "fold", "fold 1")) is None, "the oldest are gone"
    assert kept.ask(changed(changed(SECOND, 0, "10:31", "10:45"), 1, "fold", "fold 99")) is not None
    assert kept.ask(changed(SECOND, 0, "10:31", "10:45"), owner=other) is not None, "a tenant crowds out no other"
    assert kept.ask([("system", "x" * 200_000), *FIRST[1:]]) is None
    latest = changed(changed(THIRD, 0, "10:31", "10:59"), 1, "fold", "fold 99")
    assert kept.ask(latest) is not None, "a prompt beyond the bound crowds out nothing"


def test_a_conversation_has_a_bounded_number_of_branches() -> None:
    kept = Kept()
    for i in range(100):
        assert kept.ask(changed(FIRST, 0, "10:31", f"10:{i:03}")) is None  # and ask checks the bound
    assert kept.ask(changed(SECOND, 0, "10:31", "10:099")) is None, "its own branch is still known"


async def post(client: httpx.AsyncClient, chat: Chat, **more: Any) -> dict[str, Any]:
    reply = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages(chat), **more})
    assert reply.status_code == 200, reply.text
    return events(reply)[-1] if more.get("stream") else reply.json()


async def test_replies_metrics_and_the_log_tell_it_without_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "thinkfold.server.drift")
    async with serving(ScriptedEngine()) as client:
        assert "drift" not in (await post(client, FIRST))["thinkfold"]
        assert "drift" not in (await post(client, SECOND))["thinkfold"]
        streamed = await post(client, changed(THIRD, 0, "10:31", "10:45"), stream=True)
        drift = streamed["thinkfold"]["drift"]
        assert (drift["kind"], drift["message"], drift["role"]) == ("system", 0, "system")
        counted = (await client.get("/metrics")).text
        assert (await client.get("/v1/thinkfold/engine")).json()["drift"] == [drift]
    assert 'thinkfold_prefix_drift_total{kind="system"} 1.0' in counted
    (line,) = [json.loads(record.message) for record in caplog.records]
    assert line == {"event": "thinkfold.drift", "request": streamed["id"], **drift}


@pytest.mark.parametrize("normalize", [True, False])
async def test_blanks_and_line_ends_are_drift_only_where_they_are_not_unified(normalize: bool) -> None:
    engine = ScriptedEngine(config=EngineConfig(served_model_name="tiny", normalize_prompts=normalize))
    engine.prompts = type(engine.prompts)(engine.tokenizer, normalize=normalize)
    async with serving(engine) as client:
        await post(client, [("system", f"{LONG}\nAnswer."), *FIRST[1:]])
        told = await post(client, [("system", f"{LONG}\r\nAnswer."), *SECOND[1:]])
    assert ("drift" in told["thinkfold"]) is not normalize


async def test_without_a_prefix_cache_nothing_drifts() -> None:
    engine = ScriptedEngine(config=EngineConfig(served_model_name="tiny", enable_prefix_caching=False))
    async with serving(engine) as client:
        await post(client, FIRST)
        assert "drift" not in (await post(client, changed(SECOND, 0, "10:31", "10:45")))["thinkfold"]


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_the_other_chats_tell_it_too(api: str) -> None:
    async with serving(ScriptedEngine()) as client:
        for system, chat in ((SYSTEM, FIRST[1:]), (SYSTEM.replace("10:31", "10:45"), SECOND[1:])):
            body: dict[str, Any] = {"model": "tiny", "input": messages(chat), "instructions": system}
            if api == "messages":
                body = {"model": "tiny", "messages": messages(chat), "system": system, "max_tokens": 50}
            reply = (await client.post(f"/v1/{api}", json=body)).json()
    assert reply["thinkfold"]["drift"]["kind"] == "system"


async def test_keys_of_two_tenants_share_no_session() -> None:
    wish = {"session": {"id": "job", "total_budget": 9000}}
    drifted = changed(THIRD, 1, "fold", "Fold")
    async with guarded(Access(KeyTable([key("ann", RIGHT), key("bob", WRONG)]))) as client:
        client.headers.update(bearer(RIGHT))
        await post(client, SECOND, thinkfold=wish)
        client.headers.update(bearer(WRONG))
        assert "drift" not in (await post(client, drifted, thinkfold=wish))["thinkfold"]
        client.headers.update(bearer(RIGHT))
        told = (await post(client, drifted, thinkfold=wish))["thinkfold"]
        await client.delete("/v1/thinkfold/sessions/job")
        later = [*drifted[:2], ("assistant", "Summary."), *drifted[3:], ("assistant", "!"), ("user", "?")]
        assert "drift" not in (await post(client, later, thinkfold=wish))["thinkfold"]
    assert (told["drift"]["kind"], told["drift"]["message"]) == ("history", 1)
    assert told["session"]["id"] == "job"
