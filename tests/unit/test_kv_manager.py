"""KVManager and RadixCache: sharing, copy-on-write, eviction, and a long random run."""

import itertools
import random
from collections import Counter

from thinkfold.kv.manager import KVManager
from thinkfold.kv.pages import PageClass
from thinkfold.kv.table import PageTable

TOKENS = list(range(1000))


def make(num_pages=8, page_size=4, caching=True):
    return KVManager(num_pages, page_size, enable_prefix_caching=caching)


def fill(kv, tokens, namespace=(), visible=None):
    """A table that has computed `tokens`, with its visible pages published."""
    table = PageTable()
    found = kv.match(table, namespace, tokens, len(tokens) - 1)
    assert kv.allocate(table, len(tokens) - found, PageClass.PROMPT)
    table.kv_len = len(tokens)
    kv.publish(table, namespace, tokens, len(tokens) if visible is None else visible)
    return table, found


def test_a_prefix_is_found_again_in_its_namespace_only():
    kv = make()
    first, _ = fill(kv, TOKENS[:10], ("salt=a",))
    second, found = fill(kv, TOKENS[:10], ("salt=a",))
    assert found == 8
    assert second.pages[:2] == first.pages[:2]
    other, found = fill(kv, TOKENS[:10], ("salt=b",))
    assert found == 0
    kv.check_integrity([first, second, other])


def test_a_full_hit_still_computes_the_last_token():
    kv = make()
    fill(kv, TOKENS[:8])
    _, found = fill(kv, TOKENS[:8])
    assert found == 4


def test_only_visible_pages_are_published():
    kv = make()
    fill(kv, TOKENS[:12], visible=6)
    _, found = fill(kv, TOKENS[:12])
    assert found == 4


def test_equal_pages_computed_twice_become_one():
    kv = make()
    one, two = PageTable(), PageTable()
    for table in (one, two):
        kv.allocate(table, 8, PageClass.PROMPT)
        table.kv_len = 8
    kv.publish(one, (), TOKENS[:8], 8)
    kv.publish(two, (), TOKENS[:8], 8)
    assert one.pages == two.pages
    kv.check_integrity([one, two])


def test_idle_pages_go_least_recently_used_first_and_leaves_before_parents():
    kv = make(num_pages=4)
    old, _ = fill(kv, TOKENS[:8])
    kv.free(old)
    new, _ = fill(kv, TOKENS[100:108])
    kv.free(new)
    assert kv.num_available == 4
    third, _ = fill(kv, TOKENS[200:204])
    table = PageTable()
    assert kv.match(table, (), TOKENS[100:109], 8) == 8  # the newer one is whole
    kv.free(table)
    assert kv.match(table, (), TOKENS[:9], 8) == 4  # the older one has lost its leaf
    kv.check_integrity([third, table])


def test_pages_that_count_as_available_can_be_had_when_a_fork_keeps_its_own_copy_of_a_known_prefix():
    """Else a fork waits for ever for idle pages that its own page below them keeps from being evicted."""
    kv = make(num_pages=10)
    other, trunk, child = PageTable(), PageTable(), PageTable()
    for table, length in ((other, 8), (trunk, 16)):
        assert kv.allocate(table, length, PageClass.PROMPT)
        table.kv_len = length
    kv.publish(other, (), TOKENS, 8)
    kv.fork(trunk, child, 16)
    kv.publish(trunk, (), TOKENS, 16)
    kv.check_integrity([other, trunk, child])
    kv.free(trunk)
    kv.free(other)
    rest = PageTable()
    assert kv.num_available == 6
    assert kv.allocate(rest, 6 * 4, PageClass.PROMPT)
    kv.free(rest)
    kv.publish(child, (), TOKENS, 16)
    kv.free(child)
    assert kv.match(rest, (), TOKENS, 16) == 16
    kv.check_integrity([rest])


def test_a_prefix_that_is_used_again_and_again_costs_no_more_memory():
    kv = make()
    for _ in range(50):
        table, _ = fill(kv, TOKENS[:9])
        kv.free(table)

    assert len(kv.prefixes._radix._idle_leaves) == 1
    kv.check_integrity([])
    kv.clear_cache()
    assert kv.num_available == 8


def test_a_held_page_is_never_evicted():
    kv = make(num_pages=3)
    held, _ = fill(kv, TOKENS[:8])
    table = PageTable()
    assert not kv.allocate(table, 8, PageClass.PROMPT)
    assert table.pages == []
    assert kv.allocate(table, 4, PageClass.PROMPT)
    kv.check_integrity([held, table])


def test_a_fork_shares_pages_and_copies_the_last_one_on_write():
    kv = make()
    trunk, _ = fill(kv, TOKENS[:6])
    child = PageTable()
    kv.fork(trunk, child, 6)
    assert child.pages == trunk.pages
    assert kv.pages_needed(child, 1) == 1
    assert kv.allocate(child, 1, PageClass.THINKING)
    assert kv.take_work().copies == [(trunk.pages[1], child.pages[1])]
    assert child.pages[0] == trunk.pages[0]
    assert kv.pages_needed(trunk, 1) == 0  # the last holder writes in place
    kv.check_integrity([trunk, child])


def test_a_copied_page_is_not_handed_on_before_the_copy_is_done():
    kv = make(num_pages=2, caching=False)
    trunk, child = PageTable(), PageTable()
    kv.allocate(trunk, 2, PageClass.PROMPT)
    trunk.kv_len = 2
    kv.launch_step(0)
    kv.fork(trunk, child, 2)
    kv.allocate(child, 1, PageClass.ANSWER)  # step 1 will copy trunk's page
    kv.free(trunk)
    kv.take_work()
    kv.launch_step(1)
    kv.finish_step(0)
    assert kv.num_available == 0
    kv.finish_step(1)
    assert kv.num_available == 1


def test_a_rewind_keeps_its_own_pages_and_leaves_a_forks_pages_alone():
    kv = make(caching=False)
    trunk, _ = fill(kv, TOKENS[:16])
    kv.rewind(trunk, 7)
    assert len(trunk.pages) == 4
    trunk.kv_len = 16
    child = PageTable()
    kv.fork(trunk, child, 16)
    before = list(child.pages)
    kv.rewind(trunk, 6)
    assert kv.pages_needed(trunk, 10) == 3
    assert kv.allocate(trunk, 10, PageClass.THINKING)
    assert kv.take_work().copies == [(before[1], trunk.pages[1])]
    assert child.pages == before
    assert not set(trunk.pages[1:]) & set(before)
    kv.check_integrity([trunk, child])


def test_a_copy_of_a_page_that_is_itself_copied_in_this_step_reads_the_first_one():
    kv = make(num_pages=4, caching=False)
    tables = [fill(kv, TOKENS[:3])[0], PageTable(), PageTable()]
    for source, target in itertools.pairwise(tables):
        kv.fork(source, target, 3)
        assert kv.allocate(target, 1, PageClass.THINKING)
    first, second, third = (t.pages[0] for t in tables)
    assert kv.take_work().copies == [(first, second), (first, third)]


def test_random_operations_keep_every_page_accounted_for():
    rng = random.Random(7)
    kv = make(num_pages=24)
    tables: list[tuple[PageTable, list[int], tuple[str, ...]]] = []
    step, done = 0, Counter()
    for turn in range(100_000):
        kv.launch_step(step)
        if rng.random() < 0.7:
            kv.finish_step(step)
        step += 1
        action = rng.choice(("new", "grow", "fork", "free", "free", "publish", "forget"))
        done[action] += 1
        if action == "new":
            stem = rng.randrange(3) * 50
            tokens = [*TOKENS[stem : stem + rng.randrange(1, 30)], rng.randrange(5)]
            table, namespace = PageTable(session=rng.choice(("", "a", "b"))), (f"tenant={rng.randrange(2)}",)
            found = kv.match(table, namespace, tokens, len(tokens) - 1)
            if kv.allocate(table, len(tokens) - found, PageClass.PROMPT):
                table.kv_len = len(tokens)
                tables.append((table, tokens, namespace))
            else:
                kv.free(table)
        elif action == "forget":
            session = rng.choice(("a", "b"))
            if all(table.session != session for table, _, _ in tables):
                done["forgotten"] += kv.prefixes.forget((), session)
        elif tables:
            table, tokens, namespace = rng.choice(tables)
            if action == "grow" and kv.allocate(table, 1, PageClass.THINKING):
                table.kv_len += 1
            elif action == "fork":
                child = PageTable(session=table.session)
                kv.fork(table, child, rng.randrange(1, table.kv_len + 1))
                tables.append((child, tokens, namespace))
            elif action == "publish":
                kv.publish(table, namespace, tokens, min(len(tokens), table.kv_len))
            elif action == "free":
                kv.free(table)
                tables = [entry for entry in tables if entry[0] is not table]
        kv.take_work()
        if turn % 10 == 0:
            kv.check_integrity(t for t, _, _ in tables)
    for table, _, _ in tables:
        kv.free(table)
    kv.launch_step(step)
    kv.finish_step(step)
    kv.clear_cache()
    assert kv.num_available == 24
    kv.check_integrity([])
    assert done.pop("forgotten") > 100 and min(done.values()) > 10_000
