"""Compaction and chaining: the requests sent to the server and the context of its model."""

from typing import Any

import pytest

from conversation.chat.conftest import OpenChat, item_texts
from engines.runs import request_bodies
from kedge.compaction import (
    CompositeCompactor,
    MessageLimitCompactor,
    ServerCompactor,
    SplitCompactor,
    SummarizingCompactor,
    TokenLimitCompactor,
    ToolExchangeCompactor,
    TurnCompacted,
    is_summary,
)
from kedge.conversation import Chat, ChatReply
from kedge.engines import ResendLimit
from kedge.errors import ResendTooLong
from kedge.observe import reset, snapshot
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import OpaqueBlock

SUMMARY_PROMPT = "What have I said so far?"
"""The practice model answers this prompt with a list of the user's messages, as a summary."""


async def send_lines(chat: Any, *lines: str, state: bytes | None = None) -> list[Any]:
    """Send these lines one after the other, and return the answers."""
    answers: list[Any] = []
    for line in lines:
        answers.append(await chat.chat_with_state(state, line))
        state = answers[-1].state
    return answers


async def test_compaction_starts_a_new_chain(server: TestServer, open_chat: OpenChat) -> None:
    """The compacted history is sent once in full, and later requests chain on it."""
    chat = open_chat(compactor=MessageLimitCompactor(6, target_messages=2))
    answers = await send_lines(chat, *(f"Number {n}." for n in range(8)))
    compacted = [n for n, answer in enumerate(answers) if answer.compactions]
    assert compacted == [3, 6]
    chained = ["previous_response_id" in body for body in request_bodies(server)]
    assert chained == [n not in (0, 4, 7) for n in range(8)]
    assert [len(body["input"]) for body in request_bodies(server)] == [1, 1, 1, 1, 3, 1, 1, 3]
    after = item_texts(server.requests[5].context)
    assert after[0] == "Number 3."
    assert after[-1] == "Number 5."
    assert len(after) == 5


async def test_summary_is_sent_once(server: TestServer, open_chat: OpenChat) -> None:
    """A branch of the chain requests the summary, which is sent only in the request that starts the new chain."""
    chat = open_chat(compactor=SummarizingCompactor(180, 60, prompt=SUMMARY_PROMPT))
    lines = [f"My boat number {n} is called Argo {n}." for n in range(8)]
    answers = await send_lines(chat, *lines)
    index = next(n for n, answer in enumerate(answers) if answer.compactions)
    summary = answers[index].turn.blocks[0]
    assert is_summary(summary)
    asked, others = list[Any](), list[Any]()
    for each in server.requests:
        is_question = item_texts(each.body["input"])[-1:] == [SUMMARY_PROMPT]
        (asked if is_question else others).append(each)
    with_summary = [summary.text in item_texts(each.body["input"]) for each in others]
    assert with_summary == [n == index + 1 for n in range(len(lines))]
    assert "previous_response_id" not in others[index + 1].body
    texts = item_texts(others[index + 2].context)
    assert (texts[0], texts.count(summary.text), lines[0] in texts) == (summary.text, 1, False)
    for each in (others[index + 2], asked[0]):
        assert "previous_response_id" in each.body
        assert len(each.body["input"]) == 1


async def test_shortened_results_keep_the_anchor(server: TestServer, open_chat: OpenChat) -> None:
    """The newest anchor before the first shortened block is still valid, and is used."""

    def look_up(word: str) -> str:
        """Look something up."""
        return f"{word} " * 400

    compactor = ToolExchangeCompactor(100, keep_exchanges=1, min_saving=500)
    chat = open_chat(compactor=compactor, tools=[look_up])
    answers = await send_lines(
        chat, "Hello!", 'Call look_up with word="sea".', "And now?", "And then?"
    )
    (done,) = answers[2].compactions
    assert [old.kind for old, _ in done.changes.modified] == ["tool_result"]
    assert not done.removed
    assert done.tokens_after < done.tokens_before
    last = request_bodies(server)[-1]
    assert last["previous_response_id"] == answers[1].turn.blocks[3].response_id
    outputs = [item for item in server.requests[-1].context or () if "output" in item]
    assert all(len(item["output"]) < 300 for item in outputs)
    assert answers[3].plan is not None
    reread = await chat.chat_with_state(answers[3].state, "What did the tool say?")
    assert "sea" in reread.text


@pytest.fixture
async def compacted(server: TestServer, open_chat: OpenChat) -> tuple[Chat, ChatReply[None]]:
    """Return a chat, and its first answer for which the server has compacted the conversation."""
    chat = open_chat(compactor=ServerCompactor(1_000))
    answers = await send_lines(chat, "My name is Ada.", "Write 900 words.", "Write 300 words.")
    return chat, next(answer for answer in answers if answer.compactions)


async def test_threshold_of_the_server_is_sent(
    server: TestServer, compacted: tuple[Chat, ChatReply[None]]
) -> None:
    """Each request has the number of tokens from which the server compacts."""
    management = [{"type": "compaction", "compact_threshold": 1_000}]
    assert [body["context_management"] for body in request_bodies(server)] == [management] * 3


async def test_server_compacts_while_it_answers(compacted: tuple[Chat, ChatReply[None]]) -> None:
    """The server's compaction item replaces all earlier blocks in the state."""
    _, answer = compacted
    item, _ = answer.turn.blocks
    assert isinstance(item, OpaqueBlock)
    assert item.type == "compaction"


async def test_compaction_of_the_server_is_sent_and_then_continued(
    server: TestServer, compacted: tuple[Chat, ChatReply[None]]
) -> None:
    """The next request has the item in place of the earlier blocks, and the one after it is chained."""
    chat, answer = compacted
    (after,) = await send_lines(chat, "What did I say first?", state=answer.state)
    items = request_bodies(server)[-1]["input"]
    assert [item["type"] for item in items] == ["compaction", "message", "message"]
    assert "My name is Ada." in after.text
    (chained,) = await send_lines(chat, "What did I say first?", state=after.state)
    assert [item["type"] for item in request_bodies(server)[-1]["input"]] == ["message"]
    assert "My name is Ada." in chained.text


async def test_server_compacts_by_endpoint(server: TestServer, open_chat: OpenChat) -> None:
    """All but the newest exchange is replaced by the server's item, and only the anchor is sent for it."""
    chat = open_chat(compactor=ServerCompactor(400, "endpoint"))
    answers = await send_lines(chat, "My name is Ada.", "Write 100 words.", "Write 300 words.")
    request = next(r for r in server.requests if r.path == "/v1/responses/compact")
    assert request.body["input"] == []
    assert request.body["previous_response_id"]
    (compaction,) = answers[-1].compactions
    assert compaction.tokens_after < compaction.tokens_before
    (after,) = await send_lines(open_chat(), SUMMARY_PROMPT, state=answers[-1].state)
    assert request_bodies(server)[-1]["input"][0]["type"] == "compaction"
    assert "My name is Ada." in after.text
    (chained,) = await send_lines(open_chat(), SUMMARY_PROMPT, state=after.state)
    assert len(request_bodies(server)[-1]["input"]) == 1
    assert "My name is Ada." in chained.text


async def test_endpoint_after_a_lost_anchor(server: TestServer, open_chat: OpenChat) -> None:
    """If the anchor is lost, the full history is sent to the compaction endpoint once."""
    chat = open_chat(compactor=ServerCompactor(60, "endpoint"))
    first = await chat.chat_with_state(None, "My name is Ada.")
    async with chat.stream_with_state(first.state, "Write 60 words.") as stream:
        async for event in stream:
            if type(event).__name__ == "AnswerFinished":
                server.forget()
    requests = [r for r in server.requests if r.path == "/v1/responses/compact"]
    assert ["previous_response_id" in each.body for each in requests] == [True, False]
    (compaction,) = stream.reply.compactions
    assert compaction.changed


async def test_reported_usage_is_used(server: TestServer, open_chat: OpenChat) -> None:
    """The token usage of the last answer, including instructions, triggers compaction."""
    chat = open_chat(compactor=TokenLimitCompactor(300, 200))
    state: bytes | None = None
    answer = await chat.chat_with_state(state, "Hello!")
    assert answer.compactions == ()
    for n in range(30):
        answer = await chat.chat_with_state(answer.state, f"Number {n}.")
        if answer.compactions:
            break
    (compaction,) = answer.compactions
    usage = answer.usage
    assert compaction.tokens_before == usage.input_tokens + usage.output_tokens > 300
    assert compaction.tokens_after is not None
    assert compaction.tokens_after <= 200


@pytest.mark.parametrize(
    ("limit", "sent"),
    [
        *((500, 3), (ResendLimit(max_bytes=500), 3), (ResendLimit(max_blocks=12), 3)),
        *((None, 13), (ResendLimit(), 13), (ResendLimit(100_000, 13), 13)),
    ],
)
async def test_long_resend_is_compacted(
    server: TestServer, open_chat: OpenChat, limit: int | ResendLimit | None, sent: int
) -> None:
    """A server that lost its context is sent the history, compacted if it has too many bytes or blocks."""
    chat = open_chat(compactor=MessageLimitCompactor(1_000, 4), resend_limit=limit)
    answers = await send_lines(chat, *(f"Number {n}." for n in range(6)))
    assert not any(answer.compactions for answer in answers)
    server.forget()
    (after,) = await send_lines(chat, "Number 6.", state=answers[-1].state)
    last = request_bodies(server)[-1]
    assert "previous_response_id" not in last
    texts = [text[:9] for text in item_texts(last["input"])]
    assert (len(texts), texts[-3:]) == (sent, ["Number 5.", "You said:", "Number 6."])
    assert bool(after.compactions) == (sent == 3)
    assert after.text
    (chained,) = await send_lines(chat, "Number 7.", state=after.state)
    assert len(request_bodies(server)[-1]["input"]) == 1
    assert chained.compactions == ()


async def test_a_resend_that_is_not_compacted_is_no_third_request(
    server: TestServer, open_chat: OpenChat
) -> None:
    """That the server lost the response is known after the first request, also if no block can be removed."""
    chat = open_chat(compactor=MessageLimitCompactor(1_000), resend_limit=1)
    answers = await send_lines(chat, "Number 0.")
    server.forget()
    await send_lines(chat, "Number 1.", state=answers[-1].state)
    chained = ["previous_response_id" in body for body in request_bodies(server)]
    assert chained == [False, True, False]


@pytest.mark.parametrize("limit", [None, 1])
async def test_limit_of_a_call_is_an_error(
    server: TestServer, open_chat: OpenChat, limit: int | None
) -> None:
    """A caller who limits one call is told that the server lost the context, and nothing is sent again."""
    chat = open_chat(compactor=MessageLimitCompactor(1_000), resend_limit=limit)
    answers = await send_lines(chat, "Number 0.")
    server.forget()
    with pytest.raises(ResendTooLong):
        await chat.chat_with_state(answers[-1].state, "Number 1.", resend_limit=1)
    assert len(server.requests) == 2


async def test_planned_resend_is_compacted(server: TestServer, open_chat: OpenChat) -> None:
    """A state of another account has no valid anchor, and is compacted before it is sent."""
    answers = await send_lines(open_chat(), *(f"Number {n}." for n in range(6)))
    for limit in (500, ResendLimit(max_blocks=12)):
        engine = connect(f"responses:{server.base_url}#practice", api_key="another")
        chat = open_chat(engine, compactor=MessageLimitCompactor(1_000, 4), resend_limit=limit)
        (after,) = await send_lines(chat, "Number 6.", state=answers[-1].state)
        assert after.compactions[0].changed
        assert len(request_bodies(server)[-1]["input"]) == 3


@pytest.mark.parametrize("options", [{"mode": "stateless"}, {"prompt": {"id": "pmpt_1"}}])
async def test_resend_by_an_option_of_the_call_is_compacted(
    open_chat: OpenChat, options: Any
) -> None:
    """A call that sends everything although its state has an anchor is limited as any other."""
    chat = open_chat(compactor=MessageLimitCompactor(1_000, 4), resend_limit=500)
    answers = await send_lines(chat, *(f"Number {n}." for n in range(6)))
    async with chat.stream_with_state(answers[-1].state, "Number 6.", **options) as stream:
        event = await anext(stream)
    assert isinstance(event, TurnCompacted)
    assert event.occasion == "resend"


async def test_reply_has_all_compactions_of_its_call(
    server: TestServer, open_chat: OpenChat
) -> None:
    """A call that is compacted before it is sent again, and after its answer, has both results in order."""
    answers = await send_lines(open_chat(), *(f"Number {n}." for n in range(6)))
    server.forget()
    chat = open_chat(compactor=MessageLimitCompactor(3), resend_limit=500)
    (after,) = await send_lines(chat, "Number 6.", state=answers[-1].state)
    before_sending, after_answer = after.compactions
    assert [block.text for block in before_sending.blocks][-1:] == ["Number 6."]
    assert before_sending.removed[0].text == "Number 0."
    assert [block.text for block in after_answer.blocks] == ["Number 6.", after.text]


async def test_compaction_is_counted(server: TestServer, open_chat: OpenChat) -> None:
    """Metrics count compactions by compactor and outcome, removed blocks and saved tokens."""
    reset()
    split = SplitCompactor(MessageLimitCompactor(2), MessageLimitCompactor(2))
    chat = open_chat(compactor=CompositeCompactor(split))
    await send_lines(chat, "Number 0.", "Number 1.")
    counted = snapshot()
    name = "MessageLimitCompactor+MessageLimitCompactor"
    labels = (("by", name), ("outcome", "compacted"))
    assert counted["compactions_total"] == {labels: (1, 1.0)}
    assert counted["compaction_blocks_removed_total"][()] == (1, 2.0)
    assert counted["compaction_tokens_saved_total"][()][1] > 0


async def test_question_of_a_rejected_answer_is_not_compacted(
    server: TestServer, open_chat: OpenChat
) -> None:
    """A typed answer is requested again with its question, also if both are longer than the limit."""
    server.set_answers("four", "Four.", "4")
    chat = open_chat(compactor=MessageLimitCompactor(2))
    answer = await chat.chat_with_state(None, "What is 2 + 2?", output=int)
    assert (answer.output, len(server.requests)) == (4, 3)
    assert "What is 2 + 2?" in item_texts(server.requests[-1].context)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_resend_to_a_server_that_forgets_is_compacted(
    server: TestServer, open_chat: OpenChat, is_stream: bool
) -> None:
    """What is known of a server in streams, or with one model, decides whether such a call is limited."""
    engine = connect(f"responses:{server.base_url}#practice", api_key="one")
    plain = open_chat(engine)
    model: dict[str, Any] = {} if is_stream else {"model": "another"}
    server.faults.set("forget_silently")
    state = None
    for n in range(4):
        async with plain.stream_with_state(state, f"Number {n}.", **model) as stream:
            _ = [event async for event in stream]
        state = stream.state
    server.faults.clear()
    chat = open_chat(engine, compactor=MessageLimitCompactor(1_000, 4), resend_limit=500)
    answers = await send_lines(chat, *(f"Number {n}." for n in range(6)))
    async with chat.stream_with_state(answers[-1].state, "Number 6.", **model) as stream:
        event = await anext(stream)
    assert isinstance(event, TurnCompacted)
