"""A fold selector of your own beside the built-in ones: how wrong does attention get with 32 of 256 entries?"""

import torch

from thinkfold.fold import gate, selectors
from thinkfold.fold.compaction import choose, uniform_budget
from thinkfold.fold.segments import Segments, Summary, attend, raw_entries


class ValueNorm:
    """Keeps the tokens with the largest values. As a file in `fold/selectors` it is a selector by its name."""

    def select(self, segments: Segments, budget: torch.Tensor) -> Summary:
        return Summary(choose(segments.values.norm(dim=-1), budget))


torch.manual_seed(0)
layers, heads, tokens, dim, late = 2, 2, 256, 64, 32
keys, values = torch.randn(2, 1, layers, heads, tokens, dim)
values[..., ::16, :] *= 4  # some tokens say more than others
asked = keys[..., torch.randint(tokens // 16, (2 * late,)) * 16, :]  # and later ones ask for them
queries = asked + torch.randn_like(asked)


def seen_by(rows: torch.Tensor) -> Segments:
    lse = attend(rows, raw_entries(keys, values), dim**-0.5)[1]
    return Segments(keys, values, rows, lse, late=late, group=1, scale=dim**-0.5)


chosen_by, judged_by = seen_by(queries[..., :late, :]), seen_by(queries[..., late:, :])
budget = uniform_budget(layers, heads, 32)
methods = {name: selectors.create(name) for name in selectors.names()} | {"ValueNorm (yours)": ValueNorm()}
errors = {name: gate.estimate(judged_by, method.select(chosen_by, budget)).item() for name, method in methods.items()}
for name, error in sorted(errors.items(), key=lambda item: item[1]):
    print(f"{name:22} {error:.3f}")
