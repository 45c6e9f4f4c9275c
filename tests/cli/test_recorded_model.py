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


COMMANDS = (("chat", "-c", "plan", "What is my name?"), ("inspect", "plan"))


@pytest.mark.parametrize("provider", ["responses", "chat"])
@pytest.mark.parametrize("command", COMMANDS)
def test_model_at_an_unconfirmed_address_is_named_and_not_used(
    server: TestServer, store_path: Path, provider: str, command: tuple[str, ...]
) -> None:
    """A conversation of another server is not continued with the practice model; the error names its model."""
    model = f"{provider}:{server.base_url}#practice"
    create_in_python(store_path, model)
    sent = len(server.requests)
    done = run_command(*command)
    assert done.exit_code == 1
    assert model.partition("#")[0] in done.stderr
    assert "pass --model" in done.stderr
    assert len(server.requests) == sent
    assert len(run_json("show", "plan")["blocks"]) == 2


@pytest.mark.parametrize("provider", ["responses", "chat"])
def test_confirmed_model_continues(server: TestServer, store_path: Path, provider: str) -> None:
    """A model string from this machine is found by the address in the scope of the newest response."""
    model = f"{provider}:{server.base_url}#practice"
    create_in_python(store_path, model)
    remember(model_references(model))
    sent = len(server.requests)
    done = run_command("chat", "-c", "plan", "What is my name?")
    assert "Your name is Ada." in done.output
    assert len(server.requests) > sent


def test_unreachable_hosted_model_is_named(server: TestServer, store_path: Path) -> None:
    """Without a key the command fails and names the provider; nothing is stored."""
    create_in_python(store_path, "openai:practice", base_url=server.base_url, api_key="secret")
    done = run_command("chat", "-c", "plan", "What is my name?")
    assert done.exit_code == 1
    assert "openai:practice" in done.stderr
    assert "OPENAI_API_KEY" in done.stderr
    assert len(run_json("show", "plan")["blocks"]) == 2
