"""Tests of ``kedge serve``: the running command, its options and its shutdown."""

import json
import signal
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from for_each import for_each
from forked import ForkedProcess
from kedge._internal.urls import is_loopback
from kedge.cli import serve
from kedge.cli.serve import command, local_url
from kedge.config import data_dir
from kedge.server.settings import Settings
from kedge.server.uvicorn_server import bind

TIMEOUT = 300.0


@contextmanager
def run_serve(*options: str) -> Generator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run the command until the block ends; yield the process and its start-up line."""
    process = ForkedProcess(
        ["-m", "kedge", "serve", "--port", "0", "--store", ":memory:", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_no_page_serves_only_the_api_until_a_signal(tmp_path: Path) -> None:
    """The start-up line has the addresses, standard error has the access log, and the exit code is 0."""
    db = tmp_path / "server.db"
    with run_serve("--db", str(db), "--no-page") as (process, line):
        assert line["db"] == str(db)
        assert "page" not in line
        assert httpx2.get(f"{line['url']}/", timeout=TIMEOUT).status_code == 404
        body = {"model": "practice", "input": "a private matter"}
        answer = httpx2.post(
            f"{line['base_url']}/responses", json=body, verify=False, timeout=TIMEOUT
        )
        assert answer.json()["status"] == "completed"
        metrics = httpx2.get(f"{line['url']}/metrics", verify=False, timeout=TIMEOUT).text
        assert "responses_chained_mode_enabled 1.0" in metrics
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert out == ""
    assert "POST /v1/responses 200" in log
    assert "private" not in log
    assert "Traceback" not in log
    assert b"a private matter" in db.read_bytes()


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Return a function that runs the command without serving and returns its settings."""

    def run(*options: str) -> Settings:
        started: list[Settings] = []
        monkeypatch.setattr(
            serve, "serve_until_stopped", lambda settings, *_, **__: started.append(settings)
        )
        result = CliRunner().invoke(command, ["--store", ":memory:", "--port", "0", *options])
        assert result.exit_code == 0, result.output
        assert not Path(":memory:").exists()
        return started[0]

    return run


def test_options_become_settings(
    caught: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option sets a setting, and has a default; the token may be in the environment."""
    monkeypatch.setenv("KEDGE_SERVER_TOKEN", "from-outside")  # not visible in the list of processes
    public = caught("--host", "0.0.0.0")  # noqa: S104 - nothing is bound
    assert (public.token, public.any_host) == ("from-outside", False)
    assert caught("--token", "given").token == "given"
    monkeypatch.delenv("KEDGE_SERVER_TOKEN")
    plain = caught()
    assert plain.db == str(data_dir() / "server.db")
    assert plain.token is None
    assert plain.retention == 30 * 86_400
    assert not plain.zero_data_retention
    assert plain.faults is None
    assert plain.unknown_parameters is None
    script = tmp_path / "script.json"
    script.write_text('{"answers": [{"say": "Always this."}]}')
    settings = caught(
        "--db", ":memory:", "--retention-days", "0.5", "--zero-data-retention",
        "--model", f"script:{script}", "--pace", "0.25", "--fault", "status=500",
        "--unknown-parameters", "ignore",
    )  # fmt: skip
    assert settings.db == ":memory:"
    assert settings.retention == 43_200
    assert settings.zero_data_retention
    assert getattr(settings.model, "pace", None) == 0.25
    assert settings.faults is not None
    assert settings.unknown_parameters == "ignore"


@for_each(
    ("options", "code", "message"),
    [
        (["--host", "::"], 2, "a token is required"),
        (["--host", "192.0.2.1", "--token", ""], 2, "a token is required"),
        (["--host", "::", "--token", "x", "--fault", "status=500"], 2, "--fault is not allowed"),
        (["--model", "oracle"], 1, "no provider named 'oracle'"),
        (["--fault", "explode"], 1, "unknown fault 'explode'; choose one of cut_after_events"),
        (["--models", "/nowhere.toml"], 1, "cannot read /nowhere.toml"),
        (["--model", "script:/nowhere.json"], 1, "cannot be read"),
        (["--token", "secret\n"], 1, "token must be printable text without spaces at its ends"),
        (["--retention-days", "0"], 2, "retention-days"),
        (["--port", "70000"], 2, "port"),
        (["--db", "/dev/null/x"], 1, "cannot be opened"),
        (["--db", "mysql://user:secret@host/x"], 1, "unknown database address; use a file"),
        (["--host", "203.0.113.1", "--token", "x", "--db", ":memory:"], 1, "cannot listen"),
    ],
)
def test_invalid_options_are_rejected(options: list[str], code: int, message: str) -> None:
    """The exit code is 2 for invalid usage and 1 for a problem of the environment."""
    result = CliRunner().invoke(command, ["--store", ":memory:", "--port", "0", *options])
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output


def test_store_is_no_database_of_the_server(tmp_path: Path) -> None:
    """One file for both is rejected with its reason: no other server uses it."""
    path = str(tmp_path / "both.db")
    result = CliRunner().invoke(command, ["--db", path, "--store", path, "--port", "0"])
    assert result.exit_code == 2
    assert "--db and --store must be different files" in result.output
    assert not (tmp_path / "both.db").exists()


def test_port_in_use_is_reported() -> None:
    """A port that is in use is named in the error message."""
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = str(listener.getsockname()[1])
        result = CliRunner().invoke(command, ["--port", port, "--db", ":memory:", "--no-page"])
    assert result.exit_code == 1
    assert f"port {port} is in use" in result.output


def test_page_uses_loopback_url_of_server() -> None:
    """The page calls the server by a loopback address, even if it listens on all addresses."""
    with bind("0.0.0.0", 0) as listener:  # noqa: S104 - for a moment only
        assert local_url(listener).startswith("http://127.0.0.1:")


def test_only_loopback_is_local() -> None:
    """An address that other machines might reach is not local and needs a token."""
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))
    others = ("0.0.0.0", "::", "localhost.example.com", "")  # noqa: S104 - nothing is bound
    assert not any(map(is_loopback, others))


@pytest.mark.parametrize(
    ("platform", "variable", "place"),
    [
        ("linux", None, ".local/share/kedge/server.db"),
        ("linux", "XDG_DATA_HOME", "data/kedge/server.db"),
        ("darwin", None, "Library/Application Support/kedge/server.db"),
        ("win32", "LOCALAPPDATA", "data/kedge/server.db"),
    ],
)
def test_database_is_in_platform_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, variable: str | None, place: str
) -> None:
    """The default database is in the data folder of each platform."""
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path / "data"))
    assert data_dir() / "server.db" == tmp_path / place


def test_models_are_read_from_file(tmp_path: Path, caught: Callable[..., Settings]) -> None:
    """Models are read by name; the page uses the default model, or else the first."""
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\nmodel = "practice"\n[models.b]\nmodel = "ollama:llama3.2"\n')
    settings = caught("--models", str(file))
    assert list(settings.models) == ["a", "b"]
    assert (settings.model.name, settings.default) == ("a", None)
    assert caught("--model", "ollama:llama3.2").model.name == "llama3.2"
