"""What a middleware changes in a Turn on the way out (data, mode, anchors) survives in a conversation."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from conversation.conftest import Connect, assert_sent
from kedge import Chat, Conversation, Turn, user
from kedge.compaction import MessageLimitCompactor
from kedge.engines import Engine
from kedge.errors import EngineError, OutputInvalid
from kedge.middleware import guard, redact, two_phase, with_middleware
from kedge.planning import AnchorRecord, drop_anchors, get_state, set_state
from kedge.store import Store
from kedge.testing import TestServer
from kedge.turns import system


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def count_answers(turn: Turn) -> Turn:
    """Count the answers in the data, and send everything from now on."""
    state = get_state(turn)
    count = turn.data.get("answers", 0) + 1
    turn = turn.with_data(answers=count)
    return set_state(turn, replace(state, mode="stateless"))


PRIVACY = two_phase(after=count_answers, name="privacy")


def describe(turn: Turn) -> tuple[Any, ...]:
    """Return everything of a Turn that is stored, without its id."""
    state = get_state(turn)
    data = {name: value for name, value in turn.data.items() if name != "kedge.state"}
    return turn.blocks, data, state.mode, state.anchors, state.conversation_id


async def reopen(conversation: Conversation, connected: Connect, **settings: Any) -> Conversation:
    """Return the conversation as another process opens it."""
    store, name = conversation.store, conversation.id
    return await Conversation.open(connected(), store=store, id=name, **settings)


async def check_reopened(
    conversation: Conversation, connected: Connect, **settings: Any
) -> Conversation:
    """Return the conversation opened again, with the same complete Turn."""
    reopened = await reopen(conversation, connected, **settings)
    assert describe(reopened.turn) == describe(conversation.turn)
    return reopened


async def test_data_and_mode_survive_at_every_method(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """The mode applies to the next request of this object and of another process, at every method."""
    settings: dict[str, Any] = {"middleware": [PRIVACY], "tools": [add]}
    conversation = await Conversation.create(connected(), store=store, **settings)
    reply = await conversation.send("My name is Ada.")
    assert get_state(reply.turn).mode == get_state(conversation.turn).mode == "stateless"
    assert conversation.turn.data["answers"] == 1
    reopened = await check_reopened(conversation, connected, **settings)
    sent = len(kedge_server.requests)
    await conversation.stream("What is my name?").finish()
    await (await reopened.refresh()).regenerate()
    await reopened.send("Please call add with a=2 and b=3", output=str)
    assert len(kedge_server.requests) == sent + 4
    for request in kedge_server.requests[sent:]:
        assert request.body["store"] is False
        assert "previous_response_id" not in request.body
    assert reopened.turn.data["answers"] == 3
    assert len([node for node in await reopened.path() if node.kind == "edited"]) == 0
    await check_reopened(reopened, connected, **settings)


async def test_state_survives_forks_exports_and_moves(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """A fork, an imported copy and every node have the state of their Turn; before the change there is none."""
    conversation = await Conversation.create(connected(), store=store)
    before = await conversation.send("Hello")
    changed = await reopen(conversation, connected, middleware=[PRIVACY])
    after = await changed.send("My name is Ada.")
    await changed.append("Thanks.")
    fork = await check_reopened(await changed.fork(), connected)
    assert fork.turn.data["answers"] == 1
    assert get_state(fork.turn).mode == "stateless"
    (copy,) = await store.import_(await changed.export())
    copied = await Conversation.open(connected(), store=store, id=copy.id)
    assert describe(copied.turn) == describe(changed.turn)
    assert get_state((await copied.goto(after.response_id)).turn).mode == "stateless"
    await changed.goto(before.node)
    assert (get_state(changed.turn).mode, "answers" in changed.turn.data) == (None, False)
    await check_reopened(changed, connected)
    await changed.goto(after.node)
    await check_reopened(changed, connected)


async def test_state_survives_a_compaction(store: Store, connected: Connect) -> None:
    """The data of a middleware inside of the compactor is stored with the compacted history."""
    settings: dict[str, Any] = {"middleware": [PRIVACY], "compactor": MessageLimitCompactor(3)}
    conversation = await Conversation.create(connected(), store=store, **settings)
    for number in range(3):
        await conversation.send(f"Number {number}.")
    assert "compacted" in [node.kind for node in await conversation.path()]
    assert conversation.turn.data["answers"] == 3
    reopened = await reopen(conversation, connected, **settings)
    assert describe(reopened.turn)[:3] == describe(conversation.turn)[:3]


async def test_state_survives_an_invalid_answer(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """An answer of a wrong type is stored with the state, also after the last attempt."""
    kedge_server.set_answers("no number", "four", "4")
    conversation = await Conversation.create(connected(), store=store, middleware=[PRIVACY])
    with pytest.raises(OutputInvalid):
        await conversation.send("How many?", output=int, output_retries=1, key="k")
    (wrong,) = [node for node in await conversation.tree() if node.length == 4]
    turn = (await store.load(conversation.row, wrong.id)).turn()
    assert (turn.data["answers"], get_state(turn).mode) == (2, "stateless")
    assert (await conversation.send("How many?", output=int, key="k")).output == 4
    assert kedge_server.requests[-1].body["store"] is False
    assert conversation.turn.data["answers"] == 3


async def test_state_survives_an_interrupted_tool(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """A run that continues after a failed request has the state of its earlier answers."""
    inner = two_phase(after=count_answers, name="inner")

    def build(**settings: Any) -> Engine:
        return with_middleware(connected(**settings), inner)

    conversation = await Conversation.create(build(), store=store, tools=[add])

    def break_server(a: int, b: int) -> int:
        """Add two numbers."""
        kedge_server.faults.set("status=400")
        return a + b

    break_server.__name__ = "add"
    failing = await Conversation.open(
        build(), store=store, id=conversation.id, tools=[break_server]
    )
    with pytest.raises(EngineError):
        await failing.send("Please call add with a=2 and b=3")
    kedge_server.faults.clear()
    reply = await (await conversation.refresh()).resume()
    assert reply.text
    assert kedge_server.requests[-1].body["store"] is False
    assert conversation.turn.data["answers"] == 2


async def test_state_survives_a_response_in_the_background(
    store: Store, connected: Connect
) -> None:
    """The question that waits for its answer has the state, and so has the answer in another process."""
    counting = two_phase(after=lambda turn: turn.with_data(answers=turn.data.get("answers", 0) + 1))
    settings: dict[str, Any] = {"middleware": [counting]}
    conversation = await Conversation.create(connected(), store=store, **settings)
    waiting = await conversation.send("Hello", background=True)
    assert waiting.turn.data["answers"] == 1
    turn = (await store.load(conversation.row, waiting.node)).turn()
    assert turn.data["answers"] == 1
    reopened = await reopen(conversation, connected, **settings)
    assert (await reopened.resume()).turn.data["answers"] == 2
    await check_reopened(reopened, connected)


ChangeRecords = Callable[[tuple[AnchorRecord, ...]], tuple[AnchorRecord, ...]]


def change_anchors(change: ChangeRecords) -> Any:
    """Return a middleware that changes the anchor records on the way out."""

    def after(turn: Turn) -> Turn:
        state = get_state(turn)
        return set_state(turn, replace(state, anchors=change(state.anchors)))

    return two_phase(after=after, name="anchors")


def mark_lost(records: tuple[AnchorRecord, ...]) -> tuple[AnchorRecord, ...]:
    """Mark the newest record as lost."""
    return (*records[:-1], replace(records[-1], status="lost"))


def rename_newest(records: tuple[AnchorRecord, ...]) -> tuple[AnchorRecord, ...]:
    """Replace the newest record by one of another response."""
    newest = records[-1]
    return (*records[:-1], replace(newest, response_id=f"{newest.response_id}_other"))


CHANGES: dict[str, Any] = {
    "all dropped": two_phase(after=drop_anchors, name="drop"),
    "newest dropped": change_anchors(lambda records: records[:-1]),
    "oldest dropped": change_anchors(lambda records: records[1:]),
    "newest lost": change_anchors(mark_lost),
    "newest renamed": change_anchors(rename_newest),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_anchors_survive(store: Store, connected: Connect, change: str) -> None:
    """Records that a middleware drops, marks as lost or replaces are so in every process, as with an engine."""
    middleware = [CHANGES[change]]
    plain = await Conversation.create(connected(), store=store)
    await plain.send("Number 0.")
    await plain.send("Number 1.")
    changed = await reopen(plain, connected, middleware=middleware)
    await changed.send("Number 2.")
    chat = Chat(connected(), middleware=middleware)
    state = (await Chat(connected()).chat_with_state(None, "Number 0.")).state
    state = (await Chat(connected()).chat_with_state(state, "Number 1.")).state
    expected = (await chat.chat_with_state(state, "Number 2.")).turn
    described = [
        [(each.block_count, each.status, each.response_id.endswith("_other")) for each in anchors]
        for anchors in (get_state(expected).anchors, get_state(changed.turn).anchors)
    ]
    assert described[0] == described[1]
    assert described[0] != [(length, "completed", False) for length in (2, 4, 6)]
    reopened = await check_reopened(changed, connected)
    await reopened.append("Thanks.")
    await check_reopened(reopened, connected)
    await changed.refresh()
    await changed.send("Number 3.")
    await check_reopened(changed, connected)
    (copy,) = await store.import_(await changed.export())
    copied = await Conversation.open(connected(), store=store, id=copy.id)
    assert describe(copied.turn) == describe(changed.turn)
    assert await copied.export() == (await changed.export()).replace(changed.id, copied.id)
    fork = await changed.fork()
    assert describe(fork.turn) == describe(changed.turn)
    await check_reopened(fork, connected)
    # Before the change, all records are there, also for an object that knows the later Turn.
    await changed.goto(plain.head)
    assert len(get_state(changed.turn).anchors) == 2
    await check_reopened(changed, connected)


@pytest.mark.parametrize("fault", ["omit_response_id", "reuse_response_id", "forget_silently"])
async def test_what_an_engine_records_is_no_change(
    store: Store, connected: Connect, kedge_server: TestServer, fault: str
) -> None:
    """Healing, edits, lost and unusable responses follow from the stored responses, so no node has a state."""
    conversation = await Conversation.create(connected(), store=store, tools=[add])
    await conversation.send("Please call add with a=2 and b=3")
    kedge_server.faults.set(fault)
    await conversation.send("Number 1.")
    await conversation.send("Number 2.")
    kedge_server.faults.clear()
    await conversation.regenerate()
    kedge_server.forget()
    await conversation.send("Number 3.")
    await conversation.edit(conversation.turn[0], "Hello!")
    await conversation.send("Number 4.")
    assert {node.memory for node in await conversation.tree()} == {None}
    await check_reopened(conversation, connected)


async def test_a_record_marked_as_lost_is_not_found_again(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """A response that a middleware marks as lost is not continued, although the store has it."""
    middleware = [CHANGES["newest lost"]]
    conversation = await Conversation.create(connected(), store=store, middleware=middleware)
    await conversation.send("My name is Ada.")
    reopened = await reopen(conversation, connected)
    await reopened.send("What is my name?")
    assert "previous_response_id" not in kedge_server.requests[-1].body
    await reopened.send("And now?")
    assert "previous_response_id" in kedge_server.requests[-1].body


@pytest.fixture
async def whole_turn(connected: Connect) -> Turn:
    """Return a Turn of an engine, with data and an anchor."""
    turn = Turn([system("Be brief."), user("My name is Ada.")], data={"topic": {"name": "ships"}})
    return await connected().run(turn)


@pytest.mark.parametrize("create", [Conversation, Conversation.create])
async def test_conversation_begins_with_a_whole_turn(
    store: Store, connected: Connect, kedge_server: TestServer, whole_turn: Turn, create: Any
) -> None:
    """A Turn of an engine is continued with its data and its anchors."""
    conversation = await create(connected(), store=store, blocks=whole_turn)
    assert conversation.turn.data["topic"] == {"name": "ships"}
    reply = await conversation.send("What is my name?")
    assert reply.text == "Your name is Ada."
    assert_sent(kedge_server, blocks=1, anchor=whole_turn.blocks[-1].response_id)
    assert len(get_state(conversation.turn).anchors) == 2


async def test_whole_turn_is_the_same_after_reopening(
    store: Store, connected: Connect, whole_turn: Turn
) -> None:
    """Another process has the same Turn, also after it has undone the first question."""
    conversation = Conversation(connected(), store=store, blocks=whole_turn)
    await conversation.send("What is my name?")
    reopened = await check_reopened(conversation, connected)
    await reopened.undo()
    assert describe(reopened.turn) == describe(whole_turn)
    await check_reopened(reopened, connected)
    assert await store.verify() == []


async def test_whole_turn_is_created_in_a_store(store: Store, whole_turn: Turn) -> None:
    """`Store.create` keeps what a conversation keeps, and its export can be imported."""
    row = await store.create(blocks=whole_turn)
    assert describe((await store.load(row)).turn()) == describe(whole_turn)
    (copy,) = await store.import_(await store.export(row))
    assert (await store.load(copy)).blocks == whole_turn.blocks


@pytest.mark.parametrize("mode", [None, "chained"])
async def test_mode_of_a_first_turn(store: Store, connected: Connect, mode: Any) -> None:
    """The mode of a Turn that a conversation begins with applies unless the conversation has its own."""
    turn = set_state(Turn(), replace(get_state(Turn()), mode="stateless"))
    conversation = Conversation(connected(), store=store, blocks=turn, mode=mode, id="ada")
    assert get_state((await conversation).turn).mode == mode or "stateless"
    await conversation.require_row()
    assert get_state(conversation.turn).mode == (mode or "stateless")
    reopened = await check_reopened(conversation, connected)
    assert reopened.row.mode == mode
    # A Turn has no effect on a conversation that exists.
    other = await Conversation(connected(), store=store, blocks=Turn(data={"a": 1}), id="ada")
    assert describe(other.turn) == describe(conversation.turn)


async def test_guard_rules_apply_to_a_first_turn(store: Store, connected: Connect) -> None:
    """The blocks of a Turn are filtered before they are stored; its data is kept."""
    turn = Turn([user("My name is Ada.")], data={"a": 1})
    conversation = await Conversation.create(
        connected(), store=store, blocks=turn, middleware=[guard(redact("Ada"))]
    )
    assert "Ada" not in conversation.turn[0].text  # pyright: ignore[reportAttributeAccessIssue]
    assert conversation.turn.data["a"] == 1
