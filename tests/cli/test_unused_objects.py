"""Tests of ``kedge gc`` and ``kedge delete`` with conversation objects of a provider."""

from pathlib import Path

import pytest

from cli.sample_store import run_command, run_json
from engines.runs import has_object
from kedge.cli.store_options import confirmations_file, run_with_store
from kedge.store import Store
from kedge.testing import TestServer, serve

pytestmark = pytest.mark.usefixtures("store_path")


def chat(server: TestServer, name: str = "harbour") -> str:
    """Send a message in a conversation object, and return the id of the object."""
    model = f"responses:{server.base_url}#practice"
    done = run_command(
        "chat", "--model", model, "--mode", "Conversation", "-c", name, stdin="Hello\n"
    )
    assert done.exit_code == 0, done.output
    return next(each.body["conversation"] for each in server.requests[::-1] if each.context)


def delete_rows(store_path: Path) -> None:
    """Delete the conversation in the store only."""

    async def delete(store: Store) -> None:
        await store.delete(next(r for r in await store.conversations() if r.title == "harbour"))

    run_with_store(delete, f"sqlite:///{store_path}")


def test_delete_deletes_the_object_of_the_conversation() -> None:
    """``kedge delete`` deletes the object at the provider, and reports it."""
    with serve() as server:
        first = chat(server)
        second = chat(server, "quay")
        (deleted,) = run_json("delete", "harbour", "--yes")["objects_deleted"]
        assert deleted["id"] == first
        assert not has_object(server, first)
        assert has_object(server, second)
        done = run_command("delete", "quay", "--yes")
        assert "1 conversation object deleted at the provider" in done.stderr
        assert not has_object(server, second)


def test_gc_deletes_unused_objects(store_path: Path) -> None:
    """``--dry-run`` lists unused objects; without it, they are deleted."""
    with serve() as server:
        object_id = chat(server)
        assert run_json("gc", "--dry-run")["objects"] == []
        delete_rows(store_path)
        (listed,) = run_json("gc", "--dry-run")["objects"]
        assert listed["id"] == object_id
        text = f"1 unused conversation object\n  {object_id}  {listed['scope']}"
        assert text in run_command("gc", "--dry-run").output
        assert has_object(server, object_id)
        found = run_json("gc")
        assert (found["objects_deleted"], found["objects_kept"]) == ([listed], [])
        assert not has_object(server, object_id)
        assert run_json("gc", "--dry-run")["objects"] == []


def test_gc_keeps_undeletable_objects(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not reachable, not confirmed or of another account is named, and tried again by the next gc."""
    with serve() as server:
        object_id = chat(server)
        delete_rows(store_path)
        monkeypatch.setenv("KEDGE_API_KEY", "the-key-of-another-account")
        (kept,) = run_json("gc")["objects_kept"]
        assert kept["id"] == object_id
        assert "another account" in kept["problem"]
        monkeypatch.delenv("KEDGE_API_KEY")
        confirmed = confirmations_file().rename(store_path.parent / "confirmed")
        assert "not used on this machine before" in run_command("gc").stderr
        assert has_object(server, object_id)
        confirmed.rename(confirmations_file())
    done = run_command("gc")
    assert done.exit_code == 0
    assert f"the conversation object {object_id} of" in done.stderr
    assert "was not deleted" in done.stderr
    assert [each["id"] for each in run_json("gc", "--dry-run")["objects"]] == [object_id]


def test_gc_names_what_is_missing(store_path: Path) -> None:
    """Without a key or a provider, nothing is sent, and the reason is named."""
    problems = {
        "openai/api.openai.com/v1/0123456789abcdef": "set OPENAI_API_KEY",
        "nowhere/host": "nowhere",
        "kedge/0123456789abcdef": "kedge serve",
    }

    async def claim(store: Store) -> None:
        store.clock = lambda: 1_000.0
        for scope in problems:
            await store.claim_object(scope, "conv_1", "", owner="a")

    run_with_store(claim, f"sqlite:///{store_path}", make=True)
    kept = {each["scope"]: each["problem"] for each in run_json("gc")["objects_kept"]}
    assert kept.keys() == problems.keys()
    assert all(problem in kept[scope] for scope, problem in problems.items()), kept
