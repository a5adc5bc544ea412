"""Draws docs/images/sessions.svg: how many thinking requests run over time, with and without folds, simulated.

The real scheduler, admission and memory on a clock of steps that a 7B shape takes on an H200: a pool of three requests
of 2,000 + 32,000 + 500 tokens, somebody always waits, all begin at once. A simulated token, page and step stand for 16
of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.simulation import Simulation, StepTime
from thinkfold.scheduler.workload import Load
from thinkfold.types import FoldMode, FoldPolicy, FoldProfile

OUT = Path(__file__).parents[1] / "docs" / "images" / "sessions.svg"
UNIT, HEADS, CLIENTS = 16, 28 * 4, 40
LOAD = Load(125, (2000, 2000, 2000), 31, (32, 128), 1, FoldProfile(64, 16, 16, 16, 4, 12), 4096, unit=UNIT)
STEP_TIME = StepTime(5.1e-3, 0.0, 1.18e-8).scaled(UNIT)  # three rows of `bench decode` within 1 %; prompts are free
MINUTES, EVERY = 20, 2.0  # seconds between two points
INK = "#374151"


class Arm(NamedTuple):
    """What a line shows."""

    label: str
    mode: FoldMode
    predicted: bool  # admission; else the pool is filled, and who finds no page is preempted
    colour: str


ARMS = (
    Arm("eager folds", FoldMode.EAGER, True, "#1d4ed8"),
    Arm("no folds, filled and preempted", FoldMode.OFF, False, "#b45309"),
    Arm("no folds, predicted admission", FoldMode.OFF, True, "#6b7280"),
)


class Course(NamedTuple):
    """Requests that run, every so many seconds, and how many have ended and were preempted by then."""

    running: Sequence[int]
    ended: int
    preempted: int


def course(arm: Arm, minutes: float = MINUTES) -> Course:
    """One arm on the simulated clock."""
    reserve = LOAD.numbers.entries
    kv = KVManager(3 * LOAD.mean + reserve, 1, enable_prefix_caching=False, num_heads=HEADS, reserve_pages=reserve)
    scheduler = Scheduler(
        kv,
        max_num_seqs=CLIENTS,
        max_num_batched_tokens=8192 // UNIT,
        fold_counts=lambda entries, tokens: [min(entries, tokens)] * HEADS,
        admission=Admission(kv.capacity, 1) if arm.predicted else None,
    )
    simulation = Simulation(
        scheduler,
        LOAD.work(0),
        fold=FoldPolicy(arm.mode, entries=LOAD.numbers.entries),
        numbers=LOAD.numbers,
        budget=LOAD.budget,
        max_tokens=LOAD.mean - LOAD.prompt,
        clients=CLIENTS,
        step_time=STEP_TIME,
    )
    running = []
    for point in range(int(minutes * 60 / EVERY)):
        simulation.advance(point * EVERY)
        running.append(len(scheduler.running))
    return Course(running, len(simulation.latencies), sum(scheduler.pressure[rung] for rung in ("swap", "preempt")))


def draw(courses: Sequence[tuple[Arm, Course]], out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "thinkfold", "text.color": INK, "axes.edgecolor": INK})
    figure, axes = pyplot.subplots(figsize=(7.6, 3.6), layout="constrained")
    for arm, found in courses:
        minutes = [point * EVERY / 60 for point in range(len(found.running))]
        label = f"{arm.label}: {found.ended} answers, {found.preempted} preempted"
        axes.step(minutes, found.running, color=arm.colour, linewidth=1.3, where="post", label=label)
    axes.legend(frameon=False, loc="upper right")
    axes.set(xlabel="minutes", ylabel="requests that run", ylim=(0, None), xlim=(0, MINUTES))
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> int:
    """Simulate all arms and draw them."""
    courses = [(arm, course(arm)) for arm in ARMS]
    draw(courses, OUT)
    for arm, found in courses:
        print(f"{arm.label}: {found.ended} answers, {max(found.running)} at most, {found.preempted} preempted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
