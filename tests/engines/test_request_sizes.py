"""The sizes of a request: the body that is sent, and the body with the complete conversation."""

import json
from typing import Any

import pytest

from engines.conftest import open_engine
from engines.runs import collect_events
from kedge.engines.transport import encode_body
from kedge.events.run import RequestPlanned, RequestSent
from kedge.observe import reset, snapshot
from kedge.planning import render
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.text.display import format_size
from kedge.turns import ReasoningBlock, Turn, system, tool_call, user

LINES = (
    "My name is Ada.",
    'Größe: 5 µm - "quoted"\n\ttab \U0001f600',
    "Think about 6 * 7",
)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def send(engine: Any, turn: Turn, **options: Any) -> tuple[Turn, list[tuple[Any, ...]]]:
    """Send a Turn; return it with the answer, and for each request its plan, its sizes and its body."""
    bodies: list[bytes] = []
    options["tap"] = lambda request, _reply, _status: bodies.append(request)
    finished, events = await collect_events(engine, turn, **options)
    plans = [event.plan for event in events if isinstance(event, RequestPlanned)]
    sizes = [event for event in events if isinstance(event, RequestSent)]
    return finished, list(zip(plans, sizes, bodies, strict=True))


def encode_full(body: bytes, plan: Any) -> bytes:
    """Return the body of a request with the complete conversation instead of an anchor."""
    members = json.loads(body)
    members.pop("previous_response_id", None)
    members["input"] = render(plan.source, scope=plan.scope)
    return encode_body(members)


@pytest.mark.parametrize("settings", [{}, {"store": True, "reasoning": {"effort": "high"}}])
async def test_sizes_are_those_of_the_encoder(server: TestServer, settings: dict[str, Any]) -> None:
    """Every chained request reports its body and the body that would send everything, to the byte."""
    turn, seen = Turn([system("Be brief.")]), 0
    reset()
    async with open_engine(server, params=settings) as engine:
        for line in (*LINES, "Please add 2 and 3", "And now?"):
            turn, requests = await send(engine, turn.append(user(line)), tools=[add])
            for plan, sizes, body in requests:
                assert sizes.body_bytes == len(body)
                assert sizes.full_bytes == len(encode_full(body, plan))
                seen += bool(plan.anchor)
    assert seen >= 5
    assert any(isinstance(block, ReasoningBlock) for block in turn)
    totals = {name: snapshot()[f"responses_bytes_{name}_total"][()][1] for name in ("sent", "full")}
    assert 0 < totals["sent"] < totals["full"]


@pytest.mark.parametrize("provider", ["responses", "chat"])
async def test_a_dry_run_has_the_sizes_of_the_request(server: TestServer, provider: str) -> None:
    """The plan of a message that was not sent has the size of the body that is sent then."""
    async with connect(f"{provider}:{server.base_url}#practice", max_retries=0) as engine:
        turn = Turn([system("Be brief.")])
        for text in ("My name is Ada.", "What is my name?", "Once more, please."):
            turn = turn.append(user(text))
            plan = engine.plan(turn, tools=[add], temperature=0.5)
            async with engine.stream(turn, tools=[add], temperature=0.5, streaming=False) as run:
                events = [event async for event in run]
            turn = run.turn
            [sent] = [event for event in events if isinstance(event, RequestSent)]
            assert plan.sizes == (sent.body_bytes, sent.full_bytes)
            assert run.plan is not None
            assert run.plan.sizes == plan.sizes
            assert format_size(sent.body_bytes) in plan.explain()


async def test_a_plan_that_cannot_be_sent_has_the_sizes_of_its_blocks() -> None:
    """A plan with problems is explained with about the size of its blocks."""
    async with connect("practice") as engine:
        plan = engine.plan(Turn([user("Add"), tool_call("add", {"a": 1}, call_id="call_1")]))
    assert plan.problems
    assert plan.sizes == (plan.delta_bytes, plan.full_bytes)
    assert ", about " in plan.explain()
