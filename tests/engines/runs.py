"""Run engines against a server and read what was sent and answered."""

from typing import Any

from kedge.engines import ResponsesEngine
from kedge.testing import TestServer
from kedge.turns import AssistantBlock, Turn, user


def last_text(turn: Turn) -> str:
    """The words of the newest block, which is the model's."""
    block = turn.blocks[-1]
    assert isinstance(block, AssistantBlock)
    return block.text


def request_bodies(server: TestServer) -> list[dict[str, Any]]:
    """The bodies of the requests for an answer, in order."""
    return [each.body for each in server.requests if each.path == "/v1/responses"]  # type: ignore[misc]


async def send_lines(
    engine: ResponsesEngine, *lines: str, turn: Turn | None = None, **options: Any
) -> Turn:
    """Say these lines one after the other."""
    turn = turn or Turn()
    for line in lines:
        turn = await engine.run(turn.append(user(line)), **options)
    return turn
