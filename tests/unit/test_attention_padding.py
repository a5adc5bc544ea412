"""Padding is measured on the machine at hand, and what was measured holds for other numbers too."""

from __future__ import annotations

import logging

import pytest
import torch

from thinkfold.attention import padding
from thinkfold.attention.padding import KV_CHUNK, LENGTH_ALIGN, MAX_EXTRA, ROW_MULTIPLES, SUM_BLOCKS


@pytest.mark.parametrize("block", SUM_BLOCKS)
def test_a_length_between_one_and_two_blocks_becomes_two(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(padding, "sum_block", lambda: block)
    for length in range(1, 2 * KV_CHUNK + 1):
        found, rest = padding.padded(length), padding.rounded_up(length) % KV_CHUNK
        assert found % LENGTH_ALIGN == 0 and 0 <= found - padding.rounded_up(length) <= MAX_EXTRA
        assert found == padding.rounded_up(length) if rest <= block else found % KV_CHUNK in (0, 2 * block, rest)
        assert not block < found % KV_CHUNK < 2 * block or found % KV_CHUNK == 0
        assert found // KV_CHUNK - padding.rounded_up(length) // KV_CHUNK <= 1


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_this_machine_keeps_bits_with_what_was_measured(head_dim: int) -> None:
    multiple, source = padding.row_multiple(head_dim), torch.Generator().manual_seed(7)
    flash = torch._scaled_dot_product_flash_attention_for_cpu  # type: ignore[reportPrivateImportUsage]
    query, keys, values = torch.randn(3, 1, 2, KV_CHUNK, head_dim, generator=source)
    for seen in (5, 64, 190, 257, 300, 400, 449, 512):
        outputs = []
        for rows, length in ((multiple, padding.padded(seen)), (3 * multiple, KV_CHUNK), (96, KV_CHUNK)):
            mask = torch.zeros(1, 1, rows, length).masked_fill(torch.arange(length) >= seen, -torch.inf)
            out, _ = flash(query[:, :, :rows], keys[:, :, :length], values[:, :, :length], attn_mask=mask)
            outputs.append(out[:, :, :multiple])
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2]), seen


def test_where_nothing_helps_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def never_the_same(head_dim: int, rows: int, length: int, seen: int) -> torch.Tensor:
        calls.append(rows)
        return torch.full((rows, head_dim), float(len(calls)))

    monkeypatch.setattr(padding, "_attend", never_the_same)
    with caplog.at_level(logging.WARNING):
        assert padding.sum_block.__wrapped__() == KV_CHUNK
        assert padding.row_multiple.__wrapped__(64) == ROW_MULTIPLES[0]
    assert caplog.text.count("equal bits are not promised") == 2
