"""Tests of the composition of middleware, of the trace of its changes, and of system prompts."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from for_each import for_each
from kedge.compaction import MessageLimitCompactor, ServerCompactor
from kedge.conversation import Chat
from kedge.engines import Middleware
from kedge.errors import InvalidSetting, InvalidTurn
from kedge.middleware import (
    BaseMiddleware,
    compact,
    guard,
    log,
    redact,
    repair,
    retry,
    system_prompt,
    tools,
    two_phase,
    with_middleware,
)
from kedge.turns import Turn, assistant, system, user
from middleware.scripted_engine import ScriptedEngine, run_stack


def make_tagger(word: str) -> Middleware:
    """Return a middleware that appends a block before and two after the engine."""

    def before(turn: Turn) -> Turn:
        return turn.append(user(f"in {word}"))

    def after(turn: Turn) -> Turn:
        return turn.append(user(f"out {word}", origin="mine"), user(f"after {word}"))

    return two_phase(before, after, name=word)


async def test_the_first_middleware_is_the_outermost() -> None:
    """The first middleware receives the Turn first, and the result last; blocks have its name, or an own origin."""
    engine = ScriptedEngine([assistant("hello")])
    stack = with_middleware(engine, make_tagger("outer"), make_tagger("inner"))
    turn = await stack.run(Turn([user("hi")]))
    texts = [block.text for block in turn.blocks]
    outs = ["out inner", "after inner", "out outer", "after outer"]
    assert texts == ["hi", "in outer", "in inner", "hello", *outs]
    origins = [block.origin for block in turn.blocks]
    assert origins == ["user", "outer", "inner", "engine", "mine", "inner", "mine", "outer"]


@pytest.mark.parametrize("has_leave", [False, True])
async def test_enter_and_leave_may_be_async(has_leave: bool) -> None:
    """An async ``enter`` changes the Turn that is sent, an async ``leave`` the final one; a plan skips ``enter``."""

    class Stamp(BaseMiddleware):
        name = "stamp"

        async def enter(self, turn: Turn) -> Turn:
            return turn.append(user("entered"))

    class Both(Stamp):
        async def leave(self, turn: Turn) -> Turn:
            return turn.append(user("left"))

    engine = ScriptedEngine([assistant("hello")])
    stack = with_middleware(engine, Both if has_leave else Stamp, repair())
    turn = await stack.run(Turn([user("hi")]))
    texts = ["hi", "entered", "hello", *(["left"] if has_leave else [])]
    assert [block.text for block in turn.blocks] == texts
    assert turn.blocks[1].origin == "stamp"
    assert stack.plan(Turn([user("hi")])).full_blocks == 1


async def test_no_middleware_is_the_engine_itself() -> None:
    """A stack without middleware returns the engine itself."""
    engine = ScriptedEngine()
    assert with_middleware(engine) is engine
    assert with_middleware(engine, lambda inner: inner) is engine


async def test_an_engine_may_be_part_of_several_stacks() -> None:
    """A stack around another one does not change those that were made before."""
    base = with_middleware(ScriptedEngine([assistant("hello")]), make_tagger("base"))
    one, _ = (with_middleware(base, make_tagger(name)) for name in ("one", "two"))
    turn = await one.run(Turn([user("hi")]))
    assert [block.origin for block in turn.blocks[:3]] == ["user", "one", "base"]


async def test_parameters_of_a_request_precede_those_of_a_compactor() -> None:
    """A run may set another threshold than its compactor."""
    engine = ScriptedEngine([assistant("a")], [assistant("b")])
    stack = with_middleware(engine, compact(ServerCompactor(1_000)))
    own = [{"type": "compaction", "compact_threshold": 5}]
    await stack.run(Turn([user("hi")]))
    await stack.run(Turn([user("hi")]), context_management=own)
    sent = [request.params["context_management"] for request in engine.requests]
    assert [each[0]["compact_threshold"] for each in sent] == [1_000, 5]


async def test_the_trace_lists_the_changes_of_each_middleware() -> None:
    """Blocks that a middleware adds, removes, modifies or moves are traced with its name and direction."""

    def edit(turn: Turn) -> Turn:
        first, second = turn.blocks
        return Turn([second, user("edited", id=first.id)], data=turn.data)

    def prune(turn: Turn) -> Turn:
        return turn.remove(turn.blocks[0].id)

    engine = ScriptedEngine([assistant("hello")])
    stack = [two_phase(edit, name="editor"), BaseMiddleware, two_phase(None, prune)]
    stream, _ = await run_stack(engine, *stack, turn=Turn([user("one"), user("two")]))
    received = [(event.by, event.phase) for event in stream.trace]
    assert received == [("editor", "in"), ("prune", "out")]
    change, pruned = (event.diff for event in stream.trace)
    assert len(change.modified) == len(change.moved) == 1
    assert (len(pruned.removed), pruned.added) == (1, ())


async def test_a_dry_run_applies_the_middleware() -> None:
    """The plan is computed for the Turn after all middleware."""
    stack = with_middleware(ScriptedEngine(), make_tagger("careful"))
    assert stack.plan(Turn([user("hi")])).full_blocks == 2


@pytest.mark.parametrize("settings", [{"before": lambda _: None}, {"after": lambda _: None}])
async def test_a_phase_that_returns_no_turn_is_reported(settings: Any) -> None:
    """The error names the middleware, and what to return."""
    engine = ScriptedEngine([assistant("hello")])
    with pytest.raises(InvalidTurn, match="the middleware audit returned NoneType"):
        await run_stack(engine, two_phase(**settings, name="audit"))


def make_chat(**settings: Any) -> Chat:
    """Return a Chat with these settings."""
    return Chat(ScriptedEngine(), **settings)


@for_each(
    ("make", "settings", "expected"),
    [
        (make_chat, {"tools": 3}, "tools must be a list"),
        (make_chat, {"tools": "add"}, "tools must be a list"),
        (make_chat, {"tools": None}, "tools must be a list"),
        (make_chat, {"approve": True}, "approve must be a function"),
        (make_chat, {"middleware": guard(redact("a"))}, "middleware must be a list"),
        (make_chat, {"middleware": [redact("a")]}, "a middleware is a function"),
        (make_chat, {"middleware": [log]}, "call it: log"),
        (tools, {"toolbox": 3}, "tools must be a list"),
        (tools, {"max_rounds": -1}, "max_rounds must be an integer"),
        (repair, {"unanswered": "drop"}, "unanswered must be complete or remove"),
        (retry, {"first": float("nan")}, "first must be a number of seconds"),
        (retry, {"attempts": 0}, "attempts must be an integer of at least 1"),
        (system_prompt, {"text": None}, "a system prompt must be a text"),
        (make_chat, {"compactor": MessageLimitCompactor}, "compactor must"),
        (
            make_chat,
            {"compactor": MessageLimitCompactor(2), "resend_limit": "9"},
            "resend_limit must",
        ),
        (make_chat, {"compactor": [MessageLimitCompactor(2)]}, "compactor must"),
    ],
)
def test_wrong_settings_are_named(
    make: Callable[..., object], settings: dict[str, Any], expected: str
) -> None:
    """What is not a middleware, a tool or a valid option is rejected when the stack is built."""
    with pytest.raises(InvalidSetting, match=expected):
        make(**settings)


async def test_a_function_of_the_turn_returns_tools() -> None:
    """A function of the Turn that returns something else is reported before anything is sent."""
    chat = Chat(ScriptedEngine(), tools=cast("Any", lambda turn: len(turn)))  # noqa: PLW0108 - len is no selector
    with pytest.raises(InvalidSetting, match=r"tools must be a list of functions.*not int"):
        await chat.chat_with_state(None, "hi")


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


async def test_function_must_return_a_text() -> None:
    """The error names the function of the prompt, before anything is sent."""
    engine = ScriptedEngine([assistant("a")])
    stack = with_middleware(engine, system_prompt(lambda _: cast("str", None)))
    with pytest.raises(InvalidSetting, match="function of a system prompt must return a text"):
        await stack.run(Turn([user("hi")]))
    assert not engine.turns
