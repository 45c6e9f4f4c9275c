"""Test healing: a lost or rejected context is sent again in full, once, before any output is shown."""

import pytest
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from engines.conftest import open_engine
from engines.fake_server import connect_to, json_response
from engines.runs import (
    check_law,
    collect_events,
    last_text,
    list_reasons,
    request_bodies,
    send_lines,
)
from for_each import for_each
from kedge.engines import ResponsesEngine
from kedge.engines.heal_rules import RequestSummary, classify_error, find_lost, is_format_rejected
from kedge.engines.http_errors import parse_error
from kedge.errors import ChainRefused, RequestRefused
from kedge.events.run import Healed, ModeChanged
from kedge.planning import get_state
from kedge.testing import TestServer, serve
from kedge.turns import ReasoningBlock, Turn, user
from planning.recorded_turns import NOW, add_response, make_plan


@pytest.mark.parametrize("fault", ["forget_all", "forget_silently,echo=no"])
async def test_healing_can_be_disabled(
    engine: ResponsesEngine, server: TestServer, fault: str
) -> None:
    """The error is raised at once, with the Turn to continue from; nothing more is sent."""
    turn = await send_lines(engine, "One", "Two")
    server.faults.set(fault, times=1)
    requested, before = turn.append(user("Three")), len(request_bodies(server))
    with pytest.raises(ChainRefused) as exc_info:
        await engine.run(requested, heal=False)
    assert exc_info.value.turn == requested
    assert len(request_bodies(server)) == before + 1
    was_answered = fault != "forget_all"
    assert bool(exc_info.value.usage) is bool(exc_info.value.response_id) is was_answered


async def test_lost_context_is_sent_again_in_full(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """The rejected anchor is marked lost, the complete Turn is sent, and chaining starts again."""
    turn = await send_lines(engine, "One", "Two")
    lost = turn.blocks[-1].response_id
    server.forget()
    turn, events = await collect_events(engine, turn.append(user("What did I say first?")))
    healed = [event for event in events if isinstance(event, Healed)]
    assert [event.reason for event in healed] == ["gone"]
    assert lost in healed[0].lost
    assert "One" in last_text(turn)
    check_law(server, turn)
    record = get_state(turn).anchor(lost)
    assert record is not None
    assert record.status == "lost"
    await engine.run(turn.append(user("Go on")))
    assert request_bodies(server)[-1]["previous_response_id"] == turn.blocks[-1].response_id


async def test_zero_data_retention_switches_to_stateless() -> None:
    """After the first rejection, later requests are stateless and include encrypted reasoning."""
    with serve() as stateful, serve(zero_data_retention=True) as strict:
        async with open_engine(stateful, scope="one") as engine:
            turn = await send_lines(engine, "One")
        async with open_engine(strict, scope="one") as engine:
            turn, events = await collect_events(engine, turn.append(user("Think about two.")))
            reasons = list_reasons(events)
            assert reasons == ["unsupported"]
            assert any(isinstance(event, ModeChanged) for event in events)
            turn, events = await collect_events(engine, turn.append(user("Three")))
            assert not any(isinstance(event, Healed) for event in events)
            assert request_bodies(strict)[-1]["store"] is False
            assert any(isinstance(block, ReasoningBlock) for block in turn.blocks)
            check_law(strict, turn)


async def test_a_reason_is_healed_once_and_then_raised() -> None:
    """A server that fails in the same way again does not get a third request."""
    attempts: list[str] = []

    async def lose_objects(request: Request) -> Response:
        await request.body()
        if request.url.path.endswith("/conversations"):
            return json_response({"id": f"conv_{len(attempts)}"})
        attempts.append(request.url.path)
        message = f"Conversation with id 'conv_{len(attempts)}' not found."
        return json_response({"error": {"message": message}}, 404 if len(attempts) < 7 else 418)

    async with connect_to(lose_objects, mode="conversation") as engine:
        with pytest.raises(RequestRefused, match="not found"):
            await engine.run(Turn([user("Hello")]))
    assert len(attempts) == 2


async def test_response_with_a_reused_id_is_no_anchor() -> None:
    """The blocks of the response stay in the Turn, without an anchor record."""
    message = {"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}
    answer = json_response({"id": "resp_1", "status": "completed", "output": [message]})
    async with connect_to(answer, trust="always") as engine:
        turn = await engine.run(Turn([user("Hello")]))
        assert [each.status for each in get_state(turn).anchors] == ["completed"]
        turn = await engine.run(turn.append(user("Again")))
    assert [block.text for block in turn] == ["Hello", "Hi", "Again", "Hi"]
    assert [each.status for each in get_state(turn).anchors] == ["lost"]


CHAINED = RequestSummary(previous_response_id="resp_1")
FULL = RequestSummary()


def make_error(status: int, body: str) -> RequestRefused:
    """Return the error for a response with this status and body."""
    texts = parse_error(body)
    return RequestRefused(texts["message"], status=status, code=texts["code"], param=texts["param"])


@for_each(
    ("body", "message"),
    [
        (
            "<!doctype html>\n<html><title>Not found\n &middot; Kedge</title><p>…",
            "the server returned a web page, 'Not found · Kedge', instead of JSON; is the base URL correct?",
        ),
        (
            " <html>gone</html>",
            "the server returned a web page instead of JSON; is the base URL correct?",
        ),
        ("out of memory", "out of memory"),
        ("", "the server returned no error message"),
    ],
)
def test_a_web_page_is_described_in_one_line(body: str, message: str) -> None:
    """Of the page of a server or gateway at another address, the message has only the title."""
    assert parse_error(body)["message"] == message


ERROR_SHAPES = {
    "openai": (
        400,
        (
            '{"error": {"message": "Previous response with id \'resp_1\' not found.", "type": '
            '"invalid_request_error", "param": "previous_response_id", '
            '"code": "previous_response_not_found"}}'
        ),
        "gone",
    ),
    "openai, other words": (
        400,
        '{"error": {"message": "Nope.", "code": "previous_response_not_found"}}',
        "gone",
    ),
    "smg": (
        400,
        (
            '{"error": {"message": "Previous response not found", "param": null, '
            '"code": "previous_response_not_found"}}'
        ),
        "gone",
    ),
    "vllm": (
        404,
        (
            '{"error": {"message": "Response with id \'resp_1\' not found.", "param": "response_id", '
            '"code": 404}}'
        ),
        "gone",
    ),
    "ogx": (404, '{"detail": "Response with id resp_1 not found"}', "gone"),
    "a plain 404": (404, '{"detail": "Not Found"}', "gone"),
    "not even JSON": (404, "<html>gone</html>", "gone"),
    "the id in the words": (400, '{"error": {"message": "cannot find resp_1"}}', "gone"),
    "xai, zero data retention": (
        404,
        (
            '{"code": "not-found", "error": "Previous response cannot be used for this organization '
            'due to Zero Data Retention."}'
        ),
        "unsupported",
    ),
    "openai, zero data retention": (
        400,
        (
            '{"error": {"message": "Previous response cannot be used for this organization due to '
            'Zero Data Retention.", "param": "previous_response_id", "code": "unsupported_parameter"}}'
        ),
        "unsupported",
    ),
    "llama.cpp": (
        400,
        (
            '{"error": {"code": 400, "message": "llama.cpp does not support \'previous_response_id\'.", '
            '"type": "invalid_request_error"}}'
        ),
        "unsupported",
    ),
    "mistral": (
        422,
        '{"message": "previous_response_id must be omitted or null: not supported"}',
        "unsupported",
    ),
    "a missing response whose message sounds like an unsupported parameter": (
        400,
        (
            '{"error": {"message": "Previous response resp_1 cannot be used: not found.", '
            '"param": "previous_response_id", "code": "previous_response_not_found"}}'
        ),
        "gone",
    ),
    "a chain that the server holds only in part": (
        400,
        (
            '{"error": {"message": "No tool call found for function call output with call_id call_1.", '
            '"param": "input", "code": null}}'
        ),
        "gone",
    ),
    "another model": (
        404,
        (
            '{"error": {"message": "The model does not exist", "param": "model", '
            '"code": "model_not_found"}}'
        ),
        None,
    ),
    "a wrong parameter": (
        400,
        (
            '{"error": {"message": "Invalid type for \'temperature\'.", "param": "temperature", '
            '"code": "invalid_type"}}'
        ),
        None,
    ),
    "a server that fails": (500, '{"error": {"message": "previous_response_id crashed"}}', None),
}


@for_each("name", ERROR_SHAPES)
def test_a_rejected_chain_is_recognized_by_its_error(name: str) -> None:
    """Status, code and param decide first, the message last; other errors are not healed."""
    status, body, reason = ERROR_SHAPES[name]
    assert classify_error(make_error(status, body), CHAINED) == reason


@for_each("name", ERROR_SHAPES)
def test_full_send_is_not_healed_for_a_chain_error(name: str) -> None:
    """A request that was not chained is not healed for a chain error."""
    status, body, _ = ERROR_SHAPES[name]
    assert classify_error(make_error(status, body), FULL) is None


def test_rejected_reasoning_is_recognized_by_code_or_message() -> None:
    """Encrypted reasoning that the server cannot read is left out of the next request."""
    sent = RequestSummary(has_reasoning=True)
    by_code = RequestRefused("?", status=400, code="invalid_encrypted_content")
    by_message = RequestRefused("The encrypted content gAAA could not be verified.", status=400)
    assert classify_error(by_code, sent) == classify_error(by_message, sent) == "reasoning"
    assert classify_error(by_code, FULL) is None


def test_rejected_include_is_left_out() -> None:
    """A rejected ``include`` is healed by leaving it out."""
    error = RequestRefused(
        "Encrypted content is not supported with this model.", status=400, param="include"
    )
    assert classify_error(error, RequestSummary(requests_reasoning=True)) == "include"


def test_rejected_empty_input_is_healed_by_a_full_send() -> None:
    """A server that rejects an empty input gets the complete input."""
    error = RequestRefused("input must not be empty", status=400, param="input")
    assert (
        classify_error(error, RequestSummary(previous_response_id="resp_1", has_empty_input=True))
        == "empty_input"
    )


def test_missing_conversation_object_is_healed() -> None:
    """A 404 for the object is healed, and so is an object that stays locked."""
    sent = RequestSummary(conversation_id="conv_1")
    missing = RequestRefused("Conversation with id 'conv_1' not found.", status=404)
    locked = RequestRefused("Another process…", status=400, code="conversation_locked")
    assert classify_error(missing, sent) == "conversation"
    assert classify_error(locked, sent) == "conversation"


@for_each(
    ("status", "body", "expected"),
    [
        (400, '{"error": {"message": "Invalid parameter: \'text.format\' of type \'json_schema\'"}}', True),
        (400, '{"error": {"message": "Not supported.", "param": "response_format"}}', True),
        (400, '{"error": {"message": "This response_format type is unavailable now"}}', True),
        (400, '{"error": {"message": "output_config: Extra inputs are not permitted"}}', True),
        (422, '{"detail": "Structured outputs are not supported by this model"}', True),
        (400, '{"error": {"message": "Invalid schema for response_format \'answer\'"}}', False),
        (400, '{"error": {"message": "No.", "param": "text.format.schema"}}', False),
        (400, '{"error": {"message": "response_format", "code": "invalid_json_schema"}}', False),
        (500, '{"error": {"message": "response_format"}}', False),
        (400, '{"error": {"message": "Unknown parameter: \'temperature\'."}}', False),
    ],
)  # fmt: skip
def test_rejected_format_is_recognized(status: int, body: str, expected: bool) -> None:
    """An error about the schema itself, or about anything else, is not healed."""
    assert is_format_rejected(make_error(status, body)) is expected


def test_older_responses_of_the_same_server_are_lost_with_the_anchor() -> None:
    """Responses of another scope and newer ones remain, and so do all others of an anchor that was never stored."""
    turn = Turn()
    for number, scope in enumerate(("there", "", "", ""), 1):
        facts = {"scope": scope} if scope else {}
        turn = turn.append(user(f"question {number}"))
        turn = add_response(turn, f"R{number}", created_at=NOW + number, **facts)
    state, plan = get_state(turn), make_plan(turn.take(6).append(user("next")))
    assert plan.previous_response_id == "R3"
    assert find_lost(state, plan, all_older=True) == ("R3", "R2")
    assert find_lost(state, plan, all_older=False) == ("R3",)
    unstored = tuple(structs.replace(record, stored=False) for record in state.anchors)
    unstored_state = structs.replace(state, anchors=unstored)
    assert find_lost(unstored_state, plan, all_older=True) == ("R3",)
