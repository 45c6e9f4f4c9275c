"""Test the check of a conversation object after each answer: it must end with ours, and nothing else."""

from typing import Any

import pytest
from openai import OpenAI

from engines.conftest import open_engine
from engines.runs import last_context, last_text, request_bodies, send_lines
from kedge.errors import RequestRefused
from kedge.events import Event, TextDelta
from kedge.events.run import Healed, ServerForgot
from kedge.memory.object_claims import ObjectClaims
from kedge.planning import get_state
from kedge.testing import TestServer
from kedge.turns import AssistantBlock, Turn, assistant, user
from normalization import expected_context, normalize_items


def open_client(server: TestServer) -> OpenAI:
    """Create a plain client that acts as another user of the server."""
    return OpenAI(base_url=server.base_url, api_key="any")


def insert_message(server: TestServer, turn: Turn, text: str = "Intruder") -> None:
    """Add a message to the conversation object of a Turn, as another client."""
    item: Any = {"type": "message", "role": "user", "content": text}
    with open_client(server) as client:
        client.conversations.items.create(get_state(turn).conversation_id, items=[item])


async def stream_turn(engine: Any, turn: Turn, **options: Any) -> tuple[Turn, list[Event]]:
    """Send a Turn as a stream; return the Turn with the answer, and the events."""
    async with engine.stream(turn, **options) as stream:
        events = [event async for event in stream]
    return stream.turn, events


async def test_a_turn_takes_one_request_and_one_list(server: TestServer) -> None:
    """After each answer the newest items are listed once: what was sent and received, and one more."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        server.requests.clear()
        await send_lines(engine, "Two", turn=turn)
    items = f"/v1/conversations/{get_state(turn).conversation_id}/items"
    assert [each.path for each in server.requests] == ["/v1/responses", items]


async def test_foreign_items_before_anything_was_shown_are_healed(server: TestServer) -> None:
    """The answer is discarded, and everything is sent to a new object."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        insert_message(server, turn)
        answer, events = await stream_turn(engine, turn.append(user("Two")), streaming=False)
    assert [event.reason for event in events if isinstance(event, Healed)] == ["conversation"]
    assert get_state(answer).conversation_id != get_state(turn).conversation_id
    assert normalize_items(last_context(server)) == expected_context(answer)


async def test_a_stream_after_a_pause_does_not_show_foreign_items(server: TestServer) -> None:
    """The last item is compared before the request, so that a message of another client costs no wrong answer."""
    times = iter(range(0, 100_000, 60))
    async with open_engine(server, mode="conversation", clock=lambda: float(next(times))) as engine:
        turn = await send_lines(engine, "One")
        insert_message(server, turn)
        answer, events = await stream_turn(engine, turn.append(user("What did I say last?")))
    assert not any(isinstance(event, Healed | ServerForgot) for event in events)
    assert not any("Intruder" in str(each.context) for each in server.requests)
    assert normalize_items(last_context(server)) == expected_context(answer)
    assert get_state(answer).conversation_id != get_state(turn).conversation_id


async def test_a_stream_after_a_pause_continues_an_unchanged_object(server: TestServer) -> None:
    """One more list shows the last item; the next request continues with the new blocks."""
    times = iter(range(0, 100_000, 60))
    async with open_engine(server, mode="conversation", clock=lambda: float(next(times))) as engine:
        turn = await send_lines(engine, "One")
        server.requests.clear()
        answer, _ = await stream_turn(engine, turn.append(user("Two")))
    items = f"/v1/conversations/{get_state(answer).conversation_id}/items"
    assert [each.path for each in server.requests] == [items, "/v1/responses", items]
    assert [len(body["input"]) for body in request_bodies(server)] == [1]


async def test_foreign_items_in_a_shown_answer_are_reported(server: TestServer) -> None:
    """A streamed answer that was shown is reported, is no anchor, and ends the object."""
    async with open_engine(server, mode="conversation", clock=lambda: 1_000.0) as engine:
        turn = await send_lines(engine, "One")
        insert_message(server, turn)
        answer, events = await stream_turn(engine, turn.append(user("Two")))
        assert any(isinstance(event, ServerForgot) for event in events)
        assert engine.plan(answer.append(user("Three"))).is_full
        final = await send_lines(engine, "Three", turn=answer)
    assert "Intruder" not in str(last_context(server))
    assert get_state(final).conversation_id != get_state(turn).conversation_id


async def test_a_copied_turn_is_held_back_until_the_check(server: TestServer) -> None:
    """Another process does not know who continues the object, so it shows nothing before the check."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        await send_lines(engine, "My PIN is 1234", turn=turn)
        engine.objects.claims = ObjectClaims()
        answer, events = await stream_turn(engine, turn.append(user("What did I say last?")))
    shown = "".join(event.delta for event in events if isinstance(event, TextDelta))
    assert "1234" not in shown
    assert shown == last_text(answer)
    assert [event.reason for event in events if isinstance(event, Healed)] == ["conversation"]


async def test_a_copied_turn_is_held_back_after_a_rejected_request(server: TestServer) -> None:
    """A rejected request shows nothing about the end of the object, so the next answer is no less checked."""
    async with open_engine(server, mode="conversation", clock=lambda: 1_000.0) as engine:
        turn = await send_lines(engine, "One")
        await send_lines(engine, "My PIN is 1234", turn=turn)
        engine.objects.claims = ObjectClaims()
        question = turn.append(user("What did I say last?"))
        server.faults.set("status=400", times=1)
        with pytest.raises(RequestRefused):
            await engine.run(question)
        _, events = await stream_turn(engine, question)
    shown = "".join(event.delta for event in events if isinstance(event, TextDelta))
    assert "1234" not in shown
    assert "One" in shown or "What did I say" in shown


async def test_an_unchanged_copy_continues_the_object(server: TestServer) -> None:
    """After a restart the object is continued, and its next answers are not held back."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        engine.objects.claims = ObjectClaims()
        turn = await send_lines(engine, "Two", "What did I say first?", turn=turn)
    assert [len(body["input"]) for body in request_bodies(server)] == [1, 1, 1]
    assert "One" in last_text(turn)


async def test_calls_made_from_a_foreign_context_are_not_run(server: TestServer) -> None:
    """A call in a shown answer from a changed object is not run; everything is sent again."""
    runs: list[str] = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        runs.append(f"{a}+{b}")
        return a + b

    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        insert_message(server, turn)
        question = turn.append(user("call add with a=2 and b=3"))
        _, events = await stream_turn(engine, question, tools=[add])
    assert [event.reason for event in events if isinstance(event, Healed)] == ["conversation"]
    assert len(runs) == 1


async def test_a_deleted_last_item_is_found(server: TestServer) -> None:
    """An object without the last known item has another context than the Turn."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        with open_client(server) as client:
            client.conversations.items.delete(
                turn.blocks[-1].item_id, conversation_id=get_state(turn).conversation_id
            )
        answer = await send_lines(engine, "Two", turn=turn)
    assert get_state(answer).conversation_id != get_state(turn).conversation_id
    assert expected_context(answer) in [
        normalize_items(each.context) for each in server.requests if each.context
    ]


async def test_a_long_history_is_checked_in_pages(server: TestServer) -> None:
    """A full send of more items than a page has is checked, and the object is continued."""
    blocks = [make(f"Line {n}") for n in range(60) for make in (user, assistant)]
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "Two", turn=Turn(blocks))
        turn = await send_lines(engine, "Three", turn=turn)
    assert [len(body["input"]) for body in request_bodies(server)] == [121, 1]
    assert isinstance(turn.blocks[-1], AssistantBlock)


async def test_an_unstored_answer_is_not_expected_in_the_object(server: TestServer) -> None:
    """With ``store=False`` the server adds nothing to the object, which is no difference."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        _, events = await stream_turn(engine, turn.append(user("Two")), store=False)
    assert not any(isinstance(event, Healed | ServerForgot) for event in events)
