"""Draws docs/images/kv_entries.svg: KV entries of one long answer over its tokens, folded and raw, from a real run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib

from thinkfold import AsyncEngine, EngineConfig, FoldParams, SamplingParams, ThinkingParams
from thinkfold.pebble import score
from thinkfold.pebble.suites import problem_at
from thinkfold.types import Fold

matplotlib.use("svg")
OUT = Path(__file__).parents[1] / "docs" / "images" / "kv_entries.svg"
RAW, FOLDED, INK = "#b45309", "#1d4ed8", "#374151"


async def run(suite: str, question: int) -> tuple[int, int, list[tuple[int, Fold]], bool]:
    """Prompt tokens, output tokens, folds with the output tokens at which they were told, and whether it is right."""
    engine = await AsyncEngine.start(EngineConfig(fold_policy="eager"))
    problem = problem_at(suite, question)
    text, total, folds = "", 0, []
    try:
        prompt = engine.prompts.encode_chat([{"role": "user", "content": problem.question}])
        sampling, thinking = SamplingParams(temperature=0.0), ThinkingParams(thinking_token_budget=-1)
        async for news in engine.generate(prompt, sampling, thinking, FoldParams(policy="eager")):
            for output in news.outputs:
                total = output.num_output_tokens
                folds += [(total, fold) for fold in output.folds if not fold.refused]
                text += output.text
    finally:
        await engine.stop()
    return len(prompt), total, folds, score(problem, text) >= 1.0


def entries(prompt: int, total: int, folds: list[tuple[int, Fold]]) -> list[float]:
    """Entries held after each output token."""
    held, folded, queue = [], 0.0, list(folds)
    for token in range(total + 1):
        while queue and queue[0][0] <= token:
            fold = queue.pop(0)[1]
            folded += fold.end - fold.start - fold.entries
        held.append(prompt + token - folded)
    return held


def draw(prompt: int, held: list[float], out: Path) -> None:
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "thinkfold", "text.color": INK, "axes.edgecolor": INK})
    figure, axes = pyplot.subplots(figsize=(7.6, 3.4), layout="constrained")
    total = len(held) - 1
    steps = [after - before for before, after in pairwise(held)]
    corners = [0, *(t for t in range(1, total) if steps[t - 1] != steps[t]), total]
    line = [held[t] for t in corners]
    axes.plot(corners, line, color=FOLDED, linewidth=1.4)
    axes.plot([0, total], [prompt, prompt + total], color=RAW, linewidth=1.4)
    axes.fill_between(corners, line, [prompt + t for t in corners], color=RAW, alpha=0.08)
    axes.annotate("raw", (total * 0.72, prompt + total * 0.72), xytext=(-30, 8), textcoords="offset points", color=RAW)
    peak = max(range(total + 1), key=held.__getitem__)
    axes.annotate(
        f"folded: {held[peak]:.0f} at most",
        (peak, held[peak]),
        xytext=(-120, 22),
        textcoords="offset points",
        color=FOLDED,
    )
    axes.set(xlabel="output tokens", ylabel="KV entries held", xlim=(0, total), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> int:
    """Run one question, draw, and say what the picture shows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="long")
    parser.add_argument("--question", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    prompt, total, folds, right = asyncio.run(run(args.suite, args.question))
    held = entries(prompt, total, folds)
    draw(prompt, held, args.out)
    print(
        f"{args.out.name}: {total} output tokens, {len(folds)} folds, at most {max(held):.0f} of {prompt + total} "
        f"entries, the answer is {'right' if right else 'wrong'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
