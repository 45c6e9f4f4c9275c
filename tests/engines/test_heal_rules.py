"""Test every known form in which servers reject chaining, and the healing chosen for it."""

from msgspec import structs

from for_each import for_each
from kedge.engines.heal_rules import (
    RequestSummary,
    classify_error,
    find_lost,
    is_format_rejected,
)
from kedge.engines.http_errors import parse_error
from kedge.errors import RequestRefused
from kedge.planning import get_state
from kedge.turns import Turn, user
from planning.recorded_turns import NOW, add_response, make_plan

CHAINED = RequestSummary(previous_response_id="resp_1")
FULL = RequestSummary()


def make_error(status: int, body: str) -> RequestRefused:
    """Return the error for a response with this status and body."""
    texts = parse_error(body)
    return RequestRefused(texts["message"], status=status, code=texts["code"], param=texts["param"])


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
