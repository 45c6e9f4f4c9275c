"""Commands continue a conversation with the model that answered in it, or name that model and send nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.sample_store import run_command, run_json
from kedge.cli.store_options import model_references, remember
from kedge.config import store_url
from kedge.conversation import Conversation
from kedge.event_loops import run_sync
from kedge.store import open_store
from kedge.testing import serve
from kedge.testing.server import TestServer


@pytest.fixture
def server() -> Iterator[TestServer]:
    """Yield a server in another process than the practice model of the commands."""
    with serve() as server:
        yield server


def create_in_python(path: Path, model: str, **settings: Any) -> None:
    """Create the conversation ``plan`` as a program does, which records no model string."""

    async def create() -> None:
        from kedge import connect

        async with open_store(store_url(str(path))) as store, connect(model, **settings) as engine:
            conversation = await Conversation.create(engine, store=store, title="plan")
            await conversation.send("My name is Ada.")

    run_sync(create())


ASK = ("chat", "-c", "plan", "What is my name?")


@pytest.mark.parametrize("provider", ["responses", "chat"])
def test_only_a_confirmed_model_continues(
    server: TestServer, store_path: Path, provider: str
) -> None:
    """A conversation continues with the model at its recorded address, if this machine has used it before."""
    model = f"{provider}:{server.base_url}#practice"
    create_in_python(store_path, model)
    sent = len(server.requests)
    for command in (ASK, ("inspect", "plan")):
        done = run_command(*command)
        assert done.exit_code == 1
        assert model.partition("#")[0] in done.stderr
        assert "pass --model" in done.stderr
    assert len(server.requests) == sent
    assert len(run_json("show", "plan")["blocks"]) == 2
    remember(model_references(model))
    done = run_command(*ASK)
    assert "Your name is Ada." in done.output
    assert len(server.requests) > sent


def test_unreachable_hosted_model_is_named(server: TestServer, store_path: Path) -> None:
    """Without a key the command fails and names the provider; nothing is stored."""
    create_in_python(store_path, "openai:practice", base_url=server.base_url, api_key="secret")
    done = run_command(*ASK)
    assert done.exit_code == 1
    assert "openai:practice" in done.stderr
    assert "OPENAI_API_KEY" in done.stderr
    assert len(run_json("show", "plan")["blocks"]) == 2


def test_a_conditional_plan_is_shown_as_such(server: TestServer, store_path: Path) -> None:
    """Text and JSON say that a probe may change the plan; the command makes no request."""
    server.faults.set("anonymous")
    model = f"responses:{server.base_url}#practice"
    create_in_python(store_path, model)
    sent = len(server.requests)
    options = ("plan", "--say", "And?", "--model", model)
    assert "This may change" in run_command("inspect", *options).output
    plan = run_json("inspect", *options)["plan"]
    assert (plan["conditional"], plan["reason"]) == (True, "untrusted")
    assert len(server.requests) == sent
