"""Random histories for the compaction tests, and an engine that needs no server."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st

from kedge.errors import ServerFailed
from kedge.events import Usage
from kedge.planning.digests import ToolPairing
from kedge.turns import Block, Turn, assistant, reasoning, system, tool_call, tool_result, user
from middleware.scripted_engine import ScriptedEngine

T = TypeVar("T")

TEXTS = st.text("abcdefghij é漢 ", min_size=1, max_size=120)


@st.composite
def exchanges(draw: st.DrawFn, number: int) -> list[Block]:
    """Return a strategy for one question with its tool calls, results and answer."""
    blocks: list[Block] = [user(f"question {number}: {draw(TEXTS)}")]
    for round_ in range(draw(st.integers(0, 2))):
        ids = [f"call_{number}_{round_}_{i}" for i in range(draw(st.integers(1, 3)))]
        if draw(st.booleans()):
            blocks.append(reasoning("hm", encrypted_content="abc"))
        blocks += [tool_call("look", {"for": draw(TEXTS)}, call_id=each) for each in ids]
        if draw(st.integers(0, 5)) == 0:  # an event while the tool was running
            blocks.append(user("an event"))
        blocks += [tool_result(each, draw(TEXTS) * 3) for each in draw(st.permutations(ids))]
    if draw(st.integers(0, 3)) == 0:
        blocks.append(system("from now on, be brief"))
    if draw(st.integers(0, 9)):
        blocks.append(assistant(f"answer {number}: {draw(TEXTS)}"))
    return blocks


@st.composite
def histories(draw: st.DrawFn, max_exchanges: int = 8) -> tuple[Block, ...]:
    """Return a strategy for complete exchanges, possibly followed by an unanswered tool call."""
    blocks: list[Block] = []
    for number in range(draw(st.integers(0, max_exchanges))):
        blocks += draw(exchanges(number))
    if draw(st.integers(0, 4)) == 0:
        blocks += [user("and now?"), tool_call("look", "{}", call_id="call_open")]
    return tuple(blocks)


def run_immediately(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("this should not have to wait")


def pairing_problems(blocks: tuple[Block, ...]) -> set[tuple[str, str]]:
    """Return the kind and call id of each call without a result and result without a call."""
    pairing = ToolPairing()
    for index, block in enumerate(blocks):
        pairing.add(index, block)
    return {(each.kind, each.call_id) for each in pairing.problems(blocks, 0)}


def make_exchanges(count: int, text: str = "some words to fill the line") -> tuple[Block, ...]:
    """Return a plain conversation of ``count`` exchanges."""
    blocks: list[Block] = []
    for i in range(count):
        blocks += [user(f"question {i} {text}"), assistant(f"answer {i} {text}")]
    return tuple(blocks)


class FunctionEngine(ScriptedEngine):
    """An engine whose answer is computed from each Turn by a function; ``fail`` is an error."""

    usage = Usage(10, 0, 5, 0, 15)

    def __init__(self, answer: Callable[[Turn], str]) -> None:
        super().__init__(*[self.make_answer] * 100)
        self.get_text = answer

    def make_answer(self, turn: Turn) -> list[Block]:
        """Return the answer to a Turn."""
        text = self.get_text(turn)
        if text == "fail":
            raise ServerFailed("no luck today", provider=self.name)
        return [assistant(text)]
