"""Metrics: each event is counted once, labels are few, and what boards, alerts and docs name exists."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from server_stand_in import EOS, ScriptedEngine, chat, serving

from thinkfold.deploy.fleet.client import FleetClient
from thinkfold.deploy.fleet.metrics import FleetCollector
from thinkfold.engine.samples import Question
from thinkfold.types import (
    CompletionOutput,
    Costs,
    Fold,
    RequestOutput,
    ThinkingEndReason,
    ThinkingPolicy,
    VoteState,
)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
NAME = re.compile(r"\bthinkfold_[a-z_]+")
FOLDS = (Fold(0, 0, 16, 4.0, 3, 0.1), Fold(1, 16, 32, 4.0, 2, math.nan), Fold(2, 32, 48, 0.0, 0, 0.4, refused=True))


async def exposition(engine: ScriptedEngine, **body: object) -> str:
    async with serving(engine) as client:
        assert (await chat(client, **body)).status_code == 200
        return (await client.get("/metrics")).text


def values(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def samples_of(text: str) -> set[str]:
    """Every name that a query may use."""
    names: set[str] = set()
    for name, kind in re.findall(r"# TYPE (\S+) (\S+)", text):
        suffixes = {"histogram": ("_bucket", "_sum", "_count")}.get(kind, ("",))
        names |= {name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_and_folds_are_counted_once(stream: bool) -> None:
    script = ("<think>", *"abcd", "</think>", "A", EOS)
    engine = ScriptedEngine(scripts=[script], told={3: FOLDS})
    seen = values(await exposition(engine, stream=stream, n=2, thinking_token_budget=8))
    natural = 'reason="natural",tier=""'
    assert seen[f"thinkfold_thinking_length_tokens_count{{{natural}}}"] == 2
    assert seen[f"thinkfold_thinking_length_tokens_sum{{{natural}}}"] == 8
    assert (seen["thinkfold_thinking_budget_use_count"], seen["thinkfold_thinking_budget_use_sum"]) == (2, 1.0)
    assert seen["thinkfold_fold_pages_freed_total"] == 2 * (3 + 2)
    assert seen["thinkfold_fold_error_count"] == 4 and math.isclose(seen["thinkfold_fold_error_sum"], 1.0)
    assert seen["thinkfold_queue_seconds_count"] == 1
    assert seen["thinkfold_time_to_first_answer_token_seconds_count"] == 1


class Voting(ScriptedEngine):
    """Four samples, then four more, then the winner."""

    async def decide(self, question: Question, how: Any) -> AsyncIterator[RequestOutput]:
        for started in (4, 4, 8):
            state = VoteState(how.n, started, started, 0, 0, 0)
            yield RequestOutput(
                "r", [CompletionOutput(0)], ThinkingPolicy(True, None, "default"), Costs(), outcome=state
            )
        async for output in self.generate(question.prompt, question.sampling, question.thinking):
            output.outcome = VoteState(how.n, 8, 0, 8, 0, 0, answer="A", rule="beta", sample=0)
            yield output


async def test_a_vote_counts_its_waves_and_what_settled_it() -> None:
    seen = values(await exposition(Voting(), vote={"n": 8}))
    assert seen["thinkfold_vote_rounds_total"] == 2
    assert seen['thinkfold_votes_total{rule="beta"}'] == 1


async def test_no_thinking_counts_none() -> None:
    seen = values(await exposition(ScriptedEngine(scripts=[("A", EOS)])))
    assert not [name for name in seen if name.startswith("thinkfold_thinking_length_tokens_count")]
    assert seen["thinkfold_thinking_budget_use_count"] == 0


async def test_no_log_holds_what_was_asked_or_answered(caplog: pytest.LogCaptureFixture) -> None:
    secret = "Rosebud"
    engine = ScriptedEngine(scripts=[("<think>", secret, "</think>", secret, EOS)], told={1: FOLDS})
    chat = {"messages": [{"role": "user", "content": secret}]}
    paths = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": secret},
        "/v1/responses": {"input": secret, "instructions": secret},
        "/v1/messages": {"model": "tiny", "max_tokens": 99, **chat},
    }
    with caplog.at_level(logging.DEBUG):
        async with serving(engine) as client:
            for path, body in paths.items():
                for more in ({}, {"stream": True}, {"temperature": secret}, {secret: 1}):
                    reply = await client.post(path, json={**body, **more})
                    assert reply.status_code == (200 if more in ({}, {"stream": True}) else 400), reply.text
            engine.fail_after = 2
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 500
    assert "thinkfold.fold" in caplog.text and secret not in caplog.text


async def test_labels_are_bounded() -> None:
    text = await exposition(ScriptedEngine(), user="somebody", metadata={"k": "v"}, cache_salt="s", model="tiny")
    labels = {label for line in text.splitlines() for label in re.findall(r"(\w+)=\"", line)}
    assert labels <= {"le", "reason", "class", "status", "finish_reason", "rung", "limit", "rule", "outcome", "tier"}
    assert len(ThinkingEndReason) <= 16


def fleet_exposition() -> str:
    """What a fleet adds, as it is with no pool."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(cast(FleetClient, SimpleNamespace(pools={}))))
    return generate_latest(registry).decode()


async def test_boards_alerts_and_docs_name_metrics_that_exist() -> None:
    text = await exposition(ScriptedEngine())
    known = samples_of(text)
    for path in sorted(FOLDER.iterdir()):
        named = set(NAME.findall(path.read_text()))
        assert named and named <= known, (path.name, named - known)
    pages = ROOT / "docs"
    families = {name for name in re.findall(r"# TYPE (\S+)", text) if not name.endswith("_created")}
    listed = re.findall(r"^\| `(thinkfold_[a-z_]+)", (pages / "reference" / "metrics.md").read_text(), re.MULTILINE)
    assert set(listed) == families
    families |= set(re.findall(r"# TYPE (\S+)", fleet_exposition()))
    for page in pages.rglob("*.md"):
        named = set(re.findall(r"`(thinkfold_[a-z_]+)", page.read_text()))
        assert named <= known | families, (page.name, named - known - families)


def test_the_board_is_whole() -> None:
    board = json.loads((FOLDER / "grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(target["expr"] and target["legendFormat"] for panel in panels for target in panel["targets"])
    assert all(target["expr"].count("(") == target["expr"].count(")") for p in panels for target in p["targets"])


def test_every_alert_gives_a_reason() -> None:
    rules = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["annotations"]["reason"] and rule["annotations"]["summary"] and rule["labels"]["severity"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
