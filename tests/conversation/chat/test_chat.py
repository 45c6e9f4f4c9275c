"""Chat with a real server: a state is passed in, an answer and a new state are returned."""

import logging
from collections.abc import Callable
from typing import Any, assert_type, cast

import pytest

from conversation.chat.conftest import OpenChat, item_texts
from engines.runs import read_until, request_bodies
from for_each import for_each
from kedge import errors
from kedge._internal.event_loops import await_value
from kedge.compaction import MessageLimitCompactor
from kedge.conversation import Chat, ChatReply, StateReport, new_key
from kedge.events import TextDelta
from kedge.events.run import ToolFinished, TurnFinished
from kedge.middleware import block, guard, system_prompt, two_phase, with_middleware
from kedge.observe import reset, snapshot
from kedge.testing import TestServer
from kedge.turns import Turn, assistant, system, tool_call, user
from middleware.scripted_engine import ScriptedEngine, add


@pytest.mark.parametrize("key", [None, new_key()], ids=["plain", "encrypted"])
async def test_cached_state_equals_the_decoded_one(open_chat: OpenChat, key: Any) -> None:
    """A Chat that receives its own bytes sends the same request as another process."""
    chat = open_chat(state_key=key)
    first = await chat.chat_with_state(None, system("Be brief."), user("My name is Ada."))
    answer = await chat.chat_with_state(first.state, user("What is my name?"))
    other = await open_chat(state_key=key).chat_with_state(first.state, user("What is my name?"))
    assert answer.text == other.text == "Your name is Ada."
    assert answer.plan is not None
    assert other.plan is not None
    assert (answer.plan.anchor, answer.plan.digest) == (other.plan.anchor, other.plan.digest)
    assert answer.turn == other.turn


async def test_a_call_without_blocks_returns_only_the_new_text() -> None:
    """Text of the previous answer is not part of the new answer."""
    chat = Chat(ScriptedEngine([assistant("Old.")], [assistant("New.")]))
    first = await chat.chat_with_state(None, "Hello")
    second = await chat.chat_with_state(first.state)
    assert (first.text, second.text) == ("Old.", "New.")
    assert len(second.turn) == 3


async def test_leading_system_blocks(server: TestServer, open_chat: OpenChat) -> None:
    """Each call has its own instructions, also those of a middleware; they are not stored, and anchors stay valid."""
    chat = open_chat()
    first = await chat.chat_with_state(None, system("Be kind."), system("Be brief."), "Hello!")
    second = await chat.chat_with_state(first.state, system("Be rude."), "Hello again!")
    sent = [body["instructions"] for body in request_bodies(server)]
    assert sent == ["Be kind.\n\nBe brief.", "Be rude."]
    assert second.plan is not None
    assert not second.plan.is_full
    assert b"Be kind" not in first.state
    assert b"Be rude" not in second.state
    settings: Any
    for settings in ({"middleware": [system_prompt("Be kind.")]}, {"system": "Be kind."}):
        chat = open_chat(**settings)
        first = await chat.chat_with_state(None, "Hello!")
        second = await chat.chat_with_state(first.state, "What are your instructions?")
        assert second.text == 'My instructions are: "Be kind."'
        assert b"Be kind" not in first.state


async def test_appended_blocks_are_pending(server: TestServer, open_chat: OpenChat) -> None:
    """Appended blocks of any role are sent in order with the next call."""
    chat = open_chat()
    first = await chat.chat_with_state(None, "Hello!")
    added = (user("One."), assistant("Two."), system("Three."), user("The harbour is closed."))
    state = chat.write_state(first.state, first.turn.append(*added))
    report = chat.inspect_state(state)
    assert (report.blocks, report.processed_length, report.pending) == (6, 2, 4)
    assert len(server.requests) == 1
    answer = await chat.chat_with_state(state)
    texts = item_texts(server.requests[-1].context)
    assert texts[2:] == ["One.", "Two.", "Three.", "The harbour is closed."]
    assert len(request_bodies(server)[1]["input"]) == 4
    assert chat.inspect_state(answer.state).pending == 0


class ClosableEngine(ScriptedEngine):
    """An engine that records whether it was closed."""

    is_closed = False

    async def aclose(self) -> None:
        """Close the engine."""
        self.is_closed = True


@pytest.mark.parametrize("is_own", [True, False])
async def test_only_a_given_engine_stays_open(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Chat closes the engine that it made from a model string, and no other."""
    engine = ClosableEngine()
    monkeypatch.setattr("kedge.providers.model_strings.connect", lambda _: engine)
    async with Chat("model" if is_own else engine):
        pass
    assert engine.is_closed is is_own


async def test_state_of_a_stream_has_the_results_of_tools() -> None:
    """A finished tool is in the state before the model has read its result."""
    engine = ScriptedEngine([tool_call("add", {"a": 1, "b": 2})], [assistant("3")])
    chat, reports = Chat(engine, tools=[add]), list[StateReport]()
    async with chat.stream_with_state(None, "Add!") as stream:
        async for event in stream:
            if isinstance(event, ToolFinished):
                reports.append(chat.inspect_state(stream.state))
    assert [dict(report.kinds) for report in reports] == [
        {"user": 1, "tool_call": 1, "tool_result": 1}
    ]
    assert [report.pending for report in reports] == [1]


async def test_same_block_may_be_sent_twice(open_chat: OpenChat) -> None:
    """A block that is used several times gets a new id each time."""
    repeated = user("Again!")
    chat = open_chat()
    first = await chat.chat_with_state(None, repeated, repeated)
    second = await chat.chat_with_state(first.state, repeated)
    assert len({block.id for block in second.turn}) == len(second.turn) == 5


async def test_stream_yields_events_and_ends_with_the_answer(open_chat: OpenChat) -> None:
    """Text arrives in deltas, and the answer and the state are available at the end."""
    chat = open_chat()
    async with chat.stream_with_state(None, "Count to 5") as stream:
        with pytest.raises(errors.KedgeError, match="has not ended"):
            _ = stream.reply
        events = [event async for event in stream]
    assert isinstance(events[-1], TurnFinished)
    deltas = [event.delta for event in events if isinstance(event, TextDelta)]
    assert "".join(deltas) == stream.reply.text == "1 2 3 4 5"
    assert stream.state == stream.reply.state


async def test_stream_that_was_left_or_failed_has_no_further_events(
    server: TestServer, open_chat: OpenChat
) -> None:
    """A stream without an answer ends like that of an engine; its error names the state."""
    left = open_chat().stream_with_state(None, "Count to 5")
    await anext(left)
    await left.aclose()
    server.faults.set("status=400", times=1)
    failed = open_chat().stream_with_state(None, "Count to 5")
    with pytest.raises(errors.RequestRefused):
        await failed.finish()
    for stream in (left, failed):
        assert [event async for event in stream] == []
        with pytest.raises(errors.KedgeError, match="the state you sent is unchanged"):
            await stream.finish()


@for_each(
    ("call", "problem"),
    [
        (lambda: Chat(cast("Any", None)), "the model must be a model string .* not NoneType"),
        (lambda: Chat(cast("Any", Chat("practice"))), "or an engine, not Chat"),
        (lambda: with_middleware(cast("Any", "practice")), "wraps an engine, not str"),
        (lambda: Chat("practice").write_state(None, cast("Any", [])), "a Turn, not list"),
    ],
)
def test_arguments_of_a_wrong_type(call: Callable[[], object], problem: str) -> None:
    """A wrong engine or Turn is an error that names its type."""
    with pytest.raises(errors.KedgeError, match=problem):
        call()


async def test_message_without_an_answer_is_in_the_state(open_chat: OpenChat) -> None:
    """A stopped stream, an unreachable server and an incomplete answer leave a state that can be continued."""
    chat = open_chat()
    async with chat.stream_with_state(None, "Write 400 words.") as stream:
        await read_until(stream)
        state = stream.state
    report = chat.inspect_state(state)
    assert (report.blocks, report.pending) == (1, 1)
    assert (await chat.chat_with_state(state)).text
    chat = open_chat("responses:http://127.0.0.1:9/v1#practice")
    with pytest.raises(errors.Unreachable) as exc_info:
        await chat.chat_with_state(None, "Hello!")
    assert chat.inspect_state(exc_info.value.state).pending == 1
    chat = open_chat()
    with pytest.raises(errors.AnswerIncomplete) as exc_info:
        await chat.chat_with_state(None, "Write 400 words.", max_output_tokens=16)
    assert exc_info.value.state is not None
    answer = await chat.chat_with_state(exc_info.value.state, "What did I say first?")
    assert "Write 400 words." in answer.text


async def test_failure_after_a_tool(server: TestServer, open_chat: OpenChat) -> None:
    """The error's state has the tool result, so the tool is not run again."""
    runs: list[int] = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        runs.append(a + b)
        server.faults.set("status=500", times=1)
        return a + b

    chat = open_chat(tools=[add])
    with pytest.raises(errors.EngineError) as exc_info:
        await chat.chat_with_state(None, "Call add with 2 and 3.")
    report = chat.inspect_state(exc_info.value.state)
    assert dict(report.kinds) == {"user": 1, "tool_call": 1, "tool_result": 1}
    assert (report.processed_length, report.pending) == (2, 1)
    answer = await chat.chat_with_state(exc_info.value.state)
    assert answer.text == "add says: 5."
    assert runs == [5]


async def test_blocked_message_is_not_in_the_state(open_chat: OpenChat) -> None:
    """The state of a message that a guard blocks is the previous one; other exceptions have a state, too."""
    chat = open_chat(middleware=[guard(block("secret", name="secrets"))])
    first = await chat.chat_with_state(None, "Hello!")
    with pytest.raises(errors.Blocked) as exc_info:
        await chat.chat_with_state(first.state, "The secret is 42.")
    assert exc_info.value.state == first.state

    def broken(turn: Turn) -> Turn:
        raise ZeroDivisionError

    for phase, blocks in (("before", 2), ("after", 4)):
        phases: Any = {phase: broken}
        chat = open_chat(middleware=[two_phase(**phases)])
        with pytest.raises(ZeroDivisionError) as other_error:
            await chat.chat_with_state(first.state, "Hello!")
        state: bytes = other_error.value.state  # type: ignore[attr-defined]
        assert chat.inspect_state(state).blocks == blocks


async def test_calls_without_a_result_are_repaired(open_chat: OpenChat) -> None:
    """Repair is on by default: a missing tool result is added, so that the history can be sent."""
    history = (user("Add!"), tool_call("add", {"a": 1, "b": 2}, call_id="call_1"))
    state = open_chat().write_state(None, Turn(history))
    answer = await open_chat().chat_with_state(state, "Hello?")
    kinds = [block.kind for block in answer.turn]
    assert kinds == ["user", "tool_call", "tool_result", "user", "assistant"]
    with pytest.raises(errors.KedgeError, match="has no result"):
        await open_chat(repair=False).chat_with_state(state, "Hello?")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state[:-1], "not_json"),
        (lambda state: state.replace(b"Ada", b"Bob"), "damaged"),
    ],
)
async def test_invalid_state_starts_fresh_with_one_log_record(
    caplog: pytest.LogCaptureFixture, change: Any, reason: str, open_chat: OpenChat
) -> None:
    """An invalid state starts a fresh conversation, and the reason is logged once without its content."""
    chat = open_chat()
    first = await chat.chat_with_state(None, "My name is Ada.")
    reset()
    with caplog.at_level(logging.WARNING, "kedge.conversation"):
        answer = await chat.chat_with_state(change(first.state), "What did I say first?")
    assert "I cannot see it" in answer.text
    (record,) = (each for each in caplog.records if each.name.startswith("kedge.conversation"))
    assert "a state was discarded" in record.getMessage()
    assert "Ada" not in record.getMessage()
    assert snapshot()["states_discarded_total"] == {(("reason", reason),): (1, 1.0)}


async def test_state_belongs_to_its_provider(server: TestServer, open_chat: OpenChat) -> None:
    """Another provider starts fresh; another address of the same provider continues."""
    first = await open_chat().chat_with_state(None, "My name is Ada.")
    other = await open_chat("practice").chat_with_state(first.state, "What did I say first?")
    assert "I cannot see it" in other.text
    same = open_chat(f"responses:{server.base_url}/#practice")
    assert same.provider == open_chat().provider
    answer = await same.chat_with_state(first.state, "What did I say first?")
    assert "My name is Ada." in answer.text


async def test_pending_blocks_are_compacted(server: TestServer, open_chat: OpenChat) -> None:
    """Pending events are compacted before they are sent, and the remaining processed blocks count as processed."""
    chat = open_chat(compactor=MessageLimitCompactor(6))
    first = await chat.chat_with_state(None, "Hello!")
    assert await chat.compact_pending(first.state) == first.state
    state = first.state
    for number in range(20):
        state = chat.write_state(state, chat.read_state(state).append(user(f"Event {number}.")))
    state = await chat.compact_pending(state)
    report = chat.inspect_state(state)
    assert (report.blocks, report.processed_length, report.pending) == (6, 0, 6)
    await chat.chat_with_state(state, "What have I said so far?")
    assert item_texts(server.requests[-1].context)[0] == "Event 14."
    chat = open_chat(compactor=MessageLimitCompactor(4))
    first = await chat.chat_with_state(None, "One.")
    second = await chat.chat_with_state(first.state, "Two.")
    smaller = open_chat(compactor=MessageLimitCompactor(2))
    assert await smaller.compact_pending(second.state) == second.state
    state = chat.write_state(second.state, second.turn.append(user("Three.")))
    report = chat.inspect_state(await chat.compact_pending(state))
    assert (report.blocks, report.processed_length) == (3, 2)


@pytest.fixture
async def second_answer(open_chat: OpenChat) -> tuple[Chat, ChatReply[None], ChatReply[None]]:
    """Return a chat and its first two answers."""
    chat = open_chat()
    first = await chat.chat_with_state(None, "My name is Ada.")
    second = await chat.chat_with_state(first.state, "My ship is the Erebus.")
    return chat, first, second


async def test_edited_state_chains_on_the_unchanged_part(
    second_answer: tuple[Chat, ChatReply[None], ChatReply[None]],
) -> None:
    """An edit retains the anchors that are still valid, and the blocks after them are sent."""
    chat, first, second = second_answer
    question = second.turn.blocks[2]
    edited = second.turn.edit(question.id, user("My ship is the Terror."))
    state = chat.write_state(second.state, edited)
    plan = chat.plan(state)
    assert plan.previous_response_id == first.response_id
    assert (plan.delta_blocks, [each.reason for each in plan.rejected]) == (2, ["changed"])
    answer = await chat.chat_with_state(state, "What is my ship?")
    assert answer.text == "Your ship is the Terror."


async def test_truncated_state_chains_on_its_last_answer(
    second_answer: tuple[Chat, ChatReply[None], ChatReply[None]],
) -> None:
    """Without the last exchange, only the next message is sent."""
    chat, first, second = second_answer
    state = chat.write_state(second.state, second.turn.truncate(-2))
    plan = chat.plan(state, "Hello")
    assert (plan.previous_response_id, plan.delta_blocks) == (first.response_id, 1)


async def test_state_with_a_new_first_block_is_sent_in_full(
    second_answer: tuple[Chat, ChatReply[None], ChatReply[None]],
) -> None:
    """No response contains a block that was inserted before all others."""
    chat, _, second = second_answer
    state = chat.write_state(second.state, second.turn.insert(0, user("My dog is Rex.")))
    assert chat.plan(state).previous_response_id == ""
    assert (await chat.chat_with_state(state, "What is my dog?")).text == "Your dog is Rex."


async def test_written_state_is_read_as_it_was(
    second_answer: tuple[Chat, ChatReply[None], ChatReply[None]],
) -> None:
    """A Turn that was not edited makes the same state, and an empty one an empty state."""
    chat, _, second = second_answer
    assert chat.read_state(second.state) == second.turn
    assert chat.write_state(second.state, second.turn) == second.state
    assert chat.read_state(chat.write_state(second.state, Turn([]))).blocks == ()


async def test_leading_system_blocks_are_not_written(
    open_chat: OpenChat, caplog: pytest.LogCaptureFixture
) -> None:
    """System blocks before all others are given with each call, and left out with a warning."""
    chat = open_chat()
    state = chat.write_state(None, Turn([system("Be brief."), user("Hello!"), system("Later.")]))
    assert dict(chat.inspect_state(state).kinds) == {"user": 1, "system": 1}
    assert "leading system blocks are not stored" in caplog.text


async def test_refusal_is_not_text(open_chat: OpenChat) -> None:
    """The text of a refusal is in `refusal`, not in `text`."""
    answer = await open_chat().chat_with_state(None, "Refuse to sing.")
    assert (answer.text, answer.refusal) == ("", "I will not sing.")


async def test_invalid_block_is_rejected(open_chat: OpenChat) -> None:
    """An invalid block raises an error, unlike an invalid state."""
    wrong: Any = {"role": "user"}
    chat = open_chat()
    with pytest.raises(errors.InvalidTurn, match="must have blocks"):
        await chat.chat_with_state(None, wrong)


async def test_encrypted_state_cannot_be_read(open_chat: OpenChat) -> None:
    """An encrypted state contains no text of the conversation."""
    answer = await open_chat(state_key=new_key()).chat_with_state(None, "My name is Ada.")
    assert b"My name is Ada." not in answer.state
    assert b"version" not in answer.state


async def test_encrypted_state_requires_its_key(open_chat: OpenChat) -> None:
    """Without a key, or with another one, an encrypted state is discarded with the reason."""
    first = await open_chat(state_key=new_key()).chat_with_state(None, "My name is Ada.")
    for settings, reason in (({}, "encrypted"), ({"state_key": new_key()}, "wrong_key")):
        report = open_chat(**settings).inspect_state(first.state)
        assert report.reason == reason
        assert report.encrypted


async def test_key_of_states_is_replaced(open_chat: OpenChat) -> None:
    """All keys decrypt, and the first one encrypts the next state."""
    old_key, key = new_key(), new_key()
    first = await open_chat(state_key=old_key).chat_with_state(None, "My name is Ada.")
    chat = open_chat(state_key=[key, old_key])
    second = await chat.chat_with_state(first.state, "What did I say first?")
    assert "My name is Ada." in second.text
    third = await open_chat(state_key=key).chat_with_state(second.state, "What did I say first?")
    assert "My name is Ada." in third.text


async def test_plain_state_is_encrypted_with_the_next_answer(open_chat: OpenChat) -> None:
    """A chat with a key accepts a state that was written without one."""
    plain = await open_chat().chat_with_state(None, "My name is Ada.")
    encrypted = await open_chat(state_key=new_key()).chat_with_state(plain.state, "Hello again!")
    assert len(encrypted.turn) == 4
    assert b"My name is Ada." not in encrypted.state


async def test_typed_answer(open_chat: OpenChat, server: TestServer) -> None:
    """The answer has the typed value; corrections and invalid answers are part of the state and chained."""
    chat = open_chat()
    answer = await chat.chat_with_state(None, "First invalid: What is 2 + 3?", output=int)
    assert_type(answer.output, int)
    assert answer.output == 5
    bodies = request_bodies(server)
    assert bodies[1]["previous_response_id"] == server.requests[0].response_id
    assert len(answer.turn) == 4
    answer = await chat.chat_with_state(answer.state, "How many messages can you see?")
    assert_type(answer.output, None)
    assert answer.text.startswith("I can see 5 messages")
    with pytest.raises(errors.OutputInvalid) as exc_info:
        await chat.chat_with_state(None, "Always invalid: Hello", output=int, output_retries=1)
    answer = await chat.chat_with_state(exc_info.value.state, "How many messages can you see?")
    assert answer.discarded is None
    assert answer.text.startswith("I can see 5 messages")


async def test_wrong_first_arguments_say_what_to_write(open_chat: OpenChat) -> None:
    """Text as a state, a reply, a missing await and a misspelled setting raise errors that show what to write."""
    chat = open_chat()
    with pytest.raises(errors.InvalidSetting, match=r'chat_with_state\(None, "Hello"\)'):
        await chat.chat_with_state("Hello")
    reply: Any = await chat.chat_with_state(None, "My name is Ada.")
    with pytest.raises(errors.InvalidSetting, match=r"pass reply\.state"):
        await chat.chat_with_state(reply, "Hello")
    missing: Any = chat.chat_with_state(None, "Hello")
    with pytest.raises(errors.InvalidSetting, match="write await before the call"):
        await chat.chat_with_state(missing, "Hello")
    missing.close()
    turn: Any = reply.turn
    for call in (chat.read_state, chat.stream_with_state, chat.plan, chat.compact_pending):
        with pytest.raises(errors.InvalidSetting, match="a state is bytes, not Turn; pass reply"):
            await await_value(call(turn))
    assert reply.turn.text == reply.text
    assert Turn([user("Hello")]).text == ""
    misspelled: Any = {"sytem": "Be brief."}
    with pytest.raises(
        errors.UnknownSetting, match="a Chat has no setting 'sytem'; did you mean 'system'"
    ):
        Chat("practice", **misspelled)
