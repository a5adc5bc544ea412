"""The page pool: references, classes and the quarantine."""

import pytest

from thinkfold.kv.pages import PageClass, PagePool


def test_a_released_page_waits_for_the_step_that_reads_it():
    pool = PagePool(2)
    page = pool.allocate(PageClass.PROMPT)
    pool.release(page, after_step=3)
    assert (pool.num_free, pool.num_quarantined) == (1, 1)
    pool.finish_step(2)
    assert pool.num_free == 1
    pool.finish_step(3)
    assert (pool.num_free, pool.num_quarantined) == (2, 0)
    pool.check_integrity([])


def test_classes_follow_their_holders():
    pool = PagePool(4)
    page = pool.allocate(PageClass.THINKING)
    pool.retain(page, PageClass.PROMPT)
    assert pool.counts()[PageClass.THINKING] == 1
    pool.adopt(page)
    pool.release(page, -1)
    pool.release(page, -1)
    assert pool.counts() == {**dict.fromkeys(PageClass, 0), PageClass.CACHED: 1}
    assert pool.num_idle_cached == 1
    pool.retain(page, PageClass.PROMPT)
    assert pool.counts()[PageClass.PROMPT] == 1
    pool.check_integrity([[page], [page]])


def test_check_integrity_finds_a_lost_reference():
    pool = PagePool(2)
    pool.allocate(PageClass.PROMPT)
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check_integrity([])


def test_an_empty_pool_has_nothing_to_give():
    pool = PagePool(1)
    pool.allocate(PageClass.PROMPT)
    with pytest.raises(IndexError):
        pool.allocate(PageClass.PROMPT)


def test_a_page_of_an_earlier_step_does_not_wait_for_one_of_a_later_step():
    pool = PagePool(2)
    late, early = pool.allocate(PageClass.PROMPT), pool.allocate(PageClass.PROMPT)
    pool.release(late, after_step=5)
    pool.release(early, after_step=4)
    pool.finish_step(4)
    assert pool.allocate(PageClass.PROMPT) == early
    pool.check_integrity([[early]])
