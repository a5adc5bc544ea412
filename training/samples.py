"""One training text at a time: prompt through the chat template, and what the model is to write."""

import json
from pathlib import Path
from random import Random
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from thinkfold.pebble.problem import Problem, is_evaluation
from thinkfold.pebble.tasks import generate
from training.chat import SYSTEMS, greeting, outside
from training.mixture import draw
from training.traces import write

Message = dict[str, str]

GREETING_RATE, OUTSIDE_RATE, DIRECT_RATE = 0.015, 0.03, 0.025
EARLY_RATE, HISTORY_RATE, SYSTEM_RATE = 0.04, 0.05, 0.2
# Small enough to answer without thinking.
DIRECT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sums", {"terms": (1, 2), "digits": (1, 2)}),
    ("chain_sum", {"terms": (2, 3), "digits": (1, 3)}),
    ("gcd", {"numbers": (2, 2), "largest": 100}),
    ("leg_counting", {"animals": (3, 4)}),
    ("number_sorting", {"numbers": (3, 6)}),
    ("boxes", {"boxes": (2, 3), "operations": (2, 5)}),
    ("graph", {"towns": (4, 8)}),
    ("mental", {"terms": (1, 1)}),
)


class Template:
    """Pebble's chat template, rendered as transformers renders it."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(config["chat_template"])

    def prompt(self, messages: list[Message], enable_thinking: bool = True) -> str:
        """The prompt that the model continues."""
        return self._template.render(messages=messages, add_generation_prompt=True, enable_thinking=enable_thinking)


def answer_sentence(answer: str) -> str:
    """The one sentence that follows the thinking."""
    return f"The answer is \\boxed{{{answer}}}."


def fresh(task: str, size: dict[str, Any], rng: Random) -> Problem:
    """A problem that is not kept for evaluation."""
    while True:
        problem = generate(task, rng, **size)
        if not is_evaluation(problem.question):
            return problem


def _history(rng: Random) -> list[Message]:
    turns: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.15:
            question, reply = greeting(rng)
        else:
            task, size = rng.choice(DIRECT)
            problem = fresh(task, size, rng)
            question, reply = problem.question, answer_sentence(write(problem, rng).answer)
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return turns


def _talk(rng: Random) -> tuple[str, str, str]:
    """Prompt, thought and reply outside the tasks."""
    if rng.random() < GREETING_RATE / (GREETING_RATE + OUTSIDE_RATE):
        text, reply = greeting(rng)
        return text, "This is a greeting.", reply
    text, reply = outside(rng)
    return text, "This is none of my tasks.", reply


def _thought(problem: Problem, rng: Random) -> tuple[str, str]:
    """Thinking, at times closed early at a segment's end, and the answer."""
    trace = write(problem, rng)
    if rng.random() >= EARLY_RATE:
        return trace.thinking(), trace.answer
    first = trace.settled + 1 if rng.random() < 0.5 else 1
    return trace.thinking(rng.randint(first, len(trace.segments))), trace.answer


def sample(stage: int, rng: Random, template: Template) -> tuple[str, str]:
    """Prompt and completion of one training text; UNLEARNED marks stand in the completion."""
    messages: list[Message] = []
    if rng.random() < SYSTEM_RATE:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    if rng.random() < HISTORY_RATE:
        messages += _history(rng)
    thinks, kind = True, rng.random()
    if kind < GREETING_RATE + OUTSIDE_RATE:
        question, thought, reply = _talk(rng)
        thinks = rng.random() < 0.8
    elif kind < GREETING_RATE + OUTSIDE_RATE + DIRECT_RATE:
        problem = fresh(*(rng.choice(DIRECT) if rng.random() < 0.8 else draw(0, rng)), rng)
        question, thought, reply = problem.question, "", answer_sentence(write(problem, rng).answer)
        thinks = False
    else:
        problem = fresh(*draw(stage, rng), rng)
        thought, answer = _thought(problem, rng)
        question, reply = problem.question, answer_sentence(answer)
    prompt = template.prompt([*messages, {"role": "user", "content": question}], thinks)
    opening = f"<think>\n{thought}\n</think>\n\n" if thinks else ""
    return prompt, f"{opening}{reply}<|im_end|>"
