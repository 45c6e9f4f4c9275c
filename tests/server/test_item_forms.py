"""Input is written out in full, once, and ids say where they belong."""

from typing import Any

import pytest

from kedge.server.item_forms import normalize_items
from kedge.server.storage.ids import (
    make_item_id,
    make_response_id,
    new_key,
    parse_item_key,
    parse_node_number,
    parse_response_key,
)

KEY = new_key(42)


def expand_item(item: dict[str, Any]) -> dict[str, Any]:
    (written,) = normalize_items([item], KEY)
    return dict(written)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (
            {"role": "user", "content": "hi"},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "hi"}],
                "status": "completed",
            },
        ),
        (
            {"role": "assistant", "content": "hi", "type": None},
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
                ],
                "status": "completed",
            },
        ),
        (
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "a"},
                    {"type": "refusal", "refusal": "b"},
                ],
                "status": "incomplete",
                "phase": "commentary",
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "b"},
                ],
                "status": "incomplete",
                "phase": "commentary",
            },
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "1", "status": None},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": "1",
                "status": "completed",
            },
        ),
        (
            {"type": "reasoning", "summary": [], "encrypted_content": None},
            {"type": "reasoning", "summary": []},
        ),
    ],
)
def test_short_forms_are_written_out(sent: dict[str, Any], kept: dict[str, Any]) -> None:
    """A model, a listing and the next turn all read the same thing."""
    written = expand_item(sent)
    assert parse_item_key(written.pop("id")) == KEY
    assert written == kept


def test_an_id_that_was_sent_is_kept() -> None:
    """Ids are the client's to choose."""
    assert expand_item({"role": "user", "content": "x", "id": "msg_mine"})["id"] == "msg_mine"


def test_ids_carry_their_key() -> None:
    """A key names its node, and an id its key; what we did not make has none."""
    assert parse_node_number(KEY) == 42
    assert parse_response_key(make_response_id(KEY)) == KEY
    assert parse_item_key(make_item_id("function_call", KEY, 3)) == KEY
    assert parse_item_key(make_item_id("message", KEY, 100_000)) == KEY
    assert make_item_id("web_search_call", KEY, 0).startswith("item_")
    for other in ("", "resp_", "resp_x", make_response_id(KEY) + "0", "RESP_" + KEY):
        assert parse_response_key(other) is None
    for other in ("", "msg_mine", "msg_" + KEY):
        assert parse_item_key(other) is None
