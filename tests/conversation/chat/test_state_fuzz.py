"""Random states of version 1, which have no checksum, never make a call fail."""

import json
import random
from typing import Any

import pytest

from conversation.chat.conftest import OpenChat
from conversation.chat.state_mutations import mutate
from kedge.conversation import Chat
from kedge.conversation.chat_state import ChatState, encode_state
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import UnknownBlock, user

SEARCH = {"type": "search", "query": "Oslo"}
MCP_CALL = {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "f", "arguments": "{}"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello", "name": "Ada"},
    {"role": "user", "content": [{"type": "input_image", "image_url": "https://a.example/b.png"}]},
    {"role": "user", "content": [{"type": "input_file", "file_id": "file_1"}]},
    {"role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "Hi"}]},
    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "42"},
    {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}", "namespace": "n"},
    {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "1"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm"}]},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": SEARCH},
    {**MCP_CALL, "output": "1"},
    {"type": "hologram_call", "call_id": "e", "shape": {"sides": 6}},
    {"type": "compaction", "encrypted_content": None},
    {"type": "item_reference", "id": "msg_1"},
]  # fmt: skip
INPUTS: list[Any] = [
    "",
    [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    [{"type": "input_text", "text": "Hi"}, {"type": "input_image", "file_id": "file_1"}],
    [{"type": "input_image", "image_url": "data:image/tiff;base64,AAAA"}],
    [{"type": "input_file", "file_url": "https://a.example/b.pdf"}],
    [{"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,/w=="}],
    [{"type": "input_file", "filename": "a.bin", "file_data": "AAAA"}],
    [{"type": "video_url", "video_url": {"url": "https://a.example/b.mp4"}}],
]
EXCHANGES: list[list[dict[str, Any]]] = [
    *([message] for message in MESSAGES),
    *([{"role": "user", "content": content}] for content in INPUTS),
    *(
        [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": output},
        ]
        for arguments, output in [("[]", "1"), ("{", "1"), *(("{}", each) for each in INPUTS)]
    ),
    [
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "a.txt"},
    ],
    [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": "Wait."},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": "Yes."},
    ],
]
"""Messages of every type, with content that not every API can express."""
APIS = ("responses", "chat", "anthropic")
VALUES: list[Any] = [None, 5, "", "x", [], {}, {"type": "x"}, [{"type": "input_text"}], True]


def damage(rng: random.Random, value: Any) -> Any:
    """Return a JSON value with one member removed, added or replaced, at any depth."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], damage(rng, value[at]), *value[at + 1 :]]
    if not isinstance(value, dict) or not value:
        return rng.choice(VALUES)
    name = rng.choice(list(value))
    match rng.randrange(4):
        case 0:
            return {k: v for k, v in value.items() if k != name}
        case 1:
            return {**value, rng.choice(["more", "status", "id"]): rng.choice(VALUES)}
        case _:
            return {**value, name: damage(rng, value[name])}


def make_state(provider: str, messages: list[Any]) -> bytes:
    members = {"version": 1, "provider": provider, "processed_length": 0, "messages": messages}
    return json.dumps(members).encode()


async def check_state(chat: Chat, state: bytes) -> bool:
    """Call every method with a state; return whether it was used."""
    chat.inspect_state(state)
    chat.plan(state, "Hello")
    chat.read_state(state)
    answer = await chat.chat_with_state(state, "What is 2+3?")
    assert answer.text
    noted = chat.write_state(answer.state, chat.read_state(answer.state).append(user("Note.")))
    again = await chat.chat_with_state(noted, "What is 2+3?")
    assert again.discarded is None
    return answer.discarded is None


def open_chat_of(server: TestServer, api: str) -> Chat:
    """Return a chat with a server through one of its APIs."""
    if api == "anthropic":
        address = server.base_url.removesuffix("/v1")
        return Chat(connect("anthropic:practice", base_url=address, api_key="key"))
    return Chat(connect(f"{api}:{server.base_url}#practice"))


@pytest.mark.parametrize("api", APIS)
async def test_every_message_can_be_continued(server: TestServer, api: str) -> None:
    """Messages of any type, known or not, complete or not, do not make a call fail, whatever the API."""
    async with open_chat_of(server, api) as chat:
        used = [await check_state(chat, make_state(chat.provider, each)) for each in EXCHANGES]
    assert 0 < sum(used) < len(EXCHANGES)


async def test_damaged_states_of_version_1_never_raise(open_chat: OpenChat) -> None:
    """A state with any member removed, added or replaced is used or discarded; some of both."""
    rng, chat, used = random.Random(34), open_chat(), 0
    for _ in range(60):
        messages: Any = rng.sample(MESSAGES, 2)
        state = make_state(chat.provider, damage(rng, messages))
        state = mutate(rng, state, 1) if rng.random() < 0.2 else state
        used += await check_state(chat, state)
    assert 0 < used < 60


@pytest.mark.parametrize("api", ["chat", "anthropic"])
async def test_blocks_that_cannot_be_sent_are_left_out(
    server: TestServer, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A state with items that an API cannot express, or unknown blocks, is continued without them, with a note."""
    unknown = UnknownBlock({"kind": "dream"})  # pyright: ignore[reportArgumentType]
    async with open_chat_of(server, api) as chat:
        items = make_state(chat.provider, [MESSAGES[0], MESSAGES[9], MESSAGES[10]])
        newer = encode_state(ChatState(chat.provider, (user("Hello"), unknown), 2))
        for state, omitted in ((items, "2 blocks"), (newer, "1 block")):
            assert await check_state(chat, state)
            assert f"{omitted} of a state cannot be sent" in caplog.text
