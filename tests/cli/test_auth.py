"""Tests of ``kedge auth``, and of ``kedge serve`` with tokens."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result

from cli.test_serve import TIMEOUT, run_serve
from kedge.cli import group
from kedge.cli.auth import DEFAULT_SCOPES, SCOPES
from kedge.store import token_registry
from server.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return the path of a store that does not exist yet."""
    return str(tmp_path / "store.db")


def run_auth(store: str, *arguments: str) -> Result:
    """Run ``kedge auth``."""
    return CliRunner().invoke(group, ["auth", *arguments, "--store", store])


def read_json(store: str, *arguments: str) -> Any:
    """Run ``kedge auth`` with ``--json`` and return its output."""
    done = run_auth(store, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_scopes_match_the_store() -> None:
    """The command repeats the store's scopes, because importing the store takes long."""
    assert (SCOPES, DEFAULT_SCOPES) == (token_registry.SCOPES, token_registry.DEFAULT_SCOPES)


def test_tokens_are_added_listed_and_revoked(store: str) -> None:
    """A token is printed only by ``add``; ``list`` and ``revoke`` use its name."""
    assert "There are no tokens" in run_auth(store, "list").stdout
    added = run_auth(store, "add", "alice")
    secret = added.stdout.strip()
    assert secret.startswith("kedge_")
    assert "shown once" in added.stderr
    created = read_json(
        store, "add", "ci", "--user", "alice", "--scope", "server", "--tokens-per-minute", "9"
    )
    assert created["token"].startswith("kedge_")
    assert created["scopes"] == ["server"]
    read_json(store, "add", "ops", "--admin", "--scope", "metrics")
    listed = read_json(store, "list")
    assert [(each["name"], each["user"]) for each in listed] == [
        ("alice", "alice"),
        ("ci", "alice"),
        ("ops", ""),
    ]
    output = run_auth(store, "list").stdout
    assert "(administrator)" in output
    assert secret not in output + json.dumps(listed)
    assert read_json(store, "revoke", "ci") == {"name": "ci", "revoked": True}
    assert "alice: revoked" in run_auth(store, "revoke", "alice").stdout
    assert [each["name"] for each in read_json(store, "list")] == ["ops"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("add", "a", "--admin", "--user", "b"), 2, "exclude each other"),
        (("add", "a", "--user", ""), 2, "--user is empty; name a user, or use --admin"),
        (("add", "a", "--scope", "all"), 2, "Invalid value"),
        (("add", "a", "--tokens-per-minute", "9" * 30), 1, "must be from 1 to 10^15"),
        (("add", "a b"), 1, "the name of a token"),
        (("revoke", "nobody"), 1, "there is no token 'nobody'"),
    ],
)
def test_invalid_arguments_are_reported(
    store: str, arguments: tuple[str, ...], code: int, message: str
) -> None:
    """An invalid argument is reported with a message and an exit code."""
    run_auth(store, "add", "known")
    done = run_auth(store, *arguments)
    assert done.exit_code == code
    assert message in done.output


@pytest.mark.parametrize("page", ["--page", "--no-page"])
def test_server_requires_tokens_of_its_store(store: str, page: str) -> None:
    """With tokens in its store, the server requires one, and each user sees only their own responses."""
    secrets = {name: read_json(store, "add", name)["token"] for name in ("alice", "bob")}
    with run_serve("--db", ":memory:", page, "--store", store) as (_, line):
        url = f"{line['base_url']}/responses"

        def call(method: str, name: str, path: str = "", **options: Any) -> httpx2.Response:
            headers = {"authorization": f"Bearer {secrets.get(name, name)}"}
            return httpx2.request(
                method, url + path, headers=headers, verify=False, timeout=TIMEOUT, **options
            )

        body = {"model": "practice", "input": "hello"}
        response_id = call("POST", "alice", json=body).json()["id"]
        assert call("GET", "alice", f"/{response_id}").status_code == 200
        assert call("GET", "bob", f"/{response_id}").status_code == 404
        assert call("GET", "wrong", f"/{response_id}").status_code == 401
        if page == "--page":
            answer = httpx2.get(f"{line['url']}/api/conversations", verify=False, timeout=TIMEOUT)
            assert answer.status_code == 401


@pytest.mark.parametrize("page", ["--page", "--no-page"])
def test_first_token_applies_to_running_server(store: str, page: str) -> None:
    """A running server requires a token after the first one is added, and also after it is revoked."""
    with run_serve("--db", ":memory:", page, "--store", store) as (_, line):
        models = f"{line['base_url']}/models"

        def get(url: str, **headers: str) -> int:
            return httpx2.get(url, headers=headers, verify=False, timeout=TIMEOUT).status_code

        assert get(models) == 200
        secret = read_json(store, "add", "alice")["token"]
        wait_until(lambda: get(models) == 401)  # the server checks its store once a second
        assert get(models, authorization=f"Bearer {secret}") == 200
        if page == "--page":
            assert get(f"{line['url']}/api/conversations") == 401
        read_json(store, "revoke", "alice")
        assert get(models) == 401
