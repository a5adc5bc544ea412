"""Rules that stop thinking early, on scripted observations; numbers of the presets and knobs."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinkfold.control.early_stop import EarlyStopping, Guards
from thinkfold.control.facts import Facts, read_probe
from thinkfold.control.loops import tail_period
from thinkfold.control.rule import Action, AtBoundary, BoundaryKind, EndThinking, Peek, Peeked, Probe, Probed, Wrote
from thinkfold.control.shadow import Scoreboard
from thinkfold.errors import ParameterError
from thinkfold.types import ControlParams, EarlyStop, Preset, parse_control

SURE = math.log(0.96)


def stopping(**fields: object) -> EarlyStopping:
    return EarlyStopping(parse_control(fields))


def probed(at: int, text: str, probability: float = 0.9, tokens: int = 30) -> Probed:
    return Probed(at, text, math.log(probability), tokens)


def sentence(at: int, margin: float = math.nan, text: str = "") -> AtBoundary:
    return AtBoundary(at, BoundaryKind.SENTENCE, margin, text)


def paragraph(at: int, margin: float = math.nan) -> AtBoundary:
    return AtBoundary(at, BoundaryKind.PARAGRAPH, margin)


def rule_of(actions: list[Action]) -> str | None:
    return next((action.rule for action in actions if isinstance(action, EndThinking)), None)


@pytest.mark.parametrize(
    ("preset", "margin", "stops"),
    [
        ("exact", -1.0, False),
        ("conservative", 0.0, True),
        ("conservative", 0.1, False),
        ("aggressive", 1.0, True),
        ("aggressive", 1.1, False),
        ("balanced", 0.0, False),  # no probes have agreed
    ],
)
def test_margin_of_the_presets(preset: str, margin: float, stops: bool) -> None:
    assert (rule_of(stopping(preset=preset).observe(sentence(256, margin))) == "margin") is stops
    assert not stopping(preset=preset).observe(sentence(255, margin))


def test_balanced_margin_wants_two_agreeing_probes() -> None:
    rules = stopping(preset="balanced")
    rules.observe(probed(300, "7}", 0.5))
    assert not rules.observe(sentence(310, 0.25))
    rules.observe(probed(600, "\\frac{14}{2}}", 0.5))
    assert rule_of(rules.observe(sentence(610, 0.25))) == "margin"
    assert rules.observe(sentence(700, 0.0)) == []  # it has stopped


def test_balanced_stops_at_two_sure_probes_and_at_no_number_of_unsure_ones() -> None:
    sure = stopping(preset="balanced")
    assert [rule_of(sure.observe(probed(at, "0.5}", 0.98))) for at in (100, 200)] == [None, "consistency"]
    unsure = stopping(preset="balanced")
    ends = [unsure.observe(probed(100 * n, "0.5}", 0.99 if n % 2 else 0.97)) for n in range(1, 20)]
    assert not any(map(rule_of, ends))


def test_presets_differ_in_their_probes() -> None:
    def stopped_after(preset: str, probability: float) -> int | None:
        rules = stopping(preset=preset)
        return next((n for n in range(1, 9) if rule_of(rules.observe(probed(100 * n, "7}", probability)))), None)

    assert stopped_after("conservative", 0.98) == 3
    assert stopped_after("balanced", 0.98) == 2
    assert stopped_after("aggressive", 0.95) == 2
    assert stopped_after("aggressive", 0.996) == 1
    assert stopped_after("aggressive", 0.94) is None
    assert stopped_after("exact", 1.0) is None


@pytest.mark.parametrize("other", ["8}", "}", "7, but wait}"])
def test_a_different_empty_or_hedged_answer_breaks_the_row(other: str) -> None:
    rules = stopping(preset="conservative")
    texts = ["7}", "7}", other, "7}", "7}"]
    assert not any(rule_of(rules.observe(probed(100 * n, t, 0.98))) for n, t in enumerate(texts, 1))
    assert rule_of(rules.observe(probed(900, "7}", 0.98))) == "consistency"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7}.", "7"),
        ("\\frac{1}{2}} rest", "\\frac{1}{2}"),
        ("12\nmore", "12"),
        ("\\{1\\}} x", "\\{1\\}"),
        ("I know the number", "I know the number"),
        ("no, 7}", None),
        ("No", "No"),
        ("Wait, let me", None),
        ("}", None),
        ("", None),
    ],
)
def test_what_a_probe_says(text: str, answer: str | None) -> None:
    assert read_probe(text) == answer


def test_hopeless_thinking_ends_in_aggressive_only() -> None:
    for preset, expected in (("aggressive", "hopeless"), ("balanced", None)):
        rules = stopping(preset=preset)
        found = [rule_of(rules.observe(probed(100 * n, f"{n}}}", 0.3))) for n in range(1, 13)]
        assert found[:-1] == [None] * 11 and found[-1] == expected


def test_entropy_stops_by_level_and_variance_in_aggressive() -> None:
    rules = stopping(preset="aggressive")
    found = [rule_of(rules.observe(Peeked(128 * n, 0.05, 5))) for n in range(1, 12)]
    assert found.index("entropy") == 9  # the tenth peek, past 512 tokens
    restless = stopping(preset="aggressive")
    assert not any(rule_of(restless.observe(Peeked(128 * n, 0.1 * (n % 2), 5))) for n in range(1, 40))


def test_running_mean_and_variance_follow_the_formula() -> None:
    facts = Facts()
    values = [2.0, 1.0, 0.5, 0.5]
    mean, variance = values[0], None
    for n, value in enumerate(values):
        facts.record(Peeked(100 * n, value, 3))
        if n:
            mean = 0.2 * value + 0.8 * mean
            spread = (value - mean) ** 2
            variance = spread if variance is None else 0.2 * spread + 0.8 * variance
    assert facts.entropy == pytest.approx(mean)
    assert facts.variance == pytest.approx(variance)


def test_the_entropy_knob_alone_is_enough() -> None:
    rules = stopping(early_stop={"entropy": 0.1})
    assert rules.observe(paragraph(255)) == [] and rules.observe(paragraph(256)) == [Peek()]
    found = [rule_of(rules.observe(Peeked(at, 0.05, 5))) for at in (260, 512, 768)]
    assert found == [None, None, "entropy"]
    high = stopping(early_stop={"entropy": 0.1})
    assert not any(rule_of(high.observe(Peeked(100 * n, 0.11, 5))) for n in range(1, 30))


def test_the_confidence_knob_prefers_the_models_own_tag() -> None:
    rules = stopping(early_stop={"confidence": 0.95})
    assert rule_of(rules.observe(probed(200, "7}", 0.95))) is None
    assert rule_of(rules.observe(probed(300, "7}", 0.96))) == "confidence"
    tagged = stopping(early_stop={"confidence": 0.95})
    tagged.observe(sentence(100, text="so <confidence>0."))
    assert not tagged.observe(sentence(120, text="5</confidence> hm."))
    assert rule_of(tagged.observe(probed(300, "7}", 0.99))) is None  # it says itself that it is not sure
    assert rule_of(tagged.observe(sentence(400, text="<confidence> 97 % </confidence>"))) == "confidence"


def test_the_consistency_knob() -> None:
    rules = stopping(early_stop_threshold={"consistency": "3/4"})
    assert rules.observe(paragraph(256)) == [Probe(32)]
    texts = ["7}", "8}", "7.0}", "14/2}"]
    found = [rule_of(rules.observe(probed(100 * n, t, 0.2))) for n, t in enumerate(texts, 1)]
    assert found == [None, None, None, "consistency"]
    last_differs = stopping(early_stop={"consistency": "3/4"})
    assert not any(rule_of(last_differs.observe(probed(n, t))) for n, t in enumerate(["7}", "7}", "8}", "9}"], 1))


def test_knobs_add_to_a_preset() -> None:
    rules = stopping(preset="exact", early_stop={"consistency": "2/2"})
    assert [rule_of(rules.observe(probed(at, "7}"))) for at in (100, 200)] == [None, "consistency"]


def drive(rules: EarlyStopping, length: int, entropy: float, step: int = 32, tokens: int = 18) -> list[int]:
    """Thinking in paragraphs of `step` tokens; looks come back at once. Returns where probes were taken."""
    places = []
    for at in range(step, length, step):
        actions = rules.observe(paragraph(at, 9.0))
        if Peek() in actions:
            actions = rules.observe(Peeked(at, entropy, 9))
        if Probe(32) in actions:
            places.append(at)
            rules.observe(probed(at, f"{at}}}", 0.5, tokens))
    return places


def test_peeks_come_by_ticks_and_probes_only_where_one_finds_the_answer_closed() -> None:
    rules = stopping(preset="balanced")
    assert drive(rules, 8192, entropy=0.31) == []
    assert rules.facts.peek_tokens == 9 * rules.facts.num_peeks <= 0.06 * 8192
    gaps = [b - a for a, b in pairwise(drive(stopping(preset="balanced"), 32_768, entropy=0.3, tokens=4))]
    assert gaps[0] == 256 and max(gaps) == gaps[-1] == 512


def test_all_looks_stay_within_their_share() -> None:
    rules = stopping(preset="balanced")
    places = drive(rules, 32_768, entropy=0.1, tokens=52)
    assert places[:2] == [256, 512] and places[2] * 0.06 >= 3 * 52  # two are free
    assert rules.facts.probe_tokens + rules.facts.peek_tokens <= 0.06 * 32_768
    assert len(places) < len(drive(stopping(preset="balanced"), 32_768, entropy=0.1, tokens=18))


def test_a_small_margin_opens_probes_without_a_peek() -> None:
    rules = stopping(preset="balanced")
    assert rules.observe(paragraph(300, 9.0)) == [Peek()]
    assert rules.observe(Peeked(300, 2.0, 9)) == []
    assert rules.observe(paragraph(320, 4.0)) == [Probe(32)]
    assert stopping(preset="balanced").observe(paragraph(300, math.nan)) == [Peek()]


def test_a_sure_answer_is_asked_for_again_soon() -> None:
    rules = stopping(preset="balanced")
    for at, probability in ((4000, 0.5), (5000, 0.99)):
        assert rules.observe(paragraph(at, 3.0)) == [Probe(32)]
        rules.observe(probed(at, "7}", probability))
    assert rules.observe(sentence(5120, 9.0)) == []
    assert rules.observe(sentence(5128, 9.0)) == [Probe(32)]  # before the tick, at a sentence, past the gate
    assert rule_of(rules.observe(probed(5128, "7}", 0.99))) == "consistency"


def test_a_dropped_probe_is_asked_again_after_a_tick() -> None:
    rules = stopping(early_stop={"consistency": "2/2"})
    asked = [at for at in range(32, 1200, 32) if rules.observe(paragraph(at)) == [Probe(32)]]
    assert asked == [256, 512, 768, 1024]


@pytest.mark.parametrize("guard", ["tools", "grammar", "code"])
def test_guards_switch_off_all_but_loops(guard: str) -> None:
    rules = EarlyStopping(ControlParams(Preset.AGGRESSIVE), Guards(**{guard: True}))
    assert rules.off_reason == guard
    assert rules.observe(sentence(500, -1.0)) == []
    assert rules.observe(paragraph(600)) == []
    assert rule_of(rules.observe(Wrote(900, (1, 2, 3, 4) * 64))) == "loop"


def test_two_probes_without_an_answer_switch_rules_off() -> None:
    rules = stopping(preset="aggressive")
    rules.observe(probed(100, "}", 0.99))
    rules.observe(probed(200, "wait, that", 0.99))
    assert rules.off_reason == "no answers"
    assert rules.observe(sentence(300, -1.0)) == [] and rules.observe(probed(400, "7}", 0.99)) == []


def test_loops_end_thinking() -> None:
    rules = stopping(preset="balanced")
    noise = random.Random(3)
    assert not rules.observe(Wrote(512, tuple(noise.randrange(50) for _ in range(512))))
    assert rule_of(rules.observe(Wrote(512 + 320, tuple(range(80)) * 4))) == "loop"
    assert not stopping(preset="exact").observe(Wrote(512, (1,) * 512))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(4, 9), st.lists(st.integers(0, 3), max_size=6))
def test_the_period_of_a_tail(piece: list[int], repeats: int, before: list[int]) -> None:
    tokens = [9, *before, 9, *piece * repeats]
    period = tail_period(tokens, 4, 4 * len(piece))
    assert period is not None and period <= len(piece)
    assert tokens[-4 * period :] == tokens[-period:] * 4


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(2, 4), st.integers(1, 12))
def test_the_period_of_a_tail_is_the_shortest(tokens: list[int], repeats: int, least: int) -> None:
    def holds(period: int) -> bool:
        length = max(least, repeats * period)
        return length <= len(tokens) and tokens[-length:-period] == tokens[len(tokens) - length + period :]

    assert tail_period(tokens, repeats, least) == next(filter(holds, range(1, len(tokens))), None)


def test_no_period_in_three_repeats() -> None:
    assert tail_period([0, *[1, 2, 3] * 3], 4, 4) is None


def test_shadow_mode_stops_nothing_and_judges() -> None:
    rules = stopping(preset="balanced", shadow=True)
    assert all(rule_of(rules.observe(probed(100 * n, "7}", 0.99))) is None for n in range(1, 4))
    assert rules.observe(sentence(350, 0.0)) == [Probe(32)]  # what would the answer be where the margin stops?
    rules.observe(probed(360, "8}", 0.5))
    verdicts = {v.stop.rule: v for v in rules.finish("7.0", 1000)}
    assert verdicts["consistency"].agreed and verdicts["consistency"].saved_tokens == 800
    assert not verdicts["margin"].agreed and verdicts["margin"].saved_tokens == 650
    assert {v.stop.rule: v.agreed for v in rules.finish(None, 1000)} == {"consistency": False, "margin": False}


def test_a_shadow_stop_without_an_answer_has_no_verdict() -> None:
    rules = stopping(preset="conservative", shadow=True)
    assert rules.observe(sentence(300, -1.0)) == [Probe(32)]
    assert rules.finish("7", 1000) == []


def test_a_rule_that_disagrees_switches_itself_off() -> None:
    board = Scoreboard()
    switched = [board.record("margin", "m", "maths", agreed=n % 40 != 0) for n in range(1, 600)]
    assert switched.count(True) == 1 and switched.index(True) == 439  # the eleventh of 500
    assert board.switched_off("m", "maths") == {"margin"} and not board.switched_off("m", "code")
    rules = EarlyStopping(ControlParams("aggressive"), switched_off=board.switched_off("m", "maths"))
    assert rules.observe(sentence(300, -1.0)) == []
    board.forget("margin", "m", "maths")
    assert not board.switched_off("m", "maths")
    steady = Scoreboard()
    assert not any(steady.record("margin", "m", "t", agreed=n % 50 != 0) for n in range(1, 2000))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"preset": "bold"}, "control.preset"),
        ({"presets": "exact"}, "control.presets"),
        ({"early_stop": 0.1}, "early_stop"),
        ({"early_stop": {}}, "early_stop"),
        ({"early_stop": {"entropy": 0}}, "early_stop.entropy"),
        ({"early_stop": {"entropy": True}}, "early_stop.entropy"),
        ({"early_stop": {"confidence": 95}}, "early_stop.confidence"),
        ({"early_stop": {"consistency": "3"}}, "early_stop.consistency"),
        ({"early_stop": {"consistency": "5/4"}}, "early_stop.consistency"),
        ({"early_stop": {"consistency": "2/4"}}, "early_stop.consistency"),
        ({"early_stop": {"consistency": 0.75}}, "early_stop.consistency"),
        ({"early_stop": {"patience": 3}}, "early_stop.patience"),
        ({"early_stop": {"entropy": 0.1}, "early_stop_threshold": {"entropy": 0.2}}, "early_stop_threshold"),
        ({"shadow": True}, "control.shadow"),
        ({"shadow": "yes", "preset": "exact"}, "control.shadow"),
    ],
)
def test_what_cannot_be_asked(given: dict[str, object], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse_control(given)
    assert caught.value.field == field


def test_what_can_be_asked() -> None:
    knobs = {"entropy": 0.1, "confidence": 0.95, "consistency": "3/4"}
    assert parse_control({"early_stop": knobs, "early_stop_threshold": dict(knobs)}).early_stop == EarlyStop(
        0.1, 0.95, (3, 4)
    )
    assert not parse_control({"preset": None}).asks and not parse_control({"preset": "exact"}).asks
    assert parse_control({"preset": "balanced"}).asks
