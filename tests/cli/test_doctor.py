"""``kedge doctor``: what is in place, what is not, and what to do about it."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kedge.cli.doctor import KEY_VARIABLES, command
from kedge.config import store_url
from kedge.engines.evidence import ServerEvidence
from kedge.event_loops import run_sync
from kedge.store import open_store
from kedge.testing import serve
from postgresql import PASSWORD

KEY = "sk-planted-key-0123456789abcdef"
RunDoctor = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own is looked at."""
    for name in (
        *KEY_VARIABLES,
        "OPENAI_BASE_URL",
        "KEDGE_CONFIG",
        "ENABLE_RESPONSE_BOUNDARY_TRACKING",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def run_doctor(*words: str) -> tuple[Result, dict[str, dict[str, Any]]]:
    """Run it with --json: the result, and its checks by name."""
    result = CliRunner().invoke(command, ["--json", *words])
    report = json.loads(result.stdout)
    assert report["ok"] is (result.exit_code == 0)
    return result, {check["name"]: check for check in report["checks"]}


def test_a_fresh_machine_is_fine() -> None:
    """Versions are told, and that no key is needed for the practice model."""
    result, checks = run_doctor()
    assert result.exit_code == 0
    assert checks["python"]["state"] == "ok"
    assert "openai" in checks["packages"]["found"]
    assert checks["keys"]["state"] == "note"
    assert "OPENAI_API_KEY" in checks["keys"]["advice"]
    assert "does not exist yet" in checks["server.db"]["found"]


def test_a_store_without_a_folder_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It could not be made when it is needed."""
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "nowhere" / "kedge.db"))
    result, checks = run_doctor()
    assert result.exit_code == 1
    assert "its folder does not exist" in checks["store"]["found"]


def test_what_is_known_about_the_memory_of_servers_is_shown(tmp_path: Path) -> None:
    """In one sentence each; streaming or not is one line if nothing differs."""
    unproven = ServerEvidence()
    proven = ServerEvidence(proof="count", max_depth=100)
    doubted = ServerEvidence(doubt="unsupported")

    async def save() -> None:
        address = store_url()
        async with await open_store(address) as store:
            await store.save_evidence("responses/one m stream http", unproven.to_json())
            await store.save_evidence("responses/one m whole http", unproven.to_json())
            await store.save_evidence("responses/two m whole http", proven.to_json())
            await store.save_evidence("responses/three m whole http", doubted.to_json())

    run_sync(save())
    result, _ = run_doctor()
    found = [check["found"] for check in json.loads(result.stdout)["checks"]]
    assert sorted(each for each in found if each.startswith("responses/")) == [
        "responses/one, m: everything is sent until its token counts or an audit show that it remembers",
        "responses/three, m: not chained on, because the server rejected chaining as unsupported",
        (
            "responses/two, m: chained on: its token counts show that it remembers; "
            "at most 100 responses deep"
        ),
    ]


def test_a_store_of_an_older_version_has_no_evidence(tmp_path: Path) -> None:
    """It is migrated when it is opened; until then nothing is known."""
    folder = tmp_path / "kedge"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "kedge.db")) as database:
        database.execute("CREATE TABLE other (name TEXT)")
    _, checks = run_doctor()
    assert "server" not in checks


def test_a_nearly_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations could not be stored."""
    monkeypatch.setattr("kedge.cli.doctor.MIN_FREE_BYTES", 1 << 80)
    result, checks = run_doctor()
    assert result.exit_code == 1
    assert "free" in checks["folder"]["found"]
    assert "Free some space" in checks["folder"]["advice"]


def test_people_get_a_line_a_check_and_a_sum() -> None:
    """With signs that need no colour."""
    output = CliRunner().invoke(command).output
    assert "✓ python" in output
    assert "! keys" in output
    assert "No problems found." in output
    assert "use --online" in output


def test_keys_are_shown_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is damaged is said so."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("XAI_API_KEY", "sk-ünpräntable")
    result, checks = run_doctor()
    assert KEY not in result.output
    assert checks["OPENAI_API_KEY"]["found"].startswith("sk-…cdef")
    assert checks["XAI_API_KEY"]["state"] == "wrong"
    assert result.exit_code == 1


def test_a_broken_configuration_is_diagnosed_not_died_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The doctor is whom one asks then."""
    file = tmp_path / "broken.toml"
    file.write_text("modell = 'x'")
    monkeypatch.setenv("KEDGE_CONFIG", str(file))
    result, checks = run_doctor()
    assert result.exit_code == 1
    assert "line 1" in checks["config"]["found"]
    assert checks["config"]["advice"]
    file.write_text("")
    monkeypatch.setenv("KEDGE_SERVE_PORT", "many")
    _, checks = run_doctor()
    assert "KEDGE_SERVE_PORT" in checks["environment"]["found"]


def test_a_secret_that_others_can_read_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the command that mends it."""
    file = tmp_path / "config.toml"
    file.write_text('[serve]\ntoken = "planted"\n')
    monkeypatch.setenv("KEDGE_CONFIG", str(file))
    file.chmod(0o644)
    assert "chmod 600" in run_doctor()[1]["config"]["advice"]
    file.chmod(0o600)
    assert run_doctor()[1]["config"]["advice"] == ""


def test_the_rollback_switch_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may have forgotten it."""
    monkeypatch.setenv("ENABLE_RESPONSE_BOUNDARY_TRACKING", "0")
    assert run_doctor()[1]["ENABLE_RESPONSE_BOUNDARY_TRACKING"]["state"] == "note"


def test_databases_are_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sound one tells its version, a damaged one what to do; it is never written to."""
    file = tmp_path / "server.db"
    monkeypatch.setenv("KEDGE_SERVE_DB", str(file))
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version=7")
    database.close()
    before = file.read_bytes()
    assert "schema 7" in run_doctor()[1]["server.db"]["found"]
    assert file.read_bytes() == before
    file.write_bytes(b"this is no database, but long enough to look at" * 30)
    result, checks = run_doctor()
    assert checks["server.db"]["state"] == "wrong"
    assert result.exit_code == 1
    monkeypatch.setenv("KEDGE_SERVE_DB", ":memory:")
    assert run_doctor()[1]["server.db"]["state"] == "ok"


def test_online_asks_who_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reached, refused, or not there; nobody without a key is asked."""
    assert "no server is configured" in run_doctor("--online")[1]["online"]["found"]
    with serve(token=KEY) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        _, checks = run_doctor("--online")
        assert checks["reach openai"]["state"] == "ok"
        assert "answered in" in checks["reach openai"]["found"]
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        result, checks = run_doctor("--online")
        assert checks["reach openai"]["state"] == "wrong"
        assert "rejects the key (401)" in checks["reach openai"]["found"]
        assert result.exit_code == 1
        monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", server.url)
        monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
        assert "/openai/v1/models" in run_doctor("--online")[1]["reach azure"]["found"]
        monkeypatch.delenv("AZURE_OPENAI_API_KEY")
    _, checks = run_doctor("--online", "--timeout", "2")
    assert "cannot be reached" in checks["reach openai"]["found"]


def test_online_asks_the_configured_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of one's own, without the password in its address."""
    with serve() as server:
        monkeypatch.setenv("KEDGE_MODEL", f"responses:{server.base_url}#x")
        assert run_doctor("--online")[1]["reach responses"]["state"] == "ok"
    with serve() as server:
        monkeypatch.setenv("KEDGE_MODEL", f"chat:{server.base_url}#x")
        assert run_doctor("--online")[1]["reach chat"]["state"] == "ok"
        monkeypatch.setenv("KEDGE_MODEL", "ollama:llama3.2")
        monkeypatch.setenv("OLLAMA_HOST", server.url)
        assert run_doctor("--online")[1]["reach ollama"]["state"] == "ok"
    monkeypatch.setenv("KEDGE_MODEL", "responses:http://ada:planted@127.0.0.1:9/v1#x")
    result, checks = run_doctor("--online")
    assert checks["reach responses"]["state"] == "wrong"
    assert "planted" not in result.output


def test_the_database_of_replicas_is_checked(
    monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    """Whether it can be reached; the password is not shown."""
    monkeypatch.setenv("KEDGE_SERVE_DB", postgres_url)
    found = run_doctor()[1]["server.db"]
    assert found["state"] == "ok"
    assert PASSWORD not in found["found"]
    monkeypatch.setenv("KEDGE_SERVE_DB", postgres_url.replace(PASSWORD, "letmein"))
    found = run_doctor()[1]["server.db"]
    assert found["state"] == "wrong"
    assert "letmein" not in found["found"]
