"""Pins: prefixes that are evicted last, by whom they belong to, and under pressure."""

import random
from math import inf

import pytest

from thinkfold.kv.manager import KVManager
from thinkfold.kv.pages import PageClass
from thinkfold.kv.pins import Pin
from thinkfold.kv.table import PageTable

SIZE = 4


def make(num_pages=12, reserve=0):
    return KVManager(num_pages, SIZE, enable_prefix_caching=True, reserve_pages=reserve)


def publish(kv, tokens, session=""):
    """Compute a prefix and leave it to the tree; its pages."""
    table = PageTable(session=session)
    found = kv.match(table, (), tokens, len(tokens))
    assert kv.allocate(table, len(tokens) - found, PageClass.PROMPT)
    table.kv_len = len(tokens)
    kv.publish(table, (), tokens, len(tokens))
    pages = tuple(table.pages)
    kv.free(table)
    return pages


def pin(kv, name, tokens, *, owner="", expires=inf, weak=False, limit=100):
    kept = kv.prefixes.pins.put(Pin(name, owner, publish(kv, tokens), expires, weak), limit)
    kv.check_integrity([])
    return kept


def stem(first, pages):
    return [first * 100 + i for i in range(pages * SIZE)]


def hit(kv, tokens):
    table = PageTable()
    found = kv.match(table, (), tokens, len(tokens))
    kv.free(table)
    return found


def test_a_pinned_prefix_outlives_what_was_used_later():
    kv = make()
    assert pin(kv, "a", stem(1, 3))
    publish(kv, stem(2, 6))
    assert kv.usage()[PageClass.PINNED] == 3
    assert kv.usage()[PageClass.CACHED] == 6
    table = PageTable()
    assert kv.allocate(table, 9 * SIZE, PageClass.PROMPT)
    assert (hit(kv, stem(1, 3)), hit(kv, stem(2, 6))) == (3 * SIZE, 0)
    assert kv.prefixes.pins.revoked == 0
    kv.check_integrity([table])


def test_pins_give_way_before_anybody_is_refused_and_weak_ones_first():
    kv = make()
    pin(kv, "strong", stem(1, 3))
    pin(kv, "weak", stem(2, 3), weak=True)
    assert (kv.num_available, kv.num_spare) == (12, 6)
    table = PageTable()
    assert kv.allocate(table, 8 * SIZE, PageClass.THINKING)
    assert [p.name for p in kv.prefixes.pins] == ["strong"]
    assert kv.prefixes.pins.revoked == 1
    table.kv_len = 8 * SIZE
    assert kv.allocate(table, 4 * SIZE, PageClass.THINKING)
    assert list(kv.prefixes.pins) == []
    assert not kv.allocate(table, 5 * SIZE, PageClass.THINKING)
    kv.check_integrity([table])


def test_clearing_the_cache_keeps_pins_and_dropping_a_pin_makes_its_pages_cached():
    kv = make()
    pin(kv, "a", stem(1, 3))
    kv.clear_cache()
    assert hit(kv, stem(1, 3)) == 3 * SIZE
    kv.prefixes.pins.drop(*kv.prefixes.pins)
    assert (kv.usage()[PageClass.PINNED], kv.usage()[PageClass.CACHED]) == (0, 3)
    kv.clear_cache()
    assert kv.num_available == 12
    assert hit(kv, stem(1, 3)) == 0
    kv.check_integrity([])


def test_a_pinned_page_in_use_is_counted_as_a_prompt_and_comes_back_as_pinned():
    kv = make()
    pin(kv, "a", stem(1, 3))
    table = PageTable()
    kv.match(table, (), stem(1, 3), 3 * SIZE)
    assert (kv.usage()[PageClass.PROMPT], kv.usage()[PageClass.PINNED], kv.num_available) == (3, 0, 9)
    kv.prefixes.pins.drop(*kv.prefixes.pins)
    pages = tuple(table.pages)
    kv.prefixes.pins.put(Pin("b", "", pages, inf, weak=False), 100)
    kv.free(table)
    assert kv.usage()[PageClass.PINNED] == 3
    kv.check_integrity([])


def test_a_longer_weak_pin_of_the_same_owner_takes_the_place_of_the_shorter():
    kv = make()
    pin(kv, "turn 1", stem(1, 2), weak=True)
    pin(kv, "other", stem(1, 2), weak=True, owner="b")
    pin(kv, "kept", stem(1, 2))
    pin(kv, "turn 2", stem(1, 4), weak=True)
    assert [p.name for p in kv.prefixes.pins] == ["other", "kept", "turn 2"]
    assert kv.usage()[PageClass.PINNED] == 4


def test_an_owner_pins_no_more_than_its_limit():
    kv = make()
    assert pin(kv, "strong", stem(1, 2), owner="a", limit=5)
    assert pin(kv, "weak 1", stem(2, 2), owner="a", weak=True, limit=5)
    assert pin(kv, "weak 2", stem(3, 2), owner="a", weak=True, limit=5)
    assert [p.name for p in kv.prefixes.pins] == ["strong", "weak 2"]
    assert not pin(kv, "too much", stem(4, 4), owner="a", limit=5)
    assert [p.name for p in kv.prefixes.pins] == ["strong", "weak 2"]
    assert pin(kv, "of b", stem(4, 4), owner="b", limit=5)
    assert kv.prefixes.pins.pages_of("a") == 4


def test_pins_expire():
    kv = make()
    pin(kv, "short", stem(1, 2), expires=5.0)
    pin(kv, "long", stem(2, 2))
    kv.prefixes.pins.expire(4.9)
    assert len(list(kv.prefixes.pins)) == 2
    kv.prefixes.pins.expire(5.0)
    assert [p.name for p in kv.prefixes.pins] == ["long"]
    kv.check_integrity([])


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_run_keeps_tree_pins_and_pool_together(seed):
    rng, kv, tables = random.Random(seed), make(20, reserve=2), []
    for step in range(400):
        what = rng.random()
        if what < 0.4:
            tokens = stem(rng.randrange(3), 2) + stem(5 + rng.randrange(4), rng.randrange(1, 4))
            table = PageTable()
            found = kv.match(table, (), tokens, len(tokens) - 1)
            if kv.allocate(table, len(tokens) - found, PageClass.PROMPT):
                table.kv_len = len(tokens)
                kv.publish(table, (), tokens, len(tokens))
                tables.append(table)
                if rng.random() < 0.5:
                    name, owner = str(rng.randrange(6)), str(rng.randrange(2))
                    kv.prefixes.pins.put(Pin(name, owner, tuple(table.pages), step + 30, rng.random() < 0.5), 9)
            else:
                kv.free(table)
        elif what < 0.8 and tables:
            kv.free(tables.pop(rng.randrange(len(tables))))
        else:
            kv.prefixes.pins.expire(step)
        kv.check_integrity(tables)
    for table in tables:
        kv.free(table)
    assert kv.num_available == 18
    for held in kv.prefixes.pins:
        kv.prefixes.pins.drop(held)
    kv.clear_cache()
    assert kv.num_spare == 18
    kv.check_integrity([])


def test_a_forgotten_namespace_leaves_only_what_somebody_still_reads():
    kv = make(num_pages=20)
    spaces = {name: (f"tenant={name}", "salt=x") for name in "ab"}
    for space in spaces.values():
        table = PageTable()
        assert kv.allocate(table, 3 * 4, PageClass.PROMPT)
        table.kv_len = 12
        kv.publish(table, space, stem(7, 3), 12)
        kv.free(table)
    held = PageTable()
    assert kv.match(held, spaces["a"], stem(7, 3), 8) == 8
    assert kv.prefixes.forget(("tenant=a",)) == 1, "two of its three pages are being read"
    kv.check_integrity([held])
    kv.free(held)
    assert kv.prefixes.forget(("tenant=a",)) == 2 and kv.prefixes.forget(("tenant=a",)) == 0
    kv.check_integrity([])
    other = PageTable()
    assert (
        kv.match(PageTable(), spaces["a"], stem(7, 3), 12) == 0 and kv.match(other, spaces["b"], stem(7, 3), 12) == 12
    )
    kv.free(other)
    assert kv.prefixes.forget(()) == 3, "no labels are everybody's"
    kv.check_integrity([])


def test_a_forgotten_session_takes_what_it_alone_has_used():
    kv = make(num_pages=40)
    system, mine, others = stem(1, 2), stem(2, 3), stem(3, 1)
    publish(kv, system)
    publish(kv, [*system, *mine], "a")
    publish(kv, [*system, *mine[:SIZE], *others], "b")
    publish(kv, [*stem(4, 2), *mine], "a")
    publish(kv, stem(4, 2)[:SIZE])
    assert kv.prefixes.forget((), "c") == 0
    assert kv.prefixes.forget((), "a") == 2 + 4, "what came behind b's page, and behind what nobody's request has used"
    kv.check_integrity([])
    assert hit(kv, [*system, *mine]) == 3 * SIZE and hit(kv, [*stem(4, 2), *mine]) == SIZE
    assert kv.prefixes.forget((), "b") == 1, "a request without a session has found b's first page by now"
    assert hit(kv, [*system, *mine[:SIZE], *others]) == 3 * SIZE


def test_two_sessions_of_one_page_are_forgotten_one_by_one():
    kv = make(num_pages=40)
    for session in ("a", "b"):
        publish(kv, stem(1, 3), session)
    assert kv.prefixes.forget((), "a") == 0, "b has used them, too"
    assert kv.prefixes.forget((), "b") == 3
    for number in range(9):
        publish(kv, stem(1, 3), f"s{number}")
    assert sum(kv.prefixes.forget((), f"s{number}") for number in range(9)) == 0, "a prompt of many is nobody's own"
    kv.check_integrity([])
