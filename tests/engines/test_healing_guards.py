"""Test edge cases of healing and of recording responses."""

import pytest
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engines.fake_server import json_response, serve_handler
from kedge.engines.request_engine import record_outcome
from kedge.errors import RequestRefused
from kedge.events import Outcome
from kedge.planning import get_state, plan_request
from kedge.providers import connect
from kedge.turns import Turn, assistant, user

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


def test_response_with_a_reused_id_is_no_anchor() -> None:
    """The blocks of the response stay in the Turn, without an anchor record."""
    turn = Turn([user("Hello")])
    plan = plan_request(turn, scope="s", now=0.0)
    outcome = Outcome("completed", (assistant("Hi"),), "resp_1")
    recorded = record_outcome(
        turn, outcome, plan, now=0.0, stored=True, retention=None, reused=True
    )
    assert len(recorded) == 2
    assert get_state(recorded).anchors == ()
