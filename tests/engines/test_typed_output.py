"""Test typed answers: validated, requested again with their problems, and typed for the caller."""

from collections.abc import Sequence
from typing import assert_type

import pytest
from pydantic import BaseModel

from kedge.engines import Engine, Events, OutputSchema, Reply, Request, Stream, to_output_schema
from kedge.engines.anthropic import map_schema
from kedge.errors import KedgeError, OutputInvalid, RequestRefused, UnsupportedParameter
from kedge.events import TextDelta
from kedge.events.run import OutputAccepted, OutputRejected
from kedge.middleware import find_open_calls, guard, redact, tools, with_middleware
from kedge.observe import reset, snapshot
from kedge.planning import get_state
from kedge.turns import Turn, UserBlock, assistant, tool_call, user
from middleware.scripted_engine import ScriptedEngine


class Sum(BaseModel):
    """A question and its result."""

    result: int


VALID, INVALID = assistant('{"result": 5}'), assistant('{"result": "many"}')
INVALID_TEXT = INVALID.text
TURN = Turn([user("What is 2 + 3?")])


def kinds(turn: Turn) -> Sequence[str]:
    """Return the kinds of the blocks of a Turn."""
    return [block.kind for block in turn.blocks]


async def test_an_invalid_answer_is_requested_again_with_its_problems() -> None:
    """The correction has the problems and the schema, and follows the invalid answer in the Turn."""
    engine = ScriptedEngine([INVALID], [VALID])
    reply = await engine.ask(TURN, output=Sum)
    assert reply.output == Sum(result=5)
    assert reply.text == '{"result": 5}'
    assert kinds(reply.turn) == ["user", "assistant", "user", "assistant"]
    correction = reply.turn.blocks[2]
    assert isinstance(correction, UserBlock)
    assert correction.origin == "output"
    assert "- result: Input should be a valid integer" in correction.text
    assert '"title": "Sum"' in correction.text


async def test_a_correction_is_chained_to_the_invalid_answer() -> None:
    """Only the correction is sent."""
    engine = ScriptedEngine([INVALID], [VALID])
    async with engine.stream(TURN, output=Sum) as stream:
        await stream.finish()
    assert [plan.previous_response_id for plan in stream.plans] == ["", "resp_1"]
    assert [len(plan.delta) for plan in stream.plans] == [1, 1]


async def test_typed_answers_are_events_and_counted() -> None:
    """Each rejected answer is an event with its number, and so is the accepted value."""
    reset()
    engine = ScriptedEngine([INVALID], [VALID])
    async with engine.stream(TURN, output=Sum) as stream:
        events = [event async for event in stream]
    assert [event.attempt for event in events if isinstance(event, OutputRejected)] == [1]
    accepted = [event.value for event in events if isinstance(event, OutputAccepted)]
    assert accepted == [Sum(result=5)]
    counted = snapshot()["outputs_total"]
    assert counted == {(("outcome", "accepted"),): (1, 1.0), (("outcome", "rejected"),): (1, 1.0)}


async def test_format_of_a_typed_answer_is_added_to_text_options() -> None:
    """Other options of the text are sent beside the format."""
    engine = ScriptedEngine([VALID])
    await engine.run(TURN, output=Sum)
    sent, _ = engine.requests[0].resolve_params({"text": {"verbosity": "low"}})
    assert (sent["text"]["verbosity"], sent["text"]["format"]["name"]) == ("low", "Sum")


async def fail_to_match() -> OutputInvalid:
    """Return the error of a second question, none of whose three answers matches."""
    engine = ScriptedEngine([VALID], *([assistant(INVALID_TEXT)] for _ in range(3)))
    turn = await engine.run(TURN, output=Sum)
    with pytest.raises(OutputInvalid) as exc_info:
        await engine.run(turn.append(user("again")), output=Sum)
    return exc_info.value


async def test_an_answer_that_never_matches_is_an_error_with_the_text() -> None:
    """After the last retry, the error has the text and its problems; its message does not quote the text."""
    error = await fail_to_match()
    assert error.text == '{"result": "many"}'
    assert error.problems == (
        "result: Input should be a valid integer, unable to parse string as an integer",
    )
    assert error.attempts == 3
    assert "many" not in str(error)


async def test_an_error_of_typed_answers_has_the_turn_to_continue_from() -> None:
    """The Turn has all answers, each of which is an anchor."""
    turn = (await fail_to_match()).turn
    assert turn is not None
    assert len(turn) == 2 + 6
    assert len(get_state(turn).anchors) == 4


async def test_caller_tool_calls_end_the_run_without_a_value() -> None:
    """The caller answers such calls and sends the Turn again."""
    own = {"type": "function", "name": "mine", "parameters": {}}
    engine = ScriptedEngine([tool_call("mine", "{}", call_id="c1")])
    reply = await engine.ask(TURN, tools=[own], output=Sum)
    assert [call.name for call in find_open_calls(reply.turn)] == ["mine"]
    assert reply.output is None


async def test_answer_after_tool_calls_is_validated() -> None:
    """Tools run within each attempt, both those of the run and those of the middleware."""

    def add(a: int, b: int) -> int:
        return a + b

    call = tool_call("add", '{"a": 2, "b": 3}', call_id="c1")
    engine = ScriptedEngine([call], [INVALID], [VALID])
    reply = await engine.ask(TURN, tools=[add], output=Sum)
    assert reply.output == Sum(result=5)
    assert len(engine.requests) == 3
    engine = ScriptedEngine([call], [VALID])
    reply = await with_middleware(engine, tools(add)).ask(TURN, output=Sum)
    assert reply.output == Sum(result=5)


async def test_guard_applies_to_the_value() -> None:
    """Text that is redacted in the Turn is also redacted in the value."""

    class Note(BaseModel):
        text: str

    engine = ScriptedEngine([assistant('{"text": "sk-123"}')])
    stack = with_middleware(engine, guard(redact("sk-[0-9]+", direction="out")))
    reply = await stack.ask(TURN, output=Note)
    assert reply.output == Note(text="[redacted]")


async def test_format_with_output_is_rejected() -> None:
    """``text.format`` and ``output=`` together are rejected, because they contradict each other."""
    with pytest.raises(UnsupportedParameter, match=r"output= determines text\.format"):
        await ScriptedEngine([VALID]).run(
            TURN, output=Sum, text={"format": {"type": "json_object"}}
        )


class InParts(ScriptedEngine):
    """Yields the text of an answer in parts of this length."""

    length = 15

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the events of the next answer."""
        async for event in super().events(turn, request):
            if isinstance(event, TextDelta):
                for at in range(0, len(event.delta), self.length):
                    yield TextDelta(event.delta[at : at + self.length], item_id="m")
            else:
                yield event


async def test_partial_values_arrive_with_the_text() -> None:
    """Partial values start again after a rejected answer, and end with the complete value."""
    texts = ('{"result": [1, 2]}', '{"result": [3, 4, 5]}')
    engine = InParts(*([assistant(text)] for text in texts))
    async with engine.stream(TURN, output=dict[str, tuple[int, int, int]]) as stream:
        assert stream.partial_output is None
        with pytest.raises(KedgeError, match="has not ended"):
            _ = stream.output
        values = [value async for value in stream.partial_outputs()]
    expected = [[1], [1, 2], [3], [3, 4, 5]]
    assert values == [{"result": value} for value in expected]
    assert stream.output == {"result": (3, 4, 5)}


async def test_long_partial_values_are_not_parsed_for_every_delta() -> None:
    """The number of parses grows with the logarithm of the length; the last value is complete."""
    numbers = list(range(2000))
    engine = InParts([assistant(f'{{"value": {numbers}}}')])
    engine.length = 1
    async with engine.stream(TURN, output=list[int]) as stream:
        values = [value async for value in stream.partial_outputs()]
    assert len(values) < 800
    assert values[-1] == stream.output == numbers


def test_anthropic_schemas_have_only_constraints_that_the_api_accepts() -> None:
    """Constraints that the API rejects are added to the description instead, at every level."""
    schema = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 1, "description": "In years."},
            "tags": {"type": "array", "minItems": 1, "items": {"type": "string", "maxLength": 3}},
            "pet": {"oneOf": [{"$ref": "#/$defs/cat"}]},
        },
        "$defs": {"cat": {"type": "object", "properties": {}, "additionalProperties": False}},
    }
    assert map_schema(schema) == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "age": {"type": "integer", "description": 'In years. {"minimum": 1}'},
            "tags": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "string", "description": '{"maxLength": 3}'},
            },
            "pet": {"anyOf": [{"$ref": "#/$defs/cat"}]},
        },
        "$defs": {"cat": {"type": "object", "properties": {}, "additionalProperties": False}},
    }
    optional = {"type": ["object", "null"], "properties": {"any": True}}
    assert map_schema(optional) == {**optional, "additionalProperties": False}
    for open_ended in ({"type": "object", "additionalProperties": {}}, {"type": "object"}):
        with pytest.raises(UnsupportedParameter, match="members have names"):
            map_schema(open_ended)


async def check_static_types(engine: Engine) -> None:
    """Check static types; this function is not run, only type-checked."""
    assert_type(await engine.ask(TURN), Reply[None])
    assert_type((await engine.ask(TURN, output=Sum)).output, Sum)
    assert_type((await engine.ask(TURN, output=list[Sum], model="x")).output, list[Sum])
    assert_type((await engine.ask(TURN, output=int)).output, int)
    assert_type((await engine.ask(TURN, output=Sum | None)).output, Sum | None)
    assert_type((await engine.ask(TURN, output={"type": "object"})).output, None)
    assert_type(await engine.run(TURN, output=Sum), Turn)
    assert_type(engine.stream(TURN, output=Sum), Stream[Sum])
    assert_type(engine.stream(TURN).output, None)
    assert_type(engine.sync.ask(TURN, output=Sum).output, Sum)
    schema: OutputSchema[Sum | None] = to_output_schema(Sum | None)
    assert_type((await engine.ask(TURN, output=schema)).output, Sum | None)


async def test_the_last_message_of_an_answer_has_the_value() -> None:
    """Text before the value is ignored, and a value in several messages is joined."""
    reply = await ScriptedEngine([assistant("Let me see."), VALID]).ask(TURN, output=Sum)
    assert reply.output == Sum(result=5)
    parts = [assistant('{"result":'), assistant("6}")]
    assert (await ScriptedEngine(parts).ask(TURN, output=Sum)).output == Sum(result=6)


async def test_a_format_that_is_rejected_after_a_tool_call_is_an_error() -> None:
    """Tool calls that were run are not run again to heal a rejected format."""
    runs: list[str] = []

    def note(text: str) -> str:
        """Note a text."""
        runs.append(text)
        return "noted"

    rejection = RequestRefused("response_format is not supported", status=400)
    engine = ScriptedEngine([tool_call("note", {"text": "a"})], rejection)
    with pytest.raises(RequestRefused):
        await engine.ask(TURN, output=Sum, tools=[note])
    assert runs == ["a"]
    assert engine.prompted_models == set()
