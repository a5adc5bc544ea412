"""`thinkfold plan`: how many requests a card will carry and how fast, reckoned from a model's configuration.

Nothing is measured and no weights are read. Sessions are what admission would start, a step is as fast as memory can
be read; what the CUDA context, activations and graphs take is an assumption (`--overhead`). Of a model over several
cards, memory is that of each.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from thinkfold.cli.engine_flags import add_flags
from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.types import FoldMode
from thinkfold.types.checks import integer, number

if TYPE_CHECKING:
    from thinkfold.engine.planning import Card, Load, Outlook, Planner, Pool

SETTINGS = (
    "dtype",
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "page_size",
    "gpu_memory_utilization",
    "admission_risk",
    "fold_profile",
    "fold_entries",
)
KV_DTYPES = ("model", "fp8_e4m3")
CURVE = tuple(1024 << i for i in range(8))  # 1k to 128k tokens of thinking


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser(
        "plan", allow_abbrev=False, help="reckon what a card will carry, and how fast", description=__doc__
    )
    parser.add_argument(
        "--model", default="pebble", help="folder with a config.json, hub id, pebble, or a shape: 7b, 32b"
    )
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="as the card's name says it")
    parser.add_argument("--bandwidth", type=float, default=3.35, metavar="TB", help="read in a second (default: 3.35)")
    parser.add_argument("--overhead", type=float, default=1.5, metavar="GIB", help="beside weights, KV and folds")
    parser.add_argument("--prompt", default="2000", metavar="TOKENS", help="of a request (default: 2000)")
    parser.add_argument("--thinking", default="32k", metavar="TOKENS", help="of a request (default: 32k, 32 x 1024)")
    parser.add_argument("--answer", default="500", metavar="TOKENS", help="of a request (default: 500)")
    parser.add_argument("--compare", choices=["chat"], help="with a reply of 300 tokens to a prompt of 1,000")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser, EngineConfig, "engine", only=SETTINGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Raises ThinkfoldError, which names the flag."""
    from thinkfold.engine.planning import Planner

    card, load, config = card_of(args), load_of(args), config_of(args)
    found = report(Planner(config, card), config, load, compare=args.compare == "chat")
    print(json.dumps(found) if args.json else shown(found, config))
    return 0


def card_of(args: argparse.Namespace) -> Card:
    """The card that the flags describe. Raises ParameterError."""
    from thinkfold.engine.planning import Card

    number("gpu_memory", args.gpu_memory, 0.0, 1e6, open_low=True)
    number("bandwidth", args.bandwidth, 0.0, 1e6, open_low=True)
    number("overhead", args.overhead, 0.0, 1e6)
    return Card(int(args.gpu_memory * 2**30), args.bandwidth * 1e12, int(args.overhead * 2**30))


def load_of(args: argparse.Namespace) -> Load:
    """The requests that the flags describe. Raises ParameterError."""
    from thinkfold.engine.planning import Load

    return Load(tokens("prompt", args.prompt, 1), tokens("thinking", args.thinking), tokens("answer", args.answer, 1))


def config_of(args: argparse.Namespace) -> EngineConfig:
    """The engine that the flags describe. Raises ParameterError."""
    return EngineConfig(model=args.model, **{name: getattr(args, name) for name in SETTINGS})


def tokens(name: str, text: str, least: int = 0) -> int:
    """`32k` is 32 x 1024. Raises ParameterError."""
    digits = text.removesuffix("k")
    if not digits.isdecimal():
        raise ParameterError(name, f"must be a number of tokens such as 2000 or 32k, got {text!r:.40}")
    count = int(digits) * (1024 if text.endswith("k") else 1)
    integer(name, count, least)
    return count


def report(planner: Planner, config: EngineConfig, load: Load, *, compare: bool) -> dict[str, Any]:
    """The whole plan as JSON holds it. Bytes and seconds; times of a step are floors."""
    from thinkfold.engine.planning import chat

    pools = {dtype: planner.pool(dtype) for dtype in KV_DTYPES}
    found: dict[str, Any] = {"model": config.model, "load": asdict(load), "kv": {}}
    for dtype, pool in pools.items():
        outlooks = [planner.outlook(pool, load, policy) for policy in FoldMode]
        found["kv"][dtype] = {
            **asdict(pool),
            "capacity": pool.capacity,
            "entry_bytes": pool.entry_bytes,
            "policies": {str(o.policy): _numbers(o) for o in outlooks},
        }
    found["curve"] = _curve(planner, pools["model"], load)
    if compare:
        found["chat"] = _compared(planner.outlook(pools["model"], chat(), FoldMode.OFF), found["kv"]["model"])
    return found


def _numbers(outlook: Outlook) -> dict[str, Any]:
    return {name: value for name, value in asdict(outlook).items() if name != "policy"}


def _curve(planner: Planner, pool: Pool, load: Load) -> list[dict[str, Any]]:
    """Sessions, tokens and answers by length of thinking, raw and folded, up to what the model takes."""
    from thinkfold.engine.planning import with_thinking

    points = []
    for thinking in CURVE:
        longer = with_thinking(load, thinking)
        if longer.tokens <= planner.max_model_len:
            policies = {str(p): planner.outlook(pool, longer, p) for p in (FoldMode.OFF, FoldMode.EAGER)}
            points.append({"thinking": thinking, **{name: _numbers(o) for name, o in policies.items()}})
    return points


def _compared(chat: Outlook, kv: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a chat reply, and how many times as much a thinking request takes."""
    numbers = _numbers(chat)
    ratios = {
        policy: {name: _ratio(row[name], numbers[name]) for name in ("peak", "spread", "answers_h", "byte_seconds")}
        for policy, row in kv["policies"].items()
    }
    return {**numbers, "ratios": ratios}


def _ratio(value: float, base: float) -> float:
    return value / base if base else 0.0


def shown(found: dict[str, Any], config: EngineConfig) -> str:
    """The plan for people; a GB is 10^9 bytes."""
    load, first = found["load"], found["kv"]["model"]
    cards = config.tensor_parallel_size
    lines = [
        *([f"on each of {cards} cards, without the time that they take to add up what each has:"] if cards > 1 else []),
        f"{found['model']}: weights {first['weight_bytes'] / 1e9:.1f} GB, "
        f"folds of {config.max_num_seqs} requests {first['fold_bytes'] / 1e9:.2f} GB",
        f"requests of {load['prompt']:,} prompt, {load['thinking']:,} thinking and {load['answer']:,} answer tokens",
        "",
        f"{'KV':9} {'fold':9} {'KiB/token':>9} {'pool':>9} {'peak':>7} {'mean':>7} {'safe':>5} {'spread':>6} "
        f"{'step ms':>8} {'bend':>6} {'tokens/s':>9} {'answers/h':>9}",
    ]
    for dtype, kv in found["kv"].items():
        for policy, row in kv["policies"].items():
            lines.append(
                f"{dtype:9} {policy:9} {kv['entry_bytes'] / 1024:9.1f} {kv['capacity']:9,} {row['peak']:7,.0f} "
                f"{row['mean']:7,.0f} {row['sessions']:5} {row['spread']:6} {row['step_s'] * 1e3:8.2f} "
                f"{row['bend']:6.0f} {row['tokens_per_s']:9,.0f} {row['answers_h']:9,.1f}"
            )
    lines += [
        "",
        "pool, peak and mean in entries; safe: requests of any ages, spread: of evenly spread ages; step: bytes over",
        "bandwidth; bend: requests from which on a step reads more KV than weights",
    ]
    if any(row["spread"] == config.max_num_seqs for kv in found["kv"].values() for row in kv["policies"].values()):
        lines.append(f"where it says {config.max_num_seqs}, max_num_seqs is the bound, not memory")
    lines += ["", "by length of thinking, KV as the model's", f"{'':9} {'off':>21} {'eager':>21}"]
    lines.append(f"{'thinking':>9}" + f" {'spread':>10} {'answers/h':>10}" * 2)
    for point in found["curve"]:
        cells = "".join(f" {point[p]['spread']:10} {point[p]['answers_h']:10,.1f}" for p in ("off", "eager"))
        lines.append(f"{point['thinking']:9,}{cells}")
    if "chat" in found:
        chat = found["chat"]
        lines += [
            "",
            f"beside a chat reply (1,000 + 300 tokens): {chat['spread']} at a time, {chat['answers_h']:,.0f}/h",
        ]
        for policy, ratio in chat["ratios"].items():
            lines.append(
                f"{policy:9} KV x {ratio['peak']:.1f}, KV-seconds x {ratio['byte_seconds']:,.0f}, "
                f"at a time {_share(ratio['spread'])}, an hour {_share(ratio['answers_h'])}"
            )
    return "\n".join(lines)


def _share(ratio: float) -> str:
    if not ratio:
        return "none"
    return f"1/{1 / ratio:,.1f}" if ratio < 1 else f"x {ratio:.1f}"
