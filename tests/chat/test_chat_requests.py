"""Compaction and chaining on the wire: what the server was sent, and what its model saw."""

from typing import Any

from chat.conftest import OpenChat, item_texts, request_bodies
from kedge.compaction import (
    CompositeCompactor,
    MessageLimitCompactor,
    ProviderCounter,
    ServerCompactor,
    SplitCompactor,
    SummarisingCompactor,
    TokenLimitCompactor,
    ToolExchangeCompactor,
    is_summary,
)
from kedge.observe import reset, snapshot
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import OpaqueBlock

SUMMARY_PROMPT = "What have I said so far?"
"""To this the practice model answers with a list of what the user said: a summary."""


def conversation_bodies(server: TestServer, word: str = "") -> list[dict[str, Any]]:
    """The bodies of the requests of the conversation itself: those for a summary are left out."""
    return [
        body
        for body in request_bodies(server)
        if item_texts(body["input"])[-1:] != [SUMMARY_PROMPT]
    ]


async def send_lines(chat: Any, *lines: str, state: bytes | None = None) -> list[Any]:
    """Say these lines one after the other."""
    answers: list[Any] = []
    for line in lines:
        answers.append(await chat.chat_with_state(state, line))
        state = answers[-1].state
    return answers


async def test_after_a_cut_a_new_chain_starts_once_from_the_short_history(
    server: TestServer, open_chat: OpenChat
) -> None:
    """The cut history is sent once, in full; from then on requests chain again."""
    chat = open_chat(compactor=MessageLimitCompactor(6, target_messages=2))
    answers = await send_lines(chat, *(f"Number {n}." for n in range(8)))
    cuts = [n for n, answer in enumerate(answers) if answer.compaction]
    assert cuts == [3, 6]
    chained = ["previous_response_id" in body for body in request_bodies(server)]
    assert chained == [n not in (0, 4, 7) for n in range(8)]
    assert [len(body["input"]) for body in request_bodies(server)] == [1, 1, 1, 1, 3, 1, 1, 3]
    after = item_texts(server.requests[5].context)
    assert after[0] == "Number 3."
    assert after[-1] == "Number 5."
    assert len(after) == 5


async def test_a_summary_is_sent_exactly_once(server: TestServer, open_chat: OpenChat) -> None:
    """It is in the one request that starts the new chain; the server remembers it from there."""
    chat = open_chat(compactor=SummarisingCompactor(180, 60, ask=SUMMARY_PROMPT))
    lines = [f"My boat number {n} is called Argo {n}." for n in range(8)]
    answers = await send_lines(chat, *lines)
    cuts = [n for n, answer in enumerate(answers) if answer.compaction]
    assert len(cuts) >= 1
    cut = cuts[0]
    summary = answers[cut].turn.blocks[0]
    assert is_summary(summary)
    requests = conversation_bodies(server)
    holding = [n for n, body in enumerate(requests) if summary.text in item_texts(body["input"])]
    assert holding == [cut + 1]
    assert "previous_response_id" not in requests[cut + 1]
    following = [r for r in server.requests if r.body in requests][cut + 2]
    assert "previous_response_id" in following.body
    seen = item_texts(following.context)
    assert seen.count(summary.text) == 1
    assert seen[0] == summary.text
    assert lines[0] not in seen
    assert len(following.body["input"]) == 1


async def test_the_question_for_a_summary_is_all_that_is_sent_for_it(
    server: TestServer, open_chat: OpenChat
) -> None:
    """The server remembers the old part, so the summary is asked for as a branch of the chain."""
    chat = open_chat(compactor=SummarisingCompactor(180, 60, ask=SUMMARY_PROMPT))
    answers = await send_lines(chat, *(f"My boat number {n} is called Argo {n}." for n in range(8)))
    assert any(answer.compaction for answer in answers)
    questions = [
        body
        for body in request_bodies(server)
        if item_texts(body["input"])[-1:] == [SUMMARY_PROMPT]
    ]
    assert "previous_response_id" in questions[0]
    assert len(questions[0]["input"]) == 1


async def test_a_later_summary_holds_the_earlier_one(
    server: TestServer, open_chat: OpenChat
) -> None:
    """There is one summary at a time, and what the first one said is in the last one too."""
    chat = open_chat(compactor=SummarisingCompactor(220, 60, ask=SUMMARY_PROMPT))
    answers = await send_lines(
        chat, *(f"My boat number {n} is called Argo {n}." for n in range(20))
    )
    assert len([answer for answer in answers if answer.compaction]) >= 2
    summaries = [block for block in answers[-1].turn if is_summary(block)]
    assert len(summaries) == 1
    assert "Argo 0" in summaries[0].text
    assert summaries[0].metadata["summary"] > 10


async def test_a_failing_summary_call_cuts_nothing(server: TestServer, open_chat: OpenChat) -> None:
    """The answer is there, the history stays whole, and a note says so."""
    broken = open_chat("responses:http://127.0.0.1:9/v1#practice").engine
    chat = open_chat(compactor=SummarisingCompactor(20, engine=broken))
    answers = await send_lines(chat, "Number 0.", "Number 1.")
    assert len(answers[-1].turn) == 4
    assert answers[-1].compaction.notes == (
        "the summary call failed (Unreachable); nothing was cut",
    )
    third = await chat.chat_with_state(answers[-1].state, "What did I say first?")
    assert "Number 0." in third.text


async def test_shortened_tool_exchanges_keep_the_chain_before_them(
    server: TestServer, open_chat: OpenChat
) -> None:
    """The newest anchor before the first shortened block still holds, and is used."""

    def look_up(word: str) -> str:
        """Look something up."""
        return f"{word} " * 400

    compactor = ToolExchangeCompactor(100, keep_exchanges=1, min_saving=500)
    chat = open_chat(compactor=compactor, tools=[look_up])
    answers = await send_lines(
        chat, "Hello!", 'Call look_up with word="sea".', "And now?", "And then?"
    )
    done = answers[2].compaction
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


async def test_the_server_can_compact_while_it_answers(
    server: TestServer, open_chat: OpenChat
) -> None:
    """Its item comes with the answer and stands for all before it, in the state and on the wire."""
    chat = open_chat(compactor=ServerCompactor(1_000))
    answers = await send_lines(chat, "My name is Ada.", "Write 900 words.", "Write 300 words.")
    assert request_bodies(server)[0]["context_management"] == [
        {"type": "compaction", "compact_threshold": 1_000}
    ]
    cut = next(n for n, answer in enumerate(answers) if answer.compaction)
    first = answers[cut].turn.blocks[0]
    assert isinstance(first, OpaqueBlock)
    assert first.type == "compaction"
    assert len(answers[cut].turn) == 2
    (after,) = await send_lines(chat, "What did I say first?", state=answers[cut].state)
    sent = request_bodies(server)[-1]
    assert [item["type"] for item in sent["input"]] == ["compaction", "message", "message"]
    assert "My name is Ada." in after.text
    (chained,) = await send_lines(chat, "What did I say first?", state=after.state)
    assert [item["type"] for item in request_bodies(server)[-1]["input"]] == ["message"]
    assert "My name is Ada." in chained.text


async def test_the_server_can_be_asked_to_compact(server: TestServer, open_chat: OpenChat) -> None:
    """All but the newest exchange becomes its item; only the anchor was sent to get it."""
    chat = open_chat(compactor=ServerCompactor(400, "endpoint"))
    answers = await send_lines(chat, "My name is Ada.", "Write 100 words.", "Write 300 words.")
    asking = next(r for r in server.requests if r.path == "/v1/responses/compact")
    assert asking.body["input"] == []
    assert asking.body["previous_response_id"]
    assert answers[-1].compaction.tokens_after < answers[-1].compaction.tokens_before
    (after,) = await send_lines(open_chat(), SUMMARY_PROMPT, state=answers[-1].state)
    assert request_bodies(server)[-1]["input"][0]["type"] == "compaction"
    assert "My name is Ada." in after.text
    (chained,) = await send_lines(open_chat(), SUMMARY_PROMPT, state=after.state)
    assert len(request_bodies(server)[-1]["input"]) == 1
    assert "My name is Ada." in chained.text


async def test_a_server_that_forgot_compacts_from_the_whole_history(
    server: TestServer, open_chat: OpenChat
) -> None:
    """If the anchor is gone, everything is sent to be compacted, once."""
    chat = open_chat(compactor=ServerCompactor(60, "endpoint"))
    first = await chat.chat_with_state(None, "My name is Ada.")
    async with chat.stream_with_state(first.state, "Write 60 words.") as stream:
        async for event in stream:
            if type(event).__name__ == "AnswerFinished":
                server.forget()
    asking = [r for r in server.requests if r.path == "/v1/responses/compact"]
    assert ["previous_response_id" in each.body for each in asking] == [True, False]
    assert stream.answer.compaction is not None
    assert stream.answer.compaction.changed


async def test_the_provider_can_count(server: TestServer, open_chat: OpenChat) -> None:
    """Its own endpoint says how many tokens the history has, and what is left fits."""
    chat = open_chat(compactor=TokenLimitCompactor(90, 60, counter=ProviderCounter()))
    answers = await send_lines(chat, *(f"Number {n}." for n in range(6)))
    assert any(answer.compaction for answer in answers)
    counted = [r for r in server.requests if r.path == "/v1/responses/input_tokens"]
    assert counted
    assert all(each.status == 200 for each in counted)


async def test_usage_is_used_where_it_is_known(server: TestServer, open_chat: OpenChat) -> None:
    """The server's word for the size of the last answer decides, instructions included."""
    chat = open_chat(compactor=TokenLimitCompactor(300, 200))
    state: bytes | None = None
    answer = await chat.chat_with_state(state, "Hello!")
    assert answer.compaction is None
    for n in range(30):
        answer = await chat.chat_with_state(answer.state, f"Number {n}.")
        if answer.compaction:
            break
    assert answer.compaction is not None
    usage = answer.usage
    assert answer.compaction.tokens_before == usage.input_tokens + usage.output_tokens > 300
    assert answer.compaction.tokens_after is not None
    assert answer.compaction.tokens_after <= 200


async def test_a_long_resend_is_compressed_first(server: TestServer, open_chat: OpenChat) -> None:
    """A server that forgot is sent the short history, not the long one."""
    chat = open_chat(compactor=MessageLimitCompactor(1_000, 4), resend_limit=500)
    answers = await send_lines(chat, *(f"Number {n}." for n in range(6)))
    assert not any(answer.compaction for answer in answers)
    server.forget()
    (after,) = await send_lines(chat, "Number 6.", state=answers[-1].state)
    last = request_bodies(server)[-1]
    assert "previous_response_id" not in last
    assert [text[:9] for text in item_texts(last["input"])] == [
        "Number 5.",
        "You said:",
        "Number 6.",
    ]
    assert after.compaction.changed
    assert after.text
    (chained,) = await send_lines(chat, "Number 7.", state=after.state)
    assert len(request_bodies(server)[-1]["input"]) == 1
    assert chained.compaction is None


async def test_a_resend_that_the_plan_foresees_is_compressed_too(
    server: TestServer, open_chat: OpenChat
) -> None:
    """A state from another account has no anchor that holds: it is cut before it is sent."""
    answers = await send_lines(open_chat(), *(f"Number {n}." for n in range(6)))
    chat = open_chat(
        connect(f"responses:{server.base_url}#practice", api_key="another"),
        compactor=MessageLimitCompactor(1_000, 4),
        resend_limit=500,
    )
    (after,) = await send_lines(chat, "Number 6.", state=answers[-1].state)
    assert after.compaction.changed
    assert len(request_bodies(server)[-1]["input"]) == 3


async def test_without_a_limit_a_resend_is_whole(server: TestServer, open_chat: OpenChat) -> None:
    """It is off by default."""
    chat = open_chat(compactor=MessageLimitCompactor(1_000, 4))
    answers = await send_lines(chat, *(f"Number {n}." for n in range(6)))
    server.forget()
    await send_lines(chat, "Number 6.", state=answers[-1].state)
    assert len(request_bodies(server)[-1]["input"]) == 13


async def test_compaction_is_counted(server: TestServer, open_chat: OpenChat) -> None:
    """Metrics tell how often, by whom, and how much it saved."""
    reset()
    chat = open_chat(
        compactor=CompositeCompactor(
            SplitCompactor(MessageLimitCompactor(2), MessageLimitCompactor(2))
        )
    )
    await send_lines(chat, "Number 0.", "Number 1.")
    counted = snapshot()
    name = "MessageLimitCompactor+MessageLimitCompactor"
    labels = (("by", name), ("outcome", "compacted"))
    assert counted["compactions_total"] == {labels: (1, 1.0)}
    assert counted["compaction_blocks_removed_total"][()] == (1, 2.0)
    assert counted["compaction_tokens_saved_total"][()][1] > 0
