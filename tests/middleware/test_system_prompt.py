"""Tests of ``system_prompt``, which inserts one system block and may change it with every request."""

from typing import cast

import pytest

from kedge.errors import InvalidSetting
from kedge.middleware import system_prompt, with_middleware
from kedge.turns import Turn, assistant, system, user
from middleware.scripted_engine import ScriptedEngine


async def test_every_prompt_of_a_stack_is_sent() -> None:
    """Prompts follow each other, the outermost first, and each replaces only its own."""
    engine = ScriptedEngine([assistant("a")], [assistant("b")])
    texts = iter(["one", "two"])
    base = with_middleware(engine, system_prompt("base"))
    stack = with_middleware(base, system_prompt("first"), system_prompt(lambda _: next(texts)))
    turn = await stack.run(Turn([system("mine"), user("hi")]))
    await stack.run(turn.append(user("again")))
    prompts = [[str(block.content[1]) for block in sent.leading] for sent in engine.turns]
    assert prompts == [["first", "one", "base", "mine"], ["first", "two", "base", "mine"]]


def test_a_prompt_is_a_text_or_a_function() -> None:
    """Any other value is rejected when the middleware is made."""
    with pytest.raises(InvalidSetting, match="a system prompt must be a text"):
        system_prompt(cast("str", None))


async def test_function_must_return_a_text() -> None:
    """The error names the function of the prompt, before anything is sent."""
    engine = ScriptedEngine([assistant("a")])
    stack = with_middleware(engine, system_prompt(lambda _: cast("str", None)))
    with pytest.raises(InvalidSetting, match="function of a system prompt must return a text"):
        await stack.run(Turn([user("hi")]))
    assert not engine.turns
