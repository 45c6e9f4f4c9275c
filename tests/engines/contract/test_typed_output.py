"""Test typed output on every engine: enforced by the server, validated, corrected and streamed in parts."""

import enum
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from engines.contract.checks import check_law
from engines.contract.conftest import open_engine
from kedge.engines import Engine
from kedge.errors import AnswerIncomplete, OutputInvalid, OutputRefused, RequestRefused
from kedge.events.run import Healed
from kedge.middleware import guard, redact, with_middleware
from kedge.testing import TestServer
from kedge.turns import Turn, user


class Mode(enum.Enum):
    """How to travel."""

    TRAIN = "train"
    SHIP = "ship"


@dataclass
class Stop:
    """A nested dataclass with a default and a constraint."""

    city: str
    days: Annotated[int, Field(ge=1)] = 1


class Trip(BaseModel):
    """A nested model."""

    stop: Stop
    mode: Mode


TRIP = Turn([user("I travel to Lisbon for 3 days by ship.")])
SUM = Turn([user("What is 2 + 3?")])


@pytest.mark.parametrize(
    ("output", "turn", "expected"),
    [
        (Trip, TRIP, Trip(stop=Stop("Lisbon", 3), mode=Mode.SHIP)),
        (Stop, TRIP, Stop("Lisbon", 3)),
        (Mode, TRIP, Mode.SHIP),
        (list[int], SUM, [5, 2, 3]),
        (int | None, SUM, 5),
        ({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, SUM, {"n": 5}),
    ],
    ids=["model", "dataclass", "enum", "list", "union", "schema"],
)  # fmt: skip
async def test_an_answer_has_the_requested_type(
    engine: Engine, server: TestServer, output: Any, turn: Turn, expected: Any
) -> None:
    """The server gets a schema that it accepts and enforces, and the answer has the type."""
    reply = await engine.ask(turn, output=output)
    assert reply.output == expected
    assert len(server.requests) == 1
    assert len(reply.turn) == 2


async def test_an_invalid_answer_is_corrected_within_the_law(
    engine: Engine, server: TestServer, name: str
) -> None:
    """The correction is chained to the invalid answer where the server stores responses."""
    question = user("First invalid: What is 2 + 3?")
    reply = await engine.ask(Turn([question]), output=int)
    assert reply.output == 5
    assert [block.kind for block in reply.turn] == ["user", "assistant", "user", "assistant"]
    first, second = server.requests
    check_law(server, reply.turn)
    if name == "responses":
        assert second.body["previous_response_id"] == first.response_id
        assert len(second.body["input"]) == 1
    continued = await engine.ask(reply.turn.append(user("What is 3 + 4?")), output=int)
    assert continued.output == 7
    check_law(server, continued.turn)


LISBON = Turn([user('Say {"city": "Lisbon", "days": 3}')])


async def test_a_server_without_structured_output_gets_the_schema_as_text(
    server: TestServer, name: str
) -> None:
    """The rejected request is sent once more, with the schema among the instructions."""
    server.faults.set("refuse_output_format")
    async with open_engine(server, name) as engine, engine.stream(LISBON, output=Stop) as stream:
        events = [event async for event in stream]
    assert stream.output == Stop("Lisbon", 3)
    assert [event for event in events if isinstance(event, Healed)] == [Healed("format")]
    rejected, answered = server.requests
    assert "json_schema" in str(rejected.body)
    assert "json_schema" not in str(answered.body)
    assert "Answer only with JSON that matches this schema" in str(answered.body)
    check_law(server, stream.turn)


@pytest.mark.parametrize("is_guarded", [False, True])
async def test_schema_as_text_is_planned_after_the_first_rejection(
    server: TestServer, name: str, is_guarded: bool
) -> None:
    """Later requests have the schema as text at once, as planned, and after the guards of the stack."""
    server.faults.set("refuse_output_format")
    options: Any = {"output": Stop, "ephemeral": "Be brief."}
    async with open_engine(server, name) as inner:
        turn = await inner.run(LISBON, output=Stop)
        engine = with_middleware(inner, guard(redact("nested dataclass"))) if is_guarded else inner
        turn = turn.append(user('Say {"city": "Rome"}'))
        plan = engine.plan(turn, streaming=False, **options)
        sent = len(server.requests)
        reply = await engine.ask(turn, **options)
    assert reply.output == Stop("Rome", 1)
    assert len(server.requests) == sent + 1
    assert reply.plan
    assert plan.instructions == reply.plan.instructions
    assert plan.sizes[0] == reply.requests[-1].sent_bytes
    check_law(server, reply.turn)


async def test_without_healing_a_rejected_format_is_an_error(server: TestServer, name: str) -> None:
    """Without healing, a rejected format is an error; so is an answer that does not match the schema."""
    server.faults.set("refuse_output_format")
    async with open_engine(server, name) as engine:
        with pytest.raises(RequestRefused):
            await engine.ask(SUM, output=Stop, heal=False)
        assert len(server.requests) == 1
        with pytest.raises(OutputInvalid):
            await engine.ask(SUM, output=Stop, output_retries=0)
    assert len(server.requests) == 3


async def test_refusals_and_incomplete_answers_raise_their_own_errors(
    engine: Engine, server: TestServer
) -> None:
    """Refusals and incomplete answers raise their own errors and are not retried."""
    with pytest.raises(OutputRefused) as exc_info:
        await engine.ask(Turn([user("Refuse to sing.")]), output=int)
    assert exc_info.value.text in ("I will not sing.", "The model declined to answer.")
    with pytest.raises(AnswerIncomplete):
        await engine.ask(
            Turn([user("Say a very long sentence with many words in it")]),
            output=Stop,
            max_output_tokens=16,
        )
    assert len(server.requests) == 2
