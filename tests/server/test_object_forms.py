"""Normalization of input items, and ids of items and calls."""

from typing import Any

from openai import OpenAI

from for_each import for_each
from kedge.server.models import ItemOpened
from kedge.server.object_forms import (
    ITEM_ID,
    NodeKeys,
    normalize_items,
)
from kedge.server.output_writer import OutputWriter

KEYS = NodeKeys(b"secret")
KEY = KEYS.new(42)


def expand_item(item: dict[str, Any]) -> dict[str, Any]:
    (normalized,) = normalize_items([item], KEY)
    return dict(normalized)


USER = {"type": "message", "role": "user", "status": "completed"}
ASSISTANT = {"type": "message", "role": "assistant", "status": "completed"}
PARTIAL = ASSISTANT | {"status": "incomplete", "phase": "commentary"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}
REASONING = {"type": "reasoning", "summary": []}
REFUSAL = {"type": "refusal", "refusal": "b"}


def make_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


@for_each(
    ("sent", "expected"),
    [
        (
            {"role": "user", "content": "hi"},
            {**USER, "content": [{"type": "input_text", "text": "hi"}]},
        ),
        (
            {"role": "assistant", "content": "hi", "type": None},
            {**ASSISTANT, "content": [make_text("hi")]},
        ),
        (
            {**PARTIAL, "content": [{"type": "output_text", "text": "a"}, REFUSAL]},
            {**PARTIAL, "content": [make_text("a"), REFUSAL]},
        ),
        ({**RESULT, "status": None}, {**RESULT, "status": "completed"}),
        ({**REASONING, "encrypted_content": None}, REASONING),
    ],
)
def test_short_forms_are_expanded(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    """Short forms of input items are stored in their complete form."""
    item = expand_item(sent)
    assert KEYS.parse_id(ITEM_ID, item.pop("id")) == (42, KEY)
    assert item == expected
    assert expand_item({**sent, "id": "msg_mine"}) == {**expected, "id": "msg_mine"}


def test_ids_that_the_server_assigns_are_accepted_as_input(client: OpenAI) -> None:
    """Items that were sent without an id can be listed and sent back."""
    call = {"call_id": "call_1", "action": {"commands": ["ls"]}}
    outcome = {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
    items: Any = [
        {"type": "shell_call", **call},
        {"type": "shell_call_output", "call_id": "call_1", "output": [outcome]},
        {"role": "user", "content": "Say yes"},
    ]
    response = client.responses.create(model="practice", input=items)
    listed: Any = client.responses.input_items.list(response.id, order="asc").data
    assert [item.type for item in listed] == ["shell_call", "shell_call_output", "message"]
    replayed = client.responses.create(model="practice", input=[item.to_dict() for item in listed])
    assert replayed.output_text == response.output_text


KIMI_CALL_ID = "functions.get_weather:0"


@for_each(
    ("calls", "chosen", "is_retained"),
    [
        ("call", "call_1", True),
        ("call", KIMI_CALL_ID, True),
        ("call", "c" * 64, True),
        ("call", "c" * 65, False),
        ("call", "", False),
        ("toolu", "toolu_1", True),
        ("toolu", KIMI_CALL_ID, False),
        ("toolu", "", False),
    ],
)
def test_invalid_call_id_is_replaced(calls: str, chosen: str, is_retained: bool) -> None:
    """A call id that the server would reject in a request is replaced by a generated one."""
    writer = OutputWriter("0a1b", 3, call_prefix=calls)
    writer.feed(ItemOpened("function_call", "get_weather", chosen))
    (item,) = writer.items
    assert (item["call_id"] == chosen) is is_retained
    assert item["call_id"].startswith(chosen if is_retained else f"{calls}_0a1b")
