"""Tests of ``kedge auth``, and of ``kedge serve`` with tokens."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cli.sample_store import run_command, run_json
from cli.test_serve import TIMEOUT, run_serve
from kedge.cli.auth import DEFAULT_SCOPES, SCOPES
from kedge.store import token_registry
from server.waiting import wait_until


def test_scopes_match_the_store() -> None:
    """The command repeats the store's scopes, because importing the store takes long."""
    assert (SCOPES, DEFAULT_SCOPES) == (token_registry.SCOPES, token_registry.DEFAULT_SCOPES)


def test_tokens_are_added_listed_and_revoked(store_path: Path) -> None:
    """A token is printed only by ``add``; ``list`` and ``revoke`` use its name."""
    assert "There are no tokens" in run_command("auth", "list").stdout
    added = run_command("auth", "add", "alice")
    secret = added.stdout.strip()
    assert secret.startswith("kedge_")
    assert "shown once" in added.stderr
    created = run_json(
        "auth", "add", "ci", "--user", "alice", "--scope", "server", "--tokens-per-minute", "9"
    )
    assert created["token"].startswith("kedge_")
    assert created["scopes"] == ["server"]
    run_json("auth", "add", "ops", "--admin", "--scope", "metrics")
    listed = run_json("auth", "list")
    assert [(each["name"], each["user"]) for each in listed] == [
        ("alice", "alice"),
        ("ci", "alice"),
        ("ops", ""),
    ]
    output = run_command("auth", "list").stdout
    assert "(administrator)" in output
    assert secret not in output + json.dumps(listed)
    assert run_json("auth", "revoke", "ci") == {"name": "ci", "revoked": True}
    assert "alice: revoked" in run_command("auth", "revoke", "alice").stdout
    assert [each["name"] for each in run_json("auth", "list")] == ["ops"]


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
    store_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    """An invalid argument is reported with a message and an exit code."""
    run_command("auth", "add", "known")
    done = run_command("auth", *arguments)
    assert done.exit_code == code
    assert message in done.output


@pytest.mark.parametrize("page", ["--page", "--no-page"])
def test_server_requires_tokens_of_its_store(store_path: Path, page: str) -> None:
    """With tokens in its store, the server requires one, and each user sees only their own responses."""
    secrets = {name: run_json("auth", "add", name)["token"] for name in ("alice", "bob")}
    with run_serve("--db", ":memory:", page, "--store", str(store_path)) as (_, line):
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
def test_first_token_applies_to_running_server(store_path: Path, page: str) -> None:
    """A running server requires a token after the first one is added, and also after it is revoked."""
    with run_serve("--db", ":memory:", page, "--store", str(store_path)) as (_, line):
        models = f"{line['base_url']}/models"

        def get(url: str, **headers: str) -> int:
            return httpx2.get(url, headers=headers, verify=False, timeout=TIMEOUT).status_code

        assert get(models) == 200
        secret = run_json("auth", "add", "alice")["token"]
        wait_until(lambda: get(models) == 401)  # the server checks its store once a second
        assert get(models, authorization=f"Bearer {secret}") == 200
        if page == "--page":
            assert get(f"{line['url']}/api/conversations") == 401
        run_json("auth", "revoke", "alice")
        assert get(models) == 401
