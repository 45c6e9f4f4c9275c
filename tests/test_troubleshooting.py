"""Every reason for a full send in ``docs/troubleshooting.md`` is reproduced, and has the stated cause."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engines.conftest import open_engine
from engines.runs import send_lines
from kedge.errors import AnswerIncomplete
from kedge.planning import DEFAULT_RETENTION, RequestPlan
from kedge.testing import TestServer
from kedge.turns import Turn, user

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
Scenario = Callable[..., Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


def list_symptoms() -> list[str]:
    """Return the first cells of the table of reasons."""
    return re.findall(r"^\| (.+?) \| .+ \| .+ \|$", PAGE, re.MULTILINE)[1:]


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


_ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
