"""Replies of engines, chats and conversations have the same members, which are those of the stored responses."""

import anyio
import pytest

from conversation.conftest import Connect
from kedge import Conversation, Turn, user
from kedge.analytics import analyze
from kedge.chat import Chat, ChatReply
from kedge.cli.show import load_tree
from kedge.engines import Reply
from kedge.prices import sum_costs
from kedge.store import RequestRecord, Store
from kedge.testing import TestServer


def price(row: RequestRecord) -> float:
    """Return a cost of one dollar for each token of input."""
    return float(row.input_tokens or 0)


async def ask(kind: str, store: Store, connected: Connect, text: str) -> Reply:
    """Send a message and return the reply."""
    engine = connected(params={"reasoning": {"summary": "auto"}})
    match kind:
        case "engine":
            return await engine.ask(Turn([user(text)]))
        case "chat":
            return await Chat(engine).chat_with_state(None, text)
        case _:
            return await (await Conversation.create(engine, store=store)).send(text)


@pytest.mark.parametrize("kind", ["engine", "chat", "conversation"])
async def test_replies_have_the_facts_of_the_run(
    store: Store, connected: Connect, kind: str
) -> None:
    """Every reply names the model, the status and the reasoning, and has a plan, tokens and a cost."""
    reply = await ask(kind, store, connected, "Think about 6 * 7")
    assert isinstance(reply, Reply)
    assert isinstance(reply, ChatReply) is (kind == "chat")
    assert (reply.model, reply.status, reply.healed) == ("practice", "completed", ())
    assert reply.plan is not None
    assert reply.usage.input_tokens > 0
    assert reply.reasoning
    assert reply.cost is None  # no price is known for this server


async def test_cost_of_a_reply_is_that_of_its_stored_responses(
    store: Store, connected: Connect
) -> None:
    """The cost of all responses of a call is added; a reply that was stored before has that of its response."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    conversation = await Conversation.create(connected(), store=store, tools=[add], price=price)
    reply = await conversation.send("Please call add with a=2 and b=3", key="sum")
    rows = await conversation.responses()
    assert len(rows) == 2
    assert reply.cost == sum_costs([row.cost for row in rows]) == reply.usage.input_tokens
    assert reply.model == rows[-1].model
    again = await conversation.send("Please call add with a=2 and b=3", key="sum")
    assert (again.stored, again.model, again.cost) == (True, reply.model, rows[-1].cost)


async def test_reply_of_a_healed_request_names_the_reason(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """The reasons for sending a request again are those of the stored response, also in a stored reply."""
    conversation = await Conversation.create(connected(), store=store)
    await conversation.send("My name is Ada.")
    kedge_server.forget()
    reply = await conversation.send("What is my name?", key="name")
    assert reply.healed == ("gone",)
    assert [row.healed for row in await conversation.responses()][-1] == "gone"
    assert (await conversation.send("What is my name?", key="name")).healed == ("gone",)


async def test_run_stopped_during_a_tool_has_no_further_request(
    store: Store, connected: Connect
) -> None:
    """Only the request that was sent is stored and counted; the question is cancelled."""
    started = anyio.Event()

    async def wait_forever() -> str:
        """Wait."""
        started.set()
        await anyio.sleep_forever()
        return ""

    conversation = await Conversation.create(connected(), store=store, tools=[wait_forever])
    async with anyio.create_task_group() as group:
        group.start_soon(conversation.send, "Please call wait_forever")
        await started.wait()
        group.cancel_scope.cancel()
    (called,) = await conversation.responses()
    assert called.sent_bytes > called.sent_blocks == 1
    assert (await analyze(store)).requests.total == 1
    (unanswered,) = await store.unanswered_after(conversation.row, conversation.head)
    assert unanswered.status == "cancelled"
    tree = await load_tree(store, conversation.row)
    assert list(tree.marks(unanswered.end, store.clock()).values()) == ["cancelled"]


def test_sum_of_costs_is_known_only_with_every_cost() -> None:
    """A sum without the cost of one response would be too low."""
    assert sum_costs([0.5, 0.25]) == 0.75
    assert sum_costs([0.5, None]) is None
    assert sum_costs([]) is None
