"""Final answers: where they stand, when two are equal, who wins a vote."""

import pytest

from thinkfold.cli.answers import final_answer, majority, same_answer, wilson


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So it is \\boxed{12}.", "12"),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("First line\n\n  42  \n", "42"),
        ("", None),
        ("  \n ", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1,200", "1200"),
        ("1200.0", "$1200$"),
        (".5", "2/4"),
        ("7.", "7"),
        ("a  b", "A b"),
        ("\\frac{1}{2}", "0.5"),
        ("-1,000.50", "-1000.5"),
    ],
)
def test_equal_answers(left: str, right: str) -> None:
    assert same_answer(left, right)


@pytest.mark.parametrize(("left", "right"), [("1,2", "12"), ("1,2,3", "123"), ("1/0", "0"), ("A", "a"), ("7", "70")])
def test_different_answers(left: str, right: str) -> None:
    assert not same_answer(left, right)


def test_majority_counts_classes_and_takes_the_first_on_a_tie() -> None:
    assert majority(["3", "4.0", None, "4", "5"]) == 1
    assert majority(["2", "1", "1", "2"]) == 0
    assert majority([None, None]) is None
    assert majority([]) is None


def test_wilson_interval() -> None:
    low, high = wilson(190, 200)
    assert (round(low, 4), round(high, 4)) == (0.9104, 0.9726)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    assert wilson(0, 0) == (0.0, 1.0)
