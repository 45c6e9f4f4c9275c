"""Test edge cases of healing and of recording responses."""

import pytest
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engines.fake_server import json_response, make_handler, serve_handler
from kedge.errors import RequestRefused
from kedge.planning import get_state
from kedge.providers import connect
from kedge.turns import Turn, user

MAX_ATTEMPTS = 6


class LosingServer:
    """A server that creates conversation objects and never finds one of them."""

    def __init__(self) -> None:
        self.attempts = 0

    async def handle(self, request: HttpRequest) -> Response:
        """Create an object, or report that the object of a request is missing."""
        await request.body()
        if request.url.path.endswith("/conversations"):
            return json_response({"id": f"conv_{self.attempts}"})
        self.attempts += 1
        if self.attempts > MAX_ATTEMPTS:
            return json_response({"error": {"message": "stop"}}, 418)
        message = f"Conversation with id 'conv_{self.attempts}' not found."
        return json_response({"error": {"message": message}}, 404)


async def test_a_reason_is_healed_once_and_then_raised() -> None:
    """A server that fails in the same way again does not get a third request."""
    server = LosingServer()
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m", mode="conversation", max_retries=0) as engine:
            with pytest.raises(RequestRefused, match="not found"):
                await engine.run(Turn([user("Hello")]))
    assert server.attempts == 2


async def test_response_with_a_reused_id_is_no_anchor() -> None:
    """The blocks of the response stay in the Turn, without an anchor record."""
    message = {"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}
    response = {"id": "resp_1", "status": "completed", "output": [message]}
    with serve_handler(make_handler(lambda: json_response(response))) as url:
        async with connect(f"responses:{url}#m", trust="always") as engine:
            turn = await engine.run(Turn([user("Hello")]))
            assert [each.status for each in get_state(turn).anchors] == ["completed"]
            turn = await engine.run(turn.append(user("Again")))
    assert [block.text for block in turn] == ["Hello", "Hi", "Again", "Hi"]
    assert [each.status for each in get_state(turn).anchors] == ["lost"]
