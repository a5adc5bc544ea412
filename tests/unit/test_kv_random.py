"""Long random runs: every branch reads back its own entries after every step."""

import pytest
from kv_model import HEADS, Machine

OPERATIONS = {
    "grow": 14,
    "new": 3,
    "fork": 3,
    "fold": 8,
    "refold": 2,
    "drop": 1,
    "offload": 1,
    "swap_out": 2,
    "swap_in": 4,
    "publish": 3,
    "rewind": 1,
    "free": 1,
    "clear": 1,
    "launch": 8,
}
HAPPENED = (
    *("row", "hit", "fork", "publish", "rewind", "drop", "offload", "free", "free on the host"),
    *("fold", "fold refused", "fold without a free page", "block copy"),
    *("swap out", "swap out refused", "swap out of a summary", "swap in"),
)


def run(machine: Machine, operations: int, branches: int) -> None:
    weights = {name: n for name, n in OPERATIONS.items() if name != "refold" or machine.page_blocks > HEADS}
    for name in machine.rng.choices(list(weights), list(weights.values()), k=operations):
        getattr(machine, name)()
        if len(machine.models) > branches:
            machine.free()
    machine.launch()
    for model in machine.models:
        machine.kv.free(model.table)
    machine.models.clear()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("num_pages", "reserve", "host", "branches", "page_blocks"),
    [(40, 3, 60, 12, 3), (22, 2, 12, 6, 3), (22, 1, 12, 7, 5)],
)
def test_every_branch_reads_back_its_own_entries(depth, num_pages, reserve, host, branches, page_blocks):
    sizes = {"num_pages": num_pages, "reserve": reserve, "host": host, "page_blocks": page_blocks}
    machine = Machine(depth + num_pages, depth, **sizes)
    run(machine, 12_000, branches)
    kv = machine.kv
    machine.run_plan()
    while machine.flight:
        machine.finish()
    kv.clear_cache()
    kv.check_integrity([])
    assert kv.num_available == num_pages - reserve
    assert sum(kv.usage().values()) == kv.host_usage() == 0
    happened = [*HAPPENED, "refold"] if page_blocks > HEADS else HAPPENED
    if page_blocks > HEADS:  # their blocks are full
        happened.remove("block copy")
        assert not machine.done["block copy"]
    rare = {name: machine.done[name] for name in happened if machine.done[name] < 5}
    assert not rare
