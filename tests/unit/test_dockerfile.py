"""The Dockerfile cannot be built here; what it names can be looked up, and what it runs can be run."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

from thinkfold.cli.main import build_parser
from thinkfold.cli.settings import PREFIX, resolve

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ").splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def of(instruction: str) -> list[str]:
    return [line.removeprefix(f"{instruction} ").strip() for line in LINES if line.startswith(f"{instruction} ")]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    sources = [word for line in of("COPY") if "--from" not in line for word in line.split()[:-1]]
    kept = {line[1:] for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert set(sources) == kept and all((ROOT / source).exists() for source in sources)
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= kept, "the build reads them"


def test_what_is_installed_is_what_the_project_offers() -> None:
    (extras,) = re.findall(r'"\.\[(.*?)\]"', "".join(of("RUN")))
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    (base, other) = of("FROM")
    assert base.removesuffix(" AS build") == other and other.startswith("python:3.11-slim")


def test_it_runs_as_nobody_special_and_serves_to_the_outside() -> None:
    assert of("USER")[-1].isdecimal() and of("USER")[-1] != "0"
    (environment,) = of("ENV")
    given = dict(pair.split("=", 1) for pair in environment.split())
    entry, arguments = json.loads(of("ENTRYPOINT")[0]), json.loads(of("CMD")[0])
    assert entry[0] in PROJECT["scripts"]
    environ = {name: value for name, value in given.items() if name.startswith(PREFIX)}
    settings = resolve(build_parser().parse_args([*entry[1:], *arguments]), environ)
    assert (settings.serve.host, str(settings.serve.port)) == ("0.0.0.0", of("EXPOSE")[0])


class Ready(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def test_the_health_check_believes_ready() -> None:
    (check,) = of("HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    server = http.server.HTTPServer(("127.0.0.1", 0), Ready)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        environment = {**os.environ, "THINKFOLD_PORT": str(server.server_port)}
        for Ready.status, healthy in ((200, True), (503, False)):
            done = subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True, timeout=30)
            assert (done.returncode == 0) is healthy, done.stderr
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()
