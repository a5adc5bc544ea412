"""Flags that say how requests fold, for the commands that make requests."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from thinkfold.types import FOLD_PROFILES, AtAnswer, FoldMode, FoldParams


def add_fold_flags(parser: argparse.ArgumentParser) -> None:
    """One flag a field of FoldParams; what is not given is the engine's choice."""
    group = parser.add_argument_group("folding (default: the engine's choice)")
    group.add_argument(
        "--fold", dest="fold_policy", choices=[str(m) for m in FoldMode], help="when finished thinking is folded"
    )
    group.add_argument("--fold-profile", choices=list(FOLD_PROFILES), help="numbers of segments and folds")
    group.add_argument("--fold-selector", metavar="NAME", help="what chooses the entries that a fold keeps")
    group.add_argument("--fold-entries", type=int, metavar="N", help="entries of a segment in each KV head, on average")
    group.add_argument("--fold-gate", type=float, metavar="X", help="largest estimated error of a fold, 0 to 1")
    group.add_argument(
        "--fold-at-answer", choices=[str(a) for a in AtAnswer], help="what becomes of raw thinking when it ends"
    )
    group.add_argument("--fold-prefer", choices=["fold", "queue"], help="the peak that admission counts on")
    group.add_argument("--fold-delimiter-token", metavar="TEXT", help="one more token that ends a segment")
    group.add_argument("--fold-delimiter-regex", metavar="REGEX", help="ends a segment where it matches (RE2)")


def fold_wish(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, by the names of FoldParams."""
    values = {f.name: getattr(args, f"fold_{f.name}") for f in fields(FoldParams)}
    return {name: value for name, value in values.items() if value is not None}


def fold_params(args: argparse.Namespace) -> FoldParams:
    """What was given, checked. Raises ParameterError."""
    return FoldParams(**fold_wish(args))
