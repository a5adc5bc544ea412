"""Result rows: one shape for every number that eval and the benchmarks print and keep.

Rows name the processor and its cores, never the host.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from thinkfold import __version__

PACKAGES = ("torch", "transformers")


def checkout() -> Path | None:
    """The repository that this package runs from, None for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").is_file() and (root / "benchmarks").is_dir() else None


def make_row(
    bench: str,
    case: str,
    metrics: Mapping[str, float],
    *,
    seed: int | None = None,
    device: str = "cpu",
    extra_versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One row of the contract; times in seconds and rates per second unless a name says otherwise."""
    return {
        "bench": bench,
        "case": case,
        "metrics": {name: _rounded(value) for name, value in metrics.items()},
        "hardware": hardware(device),
        "versions": {"thinkfold": __version__, **_versions(), **(extra_versions or {})},
        "commit": commit(),
        "command": command_line(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seed": seed,
    }


def keep(row: Mapping[str, Any]) -> Path | None:
    """Append a row to `benchmarks/results/<bench>.jsonl` of the checkout; None where there is no checkout."""
    root = checkout()
    if root is None:
        return None
    path = root / "benchmarks" / "results" / f"{row['bench']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return path


def hardware(device: str) -> str:
    """Model and cores of the CPU, with the GPU's model first where one is used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = f"{_cpu_model()}, {cores} cores"
    if not device.startswith("cuda"):
        return cpu
    import torch

    return f"{torch.cuda.get_device_name()}; {cpu}"


def commit() -> str:
    """Short hash of the checkout's commit, with `+` where the source differs from it.

    An exported tree has no history: there the variable THINKFOLD_COMMIT names its commit.
    """
    if exported := os.environ.get("THINKFOLD_COMMIT"):
        return exported
    root = checkout()
    if root is None:
        return f"v{__version__}"
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", "src", "benchmarks/*.py")
    return head + ("+" if changed else "") if head else "uncommitted"


def command_line(argv: list[str] | None = None) -> str:
    """The command as typed; absolute paths are cut to what lies below the working directory, or to the name."""
    words = list(sys.argv if argv is None else argv)
    first = Path(words[0])
    shown = ["python", f"benchmarks/{first.name}"] if first.parent.name == "benchmarks" else ["thinkfold"]
    return shlex.join(shown + [_short_path(word) for word in words[1:]])


def _short_path(word: str) -> str:
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
