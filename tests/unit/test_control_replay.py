"""Replays of rules and votes on hand-written records, the recorder on a scripted engine, and the bench on a file."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinkfold.cli import bench, records, rows
from thinkfold.cli.arms import Arm, Shard
from thinkfold.cli.evaluation import Question, Result, Sample
from thinkfold.cli.recording import Share
from thinkfold.config import EngineConfig
from thinkfold.control.baselines import Compared, deepconf, majority, one_by_one
from thinkfold.control.early_stop import EarlyStopping
from thinkfold.control.probing import answer_part
from thinkfold.control.replay import Place, Record, oracle, replay, replay_vote
from thinkfold.engine.language import Language, load_language
from thinkfold.errors import ParameterError
from thinkfold.types import (
    Boundary,
    CompletionOutput,
    Costs,
    FoldParams,
    Phase,
    ProbeResult,
    RequestOutput,
    SamplingParams,
    ThinkingParams,
    ThinkingPolicy,
    TokenStats,
    VoteParams,
    parse_control,
)

SURE, UNSURE = -0.01005, -0.69315  # of probabilities .99 and .5, with as many digits as records keep


def place(
    at: int, answer: str | None = None, *, right: bool = False, margin: float = 9.0, entropy: float = 2.0
) -> Place:
    if answer is None:
        return Place(at, "sentence", margin)
    return Place(at, "paragraph", margin, entropy, 9, f"{answer}}}", SURE if right else UNSURE, 12, right)


def record(*places: Place, tokens: int = 1000, correct: bool = True, answer: str = "7", index: int = 0) -> Record:
    ids = list(range(tokens))
    reply = f"The answer is \\boxed{{{answer}}}."
    return Record(index, "t", tokens, tokens + 10, reply, correct, ids, list(places), stop_tokens=3)


def settled_at(first: int, tokens: int = 1000, answer: str = "7", index: int = 0) -> Record:
    places = [
        place(at, answer if at >= first else str(at), right=at >= first, entropy=0.0 if at >= first else 2.0)
        for at in range(100, tokens, 100)
    ]
    return record(*places, tokens=tokens, answer=answer, index=index)


def test_a_rule_stops_where_the_probes_agree_and_looks_are_counted() -> None:
    found = replay(settled_at(400), EarlyStopping(parse_control({"early_stop": {"consistency": "2/2"}})))
    # at 300 and 600 by the tick of 256, at 800 because the answer at 600 was sure and 128 tokens have passed
    assert (found.rule, found.correct) == ("consistency", True)
    assert found.look_tokens == 3 * 12
    assert found.tokens == 800 + 36 + 3


def test_an_early_wrong_answer_costs_accuracy() -> None:
    wrong = [replace(place(at, "5"), mean_logprob=SURE) for at in range(128, 1000, 128)]
    found = replay(record(*wrong), EarlyStopping(parse_control({"early_stop": {"confidence": 0.95}})))
    assert not found.correct and found.tokens - found.look_tokens == 256 + 3


def test_the_exact_preset_changes_nothing() -> None:
    trace = settled_at(200)
    found = replay(trace, EarlyStopping(parse_control({"preset": "exact"})))
    assert (found.tokens, found.look_tokens, found.rule) == (1000, 0, None)


def test_a_stop_behind_the_last_probe_is_none() -> None:
    late = record(place(900, margin=-1.0))
    found = replay(late, EarlyStopping(parse_control({"preset": "aggressive"})))
    assert found.rule is None and found.tokens == 1000 and found.correct


def test_a_margin_stop_takes_effect_at_the_next_probe() -> None:
    trace = record(place(300, margin=-1.0), place(350, "7", right=True))
    found = replay(trace, EarlyStopping(parse_control({"preset": "aggressive"})))
    assert (found.rule, found.tokens - found.look_tokens) == ("margin", 350 + 3)


def test_a_loop_is_seen_in_the_recorded_tokens() -> None:
    trace = replace(record(place(900, "7", right=True)), token_ids=[1, 2, 3, 4] * 250)
    assert replay(trace, EarlyStopping(parse_control({"preset": "aggressive"}))).rule == "loop"


def test_the_oracle_stops_where_all_later_probes_are_right() -> None:
    assert oracle(settled_at(400)) == 400
    assert oracle(record(place(100, "7", right=True), place(200, "8"))) == 1000
    assert oracle(record(place(100, "7", right=True), correct=False)) == 1000


def test_a_vote_on_the_clock() -> None:
    traces = [record(tokens=100 * (n + 1)) for n in range(16)]
    found = replay_vote(traces, VoteParams(16))
    assert (found.result.rule, found.correct) == ("beta", True)
    assert found.critical_path == 410 and found.tokens == 110 + 210 + 310 + 410
    exact = replay_vote(traces, VoteParams(16, stop="exact"))
    # nine of sixteen are needed: two waves of four, and the first of the third
    assert exact.result.rule == "lossless" and exact.critical_path == 410 + 810 + 910
    short = replay_vote(traces, VoteParams(8, "short"))
    assert short.result.rule == "short" and short.tokens == 110 + 210 + 310 * 6


def test_a_vote_settled_in_flight_counts_probes_and_the_answer() -> None:
    traces = [settled_at(300) for _ in range(4)]
    found = replay_vote(traces, VoteParams(4), tick_tokens=350)
    assert found.result.rule == "in_flight" and found.correct
    assert found.look_tokens == 2 * 4 * 12
    assert found.critical_path == 700 + 10 + 3 + 2 * 12
    assert found.tokens == 3 * 700 + 713 + found.look_tokens


def test_an_unsure_trace_is_killed_on_the_clock() -> None:
    sure = [replace(record(tokens=100 + n, answer=str(n)), lowest=9.0 + n) for n in range(4)]
    late = [replace(record(tokens=1000), windows=[(64, 1.0), (300, 9.5), (320, 5.0), (330, 1.0)]) for _ in range(2)]
    found = replay_vote([*sure, *late], VoteParams(6, "all"))
    # at 64 nobody has finished, at 300 the windows are sure enough, at 320 they are not
    assert found.tokens == sum(110 + n for n in range(4)) + 2 * 320
    assert found.result.cancelled == 2 and found.critical_path == 320


def test_samples_one_by_one() -> None:
    traces = [record(tokens=100, answer="8" if n == 1 else "7", correct=n != 1) for n in range(16)]
    assert one_by_one(traces) == Compared(True, 7 * 110, 7 * 110, 7)  # 6 to 1
    assert one_by_one(traces[:3]) == Compared(True, 330, 330, 3)


def test_a_plain_majority() -> None:
    traces = [record(tokens=100 * (n + 1), answer="8" if n < 2 else "7", correct=n >= 2) for n in range(5)]
    assert majority(traces) == Compared(True, 1550, 510, 5)
    assert not majority(traces[:3]).correct


def test_deepconf_kills_by_the_warm_up_and_stops_at_consensus() -> None:
    def trace(tokens: int, answer: str, lowest: float, *windows: tuple[int, float]) -> Record:
        made = record(tokens=tokens, answer=answer, correct=answer == "7")
        return replace(made, lowest=lowest, bottom=lowest, windows=list(windows))

    warm = [trace(100, "7", 1.0), trace(300, "8", 5.0)]
    others = [trace(500, "8", 2.0, (256, 9.0), (320, 4.0)), trace(190, "7", 6.0), trace(900, "7", 9.0)]
    # threshold 0.1 of the way up: 4.6. The third trace is killed at 320; weights 1 + 6 + 9 against 5 are no consensus
    found = deepconf([*warm, *others], warm_up=2, kept=0.1)
    assert found == Compared(True, 110 + 310 + 320 + 200 + 910, 310 + 910, 5)
    alike = deepconf([warm[0], *others[1:]], warm_up=1, kept=0.9)
    assert alike == Compared(True, 110, 110, 1), "one answer has all the weight"
    turned = [trace(100, "8", 0.1), trace(100, "7", 1.0), *[trace(200 + n, "7", 1.0) for n in range(3)]]
    stopped = deepconf(turned, warm_up=2, kept=1.0)  # 0.1 of 2.1 is less than a twentieth
    assert stopped.critical_path == 110 + 210 and stopped.tokens == 2 * 110 + 3 * 210


def test_a_vote_needs_its_samples() -> None:
    with pytest.raises(ValueError, match="3 samples are recorded"):
        replay_vote([record()] * 3, VoteParams(4))


def test_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    whole = [settled_at(300), replace(record(place(10, margin=math.nan)), bottom=1.5, windows=[(64, 2.5)])]
    records.save(path, whole)
    found = list(records.load(path))
    assert found[0] == whole[0] and math.isnan(found[1].places[0].margin) and found[1].bottom == 1.5
    assert found[1].windows == [(64, 2.5)]
    small = tmp_path / "records.jsonl.gz"
    records.save(small, whole)
    assert next(records.load(small)) == whole[0] and small.stat().st_size < path.stat().st_size / 4
    small.write_bytes(small.read_bytes()[:40])
    with pytest.raises(ParameterError, match="cannot read"):
        list(records.load(small))
    path.write_text('{"index": 0}\n')
    with pytest.raises(ParameterError, match="line 1: not a record"):
        list(records.load(path))
    with pytest.raises(ParameterError, match="cannot read"):
        list(records.load(tmp_path / "none"))


def test_the_bench_replays_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.jsonl"
    records.save(path, [settled_at(300 + 50 * s, tokens=4000, index=i) for i in range(3) for s in range(4)])
    module = bench.load(Path(__file__).parents[2] / "benchmarks" / "control.py")
    assert module.main(["--records", str(path), "--suite", "hard", "--votes", "4", "--json", "--no-record"]) == 0
    found = {row["case"]: row["metrics"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["replay/stop/exact/hard"]["tokens_ratio"] == 1.0
    balanced = found["replay/stop/balanced/hard"]
    assert balanced["n"] == 12 and balanced["accuracy"] == balanced["accuracy_ref"] == 1.0
    assert balanced["oracle_tokens_ratio"] < balanced["tokens_ratio"] < 1.0 and balanced["diff_ci95_low"] < 0
    assert 0 < balanced["probe_share"] <= 0.06 and balanced["stopped_by_consistency"] == 1.0
    vote = found["replay/vote/waves_4/hard"]
    assert vote["n"] == 3 and vote["tokens_ratio"] < 1.0 and "replay/vote/short_4/hard" in found
    assert found["replay/vote/one_by_one_4/hard"]["started_mean"] == 4
    assert "replay/vote/maj@4/hard" not in found, "that is the reference"
    assert found["replay/vote/deepconf_high_4/hard"]["accuracy"] == 1.0
    assert not any(case.startswith("aa/") for case in found)
    assert module.main(["--records", str(path), "--votes", "2", "--json", "--no-record"]) == 0
    found = {row["case"]: row["metrics"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["aa/maj@2/long"]["n"] == 3 and found["aa/maj@2/long"]["tokens_ratio"] == 1.0
    for refused in (["--samples", "4"], ["--suite", "easy"], ["--processes", "0"]):
        with pytest.raises(SystemExit):
            module.parse(["--record", "x", *refused])


def test_halves_and_another_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = bench.load(Path(__file__).parents[2] / "benchmarks" / "control.py")
    first = [settled_at(300, index=index) for index in (0, 19, 20, 39, 40)]
    records.save(tmp_path / "a.jsonl.gz", first)
    records.save(tmp_path / "b.jsonl.gz", [replace(first[0], correct=False, thinking_tokens=500), first[2]])
    assert [one.index for one in module.half(first, "choose")] == [0, 19, 40]
    words = ["--records", str(tmp_path / "a.jsonl.gz"), "--json", "--no-record"]
    assert module.main([*words, "--half", "report", "--suite", "both"]) == 0
    found = {row["case"]: row["metrics"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["replay/stop/exact/both/report"]["n"] == 2
    assert module.main([*words, "--against", str(tmp_path / "b.jsonl.gz")]) == 0
    found = {row["case"]: row["metrics"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["aa/long"]["n"] == 2 and found["aa/long"]["b"] == 1 and found["aa/long"]["tokens_ratio"] == 0.75
    records.save(tmp_path / "c.jsonl", [settled_at(300, index=7)])
    with pytest.raises(ParameterError, match="share no problem"):
        module.main([*words, "--against", str(tmp_path / "c.jsonl")])


def test_arms_on_the_engine_are_paired_with_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = bench.load(Path(__file__).parents[2] / "benchmarks" / "control.py")

    def answered(arm: Arm, index: int) -> Result:
        stopped = arm.control is not None
        sample = Sample("7", not stopped, 100, 90, "stop", "consistency" if stopped else "natural")
        right = not stopped or index > 40
        return Result(
            index, "t", "?", "7", [sample], right, 0, 0, None, tokens=40 if stopped else 100, probe_tokens=5 * stopped
        )

    def measured(shards: Sequence[Shard], arms: Sequence[Arm], gpus: int) -> Iterator[Any]:
        assert gpus == 2 and [len(shard.questions) for shard in shards] == [len(arms)] * 2
        for arm in arms:
            numbers = [number for shard in shards for number in dict(shard.questions)[arm]]
            yield arm, [answered(arm, number) for number in sorted(numbers)], 1.0

    monkeypatch.setattr(module, "measure", measured)
    words = ["--suite", "hard", "-n", "4", "--offset", "40", "--processes", "2", "--gpus", "2", "--json", "--no-record"]
    assert module.main(["--live", "none", "none", "balanced", *words]) == 0
    found = {row["case"]: row["metrics"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found.keys() == {"aa/hard", "stop/balanced/hard"} and found["aa/hard"]["tokens_ratio"] == 1.0
    balanced = found["stop/balanced/hard"]
    assert (balanced["n"], balanced["b"], balanced["c"], balanced["tokens_ratio"]) == (4, 1, 0, 0.4)
    assert balanced["probe_share"] == 0.05 and balanced["stopped_by_consistency"] == 1.0
    votes = module.parse(["--live", "none", "vote/waves", "none", "--samples", "8", "--temperature", "0.7"])
    none, vote, again = module.live_arms(votes)
    assert vote.how == VoteParams(8) and (vote.name, vote.seed) == ("vote/waves_8/long", 0)
    assert (none.name, none.seed, again.name) == ("none", 0, "aa/long") and again.seed > 10**6
    for refused in (["often"], ["vote/waves"], ["none", "vote/never"]):
        with pytest.raises(ParameterError, match="live"):
            module.live_arms(module.parse(["--live", *refused]))


def test_each_process_records_its_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = bench.load(Path(__file__).parents[2] / "benchmarks" / "control.py")
    path = tmp_path / "records.jsonl.gz"
    words = ["--record", str(path), "--suite", "hard", "-n", "7", "--offset", "40", "--processes", "3"]
    words += ["--concurrency", "10", "--samples", "4", "--temperature", "0.7", "--minutes", "2", "--only-record"]
    cut = module.shares(module.parse(words))
    assert sorted(number for share in cut for number in share.numbers) == list(range(40, 47))
    assert all((share.in_flight, share.seconds, share.sampling.n) == (2, 120.0, 4) for share in cut)

    def told(_: Any, asked: Sequence[Share], gpus: int) -> list[list[Record]]:
        return [[settled_at(300, index=number)] * 4 for share in asked for number in share.numbers]

    monkeypatch.setattr(module, "spread", told)
    assert module.main([*words, "--gpus", "2"]) == 0
    assert [one.index for one in records.load(path)] == [number for number in range(40, 47) for _ in range(4)]


@pytest.fixture(scope="module")
def language() -> Language:
    return load_language(EngineConfig(model="pebble"))


def test_the_answer_part_of_a_probe(language: Language) -> None:
    def part(text: str) -> tuple[str, int]:
        ids = language.tokenizer.encode(text, add_special_tokens=False)
        found, used = answer_part(language.vocabulary, ids)
        assert language.vocabulary.text(ids[:used]).startswith(found)
        return found, used

    assert part("12}. And so on")[0].startswith("12}")
    assert part("\\frac{1}{2}} more")[0].startswith("\\frac{1}{2}}")
    assert part("12\nmore")[0].startswith("12")
    assert part("12")[0] == "12"


class Scripted:
    """An engine that thinks word by word and answers every probe with `9}`, `late` tokens behind the last one told."""

    def __init__(self, language: Language, words: int, late: int = 0, dropped: str | None = None) -> None:
        self.language, self.words, self.late, self.dropped = language, words, late, dropped
        self.prompts = SimpleNamespace(encode_chat=lambda messages: [1, 2, 3])
        self.told = 0
        self.asked: list[tuple[str, tuple[int, ...], int | None]] = []

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, thinking: ThinkingParams, fold: FoldParams, **more: Any
    ) -> AsyncIterator[RequestOutput]:
        assert list(prompt) == [1, 2, 3] and fold.policy == "off" and more == {"request_id": "record-5"}
        for count in range(1, self.words + 2):
            last = count > self.words
            news = CompletionOutput(0, token_ids=[7], stats=[TokenStats(-0.1, 0.5, 3.0, float(count))])
            news.num_output_tokens, news.num_thinking_tokens = count, min(count, self.words)
            news.phase = Phase.ANSWER if last else Phase.THINKING
            news.text = "The answer is \\boxed{9}." if last else ""
            kind = "paragraph" if count % 20 == 0 else "sentence"
            news.boundaries = [Boundary(kind, count)] if count % 4 == 0 and not last else []
            self.told = count
            yield RequestOutput("r", [news], ThinkingPolicy(True, None, "default"), Costs(), finished=last)
            await asyncio.sleep(0)

    async def probe(
        self, name: str, suffix: tuple[int, ...], n: int, stop: tuple[str, ...], choice: int
    ) -> ProbeResult:
        self.asked.append((name, suffix, choice))
        ids = self.language.tokenizer.encode("9}", add_special_tokens=False)
        stats = [TokenStats(-0.1, 0.5, 3.0, 0.0) for _ in ids]
        computed = len(suffix) + len(ids)
        return ProbeResult(
            ids, "9}", stats, computed_tokens=computed, after=self.told + self.late, dropped=self.dropped
        )


QUESTION = Question(5, "t", "What?", "9", lambda text: "{9}" in text)


async def recorded(engine: Scripted, every: int) -> Record:
    recorder = records.Recorder(engine, engine.language, every=every)  # pyright: ignore[reportArgumentType]
    (found,) = await recorder.record(QUESTION, SamplingParams())
    return found


async def test_the_recorder_asks_forks_of_the_running_trace(language: Language) -> None:
    assert language.family is not None
    engine = Scripted(language, 100)
    found = await recorded(engine, 30)
    suffix = (*language.family.force_ids, *language.opener_ids)
    assert engine.asked == [("record-5", suffix, 0)] * 3
    looked = found.probed
    # asked at the boundaries 32, 64 and 96 when the token behind them was told, recorded where the engine forked
    assert [place.at for place in looked] == [33, 65, 97]
    assert [place.margin for place in looked] == [33.0, 65.0, 97.0]
    assert looked[0].correct and looked[0].entropy == 0.5 and looked[0].probe == "9}"
    assert (looked[0].peek_tokens, looked[0].probe_tokens) == (len(suffix), len(suffix) + 2)
    assert found.correct and found.stop_tokens == len(language.family.force_ids)
    assert found.bottom == pytest.approx(3.0) and found.thinking_tokens == 100


async def test_a_probe_that_comes_too_late_or_is_dropped_tells_nothing(language: Language) -> None:
    late = await recorded(Scripted(language, 100, late=10), 30)
    assert [place.at for place in late.probed] == [43, 75]
    assert all(a.at <= b.at for a, b in itertools.pairwise(late.places))
    dropped = await recorded(Scripted(language, 100, dropped="no memory was free"), 30)
    assert not dropped.probed and [place.at for place in dropped.places if place.margin > 8] == [
        20,
        32,
        40,
        60,
        64,
        80,
        96,
    ]


async def test_what_no_rule_reads_is_not_kept(language: Language) -> None:
    found = await recorded(Scripted(language, 400), 200)
    bare = [place for place in found.places if place.probe is None]
    assert all(place.kind == "paragraph" or place.margin <= records.MARGIN_SEEN for place in bare)
    assert 0 < len(bare) < 25 and found.token_ids, "it says one word again and again: the rule against loops needs them"
    engine = Scripted(language, 400)
    plain = await recorded(engine, 0)
    assert (plain.places, plain.token_ids, plain.reply, engine.asked) == ([], [], found.reply, []) and plain.windows
    assert not records.loops(list(range(1000))) and not records.loops([1, 2] * 100)


def test_a_model_whose_thinking_cannot_be_ended_is_refused(language: Language) -> None:
    with pytest.raises(ParameterError, match="cannot be ended by force"):
        records.Recorder(Scripted(language, 0), replace(language, family=None), every=1)  # pyright: ignore[reportArgumentType]


def test_the_bench_is_documented() -> None:
    root = rows.checkout()
    assert root is not None and "`control.py`" in (root / "benchmarks" / "README.md").read_text()
