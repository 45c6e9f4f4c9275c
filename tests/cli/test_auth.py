"""Tests of ``kedge auth``, and of ``kedge serve`` with tokens."""

import json
from pathlib import Path
from typing import Any

import httpx2

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
    found = [(each["name"], each["user"]) for each in listed]
    assert found == [("alice", "alice"), ("ci", "alice"), ("ops", "")]
    output = run_command("auth", "list").stdout
    assert "(administrator)" in output
    assert secret not in output + json.dumps(listed)
    assert run_json("auth", "revoke", "ci") == {"name": "ci", "revoked": True}
    assert "alice: revoked" in run_command("auth", "revoke", "alice").stdout
    assert [each["name"] for each in run_json("auth", "list")] == ["ops"]


def test_invalid_arguments_are_reported(store_path: Path) -> None:
    """An invalid argument is reported with a message and an exit code."""
    for arguments, code, message in (
        (("add", "a", "--admin", "--user", "b"), 2, "exclude each other"),
        (("add", "a", "--user", ""), 2, "--user is empty; name a user, or use --admin"),
        (("add", "a", "--scope", "all"), 2, "Invalid value"),
        (("add", "a", "--tokens-per-minute", "9" * 30), 1, "must be from 1 to 10^15"),
        (("add", "a b"), 1, "the name of a token"),
        (("revoke", "nobody"), 1, "there is no token 'nobody'"),
    ):
        done = run_command("auth", *arguments)
        assert (done.exit_code, message in done.output) == (code, True), done.output


def test_server_requires_tokens_of_its_store(store_path: Path) -> None:
    """A running server requires a token after the first one is added; each user has their own responses."""
    with run_serve("--db", ":memory:", "--no-page", "--store", str(store_path)) as (_, line):

        def call(method: str, token: str, path: str, **options: Any) -> httpx2.Response:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            url = f"{line['base_url']}/{path}"
            return httpx2.request(method, url, headers=headers, timeout=TIMEOUT, **options)

        assert call("GET", "", "models").status_code == 200
        alice, bob = (run_json("auth", "add", name)["token"] for name in ("alice", "bob"))
        # The server checks its store once a second.
        wait_until(lambda: call("GET", "", "models").status_code == 401)
        body = {"model": "practice", "input": "hello"}
        response_id = call("POST", alice, "responses", json=body).json()["id"]
        statuses = {alice: 200, bob: 404, "wrong": 401, "": 401}
        for token, status in statuses.items():
            assert call("GET", token, f"responses/{response_id}").status_code == status
