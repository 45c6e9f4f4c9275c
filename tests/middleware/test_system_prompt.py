"""Tests of ``system_prompt``, which inserts one system block and may change it with every request."""

from kedge.middleware import system_prompt, with_middleware
from kedge.turns import Turn, assistant, system, user
from middleware.scripted_engine import ScriptedEngine


async def test_running_again_replaces_the_prompt() -> None:
    """The middleware's own prompt is replaced, and the caller's system block is unchanged."""
    engine = ScriptedEngine([assistant("a")], [assistant("b")])
    texts = iter(["one", "two"])
    stack = with_middleware(engine, system_prompt(lambda _: next(texts)))
    turn = await stack.run(Turn([system("mine"), user("hi")]))
    turn = await stack.run(turn.append(user("again")))
    prompts = [each.content for each in turn.blocks if each.kind == "system"]
    assert prompts == [("system", "two"), ("system", "mine")]
