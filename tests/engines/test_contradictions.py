"""Test servers whose finished response differs from their stream: no anchor is recorded for it."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import serve_handler, sse_response
from kedge.events.run import Healed
from kedge.planning import get_state
from kedge.providers import connect
from kedge.turns import ToolCallBlock, Turn, tool_result, user

Item = dict[str, Any]
CALL: Item = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "add",
    "arguments": "[1]",
}


def message(text: str) -> Item:
    """Return a message of the model."""
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": content}


class ContradictingServer:
    """A server that streams some items, lists others in the finished response, and records requests."""

    def __init__(self, streamed: list[Item], listed: list[Item], **ending: Any) -> None:
        self.streamed, self.listed, self.ending = streamed, listed, ending
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, request: Request) -> Response:
        """Return the configured response to the first request, and a valid one to every other."""
        self.bodies.append(await request.json())
        first = len(self.bodies) == 1
        response_id = f"resp_{len(self.bodies)}"
        items = self.streamed if first else [message("Fine.")]
        listed = self.listed if first else items
        ending = {} if first else self.ending
        return sse_response(
            {"type": "response.created", "response": {"id": response_id}},
            *(
                {"type": "response.output_item.done", "output_index": index, "item": item}
                for index, item in enumerate(items)
            ),
            {
                "type": "response.completed",
                "response": {"id": response_id, "status": "completed", "output": listed, **ending},
            },
        )


def without_call_id(item: Item) -> Item:
    """Return a call without its call id."""
    return {name: value for name, value in item.items() if name != "call_id"}


CONTRADICTIONS: dict[str, Callable[[], tuple[list[Item], list[Item]]]] = {
    "text": lambda: ([message("Yes")], [message("No")]),
    "arguments": lambda: ([CALL], [{**CALL, "arguments": "[2]"}]),
    "missing item": lambda: ([message("Yes"), CALL], [message("Yes")]),
    "missing call_id": lambda: ([without_call_id(CALL)], [without_call_id(CALL)]),
    "lone surrogate": lambda: ([message("a\ud83db")], [message("a\ud83db")]),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
async def test_contradicting_response_is_no_anchor(name: str) -> None:
    """The answer stays in the Turn, nothing is marked lost, and the next request sends everything."""
    server = ContradictingServer(*CONTRADICTIONS[name]())
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            turn = await engine.run(Turn([user("One")]))
            assert get_state(turn).anchors == ()
            turn = turn.append(*_results(turn), user("Two"))
            assert engine.plan(turn).rejected == ()
            turn = await engine.run(turn)
    assert "previous_response_id" not in server.bodies[1]
    assert len(server.bodies[1]["input"]) == len(turn.blocks) - 1


def _results(turn: Turn) -> list[Any]:
    calls = [block.call_id for block in turn.blocks if isinstance(block, ToolCallBlock)]
    return [tool_result(call_id, "3") for call_id in calls]


@pytest.mark.parametrize("echo", [None, "resp_other"])
async def test_an_echo_at_the_end_of_a_response_is_checked(echo: str | None) -> None:
    """A wrong previous response id that arrives only in `response.completed` means a lost context."""
    items = [message("One.")]
    server = ContradictingServer(items, items, previous_response_id=echo)
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m", max_retries=0, trust="always") as engine:
            turn = await engine.run(Turn([user("One")]))
            async with engine.stream(turn.append(user("Two"))) as stream:
                events = [event async for event in stream]
    assert server.bodies[1]["previous_response_id"] == "resp_1"
    assert Healed("forgot", ("resp_1",), "resp_2") in events
    assert "previous_response_id" not in server.bodies[2]
    assert len(server.bodies[2]["input"]) == 3
