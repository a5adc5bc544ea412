"""How-tos: their settings are settings, their messages stand in the code, their numbers follow from it."""

from __future__ import annotations

import argparse
import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from thinkfold.cli import plan
from thinkfold.cli.main import build_parser
from thinkfold.cli.paired import tango
from thinkfold.cli.settings import resolve
from thinkfold.engine.planning import Planner
from thinkfold.thinking.specs import FamilySpec
from thinkfold.types import FoldMode

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "how-to"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


@cache
def texts_of_the_code() -> str:
    """Every string of the package, those cut by a placeholder in pieces."""
    found = []
    for path in sorted((ROOT / "src" / "thinkfold").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


def messages() -> list[str]:
    """What the troubleshooting page quotes: first columns, and what stands at the head of its lists."""
    page = PAGES["troubleshooting"]
    listed = re.findall(r"^- \*\*[^*]*?`([^`]*…[^`]*)`", page, re.MULTILINE)
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE) + listed


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_of_the_code(message: str) -> None:
    pieces = [piece.strip(" :,?") for piece in message.split("…")]
    missing = [piece for piece in pieces if piece and piece not in texts_of_the_code()]
    assert any(pieces) and not missing


def test_there_are_messages() -> None:
    assert len(messages()) > 25


def test_settings_files_are_valid(tmp_path: Path) -> None:
    (text,) = blocks("serve-32b-on-one-card", "toml")
    (tmp_path / "serve.toml").write_text(text)
    settings = resolve(argparse.Namespace(config=str(tmp_path / "serve.toml")), {})
    assert settings.engine.kv_cache_dtype == "fp8_e4m3"


def test_the_room_of_a_32b_model() -> None:
    """Tables and sentences of the page are what its command says."""
    page = PAGES["serve-32b-on-one-card"]
    (command,) = (
        line for block in blocks("serve-32b-on-one-card", "sh") for line in block.splitlines() if "plan" in line
    )
    args = build_parser().parse_args(command.split()[1:])
    card = plan.card_of(args)
    config = plan.config_of(args)
    planner, load = Planner(config, card), plan.load_of(args)
    for dtype, shown in (("model", "bf16"), ("fp8_e4m3", "fp8")):
        pool = planner.pool(dtype)
        assert f"{pool.entry_bytes / 1024:.0f} KiB" in page
        for policy in FoldMode:
            row = planner.outlook(pool, load, policy)
            line = (
                f"| {shown} | {pool.capacity:,} | {policy} | {row.sessions} | {row.spread} | "
                f"{1e3 * row.step_s:.1f} ms | {row.answers_h:.0f} |"
            )
            assert line in page, line
    parts = {
        "CUDA counts": card.memory,
        "utilization 0.92": card.memory * 0.92,
        "weights, 32.8": pool.weight_bytes,
        "what folds of 16": pool.fold_bytes,
        "an assumption": card.overhead,
        "left for KV": pool.pages * pool.page_bytes,
    }
    for words, size in parts.items():
        assert re.search(rf"^\| .*{words}.* \| {size / 1e9:.1f} \|$", page, re.MULTILINE), (words, size / 1e9)
    assert f"{pool.fold_bytes / 16 / 1e6:.0f} MB" in page


def test_data_and_bounds_of_an_eval() -> None:
    (line,) = blocks("check-your-own-data", "json")
    assert set(json.loads(line)) == {"question", "answer", "task"}
    page = PAGES["check-your-own-data"]
    low, high = tango(5, 3, 400)
    assert f"lower 95 % bound {100 * low:+.2f}, upper {100 * high:+.2f}" in page
    for n, width in ((400, "1.7"), (1500, "0.8")):
        assert f"{100 * tango(n // 100, n // 100, n)[1]:.1f}" == width and width in page


def test_flags_of_the_migration_are_ours() -> None:
    """Those of the middle column, and vLLM's own where it says that they are the same."""
    table = PAGES["migrate-from-vllm"].partition("## Requests")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `--")]
    named = [rows_of_ours(theirs.removeprefix("| "), ours) for theirs, ours, _ in rows]
    flags = {flag for row in named for flag in row}
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    known = {option for action in commands.choices["serve"]._actions for option in action.option_strings}
    assert len(rows) > 20 and len(flags) > 15 and flags <= known, flags - known


def rows_of_ours(theirs: str, ours: str) -> list[str]:
    return re.findall(r"--[a-z-]+", f"{theirs} {ours}" if ours.startswith("the same") else ours)


def test_the_row_of_a_new_family_is_one() -> None:
    (row,) = blocks("add-a-family", "text")
    spec = eval(f"({row.rstrip().removesuffix(',')})", {"FamilySpec": FamilySpec})
    assert {spec.force} == {spec.ends[0] + opener for opener in spec.openers}
    assert f'--think-start "{spec.starts[0]}" --think-end "{spec.ends[0]}"' in PAGES["add-a-family"]
