"""How messages must follow each other in Anthropic's API.

Several messages of one role in a row count as one. Every call of an assistant's message is answered
at the beginning of the next message, once, and nothing else is answered there. Thoughts come back
as they were given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.server.messages import refusals

Block = Mapping[str, Any]

PLACES: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The types of blocks that each role may use."""

THOUGHTS = ("thinking", "redacted_thinking")


@dataclass(slots=True)
class Said:
    """What one role says until the other answers: its blocks, each with its place."""

    role: str
    index: int
    blocks: list[tuple[int, int, Block]] = field(default_factory=list[tuple[int, int, Block]])


def blocks_of(content: str | Sequence[Block]) -> Sequence[Block]:
    """Show any content as blocks."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def gather(messages: Sequence[Mapping[str, Any]]) -> list[Said]:
    """Join messages of one role in a row; refuse what is empty or out of place."""
    if not messages:
        raise refusals.NO_MESSAGES()
    joined: list[Said] = []
    for index, message in enumerate(messages):
        role: str = message["role"]
        if not message["content"]:
            raise refusals.EMPTY_MESSAGE(index=index)
        if not joined or joined[-1].role != role:
            joined.append(Said(role, index))
        for part, block in enumerate(blocks_of(message["content"])):
            _check_block(block, role, index, part)
            joined[-1].blocks.append((index, part, block))
    return joined


def _check_block(block: Block, role: str, index: int, part: int) -> None:
    if block["type"] not in PLACES[role]:
        raise refusals.WRONG_PLACE(index=index, part=part, type=block["type"], role=role)
    if block["type"] == "text" and not block["text"].strip():
        raise refusals.EMPTY_TEXT()


def check_order(said: Sequence[Said]) -> None:
    """Refuse a conversation whose calls and results do not pair up, or that has no question."""
    talk = [one for one in said if one.role != "system"]
    if not talk or talk[0].role != "user":
        raise refusals.FIRST_NOT_USER()
    waiting: dict[str, None] = {}
    asking: Said | None = None
    for one in talk:
        if one.role == "user":
            _check_results(one, waiting, asking)
        asking, waiting = one, _calls(one)
    if waiting and asking is not None:
        raise refusals.CALLS_UNANSWERED(index=asking.index, ids=", ".join(waiting))
    if talk[-1].role == "assistant":
        raise refusals.PREFILL()


def _calls(said: Said) -> dict[str, None]:
    calls: dict[str, None] = {}
    for index, part, block in said.blocks:
        if block["type"] == "tool_use":
            if block["id"] in calls:
                raise refusals.SAME_CALL_TWICE(index=index, part=part)
            calls[block["id"]] = None
    return calls


def _check_results(said: Said, waiting: Mapping[str, None], asking: Said | None) -> None:
    answered: set[str] = set()
    leading = True
    for index, part, block in said.blocks:
        if block["type"] != "tool_result":
            leading = False
            continue
        id: str = block["tool_use_id"]
        if id not in waiting:
            raise refusals.RESULT_WITHOUT_CALL(index=index, part=part, id=id)
        if id in answered:
            raise refusals.TWO_RESULTS(index=index, part=part, id=id)
        if leading:  # results that stand behind other blocks do not count
            answered.add(id)
    missing = [id for id in waiting if id not in answered]
    if missing and asking is not None:
        raise refusals.CALLS_UNANSWERED(index=asking.index, ids=", ".join(missing))


def check_thinking(said: Sequence[Said]) -> None:
    """Refuse to go on with a round of tools whose thought was left out."""
    last = said[-1]
    if len(said) < 2 or last.blocks[0][2]["type"] != "tool_result":
        return
    index, _, first = said[-2].blocks[0]
    if first["type"] not in THOUGHTS:
        raise refusals.THOUGHT_MISSING(index=index, type=first["type"])
