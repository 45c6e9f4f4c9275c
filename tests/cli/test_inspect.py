"""A dry run sends nothing, and says if its plan depends on a probe that the request would make."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.sample_store import run_command, run_json
from forked import run_forked
from kedge.config import store_url
from kedge.conversation import Conversation
from kedge.event_loops import run_sync
from kedge.providers import connect
from kedge.store import open_store
from kedge.testing import TestServer, serve


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TestServer]:
    """Yield a server of an unknown kind, and configure a store with a conversation with it."""
    path = tmp_path / "kedge.db"
    monkeypatch.setenv("KEDGE_STORE", str(path))

    async def create(url: str) -> None:
        async with (
            open_store(store_url(str(path))) as store,
            connect(f"responses:{url}#practice") as engine,
        ):
            conversation = await Conversation.create(engine, store=store, title="plan")
            await conversation.send("My name is Ada.")

    with serve() as server:
        server.faults.set("anonymous")
        run_sync(create(server.base_url))
        yield server


def test_a_conditional_plan_is_shown_as_such(server: TestServer) -> None:
    """Text and JSON say that a probe may change the plan; the command makes no request."""
    sent = len(server.requests)
    options = ("plan", "--say", "And?", "--model", f"responses:{server.base_url}#practice")
    assert "This may change" in run_command("inspect", *options).output
    plan = run_json("inspect", *options)["plan"]
    assert (plan["conditional"], plan["reason"]) == (True, "untrusted")
    assert len(server.requests) == sent


PROGRAM = """
import sys
from kedge import Conversation, user
with Conversation("practice", store=sys.argv[1], id="notes").sync as conversation:
    conversation.send("My name is Ada.")
    if sys.argv[2] == "changed":
        conversation.edit(conversation.turn[0].id, user("My name is Bob."))
"""


@pytest.mark.parametrize("reason", ["lost", "changed"])
def test_a_response_is_found_missing_only_if_it_would_be_used(
    reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan has the reason of the next request, which does not ask for a response of an edited history."""
    path = str(tmp_path / "kedge.db")
    monkeypatch.setenv("KEDGE_STORE", path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    run_forked("-c", PROGRAM, path, reason, check=True)
    plan = run_json("inspect", "notes", "--say", "What is my name?")["plan"]
    assert [each["reason"] for each in plan["rejected"]] == [reason]
    sent = run_json("chat", "-c", "notes", "What is my name?")["requests"][-1]
    assert (sent["reason"], sent["sent_blocks"]) == (reason, 3)
