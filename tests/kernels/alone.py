"""Test files run as programs: a process decides once whether kernels are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys


def run_alone(file: str, mode: str, interpret: str) -> str:
    """What `file` prints when it is run with `mode`; `interpret` is Triton's "1" or "0"."""
    done = subprocess.run(
        [sys.executable, file, mode],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "TRITON_INTERPRET": interpret},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
