"""Edits that client code may make to a Turn between two requests."""

import random
from collections.abc import Callable

from msgspec.structs import replace

from kedge import turns
from kedge.middleware import find_open_calls
from kedge.turns import Block, ImagePart, ToolCallBlock, Turn, assistant, system, tool_result, user
from kedge.turns.attachments import data_url

Edit = Callable[[Turn, random.Random], Turn]

PICTURE = data_url(b"\x89PNG\r\n\x1a\n", "image/png")
MEMBERS: dict[str, dict[str, tuple[object, ...]]] = {
    "assistant": {"phase": ("commentary", "final_answer", None)},
    "tool_call": {
        "namespace": ("one", "two", None),
        "async": (True, False),
        "caller": ({"type": "direct"}, {"type": "program", "caller_id": "p"}),
    },
    "tool_result": {"caller": ({"type": "direct"}, {"type": "program", "caller_id": "p"})},
}
"""Members that a server accepts in items of each kind, with several values."""


def answer_open_calls(turn: Turn) -> Turn:
    """Return the Turn with a result for every open tool call, as a tool loop would."""
    results = [tool_result(c.call_id, f"result of {c.name}") for c in find_open_calls(turn)]
    return turn.append(*results)


def _pick_block(turn: Turn, rng: random.Random) -> Block | None:
    return rng.choice(turn.blocks) if turn.blocks else None


def edit(turn: Turn, rng: random.Random) -> Turn:
    """Change the text of a block, with the same id and metadata."""
    block = _pick_block(turn, rng)
    match block:
        case turns.UserBlock():
            return turn.edit(block.id, replace(block, parts=user(f"Edited {rng.random()}").parts))
        case turns.AssistantBlock():
            new_parts = assistant(f"Edited {rng.random()}").parts
            return turn.edit(block.id, replace(block, parts=new_parts))
        case turns.ToolResultBlock():
            parts = user(f"Other result {rng.random()}").parts
            return turn.edit(block.id, replace(block, parts=parts))
        case ToolCallBlock():
            return turn.edit(block.id, replace(block, arguments='{"edited": true}'))
        case _:
            return turn


def edit_member(turn: Turn, rng: random.Random) -> Turn:
    """Change another member of a block that a request contains, with the same id, metadata and text."""
    block = _pick_block(turn, rng)
    if block is None:
        return turn
    members = MEMBERS.get(block.kind, {})
    match block:
        case turns.SystemBlock():
            block = replace(block, role=rng.choice(("system", "developer")))
        case turns.UserBlock():
            picture = ImagePart(PICTURE, rng.choice(("auto", "low", "high")))
            parts = [part for part in block.parts if not isinstance(part, ImagePart)]
            block = replace(block, parts=(*parts, picture))
        case ToolCallBlock() if rng.random() < 0.5:
            block = replace(block, name=rng.choice(("alpha", "beta")))
        case _ if members:
            name = rng.choice(list(members))
            item = {**block.extra.get("item", {}), name: rng.choice(members[name])}
            block = replace(block, extra={**block.extra, "item": item})
        case _:
            return turn
    return turn.edit(block.id, block)


def insert(turn: Turn, rng: random.Random) -> Turn:
    """Insert a new block at a random position."""
    block = rng.choice((user, assistant, system))(f"Inserted {rng.random()}")
    return turn.insert(rng.randrange(len(turn) + 1), block)


def remove(turn: Turn, rng: random.Random) -> Turn:
    """Remove a block."""
    block = _pick_block(turn, rng)
    return turn.remove(block.id) if block else turn


def swap(turn: Turn, rng: random.Random) -> Turn:
    """Swap two blocks."""
    blocks = list(turn.blocks)
    if len(blocks) > 1:
        a, b = rng.sample(range(len(blocks)), 2)
        blocks[a], blocks[b] = blocks[b], blocks[a]
    return Turn(blocks, data=turn.data)


def truncate(turn: Turn, rng: random.Random) -> Turn:
    """Remove all blocks after a random position."""
    return turn.take(rng.randrange(len(turn) + 1))


def summarize_old(turn: Turn, rng: random.Random) -> Turn:
    """Replace the older half by a summary."""
    middle = len(turn) // 2
    return Turn([user("Summary of what was."), *turn.blocks[middle:]], data=turn.data)


def rebuild(turn: Turn, rng: random.Random) -> Turn:
    """Return the same content with new ids."""
    return Turn([replace(block, id="") for block in turn.blocks], data=turn.data)


def drop_tags(turn: Turn, rng: random.Random) -> Turn:
    """Return the same content without metadata."""
    return Turn([replace(block, metadata={}, source=None) for block in turn.blocks], data=turn.data)


def add_metadata(turn: Turn, rng: random.Random) -> Turn:
    """Add custom metadata to a block."""
    block = _pick_block(turn, rng)
    return turn.edit(block.id, block.with_metadata(seen=True)) if block else turn


def json_round_trip(turn: Turn, rng: random.Random) -> Turn:
    """Serialize and load the Turn, as between two processes."""
    return turns.loads(turns.dumps(turn))


def replace_system_prompt(turn: Turn, rng: random.Random) -> Turn:
    """Replace the leading system blocks by another prompt."""
    body = Turn(turn.body, data=turn.data)
    return body.insert(0, system(f"Prompt {rng.random()}"))


EDITS: dict[str, Edit] = {
    each.__name__: each
    for each in (
        edit,
        edit_member,
        insert,
        remove,
        swap,
        truncate,
        summarize_old,
        rebuild,
        drop_tags,
        add_metadata,
        json_round_trip,
        replace_system_prompt,
    )
}
