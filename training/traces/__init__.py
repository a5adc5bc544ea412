"""Trace writers, one a family: `write(problem, rng) -> Trace`."""

from random import Random

from thinkfold.pebble.problem import Problem
from training.traces import (
    boxes,
    chain_sum,
    countdown,
    gcd,
    graph,
    leg_counting,
    mental,
    number_sorting,
    sums,
)
from training.traces.trace import BLANK_LINE, SEGMENT_TOKEN, UNLEARNED, Trace

__all__ = ["BLANK_LINE", "SEGMENT_TOKEN", "UNLEARNED", "WRITERS", "Trace", "write"]

WRITERS = {
    "sums": sums.write,
    "countdown": countdown.write,
    "boxes": boxes.write,
    "graph": graph.write,
    "chain_sum": chain_sum.write,
    "gcd": gcd.write,
    "number_sorting": number_sorting.write,
    "leg_counting": leg_counting.write,
    "mental": mental.write,
}


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a problem by its family's writer."""
    return WRITERS[problem.task](problem, rng)
