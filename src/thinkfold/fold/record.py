"""What attention saw of one text, and segments cut out of it with the queries that judge them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinkfold.fold.compaction import rotate
from thinkfold.fold.head_errors import Future
from thinkfold.fold.segments import Segments


@dataclass(frozen=True, slots=True)
class Record:
    """Queries, keys and values of a text's first tokens, after RoPE; `group` query heads read one KV head."""

    queries: Tensor  # [L, H, group, tokens, D]
    keys: Tensor  # [L, H, tokens, D]
    values: Tensor  # [L, H, tokens, D]
    scale: float

    def segment(
        self, start: int, end: int, now: int, late: Tensor, past: Tensor, ahead: tuple[int, ...], inv_freq: Tensor
    ) -> Segments:
        """The tokens `[start, end)` as one fold knows them before position `now`: nothing here looks further.

        `late` `[n]` are positions of real queries in `[end, now)`, `past` `[m]` those of queries that are turned to
        `ahead` positions after `now`, in turn. `inv_freq` is the model's own, as in `rotate`.
        """
        device = self.keys.device
        late, past = late.to(device), past.to(device)
        to = now + torch.tensor(ahead, device=device).repeat(len(past))[: len(past)]
        future = rotate(self.queries[:, :, :, past], to - past, inv_freq)
        rows = torch.cat((self.queries[:, :, :, late], future), dim=3).transpose(2, 3).flatten(2, 3)
        group = self.queries.shape[2]
        seen = torch.cat((late, to)).repeat_interleave(group)
        hidden = torch.arange(now, device=device) > seen.unsqueeze(-1)
        lse = torch.stack(
            [
                (q @ k[:, :now].transpose(-1, -2) * self.scale).masked_fill_(hidden, -torch.inf).logsumexp(-1)
                for q, k in zip(rows, self.keys, strict=True)
            ]
        )
        raw = (self.keys[None, :, :, start:end], self.values[None, :, :, start:end])
        return Segments(*raw, rows[None], lse[None], late=len(late), group=group, scale=self.scale)

    def future(self, positions: Tensor) -> Future:
        """The queries at `positions` `[n]`, and what they read from everything up to there."""
        positions = positions.to(self.keys.device)
        hidden = torch.arange(self.keys.shape[2], device=self.keys.device) > positions.unsqueeze(-1)
        queries, outputs, lses = self.queries[:, :, :, positions], [], []
        for rows, keys, values in zip(queries, self.keys, self.values, strict=True):
            logits = (rows @ keys.unsqueeze(1).transpose(-1, -2) * self.scale).masked_fill_(hidden, -torch.inf)
            lses.append(logits.logsumexp(-1))
            outputs.append((logits - lses[-1].unsqueeze(-1)).exp() @ values.unsqueeze(1))
        return Future(queries, torch.stack(outputs), torch.stack(lses))
