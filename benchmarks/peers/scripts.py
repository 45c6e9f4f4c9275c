"""The scripts that every library runs: what a user and a program do, and what happens to the server."""

import random
from collections.abc import Callable
from typing import Any

Operation = dict[str, Any]
_NOTE = "Here is a note about the rivers of the north, their bridges and their ports, for later."
_TOOL = "Please call add with a={} and b=3"


def send(text: str) -> Operation:
    """Send a message."""
    return {"op": "send", "text": text}


def _make_operations(rng: random.Random, turns: int, tools: bool = False) -> list[Operation]:
    """Messages of ordinary length; with tools, every third calls one."""
    texts = (
        _TOOL.format(rng.randint(1, 99))
        if tools and turn % 3 == 2
        else f"Remember item {rng.randint(100, 999)}. {_NOTE}"
        for turn in range(turns)
    )
    return [send(text) for text in texts]


def plain(rng: random.Random) -> list[Operation]:
    """Twelve messages."""
    return _make_operations(rng, 12)


def tools(rng: random.Random) -> list[Operation]:
    """Twelve messages, four of which call a tool."""
    return _make_operations(rng, 12, tools=True)


def redaction(rng: random.Random) -> list[Operation]:
    """A secret is removed from two old messages, and the conversation continues."""
    operations = _make_operations(rng, 10, tools=True)
    operations[0] = send(f"My key is sk-{rng.randint(1000, 9999)}. {_NOTE}")
    redacted = f"My key is [redacted]. {_NOTE}"
    return [
        *operations[:6],
        {"op": "edit", "turn": 0, "text": redacted},
        {"op": "edit", "turn": 3, "text": redacted},
        *operations[6:],
    ]


def edit(rng: random.Random) -> list[Operation]:
    """Every third turn an earlier message is changed; the turns after it stay."""
    operations: list[Operation] = []
    for number, each in enumerate(_make_operations(rng, 12, tools=True)):
        if number and number % 3 == 0:
            text = f"Remember {number}, edited. {_NOTE}"
            operations.append({"op": "edit", "turn": rng.randrange(number // 3) * 3, "text": text})
        operations.append(each)
    return operations


def undo(rng: random.Random) -> list[Operation]:
    """Every third message is taken back."""
    operations: list[Operation] = []
    for number, each in enumerate(_make_operations(rng, 12)):
        operations.append(each)
        if number % 3 == 2:
            operations.append({"op": "undo"})
    return operations


def fork(rng: random.Random) -> list[Operation]:
    """A second branch from the middle, and back to the first."""
    operations = _make_operations(rng, 12, tools=True)
    return [
        *operations[:6],
        {"op": "fork", "turn": 3},
        *operations[6:9],
        {"op": "switch"},
        *operations[9:],
    ]


def summary(rng: random.Random) -> list[Operation]:
    """The first turns are replaced by a summary."""
    operations = _make_operations(rng, 12, tools=True)
    compact = {"op": "summarize", "turns": 6, "text": f"So far we talked about items. {_NOTE}"}
    return [*operations[:8], compact, *operations[8:]]


def expiry(rng: random.Random) -> list[Operation]:
    """The server deletes all stored responses, as after its retention period."""
    operations = _make_operations(rng, 10)
    return [*operations[:5], {"server": "forget"}, *operations[5:]]


def restart(rng: random.Random) -> list[Operation]:
    """The program ends and starts again."""
    operations = _make_operations(rng, 10, tools=True)
    return [*operations[:5], {"op": "restart"}, *operations[5:]]


def forgetful(rng: random.Random) -> list[Operation]:
    """A server of an unknown kind that accepts every id and remembers nothing."""
    return [{"server": "fault", "fault": "forget_silently"}, *_make_operations(rng, 10)]


def random_edits(rng: random.Random) -> list[Operation]:
    """Twenty messages with changes of every kind between them."""
    operations: list[Operation] = []
    turns = 0
    for each in _make_operations(rng, 20, tools=True):
        change = rng.choice(["", "", "edit", "undo"]) if turns > 1 else ""
        if change == "edit":
            text = f"Remember {turns}, edited. {_NOTE}"
            operations.append({"op": "edit", "turn": rng.randrange(turns), "text": text})
        elif change == "undo":
            operations.append({"op": "undo"})
            turns -= 1
        operations.append(each)
        turns += 1
    return operations


SCRIPTS: dict[str, Callable[[random.Random], list[Operation]]] = {
    "plain": plain,
    "tools": tools,
    "redaction": redaction,
    "edit": edit,
    "undo": undo,
    "fork": fork,
    "summary": summary,
    "random edits": random_edits,
    "restart": restart,
    "expiry": expiry,
    "forgetful server": forgetful,
}


def make_script(name: str, seed: int = 0) -> list[Operation]:
    """Make a script; equal seeds give equal scripts."""
    return SCRIPTS[name](random.Random(f"{name} {seed}"))


def make_long_script(turns: int) -> list[Operation]:
    """A conversation without changes, for the CPU time per turn."""
    return _make_operations(random.Random(0), turns)


def make_stream_script(answers: int, word_count: int) -> list[Operation]:
    """Streamed answers, for the CPU time per event."""
    return [{"op": "stream", "text": f"Write {word_count} words"} for _ in range(answers)]
