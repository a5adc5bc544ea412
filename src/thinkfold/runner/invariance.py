"""Finds how rows of a matrix product must be padded so that each row's bits never change.

BLAS libraries choose kernels, and with them the order of additions, by the number of rows.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import PreTrainedModel

from thinkfold.runner.cpu_layers import PackedLinear

logger = logging.getLogger(__name__)

Linear = nn.Linear | PackedLinear
TILES = (1, 2, 4, 8, 16, 32)
PROBE_TILES = 12


def row_tile(model: PreTrainedModel) -> int:
    """The smallest tile T such that products of T, 2T, 3T … rows give each row the same bits.

    Measured on one linear layer of each shape of the model. Where no tile up to 32 does, rows
    are not padded and a warning says that equal bits are not promised on this machine.
    """
    shapes: dict[tuple[int, int], Linear] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | PackedLinear):
            shapes.setdefault((module.in_features, module.out_features), module)
    for tile in TILES:
        if all(_invariant(linear, tile) for linear in shapes.values()):
            return tile
    logger.warning("matrix products of this machine change with the batch: equal bits are not promised")
    return 1


@torch.inference_mode()
def _invariant(linear: Linear, tile: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tile * PROBE_TILES, linear.in_features, generator=generator)
    if isinstance(linear, nn.Linear):
        rows = rows.to(linear.weight.dtype)
    whole = linear(rows)
    return all(
        torch.equal(linear(rows[tile * lo : tile * hi]), whole[tile * lo : tile * hi])
        for lo in range(2)
        for hi in range(lo + 1, PROBE_TILES + 1)
    )
