"""Conversion of blocks to messages of OpenTelemetry's conventions."""

from kedge.observe.otel import system_parts, to_messages
from kedge.turns import assistant, image, opaque, reasoning, system, tool_call, tool_result, user


def test_every_kind_of_block_is_converted() -> None:
    """Blocks become roles and parts; invalid arguments remain text, and an opaque item is only named."""
    messages = to_messages(
        [
            system("Be brief.", role="developer"),
            user(["Look:", image("https://example.com/a.png")]),
            reasoning(summary=["Hm."]),
            assistant("I call."),
            tool_call("add", {"a": 1}, call_id="call_1"),
            tool_result("call_1", "2"),
        ]
    )
    assert [message["role"] for message in messages] == ["developer", "user", "assistant", "tool"]
    assert messages[1]["parts"] == [{"type": "text", "content": "Look:"}, {"type": "image"}]
    assert messages[2]["parts"] == [
        {"type": "reasoning", "content": "Hm."},
        {"type": "text", "content": "I call."},
        {"type": "tool_call", "id": "call_1", "name": "add", "arguments": {"a": 1}},
    ]
    assert messages[3]["parts"] == [{"type": "tool_call_response", "id": "call_1", "response": "2"}]
    broken = tool_call("add", "{broken", call_id="call_1")
    (message,) = to_messages([broken, opaque({"type": "web_search_call", "query": "private"})])
    assert message["parts"][0]["arguments"] == "{broken"
    assert "private" not in str(message["parts"][1])
    assert system_parts("Be brief.") == [{"type": "text", "content": "Be brief."}]
    assert system_parts(None) == []
