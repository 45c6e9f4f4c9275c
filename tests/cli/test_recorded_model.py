"""Commands continue a conversation with the model that answered in it, or name that model and send nothing."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.sample_store import run_command, run_json
from kedge._internal.event_loops import run_sync
from kedge.cli.store_options import model_references, parse_time, remember, run_with_store
from kedge.config import store_url
from kedge.conversation import Conversation
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


def test_answers_of_several_models_have_their_names(server: TestServer, store_path: Path) -> None:
    """Where two models answered, ``show`` and ``tree`` name the model of each answer; a provider only if needed."""
    model = f"responses:{server.base_url}#one"
    create_in_python(store_path, model)
    assert "Model one" not in run_command("show", "plan").output
    assert run_json("show", "plan")["models"] == {}
    assert " one " not in run_command("tree", "plan").output
    for other in (f"responses:{server.base_url}#two", "practice"):
        assert run_command(*ASK, "--model", other).exit_code == 0
    shown = run_command("show", "plan").output
    assert [f"Model {name}\n" in shown for name in ("one", "two", "practice")] == [True] * 3
    assert "Model one" not in run_command("show", "plan", "--last", "2").output
    assert "Model practice" in run_command("show", "plan", "--last", "2").output
    blocks = run_json("show", "plan")["blocks"]
    answers = [block["id"] for block in blocks if block["kind"] == "assistant"]
    named = run_json("show", "plan")["models"]
    assert [named[answer] for answer in answers] == ["one", "two", "practice"]
    tree = run_command("tree", "plan").output
    assert [f" {name} " in tree for name in ("one", "two", "practice")] == [True] * 3
    assert run_command(*ASK, "--model", f"responses:{server.base_url}#practice").exit_code == 0
    shown = run_command("show", "plan").output
    assert "Model practice:practice" in shown
    assert "Model responses:practice" in shown
    assert "Model one\n" in shown


def test_inspect_says_why_the_last_answer_is_not_continued(
    server: TestServer, store_path: Path
) -> None:
    """An older answer is continued because the last one came without an id."""
    model = f"responses:{server.base_url}#practice"
    create_in_python(store_path, model)
    server.faults.set("omit_response_id", times=1)
    assert run_command(*ASK, "--model", model).exit_code == 0
    output = " ".join(run_command("inspect", "plan", "--say", "And?").output.split())
    assert "Chained on resp_" in output
    assert "Not used: the last answer, because it came without an id." in output


def test_model_of_an_earlier_node(server: TestServer, store_path: Path) -> None:
    """A conversation that another model has continued is continued from before with the model of that time."""
    model = f"responses:{server.base_url}#practice"
    create_in_python(store_path, model)
    remember(model_references(model))
    node = str(run_json("show", "plan")["node"])
    assert run_command(*ASK, "--model", "practice").exit_code == 0
    assert run_json("inspect", "plan")["model"] == "practice"
    assert run_json("inspect", "plan", "--at", node)["model"] == model


def test_password_of_a_stored_address_is_not_shown(store_path: Path) -> None:
    """An imported conversation may name an address with a password, which is masked in the error."""
    data = {"model": "responses:http://ada:planted@host.example/v1#m"}
    url = store_url(str(store_path))
    run_with_store(lambda store: store.create("plan", data=data), url, make=True)
    done = run_command(*ASK)
    assert (done.exit_code, "planted" in done.output) == (1, False)
    assert "ada:…@host.example" in done.stderr


def test_times_without_a_zone_are_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A date means the same on every machine; a time may have another zone."""
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            assert parse_time("2026-11-15") == parse_time("2026-11-15T01:00+01:00") == 1794700800.0
    finally:
        time.tzset()
