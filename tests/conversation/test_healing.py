"""Lost, expired and discarded responses: what is sent again, what is marked, and what it costs."""

import pytest
from starlette.responses import Response

from conversation.conftest import BuildConversation, Connect, assert_sent, export_nodes, list_kinds
from engines.fake_server import json_response, serve_handler
from kedge import Conversation, connect, errors
from kedge.engines import Reply
from kedge.middleware import retry
from kedge.planning import get_state
from kedge.store import Store
from kedge.testing import TestServer


async def test_retention_applies_immediately(
    store: Store, kedge_server: TestServer, connected: Connect
) -> None:
    """After the retention everything is sent, by the object that created the conversation and by another one."""
    conversation = await Conversation.create(connected(), store=store, retention=0.001)
    await conversation.send("My name is Ada.")
    reply = await conversation.send("What is my name?")
    assert reply.text == "Your name is Ada."
    assert get_state(reply.turn) == get_state(conversation.turn)
    reopened = await Conversation.open(connected(), store=store, id=conversation.id)
    await reopened.send("What is my name?")
    assert [row.reason for row in await reopened.responses()] == ["new", "expired", "expired"]
    for request in kedge_server.requests:
        assert "previous_response_id" not in request.body


@pytest.fixture(params=["the same object", "reopened"])
async def forgotten(
    request: pytest.FixtureRequest,
    kedge_server: TestServer,
    conversation_with: BuildConversation,
    reopen: BuildConversation,
) -> Conversation:
    """Return a conversation with two answers, both of which the server has lost."""
    conversation = await conversation_with("My name is Ada.", "What is my name?")
    kedge_server.forget()
    if request.param == "reopened":
        return await reopen(conversation)
    return conversation


async def test_lost_context_is_sent_again(forgotten: Conversation) -> None:
    """The answer has the whole context; the reply says why, also when it is read from the store."""
    reply = await forgotten.send("What is my name?", key="name")
    assert (reply.text, reply.healed) == ("Your name is Ada.", ("gone",))
    assert (await forgotten.send("What is my name?", key="name")).healed == ("gone",)


async def test_plan_after_a_loss_names_the_lost_response(forgotten: Conversation) -> None:
    """The plan of the second request explains why nothing is continued."""
    *_, last = await forgotten.responses()
    reply = await forgotten.send("What is my name?")
    assert reply.plan
    assert reply.plan.fallback == "lost"
    assert f"Not used: {last.provider_response_id}" in reply.plan.explain()


async def test_lost_responses_are_marked_once(forgotten: Conversation) -> None:
    """All responses that the server has lost are marked, and both requests are stored with their reasons."""
    await forgotten.send("What is my name?")
    *lost, rejected, answered = await forgotten.responses()
    assert [(record.status, record.lost_reason) for record in lost] == [("lost", "gone")] * 2
    assert (rejected.status, rejected.anchor) == ("refused", lost[1].provider_response_id)
    assert (answered.healed, answered.reason, answered.anchor) == ("gone", "lost", "")


async def test_loss_is_one_incident(forgotten: Conversation) -> None:
    """A loss is recorded once, however many responses it concerns."""
    await forgotten.send("What is my name?")
    incidents = [
        (incident["kind"], incident["reason"])
        for node in await export_nodes(forgotten)
        for incident in node.get("incidents", ())
    ]
    assert incidents == [("healed", "gone")]


async def test_requests_after_a_loss_are_chained(
    kedge_server: TestServer, forgotten: Conversation, reopen: BuildConversation
) -> None:
    """Another process continues the answer that replaced the lost ones."""
    answered = await forgotten.send("What is my name?")
    other = await reopen(forgotten)
    assert get_state(other.turn) == get_state(forgotten.turn)
    await other.send("What is 1+1?")
    assert_sent(kedge_server, blocks=1, anchor=answered.response_id)


async def test_rebuilt_turn_chains_again(store: Store, connected: Connect) -> None:
    """Plain messages without ids find the stored response of their content, unless it expired, or for another key."""
    first = await Conversation.create(connected(api_key="one"), store=store)
    await first.send("My name is Ada.")
    plain = [type(block)(block.parts) for block in first.turn]  # type: ignore[attr-defined,call-arg]
    (record,) = get_state(first.turn).anchors
    for key, retention, response_id in (
        ("one", None, record.response_id),
        ("one", 0.001, ""),
        ("two", None, ""),
    ):
        engine = connected(api_key=key)
        rebuilt = await Conversation.create(engine, store=store, blocks=plain, retention=retention)
        assert rebuilt.plan("What is my name?").conditional
        plan = await rebuilt.probe_and_plan("What is my name?")
        reply = await rebuilt.send("What is my name?")
        assert reply.plan
        assert not plan.conditional
        assert plan.previous_response_id == reply.plan.previous_response_id == response_id
    assert not first.plan("What is my name?").conditional
    await store.mark_lost(record, "gone")
    again = await Conversation.open(connected(api_key="one"), store=store, id=first.id)
    assert again.plan("What is my name?").conditional  # another response may have this content


async def test_cost_of_an_incomplete_answer_is_stored(store: Store) -> None:
    """The cost has the current prices, also if the answer reached its limit."""
    async with await Conversation.create(
        "practice", store=store, price=lambda row: 1.5
    ) as conversation:
        with pytest.raises(errors.AnswerIncomplete):
            await conversation.send("Write 500 words.", max_output_tokens=20)
        (row,) = await conversation.responses()
    assert (row.provider, row.status, row.cost) == ("practice", "incomplete", 1.5)


async def test_cost_of_an_attempt_that_is_retried_is_stored(store: Store) -> None:
    """Tokens of an attempt that ``retry`` repeats are stored beside the path, and counted in the reply."""
    statuses = ["failed", "failed", "completed"]

    async def answer(_: object) -> Response:
        content = [{"type": "output_text", "text": "Hi"}]
        message = {"type": "message", "id": "m", "role": "assistant", "content": content}
        members = {"usage": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}}
        error = {"code": "server_error", "message": "overloaded"}
        status = statuses.pop(0)
        result = {"error": error} if status == "failed" else {"output": [message]}
        return json_response({"id": f"resp_{len(statuses)}", "status": status, **members, **result})

    with serve_handler(answer) as url:
        engine = connect(f"responses:{url}#m")
        async with await Conversation.create(
            engine, store=store, middleware=[retry(first=0)], price=lambda row: 1.5
        ) as conversation:
            reply = await conversation.send("Hello")
            rows = await conversation.responses()
            path = await conversation.path()
    assert reply.text == "Hi"
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (21, 9)
    found = sorted((row.status, row.cost, row.input_tokens) for row in rows)
    assert found == [("completed", 1.5, 7), *[("failed", 1.5, 7)] * 2]
    errors = sorted((row.is_resent, row.error_code, "overloaded" in row.error) for row in rows)
    assert errors == [(False, "", False), *[(True, "server_error", True)] * 2]
    assert list_kinds(path) == ["root", "asked", "answered"]


@pytest.fixture
async def healed(
    kedge_server: TestServer, conversation_with: BuildConversation
) -> tuple[Conversation, Reply[None]]:
    """Return a conversation and its second reply; the first answer to that message lacked the context."""
    conversation = await conversation_with("One", price=lambda row: 1.5)
    kedge_server.faults.set("forget_silently,echo=no", times=1)
    return conversation, await conversation.send("Two")


async def test_cost_of_an_answer_that_healing_discards_is_stored(
    healed: tuple[Conversation, Reply[None]],
) -> None:
    """Both answers are stored with their costs, and the discarded one says why it was."""
    _, *rows = await healed[0].responses()
    discarded, answered = sorted(rows, key=lambda row: row.status, reverse=True)
    assert (discarded.status, discarded.cost, discarded.healed) == ("failed", 1.5, "")
    assert (answered.status, answered.cost, answered.healed) == ("completed", 1.5, "forgot")
    assert discarded.anchor
    assert discarded.is_resent
    assert "without the context" in discarded.error


async def test_tokens_of_an_answer_that_healing_discards_are_counted(
    healed: tuple[Conversation, Reply[None]],
) -> None:
    """The usage of the reply is that of both requests."""
    conversation, reply = healed
    _, *rows = await conversation.responses()
    tokens = [row.input_tokens or 0 for row in rows]
    assert all(tokens)
    assert reply.usage.input_tokens == sum(tokens)


async def test_answer_that_healing_discards_is_beside_the_path(
    healed: tuple[Conversation, Reply[None]],
) -> None:
    """The conversation has only the answer with the context."""
    kinds = ["root", "asked", "answered", "asked", "answered"]
    assert list_kinds(await healed[0].path()) == kinds
