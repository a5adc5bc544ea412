"""Muon for the matrices, AdamW for the embedding and the gains."""

from collections import defaultdict

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of a stack [matrices, rows, columns], by Newton-Schulz in bf16."""
    a, b, c = NEWTON_SCHULZ
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, then the orthogonal update; matrices of one shape are handled as one stack."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            stacks: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                stacks[param.shape].append(param)
            for shape, params in stacks.items():
                self._update(params, group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5)

    def _update(self, params: list[nn.Parameter], rate: float) -> None:
        moments, grads = [], []
        for param in params:
            state = self.state[param]
            if not state:
                state["moment"] = torch.zeros_like(param)
            assert param.grad is not None
            moments.append(state["moment"])
            grads.append(param.grad)
        torch._foreach_lerp_(moments, grads, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(grads, moments, MOMENTUM)
        updates = orthogonal(torch.stack(ahead)).float().unbind(0)
        torch._foreach_add_(params, updates, alpha=-rate)


class Optimizer:
    """Both optimisers under one learning rate factor."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        fused = others[0].is_cuda
        self._parts = (
            (Muon(matrices, MATRIX_RATE), MATRIX_RATE),
            (torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused), OTHER_RATE),
        )

    def step(self, factor: float) -> None:
        """One update at `factor` of the full rates; gradients are cleared."""
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """State of both."""
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Restore both."""
        for (optimizer, _), state in zip(self._parts, states, strict=True):
            optimizer.load_state_dict(state)
