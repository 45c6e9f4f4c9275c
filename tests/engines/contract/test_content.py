"""Test text, tools, images, reasoning, formats and token counts on every engine."""

import json
from typing import Any

import pytest

from engines.contract.checks import ADD, check_law, flatten
from engines.runs import last_text
from kedge.engines import Engine
from kedge.errors import AnswerIncomplete, UnsupportedBlock
from kedge.events import (
    ReasoningDelta,
    ResponseCompleted,
    ResponseStarted,
    TextDelta,
)
from kedge.events.run import AnswerFinished, RequestPlanned, RequestSent, TurnFinished
from kedge.observe import reset, snapshot
from kedge.testing import TestServer
from kedge.turns import (
    Block,
    ReasoningBlock,
    ToolCallBlock,
    Turn,
    audio,
    file,
    image,
    system,
    tool_result,
    user,
)
from normalization import normalize_blocks

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
TWO_CALLS = "Call add with 2 and 3 and get_weather in Rome."


def block_contents(blocks: tuple[Block, ...]) -> list[Any]:
    """Return the contents of blocks without their ids, with arguments as parsed values."""
    parts: list[Any] = []
    for block in blocks:
        match block:
            case ToolCallBlock():
                parts.append(("call", block.name, json.loads(block.arguments)))
            case ReasoningBlock():
                parts.append(("reasoning", *block.summary, *block.texts))
            case _:
                parts.append((block.kind, *block.content))
    return parts


async def test_conversation_context_is_complete(engine: Engine, server: TestServer) -> None:
    """Every request has the complete conversation as its context, by an anchor or sent in full."""
    turn = Turn([system("Be kind.")])
    for line in ("My ship is the Erebus.", "Hello", "What is my ship?"):
        turn = await engine.run(turn.append(user(line)))
        check_law(server, turn)
    assert last_text(turn) == "Your ship is the Erebus."
    assert last_text(await engine.run(turn.append(user("What are your instructions?")))) == (
        'My instructions are: "Be kind."'
    )


async def test_a_stream_yields_events_and_ends_with_the_turn(engine: Engine) -> None:
    """Events arrive in order, deltas add up to the answer, and the Turn is available at the end."""
    turn = Turn([user("What is 6 * 7?")])
    async with engine.stream(turn) as stream:
        events = [event async for event in stream]
    kinds = [type(event) for event in events]
    assert kinds[0] is RequestPlanned
    assert kinds[1:3] == [RequestSent, ResponseStarted]
    assert kinds[-3:] == [ResponseCompleted, AnswerFinished, TurnFinished]
    assert "".join(e.delta for e in events if isinstance(e, TextDelta)) == last_text(stream.turn)
    assert stream.turn.blocks[:1] == turn.blocks
    assert stream.turn.blocks[-1].response_id
    assert stream.text == last_text(stream.turn)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("What is 6 * 7?", {}),
        ("Think about 6 * 7", {"reasoning": {"effort": "low"}}),
        ("Refuse to sing", {}),
        (TWO_CALLS, {"tools": (ADD, WEATHER)}),
        (TWO_CALLS, {"tools": (ADD, WEATHER), "reasoning": {"effort": "low"}}),
    ],
    ids=["words", "thoughts", "refusal", "calls", "thoughts and calls"],
)
async def test_run_and_stream_return_the_same_blocks(
    engine: Engine, line: str, options: dict[str, Any]
) -> None:
    """`run` and `stream` return the same blocks in the same order."""
    turn = Turn([user(line)])
    complete = await engine.run(turn, **options)
    async with engine.stream(turn, **options) as stream:
        events = [event async for event in stream]
    assert block_contents(stream.turn.blocks) == block_contents(complete.blocks)
    positions = [block.output_index for block in complete.blocks[1:]]
    assert positions == list(range(len(positions)))
    assert [b.output_index for b in stream.turn.blocks[1:]] == positions
    reasoning_text = "".join(e.delta for e in events if isinstance(e, ReasoningDelta))
    received = [b.summary + b.texts for b in complete if isinstance(b, ReasoningBlock)]
    assert reasoning_text == "".join(text for texts in received for text in texts)
    assert bool(received) == ("reasoning" in options)


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_name_of_a_call_is_inferred(
    engine: Engine, server: TestServer, streaming: bool
) -> None:
    """A missing name is inferred and counted; the server stored no name, so no anchor is recorded."""
    reset()
    server.faults.set("omit_call_name")
    turn = await engine.run(
        Turn([user("Call add with 2 and 3")]), tools=(ADD, WEATHER), streaming=streaming
    )
    assert snapshot()["tool_call_names_inferred_total"] == {(): (1, 1.0)}
    call = turn.blocks[-1]
    assert isinstance(call, ToolCallBlock)
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})
    turn = turn.append(tool_result(call.call_id, "5"))
    assert engine.plan(turn, tools=(ADD, WEATHER)).anchor is None
    server.faults.clear()
    turn = await engine.run(turn, tools=(ADD, WEATHER))
    check_law(server, turn)
    assert "5" in last_text(turn)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"parallel_tool_calls": False}, ["add"]),
        ({"tool_choice": "none"}, []),
        ({"tool_choice": {"type": "function", "name": "get_weather"}}, ["get_weather"]),
        ({"tool_choice": "auto"}, ["add", "get_weather"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["add"]),
    ],
    ids=["one by one", "none", "named", "auto", "required"],
)
async def test_tool_choice_is_supported(
    engine: Engine, options: dict[str, Any], calls: list[str]
) -> None:
    """The tool options of the Responses API work with every provider."""
    turn = await engine.run(Turn([user(TWO_CALLS)]), tools=(ADD, WEATHER), **options)
    assert [block.name for block in turn if isinstance(block, ToolCallBlock)] == calls


async def test_images_files_and_audio_are_sent_or_rejected(
    engine: Engine, name: str, server: TestServer
) -> None:
    """They are sent in their position among the text; without audio input nothing is sent."""
    shown = user(["Look:", image(b"png"), "and", file(b"%PDF", filename="a.pdf"), "What is 2+3?"])
    turn = await engine.run(Turn([shown]))
    check_law(server, turn)
    sent = flatten(normalize_blocks([shown]))
    assert ("user", "image", "data:image/png;base64,cG5n", "auto") in sent
    turn = Turn([user(["Listen:", audio(b"RIFF"), "What is 2+3?"])])
    if name == "anthropic":
        with pytest.raises(UnsupportedBlock, match=turn.blocks[0].id):
            await engine.run(turn)
        assert len(server.requests) == 1
    else:
        check_law(server, await engine.run(turn))


LONG_QUESTION = Turn([user("Write 100 words")])


async def truncate_answer(engine: Engine, *, streaming: bool) -> AnswerIncomplete:
    """Return the error of an answer that reached its limit."""
    with pytest.raises(AnswerIncomplete) as exc_info:
        await engine.run(LONG_QUESTION, max_output_tokens=16, streaming=streaming)
    return exc_info.value


@pytest.mark.parametrize("streaming", [False, True])
async def test_truncated_answer_raises_incomplete_error(engine: Engine, streaming: bool) -> None:
    """The error has the reason, the id, the usage and what was received, marked as partial."""
    error = await truncate_answer(engine, streaming=streaming)
    assert error.code == "max_output_tokens"
    assert error.response_id
    assert error.usage
    assert error.partial
    assert error.partial[-1].metadata["kedge.partial"] is True


@pytest.mark.parametrize("streaming", [False, True])
async def test_truncated_answer_is_no_anchor(
    engine: Engine, server: TestServer, streaming: bool
) -> None:
    """The Turn of the error is as it was before, and can be continued."""
    error = await truncate_answer(engine, streaming=streaming)
    assert error.turn == LONG_QUESTION
    turn = LONG_QUESTION.append(user("Never mind. What is 2+3?"))
    finished = await engine.run(turn, streaming=streaming)
    assert len(finished) == 3
    check_law(server, finished)


async def test_reasoning_is_shown_counted_and_resent_only_to_its_provider(
    engine: Engine, name: str, server: TestServer
) -> None:
    """Reasoning is not sent again after an edit of a block before it."""
    options: dict[str, Any] = {"reasoning": {"effort": "low"}}
    async with engine.stream(Turn([user("Think about 6 * 7")]), **options) as stream:
        await stream.finish()
    turn = stream.turn
    reasoning_block = turn.blocks[1]
    assert isinstance(reasoning_block, ReasoningBlock)
    if not name.startswith("responses") or name == "responses, stateless":
        assert bool(reasoning_block.encrypted_content) == (name != "chat")
    turn = await engine.run(turn.append(user("Sure?")), **options)
    context = server.requests[-1].context
    assert context is not None
    remembered = [item for item in context if item.get("type") == "reasoning"]
    assert len(remembered) == (0 if name == "chat" else 1)
    edited = turn.edit(turn.blocks[0].id, user("Think about 6 * 8")).append(user("Well?"))
    await engine.run(edited, **options)
    context = server.requests[-1].context
    assert context is not None
    assert not [item for item in context if item.get("type") == "reasoning"]
