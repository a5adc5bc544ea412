"""The best of several samples, by a verifier of one's own: a Countdown answer is easy to check and hard to find."""

import re
import sys
from collections.abc import Sequence

from thinkfold import LLM, SamplingParams
from thinkfold.types import BestOfParams, Judged

NUMBERS, TARGET = [9, 4, 7], 43
QUESTION = (
    f"Use the numbers {', '.join(map(str, NUMBERS))} exactly once each, with + - * / and brackets, to make {TARGET}."
)


def checks(question: str, judged: Sequence[Judged]) -> list[float]:
    """1 for an expression that uses every number once and makes the target, .2 for one that only uses them."""
    scores = []
    for one in judged:
        boxed = re.findall(r"\\boxed\{([^{}=]*)", one.answer) or [""]
        used = sorted(map(int, re.findall(r"\d+", boxed[-1]))) == sorted(NUMBERS)
        scores.append((1.0 if value(boxed[-1]) == TARGET else 0.2) if used else 0.0)
    return scores


def value(text: str) -> float | None:
    """What an expression of numbers, brackets and + - * / makes."""
    try:
        return eval(text) if re.fullmatch(r"[\d\s()*/+-]{1,60}", text) and "**" not in text else None
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None


with LLM(sys.argv[1] if len(sys.argv) > 1 else "pebble") as llm:
    chat = [{"role": "user", "content": QUESTION}]
    reply = llm.chat(chat, SamplingParams(temperature=0.8, max_tokens=1500), best_of=BestOfParams(checks, n=4))[0]
print(reply.outputs[0].text.strip())
for found in reply.outcome.scores:
    print(f"sample {found.sample}: {found.answer} scores {found.score}")
