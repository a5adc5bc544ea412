"""The pages tell the truth: commands exist, links and trees match the disk."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from thinkfold.cli.main import build_parser
from thinkfold.cli.serve import server_options
from thinkfold.cli.settings import resolve

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CHINESE = ROOT / "README.zh.md"
PAGES = [
    README,
    CHINESE,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code blocks of a page in one language ("" for those without)."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Every command line of a page's sh blocks, as words."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


@cache
def anchors(page: Path) -> set[str]:
    """What links into a page may point at: its headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def inline(page: Path) -> list[list[str]]:
    """`thinkfold` commands within a sentence or a table that name more than the command."""
    found = re.findall(r"`(thinkfold (?:serve|deploy|ask|eval|calibrate|bench) [^`]+)`", page.read_text())
    return [shlex.split(text) for text in found if "NAME" not in text]


ALL_COMMANDS = [words for page in PAGES for words in commands(page)]
INLINE = [words for page in PAGES for words in inline(page)]


HELP = """
import contextlib, io, json, sys
from thinkfold.cli.main import main
shown = {}
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            main([*command.split(), "--help"])
        except SystemExit as end:
            assert not end.code, command
    shown[command] = text.getvalue()
print(json.dumps(shown))
"""


def helps(commands: set[str]) -> dict[str, str]:
    """What `thinkfold COMMAND --help` shows, in one process: most of its time goes into imports."""
    done = subprocess.run(
        [sys.executable, "-c", HELP, json.dumps(sorted(commands))],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_there_is_something_to_test() -> None:
    assert {words[0] for words in ALL_COMMANDS} == {"make", "thinkfold", "curl", "docker"}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = {words[1] for words in ALL_COMMANDS if words[0] == "make"}
    wanted |= {m for page in PAGES for m in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert wanted
    assert wanted <= targets


def command_of(words: list[str]) -> str:
    """The command that has the options; a bench may have a script a kind of model."""
    command = words[1:3] if words[1] == "bench" else words[1:2]
    if words[1] == "bench" and "--model" in words:
        command = [*command, "--model", words[words.index("--model") + 1]]
    return " ".join(command)


def test_commands_and_their_options_exist() -> None:
    typed = [words for words in ALL_COMMANDS + INLINE if words[0] == "thinkfold"]
    shown = helps({command_of(words) for words in typed})
    for words in typed:
        wanted = [w for w in words[2:] if w.startswith("-")]
        missing = [w for w in wanted if not re.search(rf"(?<!\S){w}\b", shown[command_of(words)])]
        assert not missing, f"{' '.join(words)}: no {missing}"


def test_commands_are_taken_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a bench are its script's; a server's settings, and the files of ours that it names, are read."""
    monkeypatch.chdir(ROOT)
    taken = 0
    for words in ALL_COMMANDS + [words for words in INLINE if not words[-1].startswith("--")]:  # or it names an option
        if words[0] != "thinkfold" or words[1] == "bench" or any(word.isupper() or "|" in word for word in words):
            continue
        args = build_parser().parse_args(words[1:])
        if words[1] == "serve" and "--config" not in words:
            server_options(resolve(args, {}).serve)
        taken += 1
    assert taken > 40


def test_every_command_has_its_own_help() -> None:
    assert all(name in helps({""})[""] for name in ("serve", "ask", "eval", "bench"))


def test_the_chinese_readme_says_the_same() -> None:
    def code(page: Path, language: str) -> list[str]:
        return [re.sub(r" +#.*", "", block) for block in blocks(page, language)]

    assert code(CHINESE, "python") == code(README, "python")
    assert code(CHINESE, "sh") == code(README, "sh")
    pictures = [re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text()) for page in (README, CHINESE)]
    assert pictures[0] == pictures[1]
    ours, theirs = (set(re.findall(r"\]\(([^)]+)\)", page.read_text())) for page in (README, CHINESE))
    assert {link for link in ours if link.startswith("docs/")} - theirs <= {"docs/lab-notes.md"}
    numbers = [set(re.findall(r"\d[\d,.]*\d", page.read_text())) for page in (CHINESE, README)]
    assert numbers[0] <= numbers[1]


def test_tests_named_in_pages_exist() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        named = re.findall(r"`pytest (?:-k )?([\w/.]+)`", page.read_text())
        missing = [n for n in named if not (ROOT / n).is_file() and f"def {n}" not in code]
        assert not missing, f"{page.name}: {missing}"


def test_the_tree_matches_the_disk() -> None:
    tree = next(block for block in blocks(README, "") if block.startswith("src/"))
    paths: list[Path] = []
    for line in tree.splitlines():
        name = line.split()[0]
        base = ROOT / "src" / "thinkfold" if line.startswith(" ") else ROOT
        paths.append(base / name)
    missing = [str(p.relative_to(ROOT)) for p in paths if not p.exists()]
    assert not missing
    package = {p for p in (ROOT / "src" / "thinkfold").iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert package <= set(paths), "the tree misses a package"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    targets = {(page.parent / link if link else page, anchor) for link, anchor in links}
    assert not [str(path) for path, _ in targets if not path.exists()]
    lost = [(str(path), anchor) for path, anchor in targets if anchor and anchor not in anchors(path)]
    assert not lost


def test_files_named_in_pages_exist() -> None:
    for page in PAGES:
        named = re.findall(r"`((?:tests|src|benchmarks|docs|training)/[\w./-]+|\w+/\w+\.py)`", page.read_text())
        places = [ROOT, ROOT / "src" / "thinkfold", page.parent]
        missing = [n for n in named if not any((p / n).exists() for p in places) and "NAME" not in n]
        assert not missing, f"{page.name}: {missing}"
