"""The voting relation: bug cases 65 to 72, and properties over random answers."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinkfold.control import symbolic as symbolic_module
from thinkfold.control.embedding import EmbeddingError, Vector, unit
from thinkfold.control.equality import Equality, Partition, Rung
from thinkfold.control.symbolic import Patience, Symbolic, is_small

SAME = [
    ("0.125", "1/8", r"\tfrac18"),
    ("016", "16"),
    ("2.50", "5/2"),
    (r"-\frac34", "-0.75"),
    ("1.2e3", "1200"),
    ("+7", "7"),
    (r"2\sqrt2", r"\sqrt8"),
    ("0.333333", "1/3"),
    ("0.666666", "0.666667", "2/3"),  # cut and rounded
    (r"\sqrt{2}", "1.414214"),
    (r"(x+1)^2", "x^2+2x+1"),
    ("y=2x+1", "2x+1=y"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt 2}"),
]
DIFFERENT = [
    ("2^{-60}", "2^{-61}"),
    ("1/30!", "1/31!"),
    ("33.3", "100/3"),
    ("1-1/e", "1+1/e"),
    ("12:00", "1:00"),
    ("2", "200"),
    ("0.5", "50"),
    ("1000", "1000.05"),
    ("0.33333", "1/3"),
    ("(1,2)", "[1,2]"),
    ("x+1", "x-1"),
]
SAME_AMOUNTS = [
    ("12,345", "12345", "12{,}345", r"12\,345"),
    (r"\$4,000", "4000"),
    (r"40\%", "40 percent", r"\boxed{40 \text{ percent}}"),
    ("9 cm", r"9\text{ cm}"),
    ("40%", "0.4"),
    ("9 cm", "9"),
    ("1, 2", "2 and 1"),
]
OTHER_AMOUNTS = [
    ("1,2", "12"),
    ("(1,234)", "1234"),
    ("1,23", "123"),
    ("9 cm", "9 m"),
    ("40%", "4%"),
    ("40%", "40"),
]
HOSTILE = [
    r"\boxed{7^{7^{7^{7}}}}",
    "9**9**9**9",
    "2**30**5",
    "(" * 10**6 + "1" + ")" * 10**6,
    "9" * 100_000,
    '__import__("os")',
    "10^{100000}!",
]


@pytest.fixture(scope="module")
def symbolic() -> Iterator[Symbolic]:
    with Symbolic(seconds=5.0) as checker:
        yield checker


@pytest.fixture(scope="module")
def equality(symbolic: Symbolic) -> Equality:
    return Equality(symbolic)


def classes(found: Partition, answers: Sequence[str | None]) -> set[frozenset[str]]:
    return {frozenset(str(answers[i]) for i in one.members) for one in found.classes}


def test_case_65_equal_answers_win_together(equality: Equality) -> None:
    votes = ["1/2", "0.5", r"\frac{1}{2}", "3", "3"]
    for order in set(itertools.permutations(votes)):
        found = equality.partition(order)
        leader = max(found.classes, key=lambda one: len(one.members))
        assert sorted(len(one.members) for one in found.classes) == [2, 3]
        assert leader.rung is Rung.NUMBER
        assert leader.answer == next(text for text in order if text != "3")


@pytest.mark.parametrize("spellings", SAME, ids=lambda s: s[0])
def test_case_66_same_numbers(equality: Equality, spellings: tuple[str, ...]) -> None:
    for order in itertools.permutations(spellings):
        assert len(equality.partition(order).classes) == 1


@pytest.mark.parametrize("spellings", DIFFERENT, ids=lambda s: s[0])
def test_case_66_different_numbers(equality: Equality, spellings: tuple[str, str]) -> None:
    for order in itertools.permutations(spellings):
        assert len(equality.partition(order).classes) == 2


def test_case_66_a_decimal_of_two_exact_values_joins_neither(equality: Equality) -> None:
    answers = ["0.333333", "1/3", "3333334/10000000"]
    assert len(equality.partition(answers).classes) == 3
    assert len(equality.partition(answers[:2]).classes) == 1


def test_case_66_the_rung_says_what_was_needed(equality: Equality) -> None:
    assert equality.partition(["7", "7"]).classes[0].rung is Rung.CANONICAL
    assert equality.partition(["0.333333", "1/3"]).classes[0].rung is Rung.DECIMAL
    assert equality.partition([r"2\sqrt2", r"\sqrt8"]).classes[0].rung is Rung.SYMBOLIC
    assert equality.partition(["9", "9 cm"]).classes[0].rung is Rung.UNIT


@pytest.mark.parametrize("spellings", SAME_AMOUNTS, ids=lambda s: s[0])
def test_case_68_same_amounts(equality: Equality, spellings: tuple[str, ...]) -> None:
    for order in itertools.permutations(spellings):
        assert len(equality.partition(order).classes) == 1


@pytest.mark.parametrize("spellings", OTHER_AMOUNTS, ids=lambda s: s[0])
def test_case_68_different_amounts(equality: Equality, spellings: tuple[str, str]) -> None:
    for order in itertools.permutations(spellings):
        assert len(equality.partition(order).classes) == 2


def test_case_68_a_bare_number_between_two_units_stays_alone(equality: Equality) -> None:
    for order in itertools.permutations(["9", "9 cm", "9 m"]):
        assert len(equality.partition(order).classes) == 3


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda s: s[:12])
def test_case_72_hostile_answers_return_at_once(hostile: str, symbolic: Symbolic) -> None:
    symbolic.read("x")  # the process runs
    took: list[float] = []

    def compare() -> None:
        started = time.process_time()
        found = Equality(symbolic).partition([hostile, hostile, "7"])
        took.append(time.process_time() - started)
        assert [len(one.members) for one in found.classes] == [2, 1]

    compare()
    thread = threading.Thread(target=compare)
    thread.start()
    thread.join(timeout=20)
    assert len(took) == 2 and max(took) < 0.1
    assert not is_small(hostile) or "import" in hostile


def test_case_72_a_slow_formula_is_killed_and_the_next_one_is_answered() -> None:
    with Symbolic(seconds=0.2) as checker:
        slow = r"\prod_{k=1}^{900} (x^{k} + y^{k} + 1)"
        assert is_small(slow)
        patience = Patience(1)
        assert checker.read(slow, patience) is None and patience.left == 0
        assert checker.read(slow, patience) is None and patience.left == 0, "what is known is not asked again"
        assert checker.read("x+x", patience) is None, "out of patience"
        assert Equality(checker).partition([slow, "1"]).classes[0].rung is Rung.CANONICAL


def test_case_72_a_slow_formula_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one process is busy another one answers, and who waits for the slow one is out of time alone."""
    with Symbolic(seconds=30.0) as checker:
        assert checker.same("x+x", "2x")
        asked, go_on = threading.Event(), threading.Event()
        ask = symbolic_module._Worker.ask

        def slow_first(self: object, line: str, seconds: float) -> dict:
            if "slow" not in line:
                return ask(self, line, seconds)  # pyright: ignore[reportArgumentType]
            asked.set()
            assert go_on.wait(60)
            raise TimeoutError

        monkeypatch.setattr(symbolic_module._Worker, "ask", slow_first)
        mine, others = Patience(2), Patience(2)
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(checker.read("slow", mine)))
        thread.start()
        assert asked.wait(60)
        assert checker.same("y+y", "2y", others), "answered while the slow one runs"
        go_on.set()
        thread.join(60)
        assert found == [None] and (mine.left, others.left) == (1, 2)


def test_case_72_the_worker_stops_and_starts_again(symbolic: Symbolic) -> None:
    symbolic.stop()
    assert symbolic.same("3x+x", "4x")


def test_a_checker_whose_process_cannot_start_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with Symbolic() as checker:
        assert checker.read("x") is None
        assert len(Equality(checker).partition(["x+x", "2x"]).classes) == 2


class Compass:
    """An embedder by the first word: north and east are at right angles, north-north-east is near north."""

    ANGLES = {"north": (1.0, 0.0), "nearly": (0.95, 0.31225), "more": (0.80, 0.6), "east": (0.0, 1.0)}  # noqa: RUF012

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        return [unit(self.ANGLES[text.split()[0]]) for text in texts]


def test_embeddings_join_by_complete_link() -> None:
    relation = Equality(embedder=Compass())
    answers = ["north it lies", "nearly there it lies", "more or less", "east it is"]
    found = relation.partition(answers)
    # nearly-more is .95 alike, north-nearly .95, but north-more .8 keeps all three from one class
    assert sorted(len(one.members) for one in found.classes) == [1, 1, 2]
    joined = next(one for one in found.classes if len(one.members) == 2)
    assert joined.rung is Rung.EMBEDDING and joined.answer in answers
    for order in itertools.permutations(answers):
        assert classes(relation.partition(order), order) == classes(found, answers)


def test_the_representative_of_an_embedding_class_is_its_medoid() -> None:
    relation = Equality(embedder=Compass(), min_cosine=0.75)
    answers = ["north it lies", "more or less", "nearly there"]
    assert relation.partition(answers).classes[0].answer == "nearly there"


def test_a_failing_embedder_falls_back_to_letters(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def embed(self, texts: Sequence[str]) -> list[Vector]:
            raise EmbeddingError("gone")

    found = Equality(embedder=Broken()).partition(["the red house stands there", "the red house stand there"])
    assert found.classes[0].rung is Rung.EDIT
    assert "gone" in caplog.text


def test_texts_are_embedded_once_and_a_broken_embedder_is_not_asked_again() -> None:
    class Counting(Compass):
        def __init__(self) -> None:
            self.asked: list[list[str]] = []
            self.broken = False

        def embed(self, texts: Sequence[str]) -> list[Vector]:
            self.asked.append(list(texts))
            if self.broken:
                raise EmbeddingError("gone")
            return super().embed(texts)

    embedder = Counting()
    relation = Equality(embedder=embedder)
    relation.partition(["north it lies", "east it is"])
    relation.partition(["north it lies", "east it is", "more or less"])
    assert embedder.asked == [["east it is", "north it lies"], ["more or less"]]
    embedder.broken = True
    for _ in range(2):
        relation.partition(["north it lies", "nearly there it lies"])
    assert len(embedder.asked) == 3


def test_likeness_never_joins_other_numbers_or_a_negation() -> None:
    relation = Equality()
    for a, b in (
        ("there are 12 apples in the large basket", "there are 13 apples in the large basket"),
        ("this large number is prime for sure", "this large number is not prime for sure"),
    ):
        assert not relation.same(a, b)
    assert relation.same("There are 12 apples in the big basket", "there are 12 apples in the big baskets")


NUMBERS = ["1/2", "0.5", "0.50", "3", "3.0", "3 cm", "3 m", "1/3", "0.333333", "0.3333333", "33%", "0.33", "(B)", "B"]
OTHERS = [
    "b",
    "yes",
    "Yes.",
    "1,2",
    "2, 1",
    "(1,2)",
    "x+1",
    "1+x",
    "5 apples",
    "5 apple",
    "5",
    r"\$5",
    "it is so",
    "it is so!",
]
ANSWERS = st.sampled_from(NUMBERS + OTHERS)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(ANSWERS, st.none()), max_size=12), st.randoms(use_true_random=False))
def test_classes_do_not_depend_on_order(answers: list[str | None], shuffle: random.Random) -> None:
    relation = Equality()
    found = relation.partition(answers)
    members = sorted(index for one in found.classes for index in one.members)
    assert members == [index for index, answer in enumerate(answers) if answer is not None]
    moved = list(answers)
    shuffle.shuffle(moved)
    assert classes(relation.partition(moved), moved) == classes(found, answers)
    assert all(one.representative in one.members and one.answer == answers[one.representative] for one in found.classes)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_the_relation_is_reflexive_and_symmetric(a: str, b: str) -> None:
    relation = Equality()
    assert relation.same(a, a)
    assert relation.same(a, b) == relation.same(b, a)


@settings(max_examples=150, deadline=None)
@given(st.lists(ANSWERS, min_size=2, max_size=8), st.lists(st.integers(1, 4), min_size=8, max_size=8))
def test_classes_do_not_depend_on_counts(answers: list[str], counts: list[int]) -> None:
    repeated = [answer for answer, count in zip(answers, counts, strict=False) for _ in range(count)]
    relation = Equality()
    assert classes(relation.partition(repeated), repeated) == classes(relation.partition(answers), answers)
