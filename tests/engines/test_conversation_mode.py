"""Test conversation mode: an object holds the conversation, one line of history continues it, and it is checked."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from msgspec import structs
from openai import AsyncOpenAI, OpenAI

from engines.conftest import open_link
from engines.runs import Link, last_context, last_text, list_reasons, read_until
from kedge.engines import stored_items
from kedge.errors import AnswerIncomplete, RequestRefused, ServerFailed, StreamCut
from kedge.events import Event, TextDelta
from kedge.events.run import FellBack, Healed, ModeChanged, ServerForgot
from kedge.evidence.object_claims import ObjectClaims
from kedge.planning import get_state, set_state
from kedge.testing import TestServer
from kedge.turns import AssistantBlock, Turn, assistant, user
from normalization import expected_context, normalize_items

LONG = "Remember these words: " + "river mountain valley " * 200


@pytest.fixture
def settings() -> dict[str, Any]:
    """Return the settings of an engine that continues conversation objects."""
    return {"mode": "conversation"}


@pytest.fixture
async def turn(link: Link) -> Turn:
    """Return a Turn with one answer, which has an object."""
    return await link.send("One")


def object_of(turn: Turn) -> str:
    """Return the id of the conversation object of a Turn."""
    return get_state(turn).conversation_id


def items_of(turn: Turn) -> str:
    """Return the path of the items of that object."""
    return f"/v1/conversations/{object_of(turn)}/items"


def has_loss(events: list[Event]) -> bool:
    """Return whether a loss was reported or healed."""
    return any(isinstance(event, Healed | ServerForgot) for event in events)


def make_client(server: TestServer) -> OpenAI:
    """Create a plain client that acts as another user of the server."""
    return OpenAI(base_url=server.base_url, api_key="any")


async def test_one_object_holds_the_complete_conversation(link: Link) -> None:
    """The first request creates the object, and the next ones send only new blocks."""
    turn = await link.send("One", "Two", "What did I say first?")
    assert {body["conversation"] for body in link.bodies} == {object_of(turn)}
    assert link.lengths == [1, 1, 1]
    assert all("previous_response_id" not in body for body in link.bodies)
    link.check_law(turn)
    assert "One" in last_text(turn)


async def test_responses_in_an_object_are_no_anchors(link: Link, turn: Turn) -> None:
    """A response inside an object proves nothing for a chain, because the object may have changed."""
    plan = link.engine.plan(turn.append(user("Two")), mode="chained")
    assert (plan.anchor, plan.fallback) == (None, "scope")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("echo", ["no", "missing"])
async def test_an_answer_outside_the_object_is_healed(
    link: Link, echo: str, *, streaming: bool
) -> None:
    """A server that named the object before and now does not has not read it."""
    turn = await link.send("One", streaming=streaming)
    link.server.faults.set(f"forget_silently,echo={echo}", times=1)
    answer, events = await link.collect(turn, "What did I say first?", streaming=streaming)
    assert list_reasons(events) == ["forgot"]
    link.check_law(answer)
    assert "One" in last_text(answer)
    assert object_of(answer) != object_of(turn)


async def test_server_that_never_names_objects_is_not_healed(link: Link) -> None:
    """A server that never names the object is not healed; an answer outside of its object is no anchor."""
    link.server.faults.set("forget_silently,echo=missing", times=1)
    turn = await link.send("One", streaming=False)
    link.server.faults.set("forget_silently,echo=missing", times=1)
    _, events = await link.collect(turn, "Two", streaming=False)
    assert not has_loss(events)


@pytest.mark.parametrize("conversation_id", ["../admin", "..", "conv_1/../../admin?", "conv_1#"])
async def test_the_id_of_an_object_does_not_choose_another_address(
    conversation_id: str, link: Link, turn: Turn
) -> None:
    """An id in an imported Turn is one segment of a URL; one that cannot be is no object."""
    state = structs.replace(get_state(turn), conversation_id=conversation_id)
    link.server.requests.clear()
    turn = await link.send("Two", turn=set_state(turn, state))
    assert set(link.paths) <= {"/v1/responses", "/v1/conversations", items_of(turn)}
    link.check_law(turn)


def insert_message(server: TestServer, object_id: str) -> None:
    """Add a message to a conversation object, as another client."""
    item: Any = {"type": "message", "role": "user", "content": "Intruder"}
    with make_client(server) as client:
        client.conversations.items.create(object_id, items=[item])


async def test_a_turn_takes_one_request_and_one_list(link: Link, turn: Turn) -> None:
    """After each answer the newest items are listed once: what was sent and received, and one more."""
    link.server.requests.clear()
    await link.send("Two", turn=turn)
    assert link.paths == ["/v1/responses", items_of(turn)]


async def test_foreign_items_before_anything_was_shown_are_healed(link: Link, turn: Turn) -> None:
    """The answer is discarded, and everything is sent to a new object."""
    insert_message(link.server, object_of(turn))
    answer, events = await link.collect(turn, "Two", streaming=False)
    assert list_reasons(events) == ["conversation"]
    assert object_of(answer) != object_of(turn)
    link.check_law(answer)


@pytest.mark.parametrize("is_changed", [True, False])
async def test_a_stream_after_a_pause_checks_the_last_item(
    server: TestServer, is_changed: bool
) -> None:
    """One list before a stream shows a message of another client, which costs no wrong answer."""
    times = iter(range(0, 100_000, 60))
    async with open_link(server, mode="conversation", clock=lambda: float(next(times))) as link:
        turn = await link.send("One")
        if is_changed:
            insert_message(server, object_of(turn))
        server.requests.clear()
        answer, events = await link.collect(turn, "What did I say last?")
        assert not has_loss(events)
        assert not any("Intruder" in str(each.context) for each in server.requests)
        assert (object_of(answer) != object_of(turn)) is is_changed
        link.check_law(answer)
        if not is_changed:
            await link.send("Three", turn=answer)  # which is not streamed
            request = ["/v1/responses", items_of(turn)]
            assert link.paths == [items_of(turn), *request, *request]
            assert link.lengths == [1, 1]


@pytest.mark.parametrize("is_rejected", [False, True])
async def test_a_copied_turn_is_held_back_until_the_check(
    server: TestServer, is_rejected: bool
) -> None:
    """Another process does not know who continues the object, also after a request that was rejected."""
    async with open_link(server, mode="conversation", clock=lambda: 1_000.0) as link:
        turn = await link.send("One")
        await link.send("My PIN is 1234", turn=turn)
        link.engine.objects.claims = ObjectClaims()
        question = turn.append(user("What did I say last?"))
        if is_rejected:
            server.faults.set("status=400", times=1)
            with pytest.raises(RequestRefused):
                await link.engine.run(question)
        answer, events = await link.collect(question)
    shown = "".join(event.delta for event in events if isinstance(event, TextDelta))
    assert "1234" not in shown
    assert shown == last_text(answer)
    assert "One" in shown or "What did I say" in shown
    assert list_reasons(events) == ([] if is_rejected else ["conversation"])


@pytest.mark.parametrize(("is_held", "count"), [(False, 2), (True, 6)])
async def test_a_cut_answer_is_not_requested_again(
    link: Link, turn: Turn, is_held: bool, count: int
) -> None:
    """The object may contain the request already; of an answer that was held back nothing is shown."""
    if is_held:
        link.engine.objects.claims = ObjectClaims()
    link.server.faults.set(f"cut_after_events={count}", times=1)
    async with link.engine.stream(turn.append(user("Two"))) as stream:
        with pytest.raises(StreamCut):
            await read_until(stream)
    link.check_law(await link.send("Two", turn=turn))


@pytest.mark.parametrize("is_held", [False, True])
async def test_an_answer_whose_object_cannot_be_checked_is_used_if_it_was_shown(
    link: Link, turn: Turn, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of a copied Turn, whose object others may continue, is sent again in full."""

    async def fail(*_: Any) -> None:
        raise ServerFailed("no list")

    if is_held:
        link.engine.objects.claims = ObjectClaims()
    monkeypatch.setattr(stored_items, "_list_newest", fail)
    _, events = await link.collect(turn, "Two")
    assert (has_loss(events), list_reasons(events)) == (is_held, ["conversation"] * is_held)


async def test_a_new_object_that_others_changed_is_not_continued(link: Link) -> None:
    """An answer in the first request to an object is shown, and the next one is in another object."""
    async with link.engine.stream(Turn([user("One")])) as stream:
        await read_until(stream)
        insert_message(link.server, link.bodies[-1]["conversation"])
        turn = await stream.finish()
    assert (object_of(turn), link.engine.plan(turn.append(user("Two"))).anchor) == ("", None)
    link.check_law(await link.send("What did I say last?", turn=turn))


async def test_an_unchanged_copy_continues_the_object(link: Link, turn: Turn) -> None:
    """After a restart the object is continued, and its next answers are not held back."""
    link.engine.objects.claims = ObjectClaims()
    turn = await link.send("Two", "What did I say first?", turn=turn)
    assert link.lengths == [1, 1, 1]
    assert "One" in last_text(turn)


async def test_calls_made_from_a_foreign_context_are_not_run(link: Link, turn: Turn) -> None:
    """A call in a shown answer from a changed object is not run; everything is sent again."""
    runs: list[str] = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        runs.append(f"{a}+{b}")
        return a + b

    insert_message(link.server, object_of(turn))
    _, events = await link.collect(turn, "call add with a=2 and b=3", tools=[add])
    assert list_reasons(events) == ["conversation"]
    assert runs == ["2+3"]


async def test_a_long_history_is_checked_in_pages(link: Link) -> None:
    """A full send of more items than a page has is checked, and the object is continued."""
    blocks = [make(f"Line {n}") for n in range(60) for make in (user, assistant)]
    turn = await link.send("Two", "Three", turn=Turn(blocks))
    assert link.lengths == [121, 1]
    assert isinstance(turn.blocks[-1], AssistantBlock)


async def test_an_unstored_answer_is_not_expected_in_the_object(link: Link, turn: Turn) -> None:
    """With ``store=False`` the server adds nothing to the object, which is no difference."""
    _, events = await link.collect(turn, "Two", store=False)
    assert not has_loss(events)


async def test_an_object_is_not_continued_after_an_incomplete_answer(
    link: Link, turn: Turn
) -> None:
    """The Turn of the error has no object, so everything is sent to a new one."""
    with pytest.raises(AnswerIncomplete) as caught:
        await link.send("Write 100 words", turn=turn, max_output_tokens=16)
    assert caught.value.turn is not None
    assert object_of(caught.value.turn) == ""


def delete_item(server: TestServer, turn: Turn, index: int) -> None:
    """Delete an item of the conversation object of a Turn, counted from the oldest one."""
    with make_client(server) as client:
        listed: Any = list(client.conversations.items.list(object_of(turn), order="asc"))
        client.conversations.items.delete(listed[index].id, conversation_id=object_of(turn))


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_honest_unknown_server_is_continued(link: Link, *, streaming: bool) -> None:
    """Once its token counts prove that it reads the object, only new blocks are sent."""
    link.server.faults.set("anonymous")
    turn = await link.send(LONG, "Two", streaming=streaming)
    link.server.requests.clear()
    turn = await link.send("What did I say last?", turn=turn, streaming=streaming)
    assert link.lengths == [1]
    assert "Two" in last_text(turn)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_deleted_item_is_found_by_the_token_count(link: Link, *, streaming: bool) -> None:
    """The end of the object is as expected, but the server counts fewer tokens than the object had."""
    turn = await link.send(LONG, "Two")
    delete_item(link.server, turn, 0)
    answer, events = await link.collect(turn, "Three", streaming=streaming)
    expected = ServerForgot if streaming else Healed
    assert any(isinstance(event, expected) for event in events)
    assert streaming or normalize_items(last_context(link.server)) == expected_context(answer)


async def test_an_audit_finds_a_deleted_item(server: TestServer) -> None:
    """With ``audit_every`` all items of the object are compared before the request."""
    async with open_link(server, mode="conversation", audit_every=1) as link:
        turn = (await link.send("One", "Two", "Three")).append(user("Four"))
        assert (await link.engine.verify(turn)).agrees is True
        delete_item(server, turn, 2)
        assert (await link.engine.verify(turn)).agrees is False
        answer, events = await link.collect(turn)
    assert list_reasons(events) == ["audit"]
    link.check_law(answer)


async def test_an_object_is_not_used_without_trust(server: TestServer) -> None:
    """With ``trust="never"`` everything is sent, and nothing is stored."""
    async with open_link(server, mode="conversation", trust="never") as link:
        turn, events = await link.collect(Turn(), "One")
    changes = [event for event in events if isinstance(event, ModeChanged)]
    assert [(event.mode, event.reason) for event in changes] == [("stateless", "never")]
    assert object_of(turn) == ""


def check_contexts(server: TestServer, *turns: Turn) -> None:
    """Check that each Turn was answered from its own messages, and that no two share an object."""
    contexts = [normalize_items(each.context) for each in server.requests if each.context]
    for turn in turns:
        assert expected_context(turn) in contexts
    assert len({object_of(turn) for turn in turns}) == len(turns)


def test_a_request_that_knows_no_response_does_not_own_a_claimed_object() -> None:
    """An object in use is taken for every other request, also for one that knows no response in it."""
    claims = ObjectClaims()
    assert [claims.claim("here", "conv_1", "") for _ in range(2)] == ["unknown", "taken"]
    claims.release("here", "conv_1", "R1")
    found = {last: claims.find("here", "conv_1", last) for last in ("", "R0", "R1")}
    assert found == {"": "taken", "R0": "taken", "R1": "owned"}


async def test_a_fork_does_not_continue_the_object_of_a_running_answer(
    link: Link, turn: Turn
) -> None:
    """While one line of history is answered, another one of any engine sends everything to a new object."""
    async with (
        open_link(link.server, mode="conversation") as other,
        link.engine.stream(turn.append(user("My PIN is 1234"))) as stream,
    ):
        await read_until(stream)
        fork = turn.append(user("What did I say last?"))
        assert other.engine.plan(fork).fallback == "taken"
        fork = await other.engine.run(fork)
        await stream.finish()
    check_contexts(link.server, stream.turn, fork)
    assert "1234" not in last_text(fork)


async def test_a_line_that_lost_its_object_continues_the_new_one(link: Link, turn: Turn) -> None:
    """The new object of a fork is continued with deltas; so is the first one."""
    first = await link.send("Two", turn=turn)
    second = await link.send("Three", "Four", turn=turn)
    first = await link.send("Five", turn=first)
    assert link.lengths == [1, 1, 3, 1, 1]
    check_contexts(link.server, first, second)


@asynccontextmanager
async def lock_object(server: TestServer, turn: Turn) -> AsyncIterator[None]:
    """Lock the object of a Turn by a stream of another client."""
    options: Any = {"input": "Count to 1000, very slowly.", "conversation": object_of(turn)}
    async with AsyncOpenAI(base_url=server.base_url, api_key="any") as client:
        stream: Any = await client.responses.create(model="practice", stream=True, **options)
        await anext(aiter(stream))
        yield
        await stream.close()


async def test_a_locked_object_is_waited_for(
    link: Link, turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that another client uses for a moment is continued once it is free and unchanged."""
    rejected = anyio.Event()
    answers: list[Turn] = []

    async def wait(seconds: float) -> None:
        rejected.set()
        await anyio.sleep(seconds)

    async def send() -> None:
        answers.append(await link.send("Two", turn=turn))

    monkeypatch.setattr(stored_items, "LOCK_SECONDS", 300.0)
    monkeypatch.setattr(stored_items, "sleep", wait)
    async with anyio.create_task_group() as group, lock_object(link.server, turn):
        group.start_soon(send)
        with anyio.fail_after(60):
            await rejected.wait()
    assert object_of(answers[0]) == object_of(turn)
    check_contexts(link.server, *answers)


async def test_an_object_that_stays_locked_is_replaced(
    link: Link, turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time limit everything is sent to a new object."""
    monkeypatch.setattr(stored_items, "LOCK_SECONDS", 0.0)
    async with lock_object(link.server, turn):
        answer, events = await link.collect(turn, "Two")
    assert FellBack("taken") in events
    assert object_of(answer) != object_of(turn)
    check_contexts(link.server, answer)
