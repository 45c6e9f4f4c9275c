"""Test that no line of history continues a conversation object of another one, and the claims in a store."""

import anyio
import pytest

from engines.conftest import open_engine
from engines.runs import last_context, last_text, read_until, send_lines
from kedge import Conversation
from kedge.engines import ResponsesEngine
from kedge.errors import RequestRefused
from kedge.evidence.object_claims import ObjectClaims
from kedge.planning import get_state
from kedge.store import Store, open_store
from kedge.testing import TestServer, serve
from kedge.turns import Turn, user
from kedge.workflows import Side, debate, refine
from normalization import expected_context, normalize_items


def get_object(turn: Turn) -> str:
    """Return the conversation object of a Turn."""
    return get_state(turn).conversation_id


def check_answer(server: TestServer, turn: Turn) -> None:
    """Check that the last answer of a Turn was generated from the Turn, and nothing else."""
    response_id = turn.blocks[-1].response_id
    (request,) = [each for each in server.requests if each.response_id == response_id]
    assert normalize_items(request.context) == expected_context(turn)


async def check_store(server: TestServer, store: Store) -> int:
    """Check every answer in a store, and return their number."""
    checked = 0
    for row in await store.conversations():
        for response in await store.responses(row):
            if response.status == "completed" and response.conversation == row.id:
                check_answer(server, (await store.load(row, response.node)).turn())
                checked += 1
    return checked


async def test_changed_lines_use_objects_of_their_own(
    server: TestServer, engine: ResponsesEngine, store: Store
) -> None:
    """What was regenerated, undone or edited is not in the context; the first line can still be continued."""
    conversation = await Conversation.create(engine, store=store)
    await conversation.send("My PIN is 1234")
    first = (await conversation.send("Two")).node
    objects = [get_object(conversation.turn)]
    await conversation.regenerate()
    objects.append(get_object(conversation.turn))
    await conversation.undo()
    await conversation.send("Three")
    objects.append(get_object(conversation.turn))
    await conversation.edit(conversation.turn.blocks[0].id, "My PIN is secret")
    await conversation.send("What is my PIN?")
    assert len({*objects, get_object(conversation.turn)}) == 4
    await conversation.goto(first)
    await conversation.send("Four")
    assert get_object(conversation.turn) == objects[0]
    assert await check_store(server, store) == 6


async def test_an_import_does_not_continue_the_object_of_the_original(
    server: TestServer, engine: ResponsesEngine, store: Store
) -> None:
    """A copy in the same store shares claims; one in another process is held back until the check."""
    conversation = await Conversation.create(engine, store=store)
    await conversation.send("One")
    exported = await conversation.export()
    await conversation.send("Two")
    (row,) = await store.import_(exported)
    copy = await Conversation.open(engine, store=store, id=row.id)
    await copy.send("Three")
    assert get_object(copy.turn) != get_object(conversation.turn)
    assert await check_store(server, store) == 4
    async with (
        open_store("sqlite://:memory:") as other,
        open_engine(server, mode="conversation") as stranger,
    ):
        stranger.objects.claims = ObjectClaims()
        (row,) = await other.import_(exported)
        copy = await Conversation.open(stranger, store=other, id=row.id)
        await copy.send("Four")
        assert get_object(copy.turn) != get_object(conversation.turn)
        check_answer(server, copy.turn)


async def test_the_roles_of_workflows_use_objects_of_their_own(
    server: TestServer, engine: ResponsesEngine, store: Store
) -> None:
    """Sides, authors and judges on one engine are answered from their own messages."""
    sides = [Side("Ada", engine, "Speak for tea."), Side("Bob", engine, "Speak for coffee.")]
    await debate("Tea or coffee?", sides, judge=lambda _: None, store=store, rounds=2)
    conversation = await Conversation.create(engine, store=store)
    await conversation.send("One")
    await refine("Write a line.", conversation=conversation, judge=lambda _: "longer", rounds=2)
    assert await check_store(server, store) == 7
    objects = {each.body["conversation"] for each in server.requests if each.context}
    assert len(objects) == 3


def become_another_process(engine: ResponsesEngine) -> None:
    """Continue as a process that knows only what is in the store."""
    engine.objects.claims = ObjectClaims()


def count_lists(server: TestServer) -> int:
    """Return how often the items of an object were listed."""
    return sum(each.path.endswith("/items") for each in server.requests)


async def test_a_process_with_the_same_store_continues_the_object(store: Store) -> None:
    """The claim in the store shows that no other line continues the object, so the answer is not held back."""
    with serve() as server:
        async with open_engine(server, mode="conversation", clock=lambda: 1_000.0) as engine:
            await engine.attach_evidence(store)
            turn = await send_lines(engine, "One")
            become_another_process(engine)
            lists = count_lists(server)
            async with engine.stream(turn.append(user("What did I say first?"))) as stream:
                await read_until(stream)
                assert count_lists(server) == lists
                await stream.finish()
    assert get_state(stream.turn).conversation_id == get_state(turn).conversation_id
    assert "One" in last_text(stream.turn)


async def test_of_two_processes_one_continues_the_object(
    store: Store, engine: ResponsesEngine, server: TestServer
) -> None:
    """A process that finds the object claimed in the store sends everything to a new one, also after a crash."""
    await engine.attach_evidence(store)
    turn = await send_lines(engine, "One")
    async with engine.stream(turn.append(user("My PIN is 1234"))) as stream:
        await read_until(stream)
        become_another_process(engine)
        other = await engine.run(turn.append(user("What did I say last?")))
    assert get_state(other).conversation_id != get_state(turn).conversation_id
    assert normalize_items(last_context(server)) == expected_context(other)


async def test_a_rejected_request_does_not_end_the_object_in_the_store(
    store: Store, engine: ResponsesEngine, server: TestServer
) -> None:
    """The process whose request was rejected claims the object again."""
    await engine.attach_evidence(store)
    turn = await send_lines(engine, "One")
    server.faults.set("status=400", times=1)
    with pytest.raises(RequestRefused):
        await engine.run(turn.append(user("Two")))
    again = await engine.run(turn.append(user("Two")))
    assert get_state(again).conversation_id == get_state(turn).conversation_id


async def test_one_of_many_claims_succeeds(store: Store) -> None:
    """Exactly one of several processes gets an object that ends with a known response."""
    assert await store.claim_object("s", "conv", "", owner="a") == "unknown"
    await store.release_object("s", "conv", "R1", owner="a")
    found: list[str] = []

    async def claim(owner: str) -> None:
        found.append(await store.claim_object("s", "conv", "R1", owner=owner))

    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(claim, f"process {number}")
    assert sorted(found) == ["owned", *["taken"] * 4]
    await store.release_object("s", "conv", "R9", owner="a process without the claim")
    assert await store.claim_object("s", "conv", "R9", owner="b") == "taken"
    other = store.use_namespace("other")
    assert await other.claim_object("s", "conv", "R1", owner="b") == "unknown"
