"""Pebble's tasks: checkers accept their own traces' answers and refuse damaged ones; suites are fixed."""

import ast
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Any

import pytest

from thinkfold.pebble import SUITES, Problem, extract_boxed, pebble_path, problems, score
from thinkfold.pebble.problem import is_evaluation
from thinkfold.pebble.tasks import BORROWED, FAMILIES, chain_sum, gcd, generate, leg_counting, number_sorting, own_score
from training.samples import fresh
from training.traces import SEGMENT_TOKEN, UNLEARNED, WRITERS, write

SIZES: dict[str, dict[str, Any]] = {"sums": {"terms": (1, 6), "digits": (1, 4)}, "boxes": {"operations": (1, 60)}}


def boxed(answer: str) -> str:
    return f"\n</think>\n\nThe answer is \\boxed{{{answer}}}."


def damaged(answer: str, rng: Random) -> str:
    """The answer with one digit changed; a list (whose judge tolerates small errors) reversed."""
    if answer.startswith("["):
        return str(ast.literal_eval(answer)[::-1])
    places = [i for i, char in enumerate(answer) if char.isdigit()]
    at = rng.choice(places)
    other = rng.choice([digit for digit in "0123456789" if digit != answer[at]])
    return answer[:at] + other + answer[at + 1 :]


@pytest.mark.parametrize("task", sorted(FAMILIES))
def test_checker_accepts_its_traces_and_refuses_damage(task: str) -> None:
    if task in BORROWED:
        pytest.importorskip("reasoning_gym")
    rng = Random(task)
    for _ in range(40):
        problem = generate(task, rng, **SIZES.get(task, {}))
        trace = write(problem, rng)
        for judge in (score, own_score):
            assert judge(problem, boxed(trace.answer)) == 1.0
            assert judge(problem, boxed(damaged(trace.answer, rng))) == 0.0
            assert judge(problem, trace.answer) == 0.0, "an answer outside a box counts as none"
            assert judge(problem, f"<think>{boxed(trace.answer)[11:]}") in (0.0, 1.0)


@pytest.mark.parametrize("task", sorted(WRITERS))
def test_traces_state_the_answer_and_mark_their_slips(task: str) -> None:
    rng = Random(f"trace {task}")
    for _ in range(40):
        problem = generate(task, rng, **SIZES.get(task, {}))
        trace = write(problem, rng)
        assert 0 <= trace.settled < len(trace.segments)
        assert trace.thinking().count(UNLEARNED) % 2 == 0
        assert (trace.delimiter == SEGMENT_TOKEN) == (task == "graph")
        last = trace.thinking(trace.settled + 1).replace(UNLEARNED, "")
        if task not in BORROWED[2:3]:  # a sorted list is written in another form
            assert (trace.answer if task == "countdown" else problem.answer) in last


def test_planted_slips_are_caught_and_corrected() -> None:
    rng = Random(5)
    slips = 0
    for _ in range(150):
        problem = generate("sums", rng, terms=(2, 5), digits=(2, 4))
        trace = write(problem, rng)
        slips += UNLEARNED in trace.thinking()
        assert trace.answer == problem.answer
        if UNLEARNED in trace.thinking():
            assert "Wait" in trace.thinking()
    assert slips > 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is \\boxed{42}.", "42"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2", None),
        ("\\boxed{{1}", None),
        ("\\boxed{}", ""),
        ("no box", None),
        ("", None),
    ],
)
def test_extract_boxed(text: str, expected: str | None) -> None:
    assert extract_boxed(text) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("(2+3)*4", 1.0),
        ("4*(3+2)", 1.0),
        ("(2+3)*4=20", 1.0),
        ("2+3*4", 0.0),
        ("(2+3)*4*1", 0.0),
        ("20", 0.0),
        ("(2+3)**4", 0.0),
        ("2/0+3*4", 0.0),
        ("__import__('os').getcwd()", 0.0),
        ("(" * 150 + "2", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_reads_expressions_safely(answer: str, expected: float) -> None:
    problem = Problem("countdown", "", "20", {"numbers": [2, 3, 4], "target": 20})
    assert score(problem, boxed(answer)) == expected


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_suites_are_deterministic_and_do_not_depend_on_n(suite: str) -> None:
    first, again = list(problems(suite, 8)), list(problems(suite, 8))
    assert first == again
    assert [p.data for p in first] == [p.data for p in again]
    assert first[5:7] == list(problems(suite, 2, offset=5))
    assert all(is_evaluation(p.question) for p in first)
    assert len({p.question for p in first}) == 8


def test_suites_keep_their_problems() -> None:
    """A change here means that published numbers no longer belong to these suites."""
    digests = {
        suite: blake2b("\n".join(p.question for p in problems(suite, 8)).encode(), digest_size=8).hexdigest()
        for suite in SUITES
    }
    assert digests == {"medium": "3d87c8b79a639b5f", "hard": "b5349ee2042eb78a", "long": "374f99bd0a94ad88"}


def test_unknown_suite_is_refused() -> None:
    with pytest.raises(ValueError, match="there are medium, hard, long"):
        problems("easy", 1)


def test_training_never_draws_evaluation_problems() -> None:
    rng = Random(1)
    drawn = [fresh("gcd", {"largest": 60}, rng) for _ in range(300)]
    assert not any(is_evaluation(problem.question) for problem in drawn)


def _chain_sum(entry: dict[str, Any]) -> Problem:
    expression = entry["metadata"]["expression"].replace("- ", "-").replace("+ ", "+")
    return chain_sum.build([int(term) for term in expression.split()])


REBUILD: dict[str, Callable[[dict[str, Any]], Problem]] = {
    "chain_sum": _chain_sum,
    "gcd": lambda entry: gcd.build(entry["metadata"]["numbers"]),
    "number_sorting": lambda entry: number_sorting.build(
        entry["metadata"]["original_numbers"], entry["metadata"]["direction"]
    ),
    "leg_counting": lambda entry: leg_counting.build(entry["metadata"]["animals"]),
}


@pytest.mark.parametrize("task", BORROWED)
def test_borrowed_questions_are_reasoning_gyms_own(task: str) -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    options = {"min_digits": 2} if task == "chain_sum" else {}  # "- 0" loses its sign when read back
    for entry in factory.create_dataset(task, size=40, seed=3, **options):
        problem = REBUILD[task](entry)
        assert (problem.question, problem.answer) == (entry["question"], entry["answer"])


def test_pebble_path_holds_what_transformers_reads() -> None:
    names = {path.name for path in pebble_path().iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
