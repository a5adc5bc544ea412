"""Tiers over HTTP: who gets which, what is echoed, what is refused, what was promised."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_stand_in import ScriptedEngine, chat_body
from test_server_access import RIGHT, WRONG, bearer, guarded, key
from tiny_tokenizer import TOOL_TEMPLATE

from thinkfold.errors import ParameterError
from thinkfold.server.access.gate import Access
from thinkfold.server.access.keys import ApiKey, KeyTable
from thinkfold.server.contract import EngineSlot
from thinkfold.server.metrics import ServerMetrics
from thinkfold.server.state import ServerOptions
from thinkfold.server.tiers import ServedTier, Slo, TierTable, load_tiers
from thinkfold.types import (
    CompletionOutput,
    ControlParams,
    Costs,
    EarlyStop,
    FoldParams,
    Preset,
    Prices,
    RequestOutput,
    ThinkingPolicy,
    Tier,
)

SHIPPED = Path(__file__).parents[2] / "deploy" / "tiers.toml"
TABLE = load_tiers(SHIPPED)
BODY = chat_body(max_tokens=50)
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", BODY),
    ("/v1/completions", {"prompt": "a", "max_tokens": 50}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 50}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 50}),
]


async def ask(
    client: httpx.AsyncClient, secret: str = "", path: str = ROUTES[0][0], **thinkfold: Any
) -> httpx.Response:
    body = {**dict(ROUTES)[path], **({"thinkfold": thinkfold} if thinkfold else {})}
    return await client.post(path, json=body, headers=bearer(secret) if secret else {})


def test_the_shipped_tiers_have_budgets_of_their_own() -> None:
    assert {name: served.tier.budget for name, served in TABLE.tiers.items()} == {
        "quick": 4096,
        "standard": 16_384,
        "deep": 65_536,
    }
    assert TABLE.tiers["quick"].fold == FoldParams(prefer="queue")
    assert TABLE.tiers["deep"].fold == FoldParams(prefer="fold", policy="pressure", at_answer="recycle")
    assert {name: served.control for name, served in TABLE.tiers.items()} == {
        "quick": ControlParams(Preset.BALANCED),
        "standard": ControlParams(Preset.BALANCED),
        "deep": ControlParams(Preset.CONSERVATIVE),
    }, "every tier that is shipped stops early"
    assert TABLE.tiers["quick"].slo == Slo(500, 15_000, 30_000)


@pytest.mark.parametrize("path", [path for path, _ in ROUTES])
async def test_every_api_knows_tiers(path: str) -> None:
    engine = ScriptedEngine()
    async with guarded(Access(), engine, ServerOptions(tiers=TABLE)) as client:
        plain, named = await ask(client, path=path), await ask(client, path=path, tier="deep")
        assert plain.json()["thinkfold"]["policy"]["tier"] == "standard"
        assert named.json()["thinkfold"]["policy"]["tier"] == "deep"
        unknown = await ask(client, path=path, tier="gold")
        assert (
            unknown.status_code == 400 and "quick, standard, deep" in unknown.text and "thinkfold.tier" in unknown.text
        )
    assert [call.service.tier for call in engine.calls] == [TABLE.tiers[n].tier for n in ("standard", "deep")]
    assert engine.calls[0].fold is None and engine.calls[1].fold == TABLE.tiers["deep"].fold


async def test_a_server_without_tiers_says_so() -> None:
    async with guarded(Access()) as client:
        refused = await ask(client, tier="quick")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "thinkfold.tier"
        assert (await ask(client)).json()["thinkfold"]["policy"]["tier"] == ""


async def test_a_key_has_its_tier_and_those_it_may_name() -> None:
    keys = KeyTable([key("a", RIGHT, tier="deep"), key("b", WRONG, tiers=["quick"])])
    async with guarded(Access(keys), None, ServerOptions(tiers=TABLE)) as client:
        assert (await ask(client, RIGHT)).json()["thinkfold"]["policy"]["tier"] == "deep"
        assert (await ask(client, RIGHT, tier="quick")).json()["thinkfold"]["policy"]["tier"] == "quick"
        assert (await ask(client, WRONG)).json()["thinkfold"]["policy"]["tier"] == "quick"
        refused = await ask(client, WRONG, tier="deep")
        assert refused.status_code == 400 and refused.json()["error"]["message"].endswith("there are quick")


def test_a_key_of_a_tier_that_is_not_there_is_refused_at_the_start() -> None:
    with pytest.raises(ParameterError, match=r"^api_keys.tier: of a: 'gold' is none of quick, standard, deep"):
        TABLE.check_keys(KeyTable([key("a", RIGHT, tier="gold")]))
    with pytest.raises(ParameterError, match=r"api_keys.tier: of a is none of its tiers"):
        ApiKey("a", hashlib.sha256(b"x").hexdigest(), tier="x", tiers=("y",))


async def test_limits_and_their_refusals_name_fields() -> None:
    engine = ScriptedEngine()
    async with guarded(Access(), engine) as client:
        reply = (await ask(client, deadline_ms=2000, max_cost=1.5)).json()
        policy = reply["thinkfold"]["policy"]
        assert (policy["deadline_ms"], policy["max_cost"]) == (2000, 1.5)
        assert reply["usage"]["thinkfold"]["cost"] == 0.0
        wrong: list[tuple[str, Any]] = [("deadline_ms", 0), ("max_cost", -1.0), ("max_cost", 0)]
        for name, value in wrong:
            refused = await ask(client, **{name: value})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == f"thinkfold.{name}"
    assert (engine.calls[0].service.deadline_ms, engine.calls[0].service.max_cost) == (2000, 1.5)


async def test_an_operators_prices_make_the_bill() -> None:
    async with guarded(Access(), None, ServerOptions(prices=Prices(gpu_second=0.0, prompt=1e6))) as client:
        usage = (await ask(client)).json()["usage"]
        assert usage["thinkfold"]["cost"] == usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (FoldParams(), FoldParams(policy="eager", entries=16, at_answer="recycle", prefer="queue")),
        (FoldParams(policy="off"), FoldParams(policy="off", entries=16, prefer="queue")),
        (FoldParams(profile="fine"), FoldParams(policy="eager", profile="fine", at_answer="recycle", prefer="queue")),
        (FoldParams(prefer="fold"), FoldParams(policy="eager", entries=16, at_answer="recycle", prefer="fold")),
    ],
)
def test_a_request_beats_its_tier_field_by_field(asked: FoldParams, given: FoldParams) -> None:
    fold = FoldParams(policy="eager", entries=16, at_answer="recycle", prefer="queue")
    assert ServedTier(Tier("t"), fold).fold_of(asked) == given


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "tiers: must hold"),
        ("[tiers.a]\nbudget = 1\n", "tiers.default: must name"),
        ('default = "b"\n[tiers.a]\nbudget = 1\n', "tiers.default: 'b' is none of a"),
        ('default = "a"\nx = 1\n[tiers.a]\nbudget = 1\n', "tiers.x: there is no such field"),
        ('default = "a"\n[tiers.a]\nweight = 1.0\n', "tiers.a.budget: is missing"),
        ('default = "a"\n[tiers.a]\nbudget = -5\n', "tiers.a.budget: must be"),
        ('default = "a"\n[tiers.a]\nbudget = 1\nweight = 0\n', "tiers.a.weight"),
        ('default = "a"\n[tiers.a]\nbudget = 1\nkv_quota = 2\n', "tiers.a.kv_quota"),
        ('default = "a"\n[tiers.a]\nbudget = 1\nprefer = "x"\n', "tiers.a.fold.prefer"),
        ('default = "a"\n[tiers.a]\nbudget = 1\nslo = 3\n', "tiers.a.slo: must be a table"),
        ('default = "a"\n[tiers.a]\nbudget = 1\n[tiers.a.slo]\nttft_ms = 0\n', "tiers.a.slo.ttft_ms"),
        ('default = "a"\n[tiers.a]\nbudget = 1\n[tiers.a.fold]\nx = 0\n', "tiers.a.fold.x"),
        ('default = "a"\n[tiers.a]\nbudget = 1\n[tiers.a.control]\npreset = "bold"\n', "tiers.a.control.preset: must"),
        ('default = "a"\n[tiers.a]\nbudget = 1\n[tiers.a.control]\nwish = 1\n', "tiers.a.control.wish: there is no"),
        (
            'default = "a"\n[tiers.a]\nbudget = 1\n[tiers.a.control.early_stop]\nentropy = -1\n',
            "tiers.a.control.early_stop.entropy: must",
        ),
        ('default = "a"\n[tiers.a]\nbudget = 1\nmax_samples = 0\n', "tiers.a.max_samples: must be"),
        ('default = "a"\n[tiers.a]\nbudget = 1\n[tiers.a.prices]\nanswer = -1\n', "tiers.a.prices.answer: must be"),
        ('default = "a b"\n[tiers."a b"]\nbudget = 1\n', "tiers: 'a b' must be"),
        ("[tiers\n", "tiers: is not valid TOML"),
    ],
)
def test_wrong_tier_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=words.replace("[", r"\[")):
        load_tiers(path)
    with pytest.raises(ParameterError, match="tiers: cannot be read"):
        load_tiers(tmp_path / "nowhere")


@pytest.mark.parametrize("path", [path for path, _ in ROUTES])
async def test_a_tier_stops_early_unless_the_request_says_otherwise(path: str) -> None:
    asked = [{}, {"tier": "deep"}, {"control": {"preset": "exact"}}, {"control": {"early_stop": {"entropy": 0.1}}}]
    engine = ScriptedEngine()
    async with guarded(Access(), engine, ServerOptions(tiers=TABLE, control=ControlParams("aggressive"))) as client:
        told = [(await ask(client, path=path, **more)).json()["thinkfold"]["policy"]["control"] for more in asked]
    knobs = ControlParams(early_stop=EarlyStop(entropy=0.1))
    wanted = [ControlParams("balanced"), ControlParams("conservative"), ControlParams("exact"), knobs]
    assert [call.control for call in engine.calls] == wanted
    assert [one and one["preset"] for one in told] == ["balanced", "conservative", None, None]
    assert told[3] is not None and told[3]["early_stop"]["entropy"] == 0.1


async def test_the_servers_own_preset_is_for_tiers_that_have_none() -> None:
    tiers = TierTable(
        {"a": ServedTier(Tier("a", 9)), "b": ServedTier(Tier("b", 9), control=ControlParams("exact"))}, "a"
    )
    engine = ScriptedEngine()
    async with guarded(Access(), engine, ServerOptions(tiers=tiers, control=ControlParams("balanced"))) as client:
        for tier in ("a", "b"):
            await ask(client, tier=tier)
    assert [call.control for call in engine.calls] == [ControlParams("balanced"), ControlParams("exact")]


async def test_a_tiers_rules_know_of_tools_and_of_models_that_cannot_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    engine = ScriptedEngine(template=TOOL_TEMPLATE)
    async with guarded(Access(), engine, ServerOptions(tiers=TABLE)) as client:
        await client.post(ROUTES[0][0], json={**BODY, "tools": [tool]})
        model = replace(engine.model, budget_enforced=False)
        monkeypatch.setattr(ScriptedEngine, "model", model)
        reply = await client.post(ROUTES[0][0], json=BODY)
    assert [call.control for call in engine.calls] == [ControlParams("balanced", task="tools"), None]
    assert reply.json()["thinkfold"]["policy"]["control"] is None


async def test_a_tier_bounds_samples_and_has_its_prices() -> None:
    cheap = ServedTier(Tier("cheap", 9), max_samples=2, prices=Prices(gpu_second=0.0, prompt=1e6))
    async with guarded(Access(), None, ServerOptions(tiers=TierTable({"cheap": cheap}, "cheap"))) as client:
        best, search = {"best_of": {"n": 3, "verifier": "judge"}}, {"search": {"width": 1, "branch": 3}}
        asked = (({"n": 3}, "n"), ({"vote": {"n": 3}}, "vote.n"), (best, "best_of.n"), (search, "search.width"))
        for more, field in asked:
            refused = await client.post(ROUTES[0][0], json={**BODY, **more})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == field
            assert "tier 'cheap' allows 2 samples" in refused.text
        usage = (await client.post(ROUTES[0][0], json={**BODY, "n": 2})).json()["usage"]
    assert usage["thinkfold"]["cost"] == usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def test_there_are_few_tiers_because_they_are_labels() -> None:
    with pytest.raises(ParameterError, match="at most 16"):
        TierTable({str(i): ServedTier(Tier(str(i), 1)) for i in range(17)}, "0")


def test_promises_are_counted_by_tier() -> None:
    """A clock of the test's own: first token after 1 s, answer after 2 s, end after 4 s."""
    now = [0.0]
    metrics = ServerMetrics(EngineSlot(_nobody), clock=lambda: now[0])

    def request(slo: Slo | None, fails: bool = False) -> None:
        timer = metrics.timer("quick", slo)
        for text, tokens in (("", 1), ("A", 2)):
            now[0] += 1.0
            news = CompletionOutput(0, text=text, num_output_tokens=tokens)
            timer.observe(RequestOutput("r", [news], ThinkingPolicy(True, 9, "default"), Costs()))
        now[0] += 2.0
        timer.miss() if fails else timer.finish(2)

    request(Slo(1000, 2000, 4000))
    request(Slo(999, 2000, 3999))
    request(Slo(ttft_ms=5000), fails=True)
    request(None)
    value = metrics.registry.get_sample_value
    counted = {met: value("thinkfold_slo_requests_total", {"tier": "quick", "slo": met}) for met in ("met", "missed")}
    assert counted == {"met": 1, "missed": 2}
    names = ("ttft", "first_answer", "total")
    missed = [value("thinkfold_slo_misses_total", {"tier": "quick", "promise": name}) for name in names]
    assert missed == [2, None, 1]


async def _nobody() -> Any:
    raise AssertionError("no engine is asked")
