"""The store of responses: bounds, times, tenants."""

from __future__ import annotations

import random

import pytest

from thinkfold.server.responses.store import ResponseStore, StoredResponse


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def response(text: str = "") -> StoredResponse:
    return StoredResponse({"id": "x"}, [{"role": "user", "content": text}])


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_response_lives_for_its_time_since_it_was_last_used(clock: Clock) -> None:
    store = ResponseStore(1 << 20, 10, clock)
    assert store.put("", "a", response()) and store.put("", "b", response())
    clock.now = 9
    assert store.get("", "a") is not None
    clock.now = 12
    assert store.get("", "a") is not None and store.get("", "b") is None
    clock.now = 22
    assert store.get("", "a") is None and not store.delete("", "a")
    store.check_integrity()


def test_the_least_recently_used_makes_room(clock: Clock) -> None:
    store = ResponseStore(3 * 4000, 10, clock)
    for name in "abc":
        store.put("", name, response("x" * 1000))
    store.get("", "a")
    store.put("", "d", response("x" * 1000))
    assert [store.get("", name) is not None for name in "abcd"] == [True, False, True, True]
    assert not store.put("", "e", response("x" * 20_000)) and store.get("", "a") is not None
    store.check_integrity()


def test_tenants_are_apart_and_can_be_forgotten(clock: Clock) -> None:
    store = ResponseStore(1 << 20, 10, clock)
    store.put("one", "a", response())
    store.put("one", "b", response())
    store.put("two", "a", response("other"))
    assert store.get("three", "a") is None and not store.delete("three", "a")
    assert store.delete_tenant("one") == 2
    assert store.get("one", "a") is None and store.get("two", "a") is not None
    store.check_integrity()


def test_random_use_keeps_the_books(clock: Clock) -> None:
    random.seed(1)
    store = ResponseStore(30_000, 20, clock)
    for _ in range(500):
        key = random.choice("ab"), random.choice("uvwxyz")
        action = random.random()
        if action < 0.5:
            store.put(*key, response("x" * random.randrange(12_000)))
        elif action < 0.8:
            store.get(*key)
        else:
            store.delete(*key)
        clock.now += random.random() * 3
        store.check_integrity()
