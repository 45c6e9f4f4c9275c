"""States of version 1: messages that another program wrote, which are imported."""

import json
from typing import Any

import pytest

from for_each import for_each
from kedge.chat import Chat
from kedge.chat.state import ChatState, import_messages
from kedge.turns import (
    AssistantBlock,
    UserBlock,
    assistant,
    tool_call,
    tool_result,
    user,
)
from middleware.scripted_engine import ScriptedEngine


def make_version_1(*messages: Any, processed: int = 0) -> dict[str, Any]:
    """Return a state of version 1."""
    return {
        "version": 1,
        "provider": "openai",
        "processed_length": processed,
        "messages": list(messages),
    }


def test_messages_become_blocks() -> None:
    """Messages are converted to blocks, without responses or anchors."""
    messages = {"role": "user", "content": "Ada"}, {"role": "assistant", "content": "Hello"}
    imported = import_messages(make_version_1(*messages, processed=2))
    first, second = imported.blocks
    assert isinstance(first, UserBlock)
    assert isinstance(second, AssistantBlock)
    assert (first.text, second.text) == ("Ada", "Hello")
    assert imported.is_imported
    assert imported == ChatState("openai", (first, second), 2)


@pytest.mark.parametrize(("processed", "left"), [(0, 0), (1, 0), (2, 0), (3, 1)])
def test_leading_system_messages_are_omitted_and_not_counted(processed: int, left: int) -> None:
    """Leading system messages are not part of an imported state; later ones are."""
    rules, more = {"role": "system", "content": "Be kind"}, {"role": "developer", "content": "Now"}
    message = {"role": "user", "content": "Ada"}
    imported = import_messages(make_version_1(rules, rules, message, more, processed=processed))
    assert len(imported.blocks) == 2
    assert imported.processed_length == left


@for_each("messages", [None, "hello", {}, [1], [{}], [{"content": "Ada"}]])
def test_invalid_messages_are_rejected(messages: object) -> None:
    """Messages of an invalid form raise an error, which discards the state."""
    with pytest.raises(ValueError, match="messages are objects"):
        import_messages({**make_version_1(), "messages": messages})


CHAT_COMPLETIONS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in Oslo?"}]},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def test_chat_completions_messages_become_blocks() -> None:
    """Tool calls and results are converted too, and the processed length counts blocks."""
    imported = import_messages(make_version_1(*CHAT_COMPLETIONS, processed=5))
    assert list(imported.blocks) == [
        user("Weather in Oslo?"),
        tool_call("weather", '{"city":"Oslo"}', call_id="call_1"),
        tool_result("call_1", "rain"),
        assistant("It rains."),
    ]
    assert imported.processed_length == 4


@for_each(
    "message",
    [
        {"role": "user", "content": 5},
        {"role": "narrator", "content": "Once upon a time"},
        {"role": "user", "content": [{"type": "tool_result", "content": "rain"}]},
        {"role": "assistant", "tool_calls": [{"id": "call_1"}]},
        {"role": "assistant", "tool_calls": 5},
        {"role": "tool", "content": "rain"},
        {"role": "assistant"},
        {"type": "function_call", "name": 5},
    ],
)
async def test_unconvertible_state_is_discarded(message: Any) -> None:
    """The state is reported as malformed, a call with it starts fresh, and its result can be continued."""
    state = json.dumps({**make_version_1(message), "provider": "scripted"})
    chat = Chat(ScriptedEngine([assistant("Hello")], [assistant("Hello again")]))
    assert chat.inspect_state(state).reason == "malformed"
    answer = await chat.chat_with_state(state, "Hello")
    assert answer.discarded is not None
    assert answer.discarded.reason == "malformed"
    assert len(answer.turn) == 2
    assert (await chat.chat_with_state(answer.state, "Hello")).discarded is None
