"""Guards redact and block, and what was redacted never comes back."""

import pytest

from kedge.errors import Blocked, StreamCut
from kedge.events import TextDelta
from kedge.events.run import ToolFinished, ToolStarted
from kedge.middleware import block, guard, redact, tools, with_middleware
from kedge.turns import AssistantBlock, ReasoningBlock, Turn, assistant, reasoning, tool_call, user
from middleware.scripted import Scripted


async def test_redaction_changes_what_is_sent_and_what_is_kept() -> None:
    """The secret is in neither the request nor the Turn that comes back."""
    engine = Scripted([assistant("ok")])
    stack = with_middleware(engine, guard(redact(r"\d{4}")))
    turn = await stack.run(Turn([user("my code is 4711"), tool_call("f", '{"pin": "4711"}')]))
    assert "4711" not in str([repr(each) for each in engine.turns[0].blocks])
    assert "4711" not in str([repr(each) for each in turn.blocks])


async def test_redacted_reasoning_loses_its_seal() -> None:
    """Reasoning that holds the secret is emptied, encrypted content included."""
    thought = reasoning("the code is 4711", encrypted_content="seal")
    engine = Scripted([thought, assistant("ok")])
    turn = await with_middleware(engine, guard(redact(r"\d{4}"))).run(Turn([user("hi")]))
    kept = turn.blocks[1]
    assert isinstance(kept, ReasoningBlock)
    assert kept.content == ((), (), "")


async def test_nothing_is_shown_that_is_redacted_a_moment_later() -> None:
    """With rules for the way out, text is shown only when it is whole and clean."""
    engine = Scripted([assistant("the code is 4711")])
    async with with_middleware(engine, guard(redact(r"\d{4}"))).stream(Turn([user("?")])) as stream:
        shown = [event.delta async for event in stream if isinstance(event, TextDelta)]
    assert shown == ["the code is [redacted]"]
    answer = stream.turn.blocks[-1]
    assert isinstance(answer, AssistantBlock)
    assert answer.text == "the code is [redacted]"
    assert "4711" not in repr(stream.answers)


async def test_a_blocked_turn_is_not_sent() -> None:
    """The error names the rule and never the content."""
    engine = Scripted([assistant("ok")])
    stack = with_middleware(engine, guard(block("hunter2", name="passwords", direction="in")))
    with pytest.raises(Blocked) as caught:
        await stack.run(Turn([user("it is hunter2")]))
    assert engine.turns == []
    assert caught.value.rule == "passwords"
    assert "hunter2" not in str(caught.value)


async def test_an_answer_can_be_blocked() -> None:
    """A rule for the way out stops an answer."""
    engine = Scripted([assistant("it is hunter2")])
    stack = with_middleware(engine, guard(block("hunter2", name="passwords", direction="out")))
    with pytest.raises(Blocked, match="passwords"):
        await stack.run(Turn([user("what is it?")]))


async def test_half_an_answer_is_guarded_as_well() -> None:
    """What an error brings back holds no more than an answer would."""
    error = StreamCut("cut")
    error.turn = Turn([user("?"), assistant("the code is 4711")])
    error.partial = (assistant("the code is 4711"),)
    stack = with_middleware(Scripted(error), guard(redact(r"\d{4}", direction="out")))
    with pytest.raises(StreamCut) as caught:
        await stack.run(Turn([user("?")]))
    assert caught.value.turn is not None
    kept = [*caught.value.turn.blocks, *caught.value.partial]
    assert "4711" not in repr(kept)
    assert "[redacted]" in repr(kept)


async def test_what_tools_say_is_shown_guarded() -> None:
    """The events of a tool's run hold neither arguments nor results that the guard redacts."""

    def code() -> str:
        """Tell the code."""
        return "it is 4711"

    engine = Scripted([tool_call("code", "{}", call_id="call_1")], [assistant("done")])
    stack = with_middleware(engine, guard(redact(r"\d{4}", direction="out")), tools(code))
    async with stack.stream(Turn([user("?")])) as stream:
        shown = [e async for e in stream if isinstance(e, ToolStarted | ToolFinished)]
    assert len(shown) == 2
    assert "4711" not in repr(shown)
    assert "[redacted]" in repr(shown)
