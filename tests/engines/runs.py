"""Helpers that run engines against a server and read what was sent and answered."""

from dataclasses import dataclass
from typing import Any

from openai import NotFoundError, OpenAI

from kedge.engines import Engine, ResponsesEngine, RunStream
from kedge.events import Event, TextDelta
from kedge.events.run import Healed
from kedge.testing import TestServer
from kedge.turns import AssistantBlock, Turn, user
from normalization import expected_context, normalize_items


def last_text(turn: Turn) -> str:
    """Return the text of the newest block, which must be the model's."""
    block = turn.blocks[-1]
    assert isinstance(block, AssistantBlock)
    return block.text


def request_bodies(server: TestServer) -> list[dict[str, Any]]:
    """Return the bodies of the requests to ``/v1/responses``, in order."""
    return [each.body for each in server.requests if each.path == "/v1/responses"]  # type: ignore[misc]


def last_context(server: TestServer) -> list[Any]:
    """Return the items that the model read for the newest request."""
    return next(list(each.context) for each in reversed(server.requests) if each.context)


def has_object(server: TestServer, object_id: str) -> bool:
    """Return whether a server has a conversation object."""
    with OpenAI(base_url=server.base_url, api_key="any") as client:
        try:
            client.conversations.retrieve(object_id)
        except NotFoundError:
            return False
    return True


async def collect_events(engine: Engine, turn: Turn, **options: Any) -> tuple[Turn, list[Event]]:
    """Send a Turn; return the Turn with the answer, and the events."""
    async with engine.stream(turn, **options) as stream:
        events = [event async for event in stream]
    return stream.turn, events


async def talk(engine: Engine, turn: Turn, text: str, **options: Any) -> tuple[Turn, list[Event]]:
    """Send a message; return the Turn with the answer, and the events."""
    return await collect_events(engine, turn.append(user(text)), **options)


async def read_until(stream: RunStream[Any], kind: type[Event] = TextDelta) -> None:
    """Read a stream up to the first event of a kind."""
    async for event in stream:
        if isinstance(event, kind):
            return


def list_reasons(events: list[Event]) -> list[str]:
    """Return why requests were healed, in order."""
    return [event.reason for event in events if isinstance(event, Healed)]


def check_law(server: TestServer, turn: Turn) -> None:
    """Check that the context of the newest request equals the Turn before its answer."""
    assert normalize_items(last_context(server)) == expected_context(turn)


async def send_lines(engine: Engine, *lines: str, turn: Turn | None = None, **options: Any) -> Turn:
    """Send these lines one after the other, and return the Turn."""
    turn = turn or Turn()
    for line in lines:
        turn = await engine.run(turn.append(user(line)), **options)
    return turn


@dataclass(frozen=True, slots=True)
class Link:
    """An engine and the server that it is connected to."""

    engine: ResponsesEngine
    server: TestServer

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The bodies of the requests to ``/v1/responses``, in order."""
        return request_bodies(self.server)

    @property
    def lengths(self) -> list[int]:
        """How many items each request had."""
        return [len(body["input"]) for body in self.bodies]

    @property
    def paths(self) -> list[str]:
        """The paths of all requests."""
        return [each.path for each in self.server.requests]

    async def send(self, *lines: str, turn: Turn | None = None, **options: Any) -> Turn:
        """Send these lines one after the other, and return the Turn."""
        return await send_lines(self.engine, *lines, turn=turn, **options)

    async def collect(self, turn: Turn, *lines: str, **options: Any) -> tuple[Turn, list[Event]]:
        """Send a Turn with these lines at once; return the Turn with the answer, and the events."""
        return await collect_events(self.engine, turn.append(*map(user, lines)), **options)

    def check_law(self, turn: Turn) -> None:
        """Check that the context of the newest request equals the Turn before its answer."""
        check_law(self.server, turn)
