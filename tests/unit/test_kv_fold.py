"""Folding in KVManager: head blocks for raw pages, the reserve, copy-on-write and what is refused."""

import pytest

from thinkfold.errors import ParameterError
from thinkfold.kv.manager import KVManager
from thinkfold.kv.pages import PageClass
from thinkfold.kv.table import PageTable

SIZE, HEADS = 4, 3


def make(num_pages=12, caching=False, **options):
    return KVManager(num_pages, SIZE, enable_prefix_caching=caching, num_heads=HEADS, **options)


def grown(kv, entries, table=None):
    """A table with `entries` more entries that a finished step has written."""
    table = table or PageTable()
    assert kv.allocate(table, entries, PageClass.THINKING)
    table.kv_len += entries
    return table


def step(kv, number):
    """Launch and finish one step; returns its copies."""
    work = kv.take_work()
    kv.launch_step(number)
    kv.finish_step(number)
    return work


def test_a_fold_replaces_raw_pages_by_head_blocks():
    kv = make()
    table = grown(kv, 18)
    pages = list(table.pages)
    growth = kv.fold(table, 1, 2, [4, 0, 5])
    assert growth is not None
    assert (growth.counts, growth.starts) == ([4, 0, 5], [0, 0, 0])
    assert [len(new) for new in growth.new_blocks] == [1, 0, 2]
    assert table.pages == [pages[0], *pages[3:]]
    assert table.kv_len == 10
    assert (table.summary.blocks, table.summary.lengths) == (growth.new_blocks, [4, 0, 5])
    assert table.summary.mean_entries == 3.0
    assert kv.usage()[PageClass.SUMMARY] == 1
    assert kv.usage()[PageClass.THINKING] == 3
    assert kv.has_work
    kv.check_integrity([table])


def test_a_second_fold_goes_on_in_the_last_block():
    kv = make()
    table = grown(kv, 24)
    first = kv.fold(table, 0, 2, [3, 4, 5])
    step(kv, 0)
    second = kv.fold(table, 0, 2, [2, 2, 2])
    assert first is not None
    assert second is not None
    assert second.starts == [3, 4, 5]
    assert [len(new) for new in second.new_blocks] == [1, 1, 0]
    assert second.copies == []
    assert table.summary.lengths == [5, 6, 7]
    assert table.summary.blocks == [a + b for a, b in zip(first.new_blocks, second.new_blocks, strict=True)]
    kv.check_integrity([table])


def test_folded_pages_are_held_until_the_step_that_folds_has_finished():
    """The commit reads the span's raw pages when that step runs, so nobody may have them before."""
    kv = make(num_pages=5)
    table = grown(kv, 16)
    kv.launch_step(0)
    kv.finish_step(0)
    assert kv.fold(table, 0, 3, [4, 4, 4]) is not None
    assert (kv.num_available, kv.num_returning) == (0, 3)
    step(kv, 1)
    assert (kv.num_available, kv.num_returning) == (3, 0)


def test_dropped_pages_are_held_for_launched_steps_only():
    kv = make(num_pages=4)
    table = grown(kv, 16)
    kv.launch_step(0)
    kv.drop_pages(table, 1, 2)
    assert (kv.num_available, kv.num_returning, table.kv_len) == (0, 2, 8)
    kv.finish_step(0)
    assert kv.num_available == 2
    assert not kv.has_work
    kv.check_integrity([table])


def test_a_fold_succeeds_without_a_free_page_and_what_returns_fills_the_reserve_first():
    kv = make(num_pages=9, reserve_pages=1)
    assert kv.capacity == 8
    table, other = grown(kv, 16), grown(kv, 16)
    assert kv.num_available == 0
    assert kv.pages_needed(other, 1) == 1
    assert not kv.allocate(other, 1, PageClass.THINKING)
    assert kv.fold(table, 0, 1, [4, 4, 4]) is not None
    assert kv.fold(other, 0, 1, [4, 4, 4]) is None
    assert (kv.num_available, kv.num_returning) == (0, 0)
    step(kv, 0)
    assert not kv.allocate(other, 1, PageClass.THINKING)
    assert kv.fold(other, 0, 2, [4, 4, 4]) is not None
    assert (kv.num_available, kv.num_returning) == (0, 1)
    step(kv, 1)
    assert kv.num_available == 1
    assert kv.allocate(other, 1, PageClass.THINKING)
    kv.check_integrity([table, other])


def test_a_fold_that_cannot_have_its_blocks_changes_nothing():
    kv = make(num_pages=4)
    table = grown(kv, 16)
    pages = list(table.pages)
    assert kv.blocks_needed(table, [1, 0, 5]) == 3
    assert kv.fold(table, 0, 2, [1, 0, 5]) is None
    assert (table.pages, table.kv_len, table.summary.blocks, table.gaps) == (pages, 16, [], [])
    assert not kv.has_work
    assert kv.fold(table, 0, 2, [0, 0, 0]) is not None


def test_a_fold_takes_idle_cached_pages_before_the_reserve():
    kv = make(num_pages=6, caching=True, reserve_pages=1)
    cached, table = grown(kv, 4), grown(kv, 16)
    kv.publish(cached, (), list(range(4)), 4)
    kv.free(cached)
    assert kv.num_available == 1
    assert kv.fold(table, 0, 1, [4, 4, 4]) is not None
    assert kv.usage()[PageClass.CACHED] == 0
    step(kv, 0)
    assert kv.num_available == 1


def test_a_shared_partly_filled_block_is_copied_before_it_grows():
    kv = make(num_pages=20)
    trunk, child = grown(kv, 24), PageTable()
    assert kv.fold(trunk, 0, 2, [3, 4, 0]) is not None
    step(kv, 0)
    kv.fork(trunk, child, 14)
    assert kv.usage()[PageClass.SUMMARY] == 1
    before = [list(blocks) for blocks in trunk.summary.blocks]
    assert kv.blocks_needed(child, [1, 1, 1]) == 3
    growth = kv.fold(child, 0, 2, [1, 1, 1])
    assert growth is not None
    assert [(head, source) for head, source, _ in growth.copies] == [(0, before[0][0])]
    assert child.summary.blocks[0] == [growth.copies[0][2]]
    assert child.summary.blocks[1][0] == before[1][0]
    assert trunk.summary.blocks == before
    kv.check_integrity([trunk, child])
    assert kv.blocks_needed(trunk, [1, 0, 0]) == 0  # the last holder writes in place
    again = kv.fold(trunk, 0, 2, [1, 0, 0])
    assert again is not None
    assert again.copies == []
    kv.check_integrity([trunk, child])


def test_a_copied_block_is_not_lent_again_before_the_copy_is_done():
    kv = make(num_pages=20)
    trunk, child = grown(kv, 24), PageTable()
    assert kv.fold(trunk, 0, 2, [3, 3, 3]) is not None
    step(kv, 0)
    kv.fork(trunk, child, 16)
    growth = kv.fold(child, 0, 1, [1, 1, 1])
    assert growth is not None
    kv.free(trunk)
    kv.take_work()
    kv.launch_step(1)
    kv.drop_pages(child, 0, 2)
    other = grown(kv, 8)
    later = kv.fold(other, 0, 2, [8, 8, 8])
    assert later is not None
    lent = {block for blocks in later.new_blocks for block in blocks}
    assert not lent & {source for _, source, _ in growth.copies}


def test_a_fork_shares_summaries_by_reference_and_the_last_holder_returns_them():
    kv = make(num_pages=8)
    trunk, child = grown(kv, 17), PageTable()
    kv.fold(trunk, 0, 4, [8, 8, 8])
    step(kv, 0)
    kv.fork(trunk, child, 1)
    assert child.summary.blocks == trunk.summary.blocks
    kv.free(trunk)
    kv.free(trunk)
    assert kv.usage()[PageClass.SUMMARY] == 2
    kv.check_integrity([trunk, child])
    kv.free(child)
    assert kv.num_available == 8
    kv.check_integrity([])


def test_pages_of_the_shared_prefix_are_never_folded():
    kv = make(caching=True)
    table, twin = grown(kv, 12), PageTable()
    kv.fork(table, twin, 12)
    kv.publish(table, (), list(range(12)), 8)
    for who in (table, twin):
        with pytest.raises(AssertionError, match="shared prefix"):
            kv.fold(who, 1, 2, [1, 1, 1])
    with pytest.raises(AssertionError, match="shared prefix"):
        kv.drop_pages(table, 0, 1)
    kv.drop_pages(table, 2, 1)
    kv.check_integrity([table, twin])


def test_a_span_is_made_of_full_pages():
    kv = make()
    table = grown(kv, 10)
    with pytest.raises(AssertionError, match="full pages"):
        kv.fold(table, 1, 2, [1, 1, 1])


def test_what_a_fork_pays_for_shrinks_with_a_fold():
    kv = make()
    trunk, child = grown(kv, 24), PageTable()
    kv.fork(trunk, child, 24)
    kv.fold(child, 1, 2, [1, 1, 1])
    assert child.shared == 4
    kv.fold(trunk, 1, 2, [1, 1, 1])
    assert trunk.shared == 0
    kv.check_integrity([trunk, child])


def test_nothing_is_rewound_or_forked_into_a_folded_span():
    kv = make()
    table = grown(kv, 18)
    kv.fold(table, 1, 2, [1, 1, 1])
    kv.rewind(table, 7)
    kv.rewind(table, 4)
    with pytest.raises(AssertionError, match="span taken out"):
        kv.rewind(table, 3)
    with pytest.raises(AssertionError, match="span taken out"):
        kv.fork(table, PageTable(), 3)
    with pytest.raises(AssertionError, match="span taken out"):
        kv.fork(table, PageTable(), 5)


def test_gaps_follow_later_folds_of_earlier_spans():
    kv = make(num_pages=20)
    table = grown(kv, 40)
    kv.drop_pages(table, 6, 2)
    kv.drop_pages(table, 2, 3)
    assert table.gaps == [2, 3]
    kv.drop_pages(table, 2, 2)
    assert (table.gaps, table.kv_len) == ([2], 12)
    kv.check_integrity([table])


def test_a_planned_row_keeps_its_pages_when_the_table_changes():
    kv = make(num_pages=20, caching=True)
    known, table, child = grown(kv, 4), grown(kv, 18), PageTable()
    kv.publish(known, (), list(range(4)), 4)
    seen, row = list(table.pages), table.pages
    kv.publish(table, (), list(range(18)), 8)
    kv.fork(table, child, 18)
    assert kv.allocate(table, 1, PageClass.THINKING)  # a copy-on-write
    table.kv_len += 1
    kv.fold(table, 2, 1, [1, 1, 1])
    kv.rewind(table, 13)
    kv.free(table)
    assert row == seen


def test_the_size_of_a_fold_is_known_before():
    kv = make()
    assert kv.pages_for_fold([0, 0, 0]) == 0
    assert kv.pages_for_fold([4, 1, 4]) == 1
    assert kv.pages_for_fold([5, 1, 4]) == 2


@pytest.mark.parametrize("reserve", [-1, 12])
def test_a_reserve_that_leaves_no_page_is_refused(reserve):
    with pytest.raises(ParameterError, match="reserve_pages"):
        make(reserve_pages=reserve)
