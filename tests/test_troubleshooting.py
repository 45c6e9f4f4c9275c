"""Reasons for a full send in ``docs/troubleshooting.md`` have the causes that the page states."""

from typing import Any

import pytest

from engines.conftest import open_engine
from engines.runs import send_lines
from for_each import for_each
from kedge.planning import RequestPlan
from kedge.planning.anchors import REASONS
from kedge.testing import TestServer
from kedge.turns import Turn, user

CAUSES: list[tuple[Any, str, dict[str, Any], dict[str, Any]]] = [
    ("unstored", "", {}, {"store": False}),
    ("too_deep", "", {"max_depth": 1}, {}),
    ("untrusted", "report_usage=none", {}, {}),
    ("no_id", "omit_response_id", {}, {}),
]
"""A reason, a fault of the server, settings of the engine, and settings of the requests."""
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


def check_reason(plan: RequestPlan | None, reason: Any) -> None:
    """Check that a plan sends everything for this reason, in the words of the page."""
    assert plan is not None
    assert plan.anchor is None
    assert REASONS[reason] in plan.explain()


@for_each(("reason", "fault", "settings", "members"), CAUSES)
async def test_server_or_settings_cause_a_full_send(
    kedge_server: TestServer, reason: Any, fault: str, settings: dict[str, Any], members: Any
) -> None:
    """Everything is sent because of the server or of a setting, and the plan states the reason."""
    kedge_server.faults.clear()
    if fault:
        kedge_server.faults.set(fault)
    async with open_engine(kedge_server, **settings) as engine:
        turn = await send_lines(engine, "One", "Two", **members)
        check_reason(engine.plan(turn.append(user("?"))), reason)
    if reason == "untrusted":
        async with open_engine(kedge_server, trust="always") as engine:
            assert engine.plan(turn.append(user("?"))).anchor


async def test_changes_of_history_cause_a_full_send(kedge_server: TestServer) -> None:
    """An edit, a Turn without its records, a call without a usable id and a lost response are stated."""
    async with open_engine(kedge_server) as engine:
        turn = await send_lines(engine, "It is 10:31.", "What time is it?")
        assert engine.plan(turn.append(user("?"))).anchor
        check_reason(engine.plan(turn.edit(turn[0].id, user("It is 10:32."))), "changed")
        check_reason(engine.plan(Turn(turn.blocks).append(user("?"))), "unproven")
        kedge_server.forget()
        check_reason((await engine.ask(turn.append(user("?")))).plan, "lost")
        kedge_server.faults.set("omit_call_id")
        called = await engine.run(Turn([user("Please call add with a=1")]), tools=[ADD])
        check_reason(engine.plan(called), "ambiguous")


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
