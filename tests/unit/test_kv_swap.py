"""The host tier: whole branches that leave and return, spans that leave for good."""

import pytest
from test_kv_fold import grown, make, step

from thinkfold.kv.pages import PageClass
from thinkfold.kv.table import PageTable


def test_a_branch_leaves_with_all_its_pages_and_summaries_and_returns_to_pages_of_its_own():
    kv = make(num_pages=12, host_pages=8, caching=True)
    table, child = grown(kv, 18), PageTable()
    kv.publish(table, (), list(range(18)), 4)
    kv.fork(table, child, 18)
    kv.fold(table, 1, 2, [4, 2, 4])
    step(kv, 0)
    pages, blocks = list(table.pages), [b for head in table.summary.blocks for b in head]
    assert kv.swap_out(table)
    assert (table.pages, table.kv_len, table.summary.lengths) == ([], 10, [4, 2, 4])
    assert (table.published, table.shared) == (0, 0)
    assert kv.host_usage() == 4
    assert kv.usage()[PageClass.SUMMARY] == 0
    kv.check_integrity([table, child])
    assert table.host is not None
    host_pages, host_blocks = table.host.pages, [b for head in table.host.blocks for b in head]
    work = step(kv, 1)
    assert work.swap_out == list(zip(pages, host_pages, strict=True))
    assert work.blocks_out == list(zip(blocks, host_blocks, strict=True))
    assert kv.swap_in(table, 0)
    assert not set(table.pages) & set(child.pages)
    assert kv.usage()[PageClass.SUMMARY] == 1
    work = kv.take_work()
    assert work.swap_in == list(zip(host_pages, table.pages, strict=True))
    assert work.blocks_in == list(zip(host_blocks, [b for head in table.summary.blocks for b in head], strict=True))
    kv.check_integrity([table, child])


def test_pages_keep_their_class_on_the_host():
    kv = make(num_pages=4, host_pages=4)
    table = PageTable()
    for entries, page_class in ((4, PageClass.PROMPT), (8, PageClass.THINKING), (4, PageClass.ANSWER)):
        assert kv.allocate(table, entries, page_class)
        table.kv_len += entries
    before = dict(kv.usage())
    kv.swap_out(table)
    step(kv, 0)
    assert sum(kv.usage().values()) == 0
    kv.swap_in(table, 0)
    assert kv.usage() == before


def test_a_swapped_page_is_held_until_the_step_that_copies_it_has_finished():
    kv = make(num_pages=3, host_pages=3)
    table = grown(kv, 12)
    kv.launch_step(0)
    kv.finish_step(0)
    kv.swap_out(table)
    assert (kv.num_available, kv.num_returning) == (0, 3)
    step(kv, 1)
    assert kv.num_available == 3


def test_host_places_are_held_until_the_step_that_reads_them_has_finished():
    kv = make(num_pages=6, host_pages=3)
    table, other = grown(kv, 12), grown(kv, 12)
    kv.swap_out(table)
    step(kv, 0)
    kv.swap_in(table, 0)
    assert kv.host_usage() == 0
    assert not kv.swap_out(other)
    step(kv, 1)
    assert kv.swap_out(other)


def test_a_host_that_is_too_small_changes_nothing():
    kv = make(num_pages=8, host_pages=4)
    table = grown(kv, 20)
    kv.fold(table, 0, 1, [1, 1, 1])
    step(kv, 0)
    pages = list(table.pages)
    assert not kv.swap_out(table)  # four pages and one for the blocks
    assert not table.swapped
    assert (table.pages, kv.host_usage(), kv.has_work) == (pages, 0, False)
    kv.check_integrity([table])


def test_a_branch_returns_only_with_headroom_and_never_into_the_reserve():
    kv = make(num_pages=8, host_pages=8, reserve_pages=2)
    table = grown(kv, 16)
    kv.swap_out(table)
    step(kv, 0)
    assert not kv.swap_in(table, 3)
    assert table.swapped
    assert kv.swap_in(table, 2)
    assert kv.num_available == 2


def test_surplus_pages_do_not_travel():
    kv = make(num_pages=8, host_pages=2)
    table = grown(kv, 16)
    kv.rewind(table, 5)
    assert len(table.pages) == 4
    assert kv.swap_out(table)
    assert kv.host_usage() == 2


def test_a_branch_that_this_step_still_brings_in_or_folds_is_not_swapped_out_again():
    kv = make(num_pages=12, host_pages=12)
    table, folded = grown(kv, 16), grown(kv, 16)
    kv.swap_out(table)
    step(kv, 0)
    kv.swap_in(table, 0)
    kv.fold(folded, 0, 1, [1, 1, 1])
    for who in (table, folded):
        assert not kv.settled(who)
        assert not kv.swap_out(who)
    assert not kv.offload(table, 0, 1)
    assert kv.fold(table, 0, 1, [1, 1, 1]) is None  # the commit would run before the pages are there
    step(kv, 1)
    assert kv.fold(table, 0, 1, [1, 1, 1]) is not None
    assert kv.swap_out(folded)
    kv.check_integrity([table, folded])


def test_a_branch_may_leave_and_return_within_one_step():
    kv = make(num_pages=8, host_pages=4)
    table = grown(kv, 16)
    kv.swap_out(table)
    assert kv.swap_in(table, 0)
    work = step(kv, 0)
    assert [h for _, h in work.swap_out] == [h for h, _ in work.swap_in]
    assert not {d for d, _ in work.swap_out} & {d for _, d in work.swap_in}


def test_a_fork_of_a_branch_that_is_coming_in_gets_its_page_from_the_host():
    kv = make(num_pages=12, host_pages=4)
    table, child = grown(kv, 6), PageTable()
    kv.swap_out(table)
    step(kv, 0)
    kv.swap_in(table, 0)
    kv.fork(table, child, 6)
    assert kv.allocate(child, 1, PageClass.THINKING)
    work = kv.take_work()
    assert work.copies == []
    host_page = {d: h for h, d in work.swap_in}
    assert host_page[child.pages[1]] == host_page[table.pages[1]]


def test_an_offloaded_span_leaves_for_good_until_the_branch_is_freed():
    kv = make(num_pages=8, host_pages=3)
    table, child = grown(kv, 18), PageTable()
    pages = list(table.pages)
    assert kv.offload(table, 1, 2)
    assert (table.offloaded, table.kv_len, table.pages) == (2, 10, [pages[0], *pages[3:]])
    assert not kv.offload(table, 0, 2)
    work = step(kv, 0)
    assert work.swap_out == list(zip(pages[1:3], table.offload_pages, strict=True))
    kv.fork(table, child, 10)
    assert child.offloaded == 0
    kv.check_integrity([table, child])
    kv.free(table)
    assert kv.host_usage() == 0
    kv.check_integrity([table, child])


@pytest.mark.parametrize("launched", [False, True])
def test_free_returns_everything_in_any_state_and_twice(launched):
    kv = make(num_pages=12, host_pages=12)
    away, back = grown(kv, 16), grown(kv, 16)
    for table in (away, back):
        kv.fold(table, 0, 1, [2, 3, 4])
    step(kv, 0)
    for table in (away, back):
        assert kv.offload(table, 0, 1)
        assert kv.swap_out(table)
    if launched:
        step(kv, 1)
    assert kv.swap_in(back, 0)
    for table in (away, back):
        kv.free(table)
        kv.free(table)
    kv.check_integrity([away, back])
    step(kv, 2)
    assert (kv.num_available, kv.host_usage()) == (12, 0)
    assert kv.swap_out(grown(kv, 12))


def test_a_branch_on_the_host_neither_grows_nor_folds_nor_forks():
    kv = make(num_pages=4, host_pages=4)
    table = grown(kv, 16)
    kv.swap_out(table)
    with pytest.raises(AssertionError, match="cannot grow"):
        kv.allocate(table, 1, PageClass.ANSWER)
    with pytest.raises(AssertionError, match="cannot be folded"):
        kv.fold(table, 0, 1, [0, 0, 0])
    with pytest.raises(AssertionError, match="cannot fork"):
        kv.fork(table, PageTable(), 4)
    with pytest.raises(AssertionError, match="swapped out once"):
        kv.swap_out(table)
    kv.rewind(table, 9)
    kv.check_integrity([table])


def test_a_step_is_not_launched_without_its_memory_work():
    kv = make(num_pages=4, host_pages=4)
    kv.swap_out(grown(kv, 16))
    with pytest.raises(AssertionError, match="without its memory work"):
        kv.launch_step(0)
