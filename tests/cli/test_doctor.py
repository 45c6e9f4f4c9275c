"""Tests of ``kedge doctor``: its checks, their results and their advice."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.sample_store import execute
from kedge.cli.doctor import command, config_command
from kedge.cli.store_options import run_with_store
from kedge.config import store_url
from kedge.evidence.server_evidence import ServerEvidence
from kedge.server.storage.database import SCHEMA_VERSION
from kedge.store import Store
from kedge.testing import serve
from postgresql import PASSWORD

KEY = "sk-planted-key-0123456789abcdef"


def run_doctor(*arguments: str) -> tuple[Result, dict[str, dict[str, Any]]]:
    """Run the command with ``--json``; return the result and the checks by name."""
    result = CliRunner().invoke(command, ["--json", *arguments])
    report = json.loads(result.stdout)
    assert report["ok"] is (result.exit_code == 0)
    return result, {check["name"]: check for check in report["checks"]}


def test_fresh_machine_has_no_problems() -> None:
    """Versions are listed, missing keys are only a note, and the text has a summary."""
    result, checks = run_doctor()
    assert result.exit_code == 0
    assert checks["python"]["state"] == "ok"
    assert "aiohttp" in checks["packages"]["found"]
    assert checks["keys"]["state"] == "note"
    assert "OPENAI_API_KEY" in checks["keys"]["advice"]
    assert "does not exist yet" in checks["server.db"]["found"]
    assert "No problems found." in CliRunner().invoke(command).output


def test_problems_of_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing folder and a disk without space are problems; a store that is not yet migrated is none."""
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "nowhere" / "kedge.db"))
    result, checks = run_doctor()
    assert result.exit_code == 1
    assert "its folder does not exist" in checks["store"]["found"]
    monkeypatch.delenv("KEDGE_STORE")
    monkeypatch.setattr("kedge.cli.doctor.MIN_FREE_BYTES", 1 << 80)
    result, checks = run_doctor()
    assert result.exit_code == 1
    assert "free" in checks["folder"]["found"]
    assert "Free some space" in checks["folder"]["advice"]
    folder = tmp_path / "kedge"
    folder.mkdir()
    execute(folder / "kedge.db", "CREATE TABLE other (name TEXT)")
    _, checks = run_doctor()
    assert "server" not in checks


def test_store_is_checked(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema, or why the store cannot be opened, is reported without a password."""
    run_with_store(lambda store: store.create(), store_url(str(store_path)), make=True)
    assert "schema" in run_doctor()[1]["store"]["found"]
    execute(store_path, "UPDATE kedge_schema SET version = 9999")
    check = run_doctor()[1]["store"]
    assert f"{store_path} was written by a newer version of Kedge" in check["found"]
    assert "Upgrade Kedge" in check["advice"]
    store_path.write_bytes(b"no database at all, but some bytes of something else" * 40)
    assert run_doctor()[0].exit_code == 1
    for variable, address, problem in (
        (
            "STORE",
            "postgresql://ada:planted@127.0.0.1:9/kedge?connect_timeout=2",
            "cannot be opened",
        ),
        ("SERVE_DB", "mysql://ada:planted@host/x", "unknown database address"),
    ):
        monkeypatch.setenv(f"KEDGE_{variable}", address)
        output = run_doctor()[0].stdout
        assert (problem in output, "planted" in output) == (True, False)


def test_evidence_about_servers_is_shown(tmp_path: Path) -> None:
    """Each server has one line; streaming and other requests are combined if their evidence is equal."""
    evidence = {
        "one m stream": ServerEvidence(),
        "one m whole": ServerEvidence(),
        "two m whole": ServerEvidence(proof="count", max_depth=100),
        "three m whole": ServerEvidence(doubt="unsupported"),
    }

    async def save(store: Store) -> None:
        for name, known in evidence.items():
            await store.save_evidence(f"responses/{name} http", known.to_json())

    run_with_store(save, store_url(), make=True)
    result, _ = run_doctor()
    texts = [check["found"] for check in json.loads(result.stdout)["checks"]]
    one, three, two = sorted(each for each in texts if each.startswith("responses/"))
    assert "one, m: everything is sent until its token counts or an audit" in one
    assert "three, m: not chained on, because the server rejected chaining" in three
    assert two.endswith("its token counts show that it remembers; at most 100 responses deep")


def test_keys_are_shown_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """API keys are masked, and a key with invalid characters is a problem."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("XAI_API_KEY", "sk-ünpräntable")
    result, checks = run_doctor()
    assert KEY not in result.output
    assert checks["OPENAI_API_KEY"]["found"].startswith("sk-…cdef")
    assert checks["XAI_API_KEY"]["state"] == "wrong"
    assert result.exit_code == 1


def test_invalid_configuration_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An invalid file or variable is reported as a failed check instead of ending the command."""
    file = tmp_path / "broken.toml"
    file.write_text("modell = 'x'")
    monkeypatch.setenv("KEDGE_CONFIG", str(file))
    result, checks = run_doctor()
    assert result.exit_code == 1
    assert "line 1" in checks["config"]["found"]
    assert checks["config"]["advice"].startswith("Fix that line, or remove")
    monkeypatch.setenv("KEDGE_CONFIG", "/dev/zero")
    result, checks = run_doctor()
    assert result.exit_code == 1
    assert "it is not a regular file" in checks["config"]["found"]
    assert checks["config"]["advice"] == (
        "Set KEDGE_CONFIG to the path of a regular file, or unset it."
    )
    monkeypatch.setenv("KEDGE_CONFIG", str(file))
    file.write_text("")
    monkeypatch.setenv("KEDGE_SERVE_PORT", "many")
    _, checks = run_doctor()
    assert "KEDGE_SERVE_PORT" in checks["environment"]["found"]


def test_unknown_variable_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is ignored is noted with the one that is most likely meant."""
    monkeypatch.setenv("KEDGE_PORT", "9000")
    report = json.loads(CliRunner().invoke(config_command, ["--json"]).stdout)
    assert report["unknown_variables"] == {"KEDGE_PORT": "KEDGE_SERVE_PORT"}
    result, checks = run_doctor()
    assert result.exit_code == 0
    assert "KEDGE_PORT is ignored" in checks["environment"]["found"]
    assert checks["environment"]["advice"] == "Did you mean KEDGE_SERVE_PORT?"


@pytest.mark.parametrize(
    ("value", "state", "found"),
    [
        ("0", "note", "chaining is disabled: the value is '0'"),
        ("disabled", "note", "chaining is disabled: the value is 'disabled'"),
        ("rolled back", "note", "chaining is disabled: the value is 'rolled back'"),
        ("Yes", "ok", "chaining is enabled: the value is 'Yes'"),
    ],
)
def test_rollback_variable_is_shown(
    monkeypatch: pytest.MonkeyPatch, value: str, state: str, found: str
) -> None:
    """The variable that disables chaining is shown with its value and what this value means."""
    monkeypatch.setenv("ENABLE_RESPONSE_BOUNDARY_TRACKING", value)
    check = run_doctor()[1]["ENABLE_RESPONSE_BOUNDARY_TRACKING"]
    assert (check["state"], check["found"]) == (state, found)


def test_readable_secret_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secret in a file that others can read is reported with the remedy; an address without a password is none."""
    file = tmp_path / "config.toml"
    file.write_text('[serve]\ntoken = "planted"\n')
    monkeypatch.setenv("KEDGE_CONFIG", str(file))
    file.chmod(0o644)
    assert "chmod 600" in run_doctor()[1]["config"]["advice"]
    file.chmod(0o600)
    assert run_doctor()[1]["config"]["advice"] == ""
    file.write_text('model = "openai:gpt-5.1"\nstore = "postgresql://ada@db/kedge"\n')
    file.chmod(0o644)
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store.db"))
    assert run_doctor()[1]["config"]["state"] == "ok"
    file.write_text('store = "postgresql://ada:planted-pass@db/kedge"\n')
    assert "contains store" in run_doctor()[1]["config"]["advice"]


def test_databases_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The schema version or the damage of a database is reported, and the file is not modified."""
    file = tmp_path / "server.db"
    monkeypatch.setenv("KEDGE_SERVE_DB", str(file))
    execute(file, "CREATE TABLE mine (x)")
    before = file.read_bytes()
    assert "has tables of another program" in run_doctor()[1]["server.db"]["found"]
    assert file.read_bytes() == before
    file.unlink()
    with serve(db=str(file)):
        pass
    assert f"schema {SCHEMA_VERSION}" in run_doctor()[1]["server.db"]["found"]
    execute(file, "UPDATE kedge_server_schema SET version = 3")
    found = run_doctor()[1]["server.db"]
    assert "older version of Kedge (schema 3" in found["found"]
    assert "another --db" in found["advice"]
    file.write_bytes(b"this is no database, but long enough to look at" * 30)
    result, checks = run_doctor()
    assert checks["server.db"]["state"] == "wrong"
    assert result.exit_code == 1
    monkeypatch.setenv("KEDGE_SERVE_DB", ":memory:")
    assert run_doctor()[1]["server.db"]["state"] == "ok"


def test_online_checks_providers_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers with a key are reported as reachable, rejecting the key, or not reachable."""
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


def test_online_checks_the_configured_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configured server is checked, and a password in its URL is not shown."""
    with serve() as server:
        monkeypatch.setenv("OLLAMA_HOST", server.url)
        addresses = [f"{api}:{server.base_url}#x" for api in ("responses", "chat")]
        for model in (*addresses, "ollama:llama3.2"):
            monkeypatch.setenv("KEDGE_MODEL", model)
            check = run_doctor("--online")[1][f"reach {model.partition(':')[0]}"]
            assert check["state"] == "ok"
    monkeypatch.setenv("KEDGE_MODEL", "responses:http://ada:planted@127.0.0.1:9/v1#x")
    result, checks = run_doctor("--online")
    assert checks["reach responses"]["state"] == "wrong"
    assert "planted" not in result.output


def test_server_database_is_checked(monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> None:
    """The connection to PostgreSQL is checked, and the password is not shown."""
    for password, state in ((PASSWORD, "ok"), ("letmein", "wrong")):
        monkeypatch.setenv("KEDGE_SERVE_DB", postgres_url.replace(PASSWORD, password))
        check = run_doctor()[1]["server.db"]
        assert (check["state"], password in check["found"]) == (state, False)
