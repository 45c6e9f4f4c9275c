"""A dry run sends nothing, and says if its plan depends on a probe that the request would make."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.sample_store import run_command, run_json
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
