"""Tests of plan cards: the summary sentence, and the marks of the messages."""

from pathlib import Path

from for_each import for_each
from kedge import Conversation, connect, open_store
from kedge.planning import get_state
from kedge.store import RequestRecord
from kedge.testing import serve
from kedge.turns import Turn, assistant, reasoning, user
from kedge.web.models import ModelSelector
from kedge.web.page_templates import render
from kedge.web.plan_card import PlanCard, describe_request_size, mark_blocks
from kedge.web.service import ConversationService
from kedge.web.shapes import format_headline


@for_each(
    ("anchor", "sent", "saved", "sentence"),
    [
        ("", 1, 0, "Sent 1 message."),
        ("", 3, 0, "Sent all 3 messages."),
        ("resp_1", 1, 2, "Sent 1 new message; the server already had the other 2."),
        ("resp_1", 0, 4, "Sent no new message; the server already had all 4."),
        ("resp_1", 2, 0, "Sent 2 new messages."),
    ],
)
def test_summary_counts_blocks(anchor: str, sent: int, saved: int, sentence: str) -> None:
    """The summary counts new and already stored messages, with the singular for one message."""
    row = RequestRecord(
        provider="practice", scope="", anchor=anchor, sent_blocks=sent, saved_blocks=saved
    )
    assert describe_request_size(row) == sentence


def test_reasoning_that_was_not_sent_is_marked() -> None:
    """Reasoning that no response proves is marked as left out, neither as sent nor as stored."""
    turn = Turn([user("Hello"), reasoning("A thought"), assistant("Hi"), user("Again")])
    row = RequestRecord(provider="practice", scope="practice", sent_blocks=3, omitted=(1,))
    blocks = mark_blocks(turn.body, row)
    marks = [(mark.kind, mark.sent, mark.omitted) for mark in blocks]
    assert marks == [
        ("user", True, False),
        ("reasoning", False, True),
        ("assistant", True, False),
        ("user", True, False),
    ]


async def test_the_card_of_a_conversation_object_names_it(tmp_path: Path) -> None:
    """The card has the object that the request continued, and the blocks that were sent to it."""
    with serve() as server:
        engine = connect(f"responses:{server.base_url}#practice", mode="conversation")
        async with engine, open_store(f"sqlite:///{tmp_path}/store.db") as store:
            conversation = await Conversation.create(engine, store=store)
            await conversation.send("One")
            before = conversation.turn.append(user("Two"))
            await conversation.send("Two")
            row = (await conversation.responses())[-1]
    object_id = get_state(conversation.turn).conversation_id
    blocks = mark_blocks(before.body, row)
    html = render("plan.html", card=PlanCard(row, blocks))
    assert f"<dt>Conversation object</dt><dd>{object_id}</dd>" in html
    assert [mark.sent for mark in blocks] == [False, False, True]


async def test_the_card_has_the_rejected_candidates_of_the_request(tmp_path: Path) -> None:
    """The reason is that of the request, also where only the engine knew that the server cannot be trusted."""
    with serve() as server:
        server.faults.set("report_usage=none")
        engine = connect(f"responses:{server.base_url}#practice")
        async with engine, open_store(f"sqlite:///{tmp_path}/store.db") as store:
            conversation = await Conversation.create(engine, store=store)
            await conversation.send("One")
            before = conversation.turn.append(user("Two"))
            reply = await conversation.send("Two")
            row = (await conversation.responses())[-1]
    assert reply.plan is not None
    expected = [(each.response_id, each.reason) for each in reply.plan.rejected]
    assert [reason for _, reason in expected] == ["untrusted"]
    blocks = mark_blocks(before.body, row)
    assert [(each.response_id, each.reason) for each in row.rejected] == expected
    assert [mark.sent for mark in blocks] == [True, True, True]


def test_the_card_says_what_the_record_says() -> None:
    """The reason is that of the record, and blocks are marked only if the Turn has as many of them."""
    turn = Turn([user("Hello"), assistant("Hi"), user("Again")])
    row = RequestRecord(
        provider="practice", scope="practice", mode="chained", reason="lost", sent_blocks=2
    )
    blocks = mark_blocks(turn.body, row)
    assert "because the server no longer has it" in format_headline(row)
    assert blocks == ()


async def test_the_card_marks_the_blocks_of_a_healed_request(tmp_path: Path) -> None:
    """The blocks are those that the request sent, not those that a plan of today would send."""
    with serve() as server:
        engine = connect(f"responses:{server.base_url}#practice", max_retries=0)
        async with engine, open_store(f"sqlite:///{tmp_path}/store.db") as store:
            conversation = await Conversation.create(engine, store=store)
            await conversation.send("One")
            server.forget()
            await conversation.send("Two")
            rejected, healed = (await conversation.responses())[1:]
            service = ConversationService(store, ModelSelector(engine, ("practice",)))
            cards = [
                await service.load_plan_card(conversation.id, each.node)
                for each in (rejected, healed)
            ]
    assert [[mark.sent for mark in card.blocks] for card in cards] == [
        [False, False, True],
        [True, True, True],
    ]
