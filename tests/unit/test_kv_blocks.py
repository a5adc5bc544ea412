"""Head blocks: lent one by one, quarantined, and their pages given back when empty."""

import random

import pytest

from thinkfold.kv.blocks import HeadBlocks
from thinkfold.kv.pages import PageClass, PagePool

HEADS = 4


def make(num_pages=4):
    pool = PagePool(num_pages)
    return pool, HeadBlocks(pool, HEADS)


def test_a_page_lends_its_blocks_to_whoever_asks():
    pool, blocks = make()
    one, two = blocks.allocate([3]), blocks.allocate([2])
    assert pool.counts()[PageClass.SUMMARY] == 2
    assert sorted(one + two)[:4] == [0, 1, 2, 3]
    assert blocks.pages_needed([3]) == 0
    assert blocks.pages_needed([4]) == 1
    blocks.check_integrity([one, two])


def test_the_fullest_pages_lend_first_and_an_empty_page_goes_back():
    pool, blocks = make()
    held = blocks.allocate([8])
    by_page = {page: [b for b in held if b // HEADS == page] for page in blocks.pages()}
    (full, almost), (sparse, rest) = by_page.items()
    for block in rest[1:]:
        blocks.release(block, -1)
    blocks.release(almost[0], -1)
    assert [b // HEADS for b in blocks.allocate([2])] == [full, sparse]
    blocks.release(rest[0], -1)
    assert len(list(blocks.pages())) == 2
    (last,) = (b for b in range(sparse * HEADS, (sparse + 1) * HEADS) if blocks.refs(b))
    blocks.release(last, -1)
    assert list(blocks.pages()) == [full]
    assert pool.num_free == 3


def test_a_released_block_waits_for_the_step_that_reads_it():
    _, blocks = make(num_pages=1)
    held = blocks.allocate([4])
    blocks.release(held[0], after_step=3)
    with pytest.raises(IndexError):
        blocks.allocate([1])
    blocks.finish_step(2)
    assert blocks.pages_needed([1]) == 1
    blocks.finish_step(3)
    assert blocks.allocate([1]) == [held[0]]
    blocks.check_integrity([held])


def test_an_empty_page_waits_for_the_last_of_its_blocks():
    pool, blocks = make(num_pages=1)
    held = blocks.allocate([2])
    blocks.release(held[0], after_step=7)
    blocks.release(held[1], after_step=3)
    pool.finish_step(3)
    blocks.finish_step(3)
    assert pool.num_free == 0
    pool.finish_step(7)
    blocks.finish_step(7)
    assert pool.num_free == 1
    assert len(blocks.allocate([4])) == 4
    blocks.check_integrity([range(4)])


def test_a_shared_block_is_free_when_its_last_holder_has_gone():
    pool, blocks = make()
    (block,) = blocks.allocate([1])
    blocks.retain(block)
    blocks.release(block, -1)
    assert blocks.refs(block) == 1
    blocks.release(block, -1)
    assert pool.num_free == 4
    blocks.check_integrity([])


def test_check_integrity_finds_a_lost_block():
    _, blocks = make()
    blocks.allocate([1])
    with pytest.raises(AssertionError, match="1 references"):
        blocks.check_integrity([])


def test_random_operations_keep_every_block_accounted_for():
    rng = random.Random(3)
    pool, blocks = make(num_pages=12)
    held: list[list[int]] = []
    for step in range(20_000):
        action = rng.random()
        if action < 0.45:
            count = rng.randrange(1, 9)
            if blocks.pages_needed([count]) <= pool.num_free:
                held.append(blocks.allocate([count]))
        elif held and action < 0.55:
            held.append([b for b in rng.choice(held) if rng.random() < 0.5])
            for block in held[-1]:
                blocks.retain(block)
        elif held:
            for block in held.pop(rng.randrange(len(held))):
                blocks.release(block, step - rng.randrange(2))
        if rng.random() < 0.7:
            pool.finish_step(step - 1)
            blocks.finish_step(step - 1)
        if step % 10 == 0:
            blocks.check_integrity(held)
            pool.check_integrity([blocks.pages()])
    for group in held:
        for block in group:
            blocks.release(block, step)
    pool.finish_step(step)
    blocks.finish_step(step)
    assert pool.num_free == 12


def test_pages_that_one_holder_has_alone_go_back_at_once():
    rng = random.Random(3)
    for _ in range(40):
        pool, blocks = make(num_pages=12)
        held = [blocks.allocate([rng.randrange(1, 11)]) for _ in range(4)]
        shared = [block for block in held[0] if rng.random() < 0.1]
        for block in shared:
            blocks.retain(block)
        for block in held[3][: rng.randrange(3)]:
            blocks.release(block, -1)
            held[3].remove(block)
        gone, others = held[0], [*held[1:], shared]
        alone = {b // HEADS for b in gone} - {b // HEADS for other in others for b in other}
        rest = blocks.release_pages(gone, after_step=5)
        assert rest == [b for b in gone if b // HEADS not in alone]
        assert pool.num_quarantined == len(alone) and not alone & set(blocks.pages())
        for block in rest:
            blocks.release(block, after_step=5)
        blocks.check_integrity(others)
        blocks.finish_step(5)
        pool.finish_step(5)
        blocks.check_integrity(others)
        pool.check_integrity([blocks.pages()])
