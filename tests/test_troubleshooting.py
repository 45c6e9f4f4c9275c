"""Every symptom of ``docs/troubleshooting.md`` is reproduced, and has the stated cause.

A row of the table of reasons is a symptom, and so is every other section. A symptom without a scenario fails.
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from click.testing import CliRunner

from engines.conftest import open_engine
from engines.runs import send_lines
from kedge import Conversation, connect, errors
from kedge.cli import group
from kedge.engines import Engine
from kedge.errors import AnswerIncomplete, CannotOpenStore, HeadConflict, UnsupportedBlock
from kedge.events import TextDelta
from kedge.events.run import Healed, ModeChanged
from kedge.middleware import repair, with_middleware
from kedge.observe.metrics import reset, snapshot
from kedge.planning import DEFAULT_RETENTION, RequestPlan
from kedge.store import TokenRegistry, open_store
from kedge.testing import TestServer, serve
from kedge.turns import Turn, opaque, tool_call, user

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
REASONS_TITLE = "Everything is sent every time"
Scenario = Callable[..., Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


def list_symptoms() -> list[str]:
    """Return the first cells of the table of reasons, and the titles of the other sections."""
    titles = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", PAGE, re.MULTILINE)
    return [*rows[1:], *(each for each in titles if each != REASONS_TITLE)]


def reproduces(symptom: str) -> Callable[[Scenario], Scenario]:
    """Add a scenario for a symptom."""

    def add(scenario: Scenario) -> Scenario:
        assert symptom not in SCENARIOS
        SCENARIOS[symptom] = scenario
        return scenario

    return add


def check_reason(plan: RequestPlan | None, symptom: str) -> None:
    """Check that a plan sends everything for this reason, in the words of the page."""
    assert plan is not None
    assert plan.anchor is None
    assert symptom in plan.explain()


@pytest.mark.parametrize("symptom", list_symptoms())
async def test_symptom_has_the_stated_cause(symptom: str, kedge_server: TestServer) -> None:
    """The cause on the page produces the symptom."""
    await SCENARIOS[symptom](kedge_server)


def test_every_scenario_is_on_the_page() -> None:
    """A symptom that was removed from the page has no scenario."""
    assert set(SCENARIOS) == set(list_symptoms())


# Reasons for a full send


@reproduces("the conversation before or in it was edited since")
async def edit_the_history(server: TestServer) -> None:
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "It is 10:31.", "What time is it?")
        assert engine.plan(turn.append(user("?"))).anchor
        edited = turn.edit(turn[0].id, user("It is 10:32."))
        check_reason(engine.plan(edited), "the conversation before or in it was edited since")


@reproduces("it belongs to another provider, endpoint, account or conversation object")
async def change_the_key(server: TestServer) -> None:
    async with open_engine(server, api_key="one") as engine:
        turn = await send_lines(engine, "Hello")
    async with open_engine(server, api_key="two") as engine:
        check_reason(engine.plan(turn.append(user("?"))), "it belongs to another provider")


@reproduces("the server did not store it")
async def send_without_storing(server: TestServer) -> None:
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "Hello", store=False)
        check_reason(engine.plan(turn.append(user("?"))), "the server did not store it")


@reproduces("the server no longer stores it, or is about to drop it")
async def wait_until_responses_expire(server: TestServer) -> None:
    now = [1_000.0]
    async with open_engine(server, clock=lambda: now[0]) as engine:
        turn = await send_lines(engine, "Hello")
        now[0] += DEFAULT_RETENTION
        check_reason(engine.plan(turn.append(user("?"))), "the server no longer stores it")


@reproduces("the server no longer has it")
async def delete_all_responses(server: TestServer) -> None:
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "Hello")
        server.forget()
        reply = await engine.ask(turn.append(user("?")))
        check_reason(reply.plan, "the server no longer has it")


@reproduces("it was never completed")
async def cut_off_an_answer(server: TestServer) -> None:
    async with open_engine(server) as engine:
        with pytest.raises(AnswerIncomplete) as caught:
            await send_lines(engine, "Tell me a long story.", max_output_tokens=16)
        assert caught.value.turn is not None
        check_reason(engine.plan(caught.value.turn.append(user("?"))), "it was never completed")


@reproduces("its chain is longer than this server is known to remember")
async def exceed_the_depth(server: TestServer) -> None:
    async with open_engine(server, max_depth=1) as engine:
        turn = await send_lines(engine, "One")
        assert engine.plan(turn.append(user("?"))).anchor
        turn = await send_lines(engine, "Two", turn=turn)
        check_reason(engine.plan(turn.append(user("?"))), "its chain is longer")


@reproduces("it cannot be checked whether this server remembers it")
async def report_no_tokens(server: TestServer) -> None:
    server.faults.set("report_usage=none")
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "One", "Two")
        check_reason(engine.plan(turn.append(user("?"))), "it cannot be checked whether")
    async with open_engine(server, trust="always") as engine:
        assert engine.plan(turn.append(user("?"))).anchor


@reproduces("there is no record of what it remembers")
async def rebuild_a_turn(server: TestServer) -> None:
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "Hello")
        rebuilt = Turn(turn.blocks).append(user("?"))
        check_reason(engine.plan(rebuilt), "there is no record of what it remembers")
        server.faults.set("omit_call_id")
        called = await engine.run(Turn([user("Please call add with a=1")]), tools=[_ADD])
        check_reason(engine.plan(called), "there is no record of what it remembers")


@reproduces("the server rejects a request that only names it, without new blocks")
async def reject_empty_input(server: TestServer) -> None:
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "Hello")
        server.faults.set("refuse_empty_input")
        reply = await engine.ask(turn)
        check_reason(reply.plan, "the server rejects a request that only names it")


@reproduces("another line of history continues its conversation object, or may have done so")
async def send_a_fork_to_an_object(server: TestServer) -> None:
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "Hello")
        await engine.run(turn.append(user("One")))
        check_reason(engine.plan(turn.append(user("Two"))), "another line of history continues")


@reproduces("it came without an id")
async def omit_response_ids(server: TestServer) -> None:
    server.faults.set("omit_response_id")
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "Hello")
        check_reason(engine.plan(turn.append(user("?"))), "it came without an id")


async def test_stateless_plan_states_why(
    kedge_server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan names the mode of the engine, a server that stores nothing, and the switch of the environment."""
    async with open_engine(kedge_server, mode="stateless") as engine:
        assert "stateless mode" in engine.plan(Turn([user("Hello")])).explain()
    async with open_engine(kedge_server) as engine:
        kedge_server.faults.set("report_unstored")
        turn = await send_lines(engine, *"1234")
        assert "does not store responses" in engine.plan(turn).explain()
    monkeypatch.setenv("ENABLE_RESPONSE_BOUNDARY_TRACKING", "0")
    async with open_engine(kedge_server) as engine:
        explanation = engine.plan(Turn([user("Hello")])).explain()
    assert "ENABLE_RESPONSE_BOUNDARY_TRACKING" in explanation


# Sections


@reproduces("The server no longer had the earlier response")
async def lose_every_response(server: TestServer) -> None:
    reset()
    server.faults.set("forget_all")
    events: list[Any] = []
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "Hello")
        for _ in range(4):
            async with engine.stream(turn.append(user("?"))) as stream:
                events += [event async for event in stream]
            turn = stream.turn
    healed = [event.reason for event in events if isinstance(event, Healed)]
    assert set(healed) == {"gone"}
    counted = snapshot()["responses_healed_total"][("reason", "gone"),]
    assert counted[1] == len(healed)
    assert [event.mode for event in events if isinstance(event, ModeChanged)][-1] == "stateless"
    assert len(healed) < 4  # no longer tried


@reproduces("HeadConflict")
async def continue_twice_at_once(server: TestServer) -> None:
    async with open_store("sqlite://:memory:") as store, open_engine(server) as engine:
        one = await Conversation.create(engine, store=store)
        two = await Conversation.open(engine, store=store, id=one.id)
        await one.send("One")
        with pytest.raises(HeadConflict) as caught:
            await two.send("Two")
        fork = await two.fork(at=caught.value.node)
        assert fork.turn.blocks[0].text == "Two"
        await two.refresh()
        assert two.turn.blocks[0].text == "One"


@reproduces("UnsupportedBlock")
async def send_a_hosted_call_elsewhere(server: TestServer) -> None:
    call = opaque({"type": "web_search_call", "id": "ws_1", "status": "completed"})
    async with connect(f"chat:{server.base_url}#practice", max_retries=0) as engine:
        with pytest.raises(UnsupportedBlock, match=r"web_search_call.*remove"):
            await engine.run(Turn([user("Search"), call, user("?")]))


@reproduces("Unsendable: a tool call without a result")
async def leave_a_call_without_result(server: TestServer) -> None:
    turn = Turn([user("Add"), tool_call("add", "{}", call_id="c"), user("?")])
    async with open_engine(server) as engine:
        with pytest.raises(errors.Unsendable, match="has no result"):
            await engine.run(turn)
        assert (await with_middleware(engine, repair()).run(turn)).blocks[-1].text


@reproduces("A stream arrives all at once")
async def buffer_a_stream(server: TestServer) -> None:
    async with (
        _open_buffering_proxy(server) as (url, ended),
        connect(f"responses:{url}/v1#practice", max_retries=0) as engine,
    ):
        await _stream_until_text(engine)
        assert ended.is_set()  # nothing was passed on before the end


@reproduces("The wrong model answers, or none")
async def set_another_model(server: TestServer) -> None:
    environment = {"KEDGE_MODEL": "openai:gpt-5.1", "OPENAI_API_KEY": "sk-planted-0123456789"}
    shown = CliRunner(env=environment).invoke(group, ["config"]).output
    (model,) = [line.split() for line in shown.splitlines() if line.startswith("model ")]
    assert model[1:3] == ["openai:gpt-5.1", "environment"]
    checked = CliRunner(env=environment).invoke(group, ["doctor"]).output
    assert "OPENAI_API_KEY" in checked
    assert "planted-0123" not in checked


@reproduces("401, 403 or 429 from `kedge serve`")
async def call_without_permission(server: TestServer) -> None:
    async with open_store("sqlite://:memory:") as store:
        registry = TokenRegistry(store, lambda: 600.0)
        secrets = {
            name: (await registry.add(name, **options))[1]
            for name, options in {
                "page": {"scopes": ["page"]},
                "limited": {"requests_per_minute": 1},
                "other": {},
            }.items()
        }
        with serve(callers=registry, hosts=None) as limited:
            await asyncio.to_thread(_check_rejections, limited.url, secrets)


def _check_rejections(url: str, secrets: dict[str, str]) -> None:
    def call(name: str, path: str = "/v1/models", **options: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {secrets.get(name, 'wrong')}"}
        method = "POST" if options else "GET"
        return httpx2.request(method, f"{url}{path}", headers=headers, timeout=300, **options)

    assert call("nobody").status_code == 401
    rejected = call("page")
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (
        403,
        "insufficient_permissions",
    )
    created = call("limited", "/v1/responses", json={"model": "m", "input": "Hello"}).json()
    again = call("limited")
    assert (again.status_code, "retry-after" in again.headers) == (429, True)
    assert call("other", f"/v1/responses/{created['id']}").status_code == 404


@reproduces("A package is missing")
async def hide_a_package(server: TestServer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(CannotOpenStore) as caught:
            await open_store("postgresql://localhost/kedge")
    quoted = re.search(r"`(conversations in PostgreSQL need[^`]+)`", PAGE)
    assert quoted is not None
    assert quoted[1] in str(caught.value)


_ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


async def _stream_until_text(engine: Engine) -> None:
    async with engine.stream(Turn([user("Tell me a story.")])) as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                return


@asynccontextmanager
async def _open_buffering_proxy(server: TestServer) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield the address of a proxy that passes on a response when it is complete, and whether one was."""
    ended = asyncio.Event()
    upstream = urlsplit(server.base_url)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int((re.search(rb"(?i)content-length: (\d+)", head) or [b"", b"0"])[1])
            body = await reader.readexactly(size)
            source, target = await asyncio.open_connection(upstream.hostname, upstream.port)
            first, rest = head.split(b"\r\n", 1)
            target.write(first + b"\r\nconnection: close\r\n" + rest + body)
            complete = await source.read(-1)
            if b"text/event-stream" in complete:
                ended.set()
            writer.write(complete)
            await writer.drain()
            target.close()
        writer.close()

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with proxy:
        port = proxy.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", ended
