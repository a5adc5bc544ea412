"""KV memory on its own: pages, head blocks and entries keep what belongs to them, planes and host tier included."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from thinkfold.attention import int4 as four_bits
from thinkfold.attention.fp8 import FP8
from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.runner import sizing
from thinkfold.runner.storage import TRANSFER_PIECE, KVStorage, page_bytes

PAGES, HOST, LAYERS, HEADS, PAGE, DIM = 150, 140, 2, 3, 8, 4
CPU = torch.device("cpu")


def filled(dtype: torch.dtype, *, bias: bool = False) -> KVStorage:
    storage = KVStorage(PAGES, LAYERS, HEADS, PAGE, DIM, dtype, CPU, HOST)
    if bias:
        storage.need_bias()
    generator = torch.Generator().manual_seed(0)
    for plane in planes(storage):
        raw = plane.view(torch.uint8) if plane.dtype == FP8 else plane
        raw.copy_(torch.randint(1, 100, raw.shape, generator=generator))
    return storage


def planes(storage: KVStorage) -> list[Tensor]:
    return [plane for plane in (storage.tensor, storage.scales, storage.bias) if plane.numel()]


def units(storage: KVStorage, parts: int) -> list[Tensor]:
    """Copies of all planes as floats, cut into pages (parts 1) or head blocks."""
    return [plane.float().reshape(PAGES * parts, -1).clone() for plane in planes(storage)]


def pairs(rng: random.Random, sources: int, targets: int, count: int) -> list[tuple[int, int]]:
    return list(zip(rng.sample(range(sources), count), rng.sample(range(targets), count), strict=True))


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, False), (torch.bfloat16, True), (FP8, False), (FP8, True)])
@pytest.mark.parametrize("parts", [1, LAYERS * HEADS])
def test_a_round_trip_through_the_host_keeps_every_plane(dtype: torch.dtype, bias: bool, parts: int) -> None:
    storage, rng = filled(dtype, bias=bias), random.Random(parts)
    before = units(storage, parts)
    assert len(before) == 1 + (dtype == FP8) + bias
    out = pairs(rng, PAGES * parts, HOST * parts, 100)
    if parts == 1:  # also one contiguous run that is longer than a piece
        out = [*zip(range(10, 10 + TRANSFER_PIECE + 5), range(3, 3 + TRANSFER_PIECE + 5), strict=True)]
    back = [
        (host, target) for (_, host), (target, _) in zip(out, pairs(rng, PAGES * parts, 200, len(out)), strict=True)
    ]
    leave, enter = (storage.pages_out, storage.pages_in) if parts == 1 else (storage.blocks_out, storage.blocks_in)
    leave(out)
    for plane in planes(storage):
        plane.view(torch.uint8).zero_()  # what is on the host is a copy
    enter(back)
    places = dict(zip((h for _, h in out), (s for s, _ in out), strict=True))
    for plane, old in zip(units(storage, parts), before, strict=True):
        for host, target in back:
            assert torch.equal(plane[target], old[places[host]])
        untouched = sorted(set(range(PAGES * parts)) - {target for _, target in back})
        assert not plane[untouched].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_int4_blocks_make_the_same_trips(dtype: torch.dtype) -> None:
    """They are no whole part of a page: what lies behind a page's last one stays as it is."""
    rng = random.Random(1)
    storage = KVStorage(20, LAYERS, HEADS, PAGE, 8, dtype, CPU, 15, int4=True)
    size, blocks = four_bits.Layout.of(PAGE, 8).block_bytes, four_bits.page_blocks(LAYERS, HEADS, PAGE, 8, dtype)
    assert storage.tensor[0].nbytes % size and not storage.bias.numel()
    before = torch.randint(256, (20 * blocks, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    storage.write_blocks(torch.arange(20 * blocks), before)
    storage.copy_blocks([(7, 8), (8, 2 * blocks)])
    behind = storage.tensor.view(torch.uint8).flatten(1)[:, blocks * size :]
    behind.fill_(77)
    before[[8, 2 * blocks]] = before[[7, 8]]
    out = [(source, source // 2) for source in range(0, 8 * blocks, 2)]  # runs of the host cross its pages
    storage.blocks_out(out)
    storage.write_blocks(torch.arange(20 * blocks), torch.zeros_like(before))
    targets = rng.sample(range(20 * blocks), len(out))
    storage.blocks_in([(host, target) for (_, host), target in zip(out, targets, strict=True)])
    expected = torch.zeros_like(before)
    expected[targets] = before[[source for source, _ in out]]
    assert torch.equal(four_bits.blocks_of(storage.tensor).flatten(0, 1), expected)
    assert (behind == 77).all()


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_copies_read_all_sources_first(dtype: torch.dtype) -> None:
    storage = filled(dtype, bias=True)
    before, blocks = units(storage, 1), units(storage, LAYERS * HEADS)
    storage.copy_pages([(1, 2), (2, 3)])
    for plane, old in zip(units(storage, 1), before, strict=True):
        assert torch.equal(plane[[2, 3]], old[[1, 2]]) and torch.equal(plane[4:], old[4:])
    storage.copy_blocks([(100, 101), (101, 7)])
    for plane, old in zip(units(storage, LAYERS * HEADS), blocks, strict=True):
        assert torch.equal(plane[[101, 7]], old[[100, 101]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_entries_are_read_and_written_as_they_are(dtype: torch.dtype) -> None:
    storage = filled(dtype, bias=True)
    before = units(storage, 1)[0].view(PAGES, LAYERS, HEADS, 2, PAGE, DIM)
    source, target = (3, 1, 2, 5), (9, 0, 1, 7)
    ids = [torch.tensor([((p * LAYERS + layer) * HEADS + head) * PAGE + at]) for p, layer, head, at in (source, target)]
    stored = storage.read(ids[0])
    storage.write(ids[1], stored)
    after = storage.tensor.float()
    for part in (0, 1):
        p, layer, head, at = target
        assert torch.equal(after[p, layer, head, part, at], before[source[0], 1, 2, part, 5])
    assert storage.bias[9, 0, 1, 7] == 0.0 and storage.bias[9, 0, 1, 6] != 0.0
    storage.write(ids[1], stored, torch.tensor([-torch.inf]))
    assert storage.bias[9, 0, 1, 7] == -torch.inf
    if dtype == FP8:
        assert torch.equal(storage.scales[9, 0, 1, :, 7], storage.scales[3, 1, 2, :, 5])


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_a_span_is_read_in_order(dtype: torch.dtype) -> None:
    storage = KVStorage(PAGES, LAYERS, HEADS, PAGE, DIM, dtype, CPU)
    rows = torch.randn((4 * PAGE * LAYERS * HEADS, DIM), generator=torch.Generator().manual_seed(1))
    pages = [17, 3, 90, 4]
    ids = torch.tensor(
        [
            ((pages[t // PAGE] * LAYERS + layer) * HEADS + head) * PAGE + t % PAGE
            for layer in range(LAYERS)
            for head in range(HEADS)
            for t in range(4 * PAGE)
        ]
    )
    storage.write(ids, storage.encode(rows, -rows))
    keys, values = storage.read_span(torch.tensor(pages))
    assert keys.shape == (LAYERS, HEADS, 4 * PAGE, DIM) and keys.dtype == torch.float32
    error = 2.0**-4 if dtype == FP8 else 0.0
    assert ((keys.reshape(-1, DIM) - rows).abs() <= error * rows.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(keys, -values)


def test_a_page_is_what_its_planes_take() -> None:
    for dtype, bias in itertools.product((torch.bfloat16, FP8), (False, True)):
        storage = KVStorage(PAGES, LAYERS, HEADS, PAGE, DIM, dtype, CPU, bias=bias)
        assert bool(storage.bias.numel()) == bias
        assert storage.page_bytes * PAGES == sum(p.numel() * p.element_size() for p in planes(storage))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_fp8_pool_holds_nearly_twice_the_tokens(head_dim: int) -> None:
    config = EngineConfig(model="x", kv_cache_bytes=1 << 30)
    sizes = [page_bytes(28, 4, 16, head_dim, dtype) for dtype in (torch.bfloat16, FP8)]
    plain, fp8 = (sizing.pool_pages(config, 1 << 20, size, CPU, lambda: None) for size in sizes)
    assert fp8 >= 1.9 * plain


def test_the_host_tier_is_whole_pages_or_refused() -> None:
    assert sizing.host_pages(EngineConfig(model="x"), 1000) == 0
    assert sizing.host_pages(EngineConfig(model="x", swap_space_bytes=3999), 1000) == 3
    with pytest.raises(ParameterError, match="swap_space_bytes"):
        sizing.host_pages(EngineConfig(model="x", swap_space_bytes=999), 1000)
    with pytest.raises(ParameterError, match="swap_space_bytes"):
        EngineConfig(model="x", swap_space_bytes=-1)
    with pytest.raises(ParameterError, match="kv_cache_dtype"):
        EngineConfig(model="x", kv_cache_dtype="fp8")  # type: ignore[arg-type]
