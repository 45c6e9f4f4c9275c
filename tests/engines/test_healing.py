"""Test healing: a lost or rejected context is sent again in full, once, before any output is shown."""

import json
from typing import Any

import pytest
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from engines.conftest import open_link
from engines.fake_server import connect_to, json_response
from engines.runs import Link, last_text, list_reasons
from for_each import for_each
from kedge.engines.heal_rules import RequestSummary, classify_error, find_lost, is_format_rejected
from kedge.engines.http_errors import parse_error
from kedge.errors import ChainRefused, RequestRefused
from kedge.events.run import Healed, ModeChanged
from kedge.planning import RequestPlan, get_state
from kedge.testing import serve
from kedge.turns import ReasoningBlock, Turn, user
from planning.recorded_turns import NOW, add_response, make_plan


@pytest.mark.parametrize("fault", ["forget_all", "forget_silently,echo=no"])
async def test_healing_can_be_disabled(link: Link, fault: str) -> None:
    """The error is raised at once, with the Turn to continue from; nothing more is sent."""
    turn = (await link.send("One", "Two")).append(user("Three"))
    link.server.faults.set(fault, times=1)
    before = len(link.bodies)
    with pytest.raises(ChainRefused) as exc_info:
        await link.engine.run(turn, heal=False)
    assert exc_info.value.turn == turn
    assert len(link.bodies) == before + 1
    was_answered = fault != "forget_all"
    assert bool(exc_info.value.usage) is bool(exc_info.value.response_id) is was_answered


@pytest.mark.parametrize(
    ("fault", "reason", "count", "next_anchor"),
    [("forget_all", "gone", 2, -1), ("forget_silently,echo=no", "forgot", 1, 1)],
)
async def test_lost_context_is_sent_again_in_full(
    link: Link, fault: str, reason: str, count: int, next_anchor: int
) -> None:
    """Everything is sent, and the next request is chained; with a response that is gone the older ones are lost."""
    turn = await link.send("One", "Two")
    lost = [record.response_id for record in get_state(turn).anchors][-count:]
    link.server.faults.set(fault, times=1)
    turn, events = await link.collect(turn, "What did I say first?")
    (healed,) = [event for event in events if isinstance(event, Healed)]
    assert (healed.reason, healed.lost) == (reason, tuple(lost[::-1]))
    assert "One" in last_text(turn)
    link.check_law(turn)
    assert [r.response_id for r in get_state(turn).anchors if r.status == "lost"] == lost
    await link.send("Go on", turn=turn)
    assert link.bodies[-1]["previous_response_id"] == turn.blocks[next_anchor].response_id


async def test_zero_data_retention_switches_to_stateless() -> None:
    """After the first rejection, later requests are stateless and include encrypted reasoning."""
    with serve() as stateful, serve(zero_data_retention=True) as strict:
        async with open_link(stateful, scope="one") as link:
            turn = await link.send("One")
        async with open_link(strict, scope="one") as link:
            turn, events = await link.collect(turn, "Think about two.")
            assert list_reasons(events) == ["unsupported"]
            assert any(isinstance(event, ModeChanged) for event in events)
            turn, events = await link.collect(turn, "Three")
            assert list_reasons(events) == []
            assert link.bodies[-1]["store"] is False
            assert any(isinstance(block, ReasoningBlock) for block in turn.blocks)
            link.check_law(turn)


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
    """The blocks of the response stay in the Turn, and neither response with the id is continued."""
    message = {"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}
    answer = json_response({"id": "resp_1", "status": "completed", "output": [message]})
    async with connect_to(answer, trust="always") as engine:
        turn = await engine.run(Turn([user("Hello")]))
        assert [each.status for each in get_state(turn).anchors] == ["completed"]
        turn = await engine.run(turn.append(user("Again")))
    assert [block.text for block in turn] == ["Hello", "Hi", "Again", "Hi"]
    assert [each.status for each in get_state(turn).anchors] == ["reused_id"]


async def test_plan_gives_the_reason_for_an_older_anchor() -> None:
    """After an answer without content or without an id, the older anchor has that reason; an answer to it is normal."""
    message = {"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}
    answers = [("resp_1", [message]), ("resp_2", []), ("", [message]), ("resp_4", [message])]
    replies = [{"id": name, "status": "completed", "output": items} for name, items in answers]

    async def reply(request: Request) -> Response:
        await request.body()
        return json_response(replies.pop(0))

    plans: list[RequestPlan] = []
    async with connect_to(reply, trust="always") as engine:
        turn = Turn()
        for text in ("One", "Two", "Three", "Four"):
            turn = turn.append(user(text))
            plans.append(engine.plan(turn))
            turn = await engine.run(turn)
        plans.append(engine.plan(turn.append(user("Five"))))
    rejected = [[(each.response_id, each.reason) for each in plan.rejected] for plan in plans]
    assert rejected == [[], [], [("resp_2", "empty")], [("", "no_id"), ("resp_2", "empty")], []]
    assert [plan.anchor_id for plan in plans] == ["", "resp_1", "resp_1", "resp_1", "resp_4"]


CHAINED = RequestSummary(previous_response_id="resp_1")
FULL = RequestSummary()


def make_error(status: int, body: Any) -> RequestRefused:
    """Return the error for a response with this status and body."""
    texts = parse_error(body if isinstance(body, str) else json.dumps(body))
    return RequestRefused(texts["message"], status=status, code=texts["code"], param=texts["param"])


def nest(message: str, code: Any = None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error as most servers send it."""
    return {"error": {"message": message, "code": code, "param": param}}


@for_each(
    ("body", "message"),
    [
        (
            "<!doctype html>\n<html><title>Not found\n &middot; Kedge</title><p>…",
            "the server returned a web page, 'Not found · Kedge', instead of JSON; is the base URL correct?",
        ),
        (
            "<?xml version='1.0'?>\n<html lang='en'>gone",
            "the server returned a web page instead of JSON; is the base URL correct?",
        ),
        (
            "<?xml version='1.0'?><Error><Code>Slow</Code>",
            "<?xml version='1.0'?><Error><Code>Slow</Code>",
        ),
        ("out of memory", "out of memory"),
        ("", "the server returned no error message"),
    ],
)
def test_a_web_page_is_described_in_one_line(body: str, message: str) -> None:
    """Of the page of a server or gateway at another address, the message has only the title; XML is shown."""
    assert parse_error(body)["message"] == message


GONE = "previous_response_not_found"
NO_RETENTION = "Previous response cannot be used for this organization due to Zero Data Retention."
ERROR_SHAPES: dict[str, tuple[int, Any, str | None]] = {
    "openai": (
        400,
        nest("Previous response with id 'resp_1' not found.", GONE, "previous_response_id"),
        "gone",
    ),
    "openai, other words": (400, {"error": {"message": "Nope.", "code": GONE}}, "gone"),
    "smg": (400, nest("Previous response not found", GONE), "gone"),
    "vllm": (404, nest("Response with id 'resp_1' not found.", 404, "response_id"), "gone"),
    "ogx": (404, {"detail": "Response with id resp_1 not found"}, "gone"),
    "a plain 404": (404, {"detail": "Not Found"}, "gone"),
    "not even JSON": (404, "<html>gone</html>", "gone"),
    "the id in the words": (400, {"error": {"message": "cannot find resp_1"}}, "gone"),
    "xai, zero data retention": (404, {"code": "not-found", "error": NO_RETENTION}, "unsupported"),
    "openai, zero data retention": (
        400,
        nest(NO_RETENTION, "unsupported_parameter", "previous_response_id"),
        "unsupported",
    ),
    "llama.cpp": (
        400,
        nest("llama.cpp does not support 'previous_response_id'.", 400),
        "unsupported",
    ),
    "mistral": (
        422,
        {"message": "previous_response_id must be omitted or null: not supported"},
        "unsupported",
    ),
    "a missing response whose message sounds like an unsupported parameter": (
        400,
        nest("Previous response resp_1 cannot be used: not found.", GONE, "previous_response_id"),
        "gone",
    ),
    "a chain that the server holds only in part": (
        400,
        nest("No tool call found for function call output with call_id call_1.", None, "input"),
        "gone",
    ),
    "another model": (404, nest("The model does not exist", "model_not_found", "model"), None),
    "a wrong parameter": (
        400,
        nest("Invalid type for 'temperature'.", "invalid_type", "temperature"),
        None,
    ),
    "another unsupported parameter": (
        400,
        nest("Unsupported parameter: 'temperature'.", "unsupported_parameter", "temperature"),
        None,
    ),
    "a server that fails": (500, {"error": {"message": "previous_response_id crashed"}}, None),
}


@for_each("name", ERROR_SHAPES)
def test_a_rejected_chain_is_recognized_by_its_error(name: str) -> None:
    """Status, code and param decide first, the message last; other errors, and full requests, are not healed."""
    status, body, reason = ERROR_SHAPES[name]
    assert classify_error(make_error(status, body), CHAINED) == reason
    assert classify_error(make_error(status, body), FULL) is None


WITH_REASONING = RequestSummary(has_reasoning=True)
WITH_INCLUDE = RequestSummary(requests_reasoning=True)
WITHOUT_INPUT = RequestSummary(previous_response_id="resp_1", has_empty_input=True)
IN_OBJECT = RequestSummary(conversation_id="conv_1")
UNREADABLE = "The encrypted content gAAA could not be verified."


@for_each(
    ("status", "body", "sent", "reason"),
    [
        (400, nest("?", "invalid_encrypted_content"), WITH_REASONING, "reasoning"),
        (400, nest(UNREADABLE), WITH_REASONING, "reasoning"),
        (400, nest("?", "invalid_encrypted_content"), FULL, None),
        (400, nest("Not supported with this model.", None, "include"), WITH_INCLUDE, "include"),
        (400, nest("input must not be empty", None, "input"), WITHOUT_INPUT, "empty_input"),
        (404, nest("Conversation with id 'conv_1' not found."), IN_OBJECT, "conversation"),
        (400, nest("Another process…", "conversation_locked"), IN_OBJECT, "conversation"),
    ],
)
def test_other_rejections_are_recognized_by_what_was_sent(
    status: int, body: Any, sent: RequestSummary, reason: str | None
) -> None:
    """Unreadable reasoning, ``include``, an empty input, and a missing or locked object are healed."""
    assert classify_error(make_error(status, body), sent) == reason


@for_each(
    ("status", "body", "expected"),
    [
        (400, nest("Invalid parameter: 'text.format' of type 'json_schema'"), True),
        (400, nest("Not supported.", None, "response_format"), True),
        (400, nest("This response_format type is unavailable now"), True),
        (400, nest("output_config: Extra inputs are not permitted"), True),
        (422, {"detail": "Structured outputs are not supported by this model"}, True),
        (400, nest("Invalid schema for response_format 'answer'"), False),
        (400, nest("No.", None, "text.format.schema"), False),
        (400, nest("response_format", "invalid_json_schema"), False),
        (500, nest("response_format"), False),
        (400, nest("Unknown parameter: 'temperature'."), False),
    ],
)
def test_rejected_format_is_recognized(status: int, body: Any, expected: bool) -> None:
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


async def test_tokens_are_counted_without_a_lost_anchor(link: Link) -> None:
    """A count does not need a response that the server lost."""
    turn = await link.send("One")
    counted = await link.engine.count_tokens(turn)
    link.server.forget()
    assert await link.engine.count_tokens(turn) == counted
