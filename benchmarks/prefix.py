"""What is left of prefix caching when a shared system prompt drifts by blanks and line ends?

One system prompt, many requests; `clean` sends it unchanged, `drift_on` and `drift_off` send it with random trailing
blanks and CRLF line ends, with prompt normalisation on and off. Hit rate: cached share of the prompt tokens of all
requests after the first. `kept_share` is the hit rate over that of `clean`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from random import Random

from thinkfold import AsyncEngine, EngineConfig, SamplingParams
from thinkfold.cli import rows
from thinkfold.llm import collect

LINES = 40
SYSTEM = "\n".join(f"Rule {i}: answer question {i} of the list with the number {i * 37 % 101}." for i in range(LINES))


def drifted(text: str, rng: Random) -> str:
    """The text with random blanks at the ends of lines, and CRLF in half of the requests."""
    lines = [line + rng.choice(["", "", " ", "  ", "\t"]) for line in text.split("\n")]
    return rng.choice(["\n", "\r\n"]).join(lines)


async def hit_rate(model: str, requests: int, seed: int, *, drift: bool, normalize: bool) -> float:
    """Cached share of the prompt tokens of all requests after the first."""
    rng = Random(seed)
    engine = await AsyncEngine.start(EngineConfig(model=model, normalize_prompts=normalize))
    cached = total = 0
    try:
        for number in range(requests + 1):
            system = drifted(SYSTEM, rng) if drift else SYSTEM
            messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {number}?"}]
            prompt = engine.prompts.encode_chat(messages)
            output = await collect(engine, prompt, SamplingParams(max_tokens=1, temperature=0.0))
            if number:
                cached += output.costs.cached_tokens
                total += output.costs.prompt_tokens
    finally:
        await engine.stop()
    return cached / total


def main(argv: Sequence[str] | None = None) -> int:
    """Run the three cases, print and keep their rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench prefix", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="pebble", help="folder or hub id (default: the embedded model)")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    rates: dict[str, float] = {}
    for case, drift, normalize in (("clean", False, True), ("drift_on", True, True), ("drift_off", True, False)):
        rates[case] = asyncio.run(hit_rate(args.model, args.requests, args.seed, drift=drift, normalize=normalize))
        metrics = {"hit_rate": rates[case], "kept_share": rates[case] / rates["clean"], "n": args.requests}
        row = rows.make_row("prefix", case, metrics, seed=args.seed)
        if not args.no_record:
            rows.keep(row)
        print(
            json.dumps(row) if args.json else f"{case:10} hit rate {rates[case]:.3f}, kept {metrics['kept_share']:.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
