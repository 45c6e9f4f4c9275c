"""Test conversation mode: an object holds the conversation, one line of history continues it, and it is checked."""

from typing import Any

import anyio
import pytest
from msgspec import structs
from openai import AsyncOpenAI, OpenAI

from engines.conftest import open_engine
from engines.runs import (
    check_law,
    collect_events,
    last_context,
    last_text,
    list_reasons,
    read_until,
    request_bodies,
    send_lines,
)
from kedge.engines import stored_items
from kedge.errors import RequestRefused
from kedge.events import TextDelta
from kedge.events.run import Healed, ModeChanged, ServerForgot
from kedge.memory.object_claims import ObjectClaims
from kedge.planning import get_state, set_state
from kedge.testing import TestServer
from kedge.turns import AssistantBlock, Turn, assistant, user
from normalization import expected_context, normalize_items

LONG = "Remember these words: " + "river mountain valley " * 200


def make_client(server: TestServer) -> OpenAI:
    """Create a plain client that acts as another user of the server."""
    return OpenAI(base_url=server.base_url, api_key="any")


async def test_one_object_holds_the_complete_conversation(server: TestServer) -> None:
    """The first request creates the object, and the next ones send only new blocks."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One", "Two", "What did I say first?")
    conversation_ids = {body["conversation"] for body in request_bodies(server)}
    assert conversation_ids == {get_state(turn).conversation_id}
    assert [len(body["input"]) for body in request_bodies(server)] == [1, 1, 1]
    assert all("previous_response_id" not in body for body in request_bodies(server))
    check_law(server, turn)
    assert "One" in last_text(turn)


async def test_an_edit_starts_a_new_object(server: TestServer) -> None:
    """An object cannot be edited, so an edited Turn is sent in full to a new one."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One", "Two")
        before = get_state(turn).conversation_id
        edited = turn.edit(turn.blocks[0].id, user("Uno")).append(user("Three"))
        turn = await engine.run(edited)
    assert get_state(turn).conversation_id != before
    check_law(server, turn)


async def test_deleted_object_is_replaced(server: TestServer) -> None:
    """A deleted object is replaced by a new one with one full send."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        with make_client(server) as client:
            client.conversations.delete(get_state(turn).conversation_id)
        turn = await engine.run(turn.append(user("Two")))
    check_law(server, turn)


async def test_responses_in_an_object_are_no_anchors(server: TestServer) -> None:
    """A response inside an object proves nothing for a chain, because the object may have changed."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        plan = engine.plan(turn.append(user("Two")), mode="chained")
    assert plan.anchor is None
    assert plan.fallback == "scope"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("echo", ["no", "missing"])
async def test_an_answer_outside_the_object_is_healed(
    server: TestServer, echo: str, *, streaming: bool
) -> None:
    """A server that named the object before and now does not has not read it."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await engine.run(Turn([user("One")]), streaming=streaming)
        object_id = get_state(turn).conversation_id
        server.faults.set(f"forget_silently,echo={echo}", times=1)
        next_turn = turn.append(user("What did I say first?"))
        answer, events = await collect_events(engine, next_turn, streaming=streaming)
    assert list_reasons(events) == ["forgot"]
    check_law(server, answer)
    assert "One" in last_text(answer)
    assert get_state(answer).conversation_id != object_id


async def test_object_missing_at_the_end_is_reported(server: TestServer) -> None:
    """The answer was already shown when the object is found missing, so an event reports it."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await engine.run(Turn([user("One")]), streaming=True)
        server.faults.set("forget_silently,echo=late", times=1)
        _, events = await collect_events(engine, turn.append(user("Two")), streaming=True)
    assert any(isinstance(event, ServerForgot) for event in events)


async def test_null_object_is_healed_at_once(server: TestServer) -> None:
    """Servers name the object at the start of an answer, so null means that it was not read."""
    server.faults.set("forget_silently,echo=no", times=2)
    async with open_engine(server, mode="conversation") as engine:
        turn = await engine.run(Turn([user("One")]), streaming=True)
        turn = await engine.run(turn.append(user("What did I say first?")), streaming=True)
    check_law(server, turn)
    assert "One" in last_text(turn)


async def test_server_that_never_names_objects_is_not_healed(server: TestServer) -> None:
    """A server that never names the object is not healed; an answer outside of its object is no anchor."""
    server.faults.set("forget_silently,echo=missing", times=1)
    async with open_engine(server, mode="conversation") as engine:
        turn = await engine.run(Turn([user("One")]), streaming=False)
        server.faults.set("forget_silently,echo=missing", times=1)
        _, events = await collect_events(engine, turn.append(user("Two")), streaming=False)
    assert not any(isinstance(event, Healed | ServerForgot) for event in events)


@pytest.mark.parametrize("conversation_id", ["../admin", "..", "conv_1/../../admin?", "conv_1#"])
async def test_the_id_of_an_object_does_not_choose_another_address(
    conversation_id: str, server: TestServer
) -> None:
    """An id in an imported Turn is one segment of a URL; one that cannot be is no object."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        turn = set_state(turn, structs.replace(get_state(turn), conversation_id=conversation_id))
        server.requests.clear()
        turn = await engine.run(turn.append(user("Two")))
    own_items = f"/v1/conversations/{get_state(turn).conversation_id}/items"
    allowed = {"/v1/responses", "/v1/conversations", own_items}
    assert {each.path for each in server.requests} <= allowed
    assert not any(
        ".." in each.path.split("/") for each in server.requests if each.path not in allowed
    )
    check_law(server, turn)


def insert_message(server: TestServer, turn: Turn, text: str = "Intruder") -> None:
    """Add a message to the conversation object of a Turn, as another client."""
    item: Any = {"type": "message", "role": "user", "content": text}
    with make_client(server) as client:
        client.conversations.items.create(get_state(turn).conversation_id, items=[item])


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
        answer, events = await collect_events(engine, turn.append(user("Two")), streaming=False)
    assert list_reasons(events) == ["conversation"]
    assert get_state(answer).conversation_id != get_state(turn).conversation_id
    check_law(server, answer)


async def test_a_stream_after_a_pause_does_not_show_foreign_items(server: TestServer) -> None:
    """The last item is compared before the request, so that a message of another client costs no wrong answer."""
    times = iter(range(0, 100_000, 60))
    async with open_engine(server, mode="conversation", clock=lambda: float(next(times))) as engine:
        turn = await send_lines(engine, "One")
        insert_message(server, turn)
        answer, events = await collect_events(engine, turn.append(user("What did I say last?")))
    assert not any(isinstance(event, Healed | ServerForgot) for event in events)
    assert not any("Intruder" in str(each.context) for each in server.requests)
    check_law(server, answer)
    assert get_state(answer).conversation_id != get_state(turn).conversation_id


async def test_a_stream_after_a_pause_continues_an_unchanged_object(server: TestServer) -> None:
    """One more list shows the last item; the next request continues with the new blocks."""
    times = iter(range(0, 100_000, 60))
    async with open_engine(server, mode="conversation", clock=lambda: float(next(times))) as engine:
        turn = await send_lines(engine, "One")
        server.requests.clear()
        answer, _ = await collect_events(engine, turn.append(user("Two")))
    items = f"/v1/conversations/{get_state(answer).conversation_id}/items"
    assert [each.path for each in server.requests] == [items, "/v1/responses", items]
    assert [len(body["input"]) for body in request_bodies(server)] == [1]


async def test_foreign_items_in_a_shown_answer_are_reported(server: TestServer) -> None:
    """A streamed answer that was shown is reported, is no anchor, and ends the object."""
    async with open_engine(server, mode="conversation", clock=lambda: 1_000.0) as engine:
        turn = await send_lines(engine, "One")
        insert_message(server, turn)
        answer, events = await collect_events(engine, turn.append(user("Two")))
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
        answer, events = await collect_events(engine, turn.append(user("What did I say last?")))
    shown = "".join(event.delta for event in events if isinstance(event, TextDelta))
    assert "1234" not in shown
    assert shown == last_text(answer)
    assert list_reasons(events) == ["conversation"]


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
        _, events = await collect_events(engine, question)
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
        _, events = await collect_events(engine, question, tools=[add])
    assert list_reasons(events) == ["conversation"]
    assert len(runs) == 1


async def test_a_deleted_last_item_is_found(server: TestServer) -> None:
    """An object without the last known item has another context than the Turn."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        with make_client(server) as client:
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
        _, events = await collect_events(engine, turn.append(user("Two")), store=False)
    assert not any(isinstance(event, Healed | ServerForgot) for event in events)


def delete_item(server: TestServer, turn: Turn, index: int) -> None:
    """Delete an item of the conversation object of a Turn, counted from the oldest one."""
    object_id = get_state(turn).conversation_id
    with make_client(server) as client:
        listed: Any = list(client.conversations.items.list(object_id, order="asc"))
        client.conversations.items.delete(listed[index].id, conversation_id=object_id)


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_honest_unknown_server_is_continued(
    server: TestServer, *, streaming: bool
) -> None:
    """Once its token counts prove that it reads the object, only new blocks are sent."""
    server.faults.set("anonymous")
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, LONG, "Two", streaming=streaming)
        server.requests.clear()
        turn = await send_lines(engine, "What did I say last?", turn=turn, streaming=streaming)
    sent = [each.body for each in server.requests if each.path == "/v1/responses"]
    assert [len(body["input"]) for body in sent] == [1]
    assert "Two" in last_text(turn)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_deleted_item_is_found_by_the_token_count(
    server: TestServer, *, streaming: bool
) -> None:
    """The end of the object is as expected, but the server counts fewer tokens than the object had."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, LONG, "Two")
        delete_item(server, turn, 0)
        answer, events = await collect_events(
            engine, turn.append(user("Three")), streaming=streaming
        )
    expected = ServerForgot if streaming else Healed
    assert any(isinstance(event, expected) for event in events)
    assert streaming or normalize_items(last_context(server)) == expected_context(answer)


async def test_an_audit_finds_a_deleted_item(server: TestServer) -> None:
    """With ``verify_every`` all items of the object are compared before the request."""
    async with open_engine(server, mode="conversation", verify_every=1) as engine:
        turn = await send_lines(engine, "One", "Two", "Three")
        assert (await engine.verify(turn.append(user("Four")))).agrees is True
        delete_item(server, turn, 2)
        assert (await engine.verify(turn.append(user("Four")))).agrees is False
        answer, events = await collect_events(engine, turn.append(user("Four")))
    assert list_reasons(events) == ["audit"]
    check_law(server, answer)


async def test_an_object_is_not_used_without_trust(server: TestServer) -> None:
    """With ``trust="never"`` everything is sent, and nothing is stored."""
    async with (
        open_engine(server, mode="conversation", trust="never") as engine,
        engine.stream(Turn([user("One")])) as stream,
    ):
        events = [event async for event in stream]
    changes = [event for event in events if isinstance(event, ModeChanged)]
    assert [(event.mode, event.reason) for event in changes] == [("stateless", "never")]
    assert get_state(stream.turn).conversation_id == ""


LONG_ANSWER = "Count to 1000, very slowly."


def check_contexts(server: TestServer, *turns: Turn) -> None:
    """Check that each Turn was answered from its own messages, and that no two share an object."""
    contexts = [normalize_items(each.context) for each in server.requests if each.context]
    for turn in turns:
        assert expected_context(turn) in contexts
    objects = [get_state(turn).conversation_id for turn in turns]
    assert len(set(objects)) == len(objects)


def test_a_request_that_knows_no_response_does_not_own_a_claimed_object() -> None:
    """An object in use is taken for every other request, also for one that knows no response in it."""
    claims = ObjectClaims()
    assert claims.claim("here", "conv_1", "") == "unknown"
    assert claims.claim("here", "conv_1", "") == "taken"
    claims.release("here", "conv_1", "R1")
    assert [claims.find("here", "conv_1", last) for last in ("", "R0", "R1")] == [
        "taken",
        "taken",
        "owned",
    ]


async def test_a_fork_does_not_continue_the_object_of_a_running_answer(server: TestServer) -> None:
    """While one line of history is answered, another one of any engine sends everything to a new object."""
    async with (
        open_engine(server, mode="conversation") as engine,
        open_engine(server, mode="conversation") as other,
    ):
        turn = await send_lines(engine, "One")
        async with engine.stream(turn.append(user("My PIN is 1234"))) as stream:
            await read_until(stream)
            fork = turn.append(user("What did I say last?"))
            assert other.plan(fork).fallback == "taken"
            fork = await other.run(fork)
            await stream.finish()
    check_contexts(server, stream.turn, fork)
    assert "1234" not in last_text(fork)


async def test_concurrent_forks_get_objects_of_their_own(server: TestServer) -> None:
    """Of several lines of history that are sent at once, one continues the object."""
    forks: list[Turn] = []

    async def send(turn: Turn, **options: Any) -> None:
        forks.append(await engine.run(turn, **options))

    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(send, turn.append(user(f"Fork {number}")))
    check_contexts(server, *forks)
    assert get_state(turn).conversation_id in {get_state(each).conversation_id for each in forks}


async def test_a_line_that_lost_its_object_continues_the_new_one(server: TestServer) -> None:
    """The new object of a fork is continued with deltas; so is the first one."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        first = await send_lines(engine, "Two", turn=turn)
        second = await send_lines(engine, "Three", "Four", turn=turn)
        first = await send_lines(engine, "Five", turn=first)
    assert [len(each.body["input"]) for each in server.requests if each.context] == [1, 1, 3, 1, 1]
    check_contexts(server, first, second)


async def test_a_stream_left_early_ends_the_object(server: TestServer) -> None:
    """The server may complete an answer that was left, so the object is not used any more."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        async with engine.stream(turn.append(user("Two"))) as stream:
            await read_until(stream)
        again = await engine.run(turn.append(user("Three")))
    assert get_state(again).conversation_id != get_state(turn).conversation_id
    check_contexts(server, again)


async def test_a_rejected_request_does_not_end_the_object(server: TestServer) -> None:
    """A server that rejects a request adds nothing to the object, which is then continued."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        server.faults.set("status=400", times=1)
        with pytest.raises(RequestRefused):
            await engine.run(turn.append(user("Two")))
        again = await engine.run(turn.append(user("Two")))
    assert get_state(again).conversation_id == get_state(turn).conversation_id


async def test_a_locked_object_is_waited_for(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that another client uses for a moment is continued once it is free and unchanged."""
    rejected = anyio.Event()

    async def wait(seconds: float) -> None:
        rejected.set()
        await anyio.sleep(seconds)

    monkeypatch.setattr(stored_items, "LOCK_SECONDS", 300.0)
    monkeypatch.setattr(stored_items, "sleep", wait)
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        object_id, answers = get_state(turn).conversation_id, list[Turn]()

        async def send() -> None:
            answers.append(await engine.run(turn.append(user("Two"))))

        async with (
            AsyncOpenAI(base_url=server.base_url, api_key="any") as client,
            anyio.create_task_group() as group,
        ):
            options: Any = {"conversation": object_id, "input": LONG_ANSWER, "stream": True}
            stream: Any = await client.responses.create(model="practice", **options)
            await anext(aiter(stream))
            group.start_soon(send)
            with anyio.fail_after(60):
                await rejected.wait()
            await stream.close()
    assert get_state(answers[0]).conversation_id == object_id
    check_contexts(server, *answers)


async def test_an_object_that_stays_locked_is_replaced(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time limit everything is sent to a new object."""
    monkeypatch.setattr(stored_items, "LOCK_SECONDS", 0.0)
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        object_id = get_state(turn).conversation_id
        async with AsyncOpenAI(base_url=server.base_url, api_key="any") as client:
            options: Any = {"conversation": object_id, "input": LONG_ANSWER, "stream": True}
            stream: Any = await client.responses.create(model="practice", **options)
            await anext(aiter(stream))
            answer = await engine.run(turn.append(user("Two")))
            await stream.close()
    assert get_state(answer).conversation_id != object_id
    check_contexts(server, answer)
