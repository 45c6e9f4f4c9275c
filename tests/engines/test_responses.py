"""Test ResponsesEngine against the strict local server, with the real client on a real socket."""

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import (
    RecordingServer,
    complete_response,
    connect_to,
    json_response,
    message_item,
)
from engines.runs import Link, last_text
from for_each import for_each
from kedge.engines import AnthropicEngine, ChatCompletionsEngine, Engine, ResponsesEngine
from kedge.errors import UnknownSetting
from kedge.events.run import ModeChanged
from kedge.planning import ConversationState, get_state, set_state
from kedge.turns import Turn, tool_call, tool_result, user

PROMPT = {"id": "pmpt_1", "variables": {"city": "Oslo"}}


async def test_rollback_switch_overrides_other_settings(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ENABLE_RESPONSE_BOUNDARY_TRACKING=disabled`` sends everything, with an event that reports it."""
    turn = await link.send("One")
    turn = set_state(turn, structs.replace(get_state(turn), mode="chained"))
    monkeypatch.setenv("ENABLE_RESPONSE_BOUNDARY_TRACKING", "disabled")
    _, events = await link.collect(turn, "Two", mode="chained")
    assert ModeChanged("stateless", "chained", "switched_off") in events
    assert "previous_response_id" not in link.bodies[-1]


async def test_mode_of_the_state_overrides_the_default(link: Link) -> None:
    """The mode of the state is used when the request has none."""
    turn = set_state(Turn([user("One")]), ConversationState(mode="stateless"))
    await link.engine.run(turn)
    assert link.bodies[-1]["store"] is False


async def test_call_ids_that_are_too_long_are_shortened(link: Link) -> None:
    """A call of another provider is sent with an id that the API accepts, and so is its result."""
    turn = Turn([user("Call f.")])
    for call_id in ("c" * 64, "c" * 65, "d" * 300):
        turn = turn.append(tool_call("f", "{}", call_id=call_id), tool_result(call_id, "1"))
    turn = await link.engine.run(turn)
    items = link.bodies[-1]["input"][1:]
    sent = [item["call_id"] for item in items]
    assert sent[0] == "c" * 64
    assert sent[::2] == sent[1::2]
    assert len(set(sent)) == 3
    assert max(map(len, sent)) == 64
    assert await link.engine.count_tokens(turn) > 0
    turn = await link.send("What did I say first?", turn=turn)
    assert len(link.bodies[-1]["input"]) == 1
    assert "Call f." in last_text(turn)


async def test_all_items_of_a_compacted_context_are_sent() -> None:
    """A server returns messages and then its compaction item; a request with them has them all."""
    content = [{"type": "input_text", "text": "Hi"}]
    retained = {"type": "message", "role": "user", "content": content}
    item = {"type": "compaction", "encrypted_content": "sealed"}
    usage = {"input_tokens": 9, "output_tokens": 1}
    answer = {"output": [retained, item], "usage": usage, "input_tokens": 5}
    server = RecordingServer(json_response(answer))
    async with connect_to(server.handle, "responses") as engine:
        blocks, counted = await engine.compact(Turn([user("Hi")]))
        await engine.count_tokens(Turn([*blocks, user("Continue")]))
    assert counted.input_tokens == 9
    assert [block.kind for block in blocks] == ["opaque", "user"]
    sealed, kept, new = server.bodies[-1]["input"]
    assert (sealed["type"], kept["role"], new["role"]) == ("compaction", "user", "user")


@pytest.mark.parametrize("options", [{"prompt": PROMPT}, {"extra_body": {"prompt": PROMPT}}])
async def test_responses_to_a_stored_prompt_are_not_continued(options: dict[str, Any]) -> None:
    """Only the server has the messages of the prompt: such a request is sent in full, and is no anchor."""
    bodies: list[dict[str, Any]] = []

    async def respond(request: Request) -> Response:
        body = await request.json()
        bodies.append(body)
        parent = {"previous_response_id": body.get("previous_response_id")}
        message = message_item(f"Answer {len(bodies)}")
        return json_response(complete_response(f"resp_{len(bodies)}", message, **parent))

    async with connect_to(respond, trust="always") as engine:
        turn = Turn()
        for number, settings in enumerate(({}, options, {}, {})):
            turn = turn.append(user(f"Line {number}"))
            plan = engine.plan(turn, streaming=False, **settings)
            turn = await engine.run(turn, streaming=False, **settings)
            assert len(bodies[-1]["input"]) == plan.delta_blocks
    parents = [body.get("previous_response_id") for body in bodies]
    assert parents == [None, None, "resp_1", "resp_3"]
    assert [len(body["input"]) for body in bodies] == [1, 3, 3, 1]


@pytest.mark.parametrize("mode", ["chained", "stateless"])
async def test_before_send_is_awaited_with_each_turn(engine: ResponsesEngine, mode: Any) -> None:
    """An engine awaits ``before_send`` with the Turn before the request is sent."""
    seen: list[tuple[int, int]] = []
    sent: list[Any] = []

    async def record(turn: Turn) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append((len(turn), len(sent)))

    turn = Turn([user("Hello")])
    options: dict[str, Any] = {"mode": mode, "tap": lambda *exchange: sent.append(exchange)}
    turn = await engine.run(turn, before_send=record, **options)
    await engine.run(turn.append(user("Again")), before_send=record, **options)
    assert seen == [(1, 0), (3, 1)]


@for_each("kind", [ResponsesEngine, ChatCompletionsEngine, AnthropicEngine])
def test_constructor_rejects_unknown_settings(kind: type[Engine]) -> None:
    """An engine that is constructed directly does not ignore a misspelled setting."""
    with pytest.raises(UnknownSetting, match="has no setting 'prompt_cash'; did you mean"):
        kind("m", make_client=list, scope="s", prompt_cash=True)  # pyright: ignore[reportCallIssue]
