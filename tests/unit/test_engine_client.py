"""A core in its own process, seen from outside: terminal signals, a parent that dies, a core that hangs."""

import os
import subprocess
import sys

import pytest

PARENT = """
import asyncio, os, signal, sys, time, types
from thinkfold.config import EngineConfig
from thinkfold.engine.client import ProcessClient
from thinkfold.engine.messages import Abort

class Idle:
    has_work = has_news = urgent = idle = has_requests = False
    ranks = None
    orders, handles = types.SimpleNamespace(take=list), types.SimpleNamespace(expire=bool)
    prefixes = types.SimpleNamespace(expire=bool, answered=[])

    def check_integrity(self):
        pass

    def abort(self, request_id):
        pass

    def advance(self):
        pass

    def news(self):
        return []

    def stats(self):
        return None

def build(config):
    if config.served_model_name == "hung":
        time.sleep(100)
    return Idle(), None

async def main(name):
    events = asyncio.Queue()
    client = ProcessClient(build, EngineConfig(served_model_name=name), events.put_nowait)
    if name == "hung":
        client.send(Abort("x" * 10**6))
        return
    await events.get()
    os.kill(client._process.pid, signal.SIGINT)
    client.send(Abort("nobody"))
    print(type(await events.get()).__name__, client._process.pid, flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    return [sys.executable, str(script)]


def test_the_core_survives_ctrl_c_of_the_terminal_and_ends_with_its_parent(command):
    """Ctrl-C reaches the whole process group: the server lets requests finish, so the core must go on."""
    parent = subprocess.Popen([*command, "idle"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    event, core = parent.stdout.readline().split()
    assert event == "News"  # it still answers
    os.kill(int(core), 0)
    parent.kill()
    assert parent.stdout.read() == ""  # the pipe closes when the core, which inherited it, has ended
    parent.wait(10)


def test_commands_that_a_hung_core_never_reads_do_not_keep_the_server_from_ending(command):
    assert subprocess.run([*command, "hung"], timeout=30, check=False).returncode == 0
