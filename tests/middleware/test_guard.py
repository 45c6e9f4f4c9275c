"""Guards redact and block, and what was redacted never comes back."""

import pytest

from kedge.errors import Blocked
from kedge.events import TextDelta
from kedge.middleware import block, guard, redact, with_middleware
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
