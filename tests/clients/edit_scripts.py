"""Random edit scripts for programs that resend their history, and the smallest upload for them.

A script is a list of steps: each may edit, drop or rewind existing turns, and then sends a
message. A program is described by two functions, so that the same scripts run on every framework.
"""

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kedge.chaining.rewrite import join_object, split_array, split_object

Send = Callable[[list[Any], str], Awaitable[tuple[str, list[Any]]]]
"""Resends a history with a new message; returns the text, and the messages of the new turn."""
Edit = Callable[[list[Any], str], list[Any]]
"""Returns the messages of a turn with a different user text."""

ANCHOR = {"previous_response_id": b'"resp_%b"' % (b"0" * 32)}
_OUTPUT_TYPES = ("function_call", "message")
_NOTE = " Here is a longer note about the rivers of the north, their bridges and their ports."


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program: change a turn, then send a message."""

    change: str
    turn: float
    """The position of the turn, as a fraction of the existing turns."""
    text: str


class SeenRequest(Protocol):
    """A request as the server recorded it."""

    raw: bytes
    context: Any


def make_script(seed: int, length: int) -> list[Step]:
    """Return a random script; equal seeds give equal scripts."""
    rng = random.Random(seed)
    changes = ["", "", "", "", "edit", "drop", "rewind"]
    messages = ["Say {0}." + _NOTE, "Please call add with a={0} and b=3", "What is {0}*5?"]
    return [
        Step(rng.choice(changes), rng.random(), rng.choice(messages).format(number))
        for number in range(length)
    ]


async def run_script(script: Sequence[Step], send: Send, edit: Edit) -> list[str]:
    """Run a script; return the texts that the program shows."""
    turns: list[list[Any]] = []
    texts: list[str] = []
    for number, step in enumerate(script):
        at = int(step.turn * len(turns))
        if turns and step.change == "edit":
            turns[at] = edit(turns[at], f"Say {number}, edited.{_NOTE}")
        elif turns and step.change == "drop":
            del turns[at]
        elif turns and step.change == "rewind":
            del turns[at + 1 :]
        text, turn = await send([item for each in turns for item in each], step.text)
        turns.append(turn)
        texts.append(text)
    return texts


def describe_item(item: Any) -> str:
    """Return what a model sees of an item, without ids and independent of the order of members."""
    seen = {k: v for k, v in item.items() if k not in ("id", "call_id", "status")}
    if "arguments" in seen:
        seen["arguments"] = json.loads(seen["arguments"])
    return json.dumps(seen, sort_keys=True)


def sum_best_bytes(requests: Sequence[SeenRequest]) -> int:
    """Return the bytes of the best plan for requests that were sent without Kedge.

    The best plan chains each request on the longest context that the server has for its beginning.
    """
    known: list[list[str]] = []
    total = 0
    for request in requests:
        context = [describe_item(item) for item in request.context]
        members = split_object(request.raw)
        elements = split_array(members["input"])
        covered = 0
        for earlier in known:
            if context[: len(earlier)] == earlier:
                covered = max(covered, _skip_output(request.context, len(earlier)))
        covered -= len(context) - len(elements)  # instructions are not part of the input
        delta = b"[%b]" % b",".join(elements[covered:])
        content = join_object({**members, "input": delta, **ANCHOR})
        total += len(content) if 0 < covered < len(elements) else len(request.raw)
        known.append(context)
    return total


def _skip_output(context: Sequence[Any], position: int) -> int:
    """Return the position after the output items that begin here."""
    while position < len(context) and _is_output(context[position]):
        position += 1
    return position


def _is_output(item: Any) -> bool:
    return item["type"] in _OUTPUT_TYPES and item.get("role", "assistant") == "assistant"
