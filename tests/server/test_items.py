"""Input is written out in full, once, and ids say where they belong."""

from typing import Any

import pytest

from kedge.server.ids import item_id, key_of_item, key_of_response, new_key, node_of, response_id
from kedge.server.items import written_out

KEY = new_key(42)


def full(item: dict[str, Any]) -> dict[str, Any]:
    (written,) = written_out([item], KEY)
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
    written = full(sent)
    assert key_of_item(written.pop("id")) == KEY
    assert written == kept


def test_an_id_that_was_sent_is_kept() -> None:
    """Ids are the client's to choose."""
    assert full({"role": "user", "content": "x", "id": "msg_mine"})["id"] == "msg_mine"


def test_ids_carry_their_key() -> None:
    """A key names its node, and an id its key; what we did not make has none."""
    assert node_of(KEY) == 42
    assert key_of_response(response_id(KEY)) == KEY
    assert key_of_item(item_id("function_call", KEY, 3)) == KEY
    assert key_of_item(item_id("message", KEY, 100_000)) == KEY
    assert item_id("web_search_call", KEY, 0).startswith("item_")
    for other in ("", "resp_", "resp_x", response_id(KEY) + "0", "RESP_" + KEY):
        assert key_of_response(other) is None
    for other in ("", "msg_mine", "msg_" + KEY):
        assert key_of_item(other) is None
