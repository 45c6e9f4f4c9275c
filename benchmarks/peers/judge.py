"""Compares what the model saw with what the program meant, and counts bytes against the best plan.

The judge knows the script, so it knows the conversation as the program has it. The server records the
context that the model saw for each request. A request is incoherent where the two differ and its answer was
used; an answer that the library discarded, to send the request again, reached nobody. Instructions and
ids are not compared: libraries send the first in different ways.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.server.request_log import RecordedRequest

Item = dict[str, Any]
_FIXED = {
    "model": "practice",
    "instructions": "Be brief.",
    "tools": [
        {
            "type": "function",
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        }
    ],
}
_ANCHOR = {"previous_response_id": f"resp_{'0' * 32}"}


@dataclass
class Score:
    """What a script showed."""

    requests: int = 0
    incoherent: int = 0
    errors: int = 0
    bytes: int = 0
    best: int = 0
    notes: list[str] = field(default_factory=list[str])

    def add(self, other: "Score") -> None:
        """Add the figures of another script."""
        self.requests += other.requests
        self.incoherent += other.incoherent
        self.errors += other.errors
        self.bytes += other.bytes
        self.best += other.best
        self.notes += other.notes


class Judge:
    """Follows one script."""

    def __init__(self) -> None:
        self.score = Score()
        self._turns: list[list[Item]] = []
        self._branch: list[list[Item]] = []
        self._remembers = True
        self._stored: list[list[Item]] = []  # contexts of stored responses, with their output

    def forget(self, *, for_good: bool) -> None:
        """The server has deleted its responses, or does not use any from now on."""
        self._stored = []
        self._remembers = not for_good

    def apply(self, operation: dict[str, Any]) -> None:
        """Apply a change to the conversation."""
        match operation:
            case {"op": "edit", "turn": turn, "text": text}:
                self._turns[turn] = [_user(text), *self._turns[turn][1:]]
            case {"op": "undo"}:
                del self._turns[-1]
            case {"op": "fork", "turn": turn}:
                self._branch = list(self._turns)
                del self._turns[turn:]
            case {"op": "switch"}:
                self._turns = list(self._branch)
            case {"op": "summarize", "turns": turns, "text": text}:
                self._turns[:turns] = [[_user(text)]]
            case _:
                pass

    def judge_turn(
        self,
        text: str,
        requests: Sequence[RecordedRequest],
        outputs: Sequence[list[Item]],
        error: str,
    ) -> None:
        """Judge the requests of a turn.

        Args:
            text: The message of the user.
            requests: All requests of the turn, also rejected ones.
            outputs: The output items of each request that was answered.
            error: The error that reached the program.
        """
        history = [item for turn in self._turns for item in turn]
        turn = [_user(text)]
        with_context = [request for request in requests if request.context is not None]
        contexts = [_describe_all(request.context or ()) for request in with_context]
        for number, (context, output) in enumerate(zip(contexts, outputs, strict=True)):
            turn += _results(context, turn)
            expected = [*history, *turn]
            answered = _describe_all(output)
            self.score.best += self._best_bytes(expected)
            if self._remembers:
                self._stored.append([*context, *answered])
            # An answer is used if it ends the turn or if its calls are run; others were discarded and repeated.
            last = number == len(with_context) - 1
            if last or _results(contexts[number + 1], [*turn, *answered]):
                self.score.incoherent += context != expected
                turn += answered
        self.score.requests += len(with_context)
        self.score.bytes += sum(len(request.raw) for request in requests)
        if error:
            self.score.errors += 1
            self.score.notes.append(error)
        else:
            self._turns.append(turn)

    def _best_bytes(self, expected: list[Item]) -> int:
        covered = max(
            (len(stored) for stored in self._stored if expected[: len(stored)] == stored), default=0
        )
        anchor = _ANCHOR if covered else {}
        body = {**_FIXED, **anchor, "input": expected[covered:]}
        return len(json.dumps(body, separators=(",", ":")).encode())


def _user(text: str) -> Item:
    return {"role": "user", "content": text}


def _describe(item: Any) -> Item | None:
    """What a model sees of an item; None for instructions and reasoning."""
    match item:
        case {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id}:
            return {
                "type": "function_call",
                "name": name,
                "arguments": json.dumps(json.loads(arguments), sort_keys=True),
                "call_id": call_id,
            }
        case {"type": "function_call_output", "call_id": call_id, "output": output}:
            return {"type": "function_call_output", "call_id": call_id, "output": _text(output)}
        case {"role": "user" | "assistant" as role, "content": content}:
            return {"role": role, "content": _text(content)}
        case _:
            return None


def _describe_all(items: Iterable[Any]) -> list[Item]:
    return [item for item in map(_describe, items) if item is not None]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _results(context: list[Item], turn: list[Item]) -> list[Item]:
    """The results of the calls of this turn which the program sent."""
    open_calls = {item["call_id"] for item in turn if item.get("type") == "function_call"}
    open_calls -= {item["call_id"] for item in turn if item.get("type") == "function_call_output"}
    return [
        item
        for item in context
        if item.get("type") == "function_call_output" and item["call_id"] in open_calls
    ]
