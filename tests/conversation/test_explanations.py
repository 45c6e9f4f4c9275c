"""What a conversation plans and says about a request is the same after it was opened again."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from conversation.conftest import BuildConversation, Connect, add
from for_each import for_each
from kedge import Conversation, user
from kedge.analytics import analyze
from kedge.compaction import MessageLimitCompactor, ServerCompactor
from kedge.compaction.compactors import CompactionMethod
from kedge.conversation.lookup import find_recorded_model
from kedge.events.run import FellBack
from kedge.observe import reset, snapshot
from kedge.planning import REASONS, Mode, Reason, RequestPlan, get_state
from kedge.planning.digests import is_compaction
from kedge.store import ConversationRow, RequestRecord, Store
from kedge.testing import TestServer
from kedge.turns.frozen_json import FrozenMap

Change = Callable[[Conversation], Awaitable[object]]


async def edit_first(conversation: Conversation) -> None:
    """Replace the first message."""
    await conversation.edit(conversation.turn.blocks[0].id, "My name is Bea.")


async def edit_and_answer(conversation: Conversation) -> None:
    """Replace the first message and send another one."""
    await edit_first(conversation)
    await conversation.send("What is my name now?")


async def edit_and_revert(conversation: Conversation) -> None:
    """Replace the first message by another and by an equal one again."""
    await edit_first(conversation)
    await conversation.edit(conversation.turn.blocks[0].id, "My name is Ada.")


async def truncate(conversation: Conversation) -> None:
    """Remove the last answer."""
    await conversation.truncate(len(conversation.turn) - 1)


def describe(plan: RequestPlan) -> tuple[object, ...]:
    """Return what a plan says."""
    rejected = tuple((each.response_id, each.reason) for each in plan.rejected)
    return plan.previous_response_id, plan.fallback, rejected, plan.delta_blocks, plan.explain()


CHANGES = (edit_first, edit_and_answer, edit_and_revert, truncate)


@pytest.mark.parametrize("change", CHANGES)
async def test_reopened_gives_same_reasons(
    store: Store, connected: Connect, change: Change
) -> None:
    """A conversation that is opened again, or follows another process, has the anchors that an edit dropped."""
    first = await Conversation.create(connected(), store=store)
    await first.send("My name is Ada.")
    await first.send("What is my name?")
    follower = await Conversation.open(connected(), store=store, id=first.id)
    await change(first)
    question = user("And once more?")
    other = await Conversation.open(connected(), store=store, id=first.id)
    assert describe(other.plan(question)) == describe(first.plan(question))
    await follower.refresh()
    assert get_state(other.turn) == get_state(follower.turn) == get_state(first.turn)
    await follower.undo()
    third = await Conversation.open(connected(), store=store, id=first.id)
    assert get_state(follower.turn) == get_state(third.turn)


@pytest.mark.parametrize(
    ("fault", "reason"), [("omit_response_id", "no_id"), ("omit_call_id", "ambiguous")]
)
async def test_full_sends_to_a_server_without_ids_are_fallbacks(
    store: Store, connected: Connect, kedge_server: TestServer, fault: str, reason: str
) -> None:
    """Plan, event, metric and row name the reason of every request that a missing id makes a full send."""
    kedge_server.faults.set(fault)
    reset()
    conversation = await Conversation.create(connected(), store=store, tools=[add])
    async with conversation.stream("Please add 2 and 3") as stream:
        events = [event async for event in stream]
    assert stream.reply.plan is not None
    assert (stream.reply.plan.fallback, stream.reply.plan.delta_blocks) == (reason, 3)
    assert [event for event in events if isinstance(event, FellBack)] == [FellBack(reason)]
    assert snapshot()["responses_fallback_total"] == {(("reason", reason),): (1, 1.0)}
    other = await Conversation.open(connected(), store=store, id=conversation.id, tools=[add])
    assert [row.reason for row in await other.responses()] == ["new", reason]
    plans = [each.plan(user("?"), streaming=True) for each in (other, conversation)]
    assert describe(plans[0]) == describe(plans[1])
    requests = (await analyze(store)).requests
    assert [(each.name, each.count) for each in requests.fallbacks] == [(reason, 1)]


class Unusable(NamedTuple):
    """A conversation whose last answer cannot be continued."""

    conversation: Conversation
    reason: Reason
    """Why it cannot be continued."""
    first: RequestRecord
    answered: RequestRecord
    """The record of the last answer."""


@pytest.fixture(params=[("omit_response_id", "no_id"), ("change_completed=text", "ambiguous")])
async def unusable(
    request: pytest.FixtureRequest, kedge_server: TestServer, conversation: Conversation
) -> Unusable:
    """Return a conversation whose last answer came without an id, or is ambiguous."""
    fault, reason = request.param
    await conversation.send("My name is Ada.")
    kedge_server.faults.set(fault, times=1)
    await conversation.stream("What is 2+3?").finish()
    first, answered = await conversation.responses()
    return Unusable(conversation, reason, first, answered)


async def test_reason_for_an_older_anchor_is_planned(
    unusable: Unusable, reopen: BuildConversation
) -> None:
    """A plan continues the response before, and says why not the last one; so does that of another process."""
    opened = await reopen(unusable.conversation)
    plan = opened.plan("What is my name?", streaming=True)
    assert plan.previous_response_id == unusable.first.provider_response_id
    rejected = [(candidate.response_id, candidate.reason) for candidate in plan.rejected]
    assert rejected == [(unusable.answered.provider_response_id, unusable.reason)]
    assert REASONS[unusable.reason] in plan.explain()
    assert describe(plan) == describe(
        unusable.conversation.plan("What is my name?", streaming=True)
    )


async def test_reason_for_an_older_anchor_is_recorded(
    unusable: Unusable, reopen: BuildConversation
) -> None:
    """The record of the answer has the reason, and so has that of the next request."""
    assert unusable.answered.status == "completed"
    assert unusable.answered.unusable_reason == unusable.reason
    opened = await reopen(unusable.conversation)
    sent = (await opened.send("What is my name?")).requests[0]
    assert [candidate.reason for candidate in sent.rejected] == [unusable.reason]
    stored = await opened.responses()
    assert [record.unusable_reason for record in stored] == ["", unusable.reason, ""]


async def test_reason_for_an_older_anchor_is_followed(
    unusable: Unusable, reopen: BuildConversation
) -> None:
    """An object that follows another process has the same anchors as that one."""
    follower = await reopen(unusable.conversation)
    opened = await reopen(unusable.conversation)
    await opened.send("What is my name?")
    await follower.refresh()
    assert get_state(follower.turn) == get_state(opened.turn)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("omit_response_id", "no_id"), ("change_completed=text", "ambiguous")],
)
async def test_reason_for_an_older_anchor_in_an_object(
    kedge_server: TestServer,
    conversation_with: BuildConversation,
    reopen: BuildConversation,
    fault: str,
    reason: Reason,
) -> None:
    """In mode ``conversation`` the last answer is not continued either, and there is no older anchor."""
    mode: Mode = "conversation"
    conversation = await conversation_with("My name is Ada.", mode=mode)
    kedge_server.faults.set(fault, times=1)
    await conversation.stream("What is 2+3?").finish()
    opened = await reopen(conversation)
    plan = opened.plan("What is my name?", streaming=True)
    assert plan.fallback == reason
    assert REASONS[reason] in plan.explain()
    assert describe(plan) == describe(conversation.plan("What is my name?", streaming=True))
    sent = (await opened.send("What is my name?")).requests[0]
    assert sent.rejected == ()
    stored = await conversation.responses()
    assert [record.unusable_reason for record in stored] == ["", reason, ""]


async def test_reason_after_a_compaction(store: Store, connected: Connect) -> None:
    """The process that compacted it, the record of the next request and a process that opens it say the same."""
    compactor = MessageLimitCompactor(3)
    conversation = await Conversation.create(connected(), store=store, compactor=compactor)
    for number in range(3):
        await conversation.send(f"Say: {number}.")
    opened = await Conversation.open(connected(), store=store, id=conversation.id)
    plans = [each.plan("And now?") for each in (conversation, opened)]
    assert [each.reason for each in plans] == ["changed", "changed"]
    first = [each.explain().splitlines()[:2] for each in plans]
    assert first[0] == first[1]
    reply = await conversation.send("And now?")
    assert [each.reason for each in reply.requests] == ["changed"]


@pytest.mark.parametrize(("how", "limit"), [("context_management", 1_000), ("endpoint", 400)])
async def test_a_compaction_of_the_server_is_sent_after_a_restart(
    how: CompactionMethod, limit: int, store: Store, connected: Connect
) -> None:
    """The records of the responses before it are known again, and do not make it look like a part of them."""
    compactor = ServerCompactor(limit, how)
    conversation = await Conversation.create(connected(), store=store, compactor=compactor)
    for text in ("My name is Ada.", "Write 900 words.", "Write 300 words."):
        await conversation.send(text)
    assert is_compaction(conversation.turn.blocks[0])
    opened = await Conversation.open(connected(), store=store, id=conversation.id)
    plans = [each.plan("What is my name?") for each in (conversation, opened)]
    assert [each.list_omitted() for each in plans] == [(), ()]
    assert plans[0].delta == plans[1].delta
    assert (await opened.send("What is my name?")).text == "Your name is Ada."


@pytest.mark.parametrize("mode", ["chained", "conversation", "stateless"])
async def test_recorded_model_is_found(store: Store, kedge_server: TestServer, mode: Mode) -> None:
    """A conversation of a server has the same model string in every mode, also in a conversation object."""
    model = f"responses:{kedge_server.base_url}#practice"
    async with Conversation(model, store=store, mode=mode) as conversation:
        await conversation.send("My name is Ada.")
        newest = (await store.responses(conversation.row))[-1]
        assert find_recorded_model(conversation.row, newest) == model


@for_each(
    ("stored", "provider", "scope", "expected"),
    [
        ("openai:gpt", "openai", f"openai/api.openai.com/v1/{'0' * 16}", "openai:gpt"),
        ("openai:gpt", "xai", f"xai/api.x.ai/v1/{'0' * 16}", "xai:gpt-new"),
        (
            "xai:x",
            "responses",
            f"responses/a.example/v1/{'0' * 16}",
            "responses:https://a.example/v1#gpt-new",
        ),
        ("", "chat", f"chat/localhost:1/v1/{'0' * 16}", "chat:http://localhost:1/v1#gpt-new"),
        ("xai:x", "practice", "practice", "xai:x"),
        ("", "practice", "practice", "practice"),
        ("xai:x", "responses", "kedge/0", "kedge:gpt-new"),
    ],
)
def test_model_of_the_newest_response(
    stored: str, provider: str, scope: str, expected: str
) -> None:
    """The stored model string is used only if its provider answered last; else the response names the model."""
    row = ConversationRow("c", data=FrozenMap({"model": stored} if stored else {}))
    response = RequestRecord(provider=provider, scope=scope, model="gpt-new")
    assert find_recorded_model(row, response) == expected
    assert find_recorded_model(row, None) == stored


@pytest.mark.parametrize("mode", ["stateless", "conversation"])
async def test_mode_of_a_new_conversation(mode: Mode, connected: Connect, store: Store) -> None:
    """Before the first message is sent, a dry run has the mode that the conversation was made with."""
    conversation = await Conversation(connected(), store=store, id="new", mode=mode)
    plans = conversation.plan("Hello."), await conversation.probe_and_plan("Hello.")
    reply = await conversation.send("Hello.")
    assert reply.plan
    assert [(each.mode, each.reason) for each in plans] == [(mode, reply.plan.reason)] * 2
    assert reply.plan.mode == mode
