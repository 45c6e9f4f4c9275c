"""Messages of the Chat Completions API become blocks."""

from typing import Any

import pytest

from for_each import for_each
from kedge.engines import messages_from_blocks
from kedge.errors import InvalidTurn, UnsupportedBlock
from kedge.server.schema.items import ITEM_TYPES
from kedge.turns import (
    assistant,
    image,
    item_from_block,
    reasoning,
    system,
    tool_call,
    tool_result,
    user,
)
from kedge.wire import blocks_from_messages
from kedge.wire.chat_messages import ITEM_MEMBERS

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_conversation_with_calls_and_images_is_converted() -> None:
    """System messages, parts, several calls of one message, results and texts become blocks in order."""
    picture = {
        "type": "image_url",
        "image_url": {"url": "https://a.example/b.png", "detail": "low"},
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What?"}, picture]},
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, {**CALL, "id": "d"}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "A cat."},
    ]
    assert blocks_from_messages(messages) == [
        system("Be brief."),
        user(["What?", image("https://a.example/b.png", detail="low")]),
        assistant("Wait."),
        tool_call("f", "{}", call_id="c"),
        tool_call("f", "{}", call_id="d"),
        tool_result("c", "1"),
        tool_result("d", "2"),
        assistant("A cat."),
    ]


def test_calls_of_the_older_form_get_ids() -> None:
    """``function_call`` and ``role: "function"`` become calls and results with the same id."""
    call = {"name": "f", "arguments": "{}"}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": "Wait.", "function_call": call},
        {"role": "function", "name": "f", "content": "2"},
        {"role": "assistant", "content": "Done.", "function_call": None},
    ]
    assert blocks_from_messages(messages) == [
        tool_call("f", {}, call_id="call_function_0"),
        tool_result("call_function_0", "1"),
        assistant("Wait."),
        tool_call("f", {}, call_id="call_function_2"),
        tool_result("call_function_2", "2"),
        assistant("Done."),
    ]
    with pytest.raises(InvalidTurn, match="no call of the function 'f' before"):
        blocks_from_messages([*messages, messages[1]])


def test_an_image_may_be_a_plain_address() -> None:
    """Some programs write the address of an image without an object around it."""
    part = {"type": "image_url", "image_url": "https://a.example/b.png"}
    (block,) = blocks_from_messages([{"role": "user", "content": [part]}])
    assert block == user(image("https://a.example/b.png"))


def test_reasoning_and_videos_of_other_servers_are_read() -> None:
    """Mistral's reasoning becomes a reasoning block, and a video a part that is sent as it came."""
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}], "closed": True}
    video = {"type": "video_url", "video_url": {"url": "https://a.example/b.webm"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, video]},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "A panda."}]},
        {"role": "user", "content": "Sure?"},
    ]
    blocks = blocks_from_messages(messages)
    assert blocks[1:3] == [reasoning(text="Hm."), assistant("A panda.")]
    assert messages_from_blocks(blocks)[0] == messages[0]
    with pytest.raises(UnsupportedBlock, match=r"only the Chat Completions API has .* video_url"):
        item_from_block(blocks[0])


def test_items_of_the_responses_api_are_converted_too() -> None:
    """A list may mix messages of one API with items of the other."""
    blocks = [user("a"), reasoning("b"), tool_call("f", "{}", call_id="c"), tool_result("c", "1")]
    assert blocks_from_messages(map(item_from_block, blocks)) == blocks


def test_required_members_are_those_of_the_api() -> None:
    """The table of items that Kedge does not interpret agrees with the schemas of the server."""
    read = {"message", "reasoning", "item_reference", "compaction_trigger"}
    read |= {
        f"{kind}{end}" for kind in ("function_call", "custom_tool_call") for end in ("", "_output")
    }
    required = {
        kind: {name.rstrip("!?") for name in members if name.endswith("!")}
        for kind, members in ITEM_TYPES.items()
        if isinstance(members, dict) and kind not in read
    }
    assert {kind: set(names) for kind, names in ITEM_MEMBERS.items()} == required


def test_further_members_of_messages_are_left_out() -> None:
    """What an application stored with a message or a result is not sent to a provider."""
    messages = [
        {"role": "user", "content": "Hello", "name": "Ada", "received_at": 5},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1", "seconds": 2},
    ]
    items = [item_from_block(block) for block in blocks_from_messages(messages)]
    assert items[0] == {"type": "message", "role": "user", "content": "Hello"}
    assert items[2] == {"type": "function_call_output", "call_id": "c", "output": "1"}


@for_each(
    ("message", "problem"),
    [
        ({"role": "tool", "content": "1"}, "'tool_call_id' is missing"),
        ({"role": "assistant", "content": None}, "a message has no content"),
        ({"role": "pirate", "content": "Arr"}, "a message has a form that is not known"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "content that is not known"),
        ("Hello", "a message must be an object, not str"),
        ({"role": "function", "name": "f", "content": "1"}, "no call of the function 'f' before"),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "'name' is missing"),
        ({"type": "hologram_call", "call_id": "c"}, "a message has a form that is not known"),
        ({"type": 5}, "a message has a form that is not known|needs a type"),
        (
            {"type": "mcp_call", "name": "f"},
            "an item of type mcp_call needs the member 'server_label'",
        ),
        ({"type": "compaction", "encrypted_content": None}, "needs the member 'encrypted_content'"),
        ({"role": "user", "content": [{"type": "input_text", "text": None}]}, "that is not known"),
    ],
)
def test_a_message_of_an_unknown_form_is_named(message: Any, problem: str) -> None:
    """The error has the position of the message and what is wrong with it."""
    with pytest.raises(InvalidTurn, match=rf"messages\[1\]: .*({problem})"):
        blocks_from_messages([{"role": "user", "content": "Hello"}, message])


def test_one_message_is_not_a_list() -> None:
    """A single message or a text in place of the list is an error."""
    with pytest.raises(InvalidTurn, match="must be a list, not dict"):
        blocks_from_messages({"role": "user", "content": "Hello"})  # pyright: ignore[reportArgumentType]
