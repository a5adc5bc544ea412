"""Finds how rows of a matrix product must be padded so that each row's bits never change.

BLAS libraries choose kernels, and with them the order of additions, by the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from thinkfold.errors import UnsupportedError

TILES = (1, 2, 4, 8, 16, 32)
PROBE_TILES = 12


def row_tile(model: PreTrainedModel) -> int:
    """The smallest tile T such that products of T, 2T, 3T … rows give each row the same bits.

    Measured on one linear layer of each shape of the model. Raises UnsupportedError if no tile
    up to 32 does.
    """
    shapes: dict[tuple[int, ...], Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            shapes.setdefault(tuple(module.weight.shape), module.weight)
    for tile in TILES:
        if all(_invariant(weight, tile) for weight in shapes.values()):
            return tile
    raise UnsupportedError("batch_invariant", "this machine's matrix products change with every batch size")


@torch.inference_mode()
def _invariant(weight: Tensor, tile: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tile * PROBE_TILES, weight.shape[1], generator=generator).to(weight.dtype)
    whole = nn.functional.linear(rows, weight)
    return all(
        torch.equal(nn.functional.linear(rows[tile * lo : tile * hi], weight), whole[tile * lo : tile * hi])
        for lo in range(2)
        for hi in range(lo + 1, PROBE_TILES + 1)
    )
