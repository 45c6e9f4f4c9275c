"""Tests of the composition of middleware and of the trace of its changes."""

from kedge.engines import Engine, Middleware
from kedge.middleware import BaseMiddleware, two_phase, with_middleware
from kedge.turns import Turn, assistant, user
from middleware.scripted_engine import ScriptedEngine


def make_tagger(word: str) -> Middleware:
    """Return a middleware that appends a block before and after the engine."""

    def before(turn: Turn) -> Turn:
        return turn.append(user(f"in {word}"))

    def after(turn: Turn) -> Turn:
        return turn.append(user(f"out {word}"))

    return two_phase(before, after, name=word)


async def test_the_first_middleware_is_the_outermost() -> None:
    """The first middleware receives the Turn first, and the result last."""
    engine = ScriptedEngine([assistant("hello")])
    stack = with_middleware(engine, make_tagger("outer"), make_tagger("inner"))
    turn = await stack.run(Turn([user("hi")]))
    expected = [
        user("hi"),
        user("in outer"),
        user("in inner"),
        assistant("hello"),
        user("out inner"),
        user("out outer"),
    ]
    assert list(turn.blocks) == expected


async def test_no_middleware_is_the_engine_itself() -> None:
    """A stack without middleware returns the engine itself."""
    engine = ScriptedEngine()
    assert with_middleware(engine) is engine
    assert with_middleware(engine, lambda inner: inner) is engine


async def test_each_block_has_the_name_of_its_middleware() -> None:
    """Blocks that a middleware adds get its name as their origin."""
    engine = ScriptedEngine([assistant("hello")])
    turn = await with_middleware(engine, make_tagger("careful")).run(Turn([user("hi")]))
    assert [block.origin for block in turn.blocks] == ["user", "careful", "engine", "careful"]


async def test_the_trace_lists_the_changes_of_each_middleware() -> None:
    """Added, removed, modified and moved blocks are traced with the middleware's name and direction."""

    def edit(turn: Turn) -> Turn:
        first, second = turn.blocks
        return Turn([second, user("edited", id=first.id)], data=turn.data)

    def prune(turn: Turn) -> Turn:
        return turn.remove(turn.blocks[0].id)

    engine = ScriptedEngine([assistant("hello")])
    stack = with_middleware(engine, two_phase(edit, name="editor"), two_phase(None, prune))
    async with stack.stream(Turn([user("one"), user("two")])) as stream:
        await stream.finish()
    received = [(event.by, event.phase) for event in stream.trace]
    assert received == [("editor", "in"), ("prune", "out")]
    change, pruned = (event.diff for event in stream.trace)
    assert len(change.modified) == len(change.moved) == 1
    assert len(pruned.removed) == 1


async def test_a_middleware_without_changes_is_not_traced() -> None:
    """A middleware that passes the Turn on is not in the trace, even if the engine appends blocks."""
    engine = ScriptedEngine([assistant("hello")])
    async with with_middleware(engine, BaseMiddleware).stream(Turn([user("hi")])) as stream:
        await stream.finish()
    assert stream.trace == []


async def test_a_class_or_a_function_may_be_a_middleware() -> None:
    """A class and a function that take an engine and return one are both middleware."""

    class Shout(BaseMiddleware):
        name = "shout"

        def leave(self, turn: Turn) -> Turn:
            return turn.append(user("HEY"))

    def plain(engine: Engine) -> Engine:
        return Shout(engine)

    for middleware in (Shout, plain):
        turn = await with_middleware(ScriptedEngine([assistant("x")]), middleware).run(
            Turn([user("y")])
        )
        assert turn.blocks[-1].origin == "shout"


async def test_a_dry_run_applies_the_middleware() -> None:
    """The plan is computed for the Turn after all middleware."""
    stack = with_middleware(ScriptedEngine(), make_tagger("careful"))
    assert stack.plan(Turn([user("hi")])).full_blocks == 2


async def test_async_phases_are_awaited() -> None:
    """Both phases may be async; a dry run skips an async phase."""

    async def before(turn: Turn) -> Turn:
        return turn.append(user("more"))

    stack = with_middleware(ScriptedEngine([assistant("hello")]), two_phase(before))
    assert stack.plan(Turn([user("hi")])).full_blocks == 1
    assert len(await stack.run(Turn([user("hi")]))) == 3
