"""Test what ``tools=`` accepts: a list, one tool, or a function of the Turn, wherever tools are passed."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from for_each import for_each
from kedge import Chat, Conversation, Turn, connect, tool, user, with_middleware
from kedge.batch import AsyncioRunner, BatchLine, run_batch
from kedge.engines.tool_loop import is_selector
from kedge.errors import InvalidSetting, InvalidTool
from kedge.middleware import tools
from kedge.store import open_store
from kedge.tools import Toolbox, ToolSource, run_calls
from kedge.tools.toolbox import build_toolbox
from kedge.turns import tool_call
from kedge.workflows import Side, debate, refine

QUESTION = "Please call add with a=2 and b=3"
ANSWER = "add says: 5."
DEFINITION = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
SIDES = [Side("yes", "practice"), Side("no", "practice")]
CALL = tool_call("add", '{"a": 2, "b": 3}', call_id="call_1")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Calculator:
    """An object with a tool, and with a function that selects tools."""

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def select(self, turn: Turn) -> Any:
        """Return the tools for a Turn."""
        return self.add if len(turn) else ()

    def __call__(self, turn: "Turn") -> Any:
        """Return the tools for a Turn."""
        return [self.add]


class Source(ToolSource):
    """A source of one tool."""

    tools = (tool(add),)


def select_untyped(turn):  # type: ignore[no-untyped-def]
    """Return the tools for a Turn."""
    return [add] if turn else []


def shout(text):  # type: ignore[no-untyped-def]
    """A function without types, which cannot be a tool."""
    return text.upper()


def now() -> str:
    """Return the time."""
    return "12:00"


ONE_TOOL = (add, tool(add), Calculator().add, Toolbox(add), Source())


@for_each("toolset", [*ONE_TOOL, [add], (add,), iter([add])])
def test_one_tool_is_a_list_of_one(toolset: Any) -> None:
    """A function, a method, a tool, a toolbox or a source is accepted without a list around it."""
    assert list(build_toolbox(toolset)) == ["add"]


@for_each("function", [Calculator().select, Calculator(), select_untyped, lambda chat: [chat]])
def test_function_of_the_turn_is_a_selector(function: Any) -> None:
    """A function whose only parameter is a Turn selects tools, and so do untyped ones that can be no tools."""
    assert is_selector(function)


@for_each("function", [*ONE_TOOL, now, shout, partial(add, a=1), len, Source, list, [add], 3])
def test_tool_is_no_selector(function: Any) -> None:
    """A function that is a tool, or that could not select tools, is never called with the Turn."""
    assert not is_selector(function)


@for_each("toolset", [shout, len, Calculator, lambda a, b: [a, b]])
def test_function_that_cannot_be_a_tool_is_rejected(toolset: Any) -> None:
    """An untyped function, which was called with the Turn, is rejected when the tools are set."""
    for make in (partial(Chat, "practice"), partial(Conversation, "practice"), AsyncioRunner):
        with pytest.raises(InvalidTool):
            make(tools=toolset)


@pytest.mark.parametrize(
    "toolset", [add, tool(add), Calculator().select, Toolbox(add)], ids=lambda each: repr(each)[:20]
)
async def test_one_tool_is_run_in_every_program(toolset: Any, tmp_path: Path) -> None:
    """An engine, a chat, a conversation and a batch run one tool, also through their synchronous forms."""
    stack = with_middleware(connect("practice"), tools(toolbox=toolset))
    async with (
        stack,
        Chat("practice", tools=toolset) as chat,
        Conversation("practice", tools=toolset) as conversation,
    ):
        texts = [
            (await stack.run(Turn([user(QUESTION)]))).blocks[-1].text,
            (await chat.chat_with_state(None, QUESTION)).text,
            (await conversation.send(QUESTION)).text,
        ]
    runner = AsyncioRunner(tools=toolset)
    lines = [BatchLine(name, (QUESTION,)) for name in "ab"]
    out = tmp_path / "out.jsonl"
    await run_batch(lines, out, name="b", store_url=str(tmp_path / "b.db"), runner=runner)
    assert texts == [ANSWER] * 3
    assert out.read_text().count(ANSWER) == 2


@for_each("toolset", [add, tool(add)])
async def test_one_tool_is_run_in_every_workflow(toolset: Any) -> None:
    """Each role of a workflow has the tool."""
    async with open_store(":memory:") as store:
        program: Any = {"store": store, "tools": toolset}
        done = await refine(QUESTION, engine="practice", judge=lambda _: True, **program)
        assert done.answer == ANSWER
        debated = await debate(QUESTION, SIDES, judge=lambda _: "yes", rounds=1, **program)
        assert [argument.text for argument in debated.arguments] == ["add says: 3."] * 2


@for_each("toolset", [add, tool(add), DEFINITION])
async def test_one_tool_of_a_request(toolset: Any) -> None:
    """One request accepts one function, tool or definition, and so does a dry run."""
    async with (
        connect("practice") as engine,
        Conversation(engine, store=":memory:") as conversation,
    ):
        text = "What tools do you have?"
        turn = await engine.run(Turn([user(text)]), tools=toolset)
        reply = await conversation.send(text, key="k", tools=toolset)
        name = "look_up" if toolset is DEFINITION else "add"
        assert [turn.blocks[-1].text, reply.text] == [f"My tools are: {name}."] * 2
        assert engine.plan(Turn([user(text)]), tools=toolset).full_blocks == 1


async def test_one_tool_of_run_calls() -> None:
    """``run_calls`` accepts a toolbox, a list or one function."""
    for toolset in (add, [add], Toolbox(add)):
        assert [result.text for result in await run_calls(toolset, [CALL])] == ["5"]


def test_one_tool_of_synchronous_programs() -> None:
    """The synchronous forms accept one function as well."""
    with Conversation("practice", tools=add).sync as conversation:
        assert conversation.send(QUESTION).text == ANSWER
        assert conversation.send(QUESTION, tools=add).text == ANSWER
    with Chat("practice", tools=add).sync as chat:
        assert chat.chat_with_state(None, QUESTION).text == ANSWER


async def test_iterator_is_read_once() -> None:
    """Tools from an iterator are offered in a request with a key, in a dry run, a batch and a workflow."""
    async with Conversation("practice", store=":memory:") as conversation:
        assert (await conversation.send(QUESTION, key="k", tools=iter([add]))).text == ANSWER
        plans = [
            await conversation.probe_and_plan("Hi", tools=tools) for tools in (iter([add]), [add])
        ]
        assert plans[0].full_bytes == plans[1].full_bytes
        program: Any = {"store": conversation.store, "tools": iter([add])}
        debated = await debate(QUESTION, SIDES, judge=lambda _: "yes", rounds=1, **program)
    assert [argument.text for argument in debated.arguments] == ["add says: 3."] * 2
    assert isinstance(AsyncioRunner(tools=iter([add])).tools, Toolbox)


@for_each("toolset", [3, None, "add", b"add"])
async def test_other_values_are_rejected(toolset: Any) -> None:
    """What is neither a list nor a tool is named with its type, before anything is sent."""
    for make in (partial(Chat, "practice"), partial(Conversation, "practice"), AsyncioRunner):
        with pytest.raises(InvalidSetting, match=f"not {type(toolset).__name__}"):
            make(tools=toolset)
    async with connect("practice") as engine:
        with pytest.raises(InvalidSetting, match=f"not {type(toolset).__name__}"):
            await engine.run(Turn([user("Hi")]), tools=toolset)
