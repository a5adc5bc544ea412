"""Settings of `serve`: one precedence, and what is shown is what would be used."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from thinkfold.cli.engine_flags import sentence
from thinkfold.cli.main import USAGE_ERROR, build_parser, main
from thinkfold.cli.profiles import PROFILES, settings_of
from thinkfold.cli.settings import Resolved, ServeSettings, resolve
from thinkfold.config import EngineConfig, own_names
from thinkfold.errors import ParameterError
from thinkfold.types import Prices


def resolved(*argv: str, environ: dict[str, str] | None = None) -> Resolved:
    return resolve(build_parser().parse_args(["serve", *argv]), environ or {})


def test_nothing_given_gives_the_defaults() -> None:
    got = resolved()
    assert (got.engine, got.serve) == (EngineConfig(), ServeSettings()) and set(got.origins.values()) == {"default"}


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('model = "file"\nport = 1\npage_size = 32\nfold_gate = 1\nopen_routes = ["/health"]\n')
    environ = {"THINKFOLD_CONFIG": str(path), "THINKFOLD_PORT": "2", "THINKFOLD_MODEL": "env", "OTHER": "x"}
    environ |= {"THINKFOLD_OWN_PROCESS": "no", "THINKFOLD_CORS_ORIGINS": "https://a, https://b"}
    got = resolved("--port", "3", environ=environ)
    assert (got.serve.port, got.engine.model, got.engine.page_size) == (3, "env", 32)
    assert got.engine.own_process is False and got.serve.cors_origins == ("https://a", "https://b")
    wanted = {"port": "flag", "model": "environment", "page_size": "file", "host": "default", "fold_gate": "file"}
    assert wanted.items() <= got.origins.items()
    assert resolved("--config", str(path)).serve == ServeSettings(port=1, open_routes=("/health",))


def test_another_name_is_as_good_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("block_size = 32\n")
    ways = [(("--block-size", "32"), {}), ((), {"THINKFOLD_BLOCK_SIZE": "32"}), (("--config", str(path)), {})]
    assert [resolved(*argv, environ=environ).engine.page_size for argv, environ in ways] == [32] * 3
    assert own_names({"block_size": 32, "seed": 1}) == {"page_size": 32, "seed": 1}


def test_what_is_printed_gives_the_same_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--page-size", "8", "--no-enable-prefix-caching", "--drain-s", "2.5", "--served-model-name", 'a "b"']
    assert main(["serve", "some/model", *flags, "--print-config"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "again.toml"
    path.write_text(text)
    again, first = resolved("--config", str(path)), resolved("some/model", *flags)
    assert (again.engine, again.serve) == (first.engine, first.serve)
    names = {f.name for cls in (EngineConfig, ServeSettings) for f in fields(cls)}
    assert set(tomllib.loads(text)) <= names and all(name in text for name in names)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1\n", "prot: is no setting; did you mean port?"),
        ('port = "1"\n', "port (in "),
        ("port = true\n", "must be an integer"),
        ('open_routes = "/x"\n', "must be a list of strings"),
        ("page_size = 7\n", "page_size: must be one of"),
        ("page_size = 8\nblock_size = 16\n", "block_size: page_size is given, too"),
        ("port = \n", "config: is not valid TOML"),
        ('open_routes = ["x"]\n', "open_routes: must begin with a slash"),
    ],
)
def test_wrong_files_are_one_line(tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    assert main(["serve", "--config", str(path), "--print-config"]) == USAGE_ERROR
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("PORT", "x"), ("OWN_PROCESS", "maybe"), ("PIPELINE_DEPTH", "one")])
def test_wrong_variables_are_named(name: str, value: str) -> None:
    with pytest.raises(ParameterError, match=f"THINKFOLD_{name}"):
        resolved(environ={f"THINKFOLD_{name}": value})


def test_every_setting_says_what_it_is() -> None:
    for cls in (EngineConfig, ServeSettings):
        assert all(sentence(cls, field.name) for field in fields(cls))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_stands_in_for_what_is_left_open_and_says_why(profile: str, tmp_path: Path) -> None:
    got = resolved("--profile", profile)
    values = {f.name: getattr(part, f.name) for part in (got.engine, got.serve) for f in fields(part)}
    assert {name: values[name] for name in PROFILES[profile]} == settings_of(profile)
    assert {got.origins[name] for name in PROFILES[profile]} == {"profile"}
    lines = got.explained()
    assert len(lines) == len(PROFILES[profile]) and all(
        choice.why in "\n".join(lines) for choice in PROFILES[profile].values()
    )
    path = tmp_path / "again.toml"
    path.write_text(got.toml())
    again = resolved("--config", str(path))
    assert (again.engine, again.serve) == (got.engine, got.serve)


def test_whatever_is_given_beats_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('profile = "agents"\ndefault_thinking_budget = 99\n')
    got = resolved("--config", str(path), "--fold-policy", "off")
    assert (got.engine.default_thinking_budget, got.engine.fold_policy) == (99, "off")
    assert got.engine.kv_cache_dtype == "fp8_e4m3" and got.origins["kv_cache_dtype"] == "profile"
    assert "default_thinking_budget = 99 (your file; the profile has 4096)" in "\n".join(got.explained())
    assert (
        resolved().explained() == [] and resolved("--profile", "maths", "--config", str(path)).serve.profile == "maths"
    )
    with pytest.raises(ParameterError, match=r"^profile: must be one of agents, maths, chains"):
        resolved(environ={"THINKFOLD_PROFILE": "fast"})


def test_prices_are_a_table_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("port = 1\n[prices]\nprompt = 0.5\nanswer = 2\n")
    got = resolved("--config", str(path))
    assert got.prices == Prices(gpu_second=0.0, prompt=0.5, answer=2) and got.serve.port == 1
    path.write_text(got.toml())
    assert resolved("--config", str(path)).prices == got.prices and resolved().prices == Prices()
    for text, words in (("prices = 1", "prices: must be a table"), ("[prices]\nx = 1", "prices.x: there is no such")):
        path.write_text(text)
        with pytest.raises(ParameterError, match=words):
            resolved("--config", str(path))
