"""Versions of state bytes, and how an older one becomes the next.

Version 2 is what Kedge writes. Version 1 is the plain form: no checksum, no anchors, and the messages as
items of the Responses API. Nothing but JSON is needed to write it, which makes it the way to bring a
history in from elsewhere:

    {"version": 1, "provider": "openai", "processed_length": 2, "messages": [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello, Ada."}]}
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from kedge.turns import SystemBlock, block_from_item, dump_block

Json = dict[str, Any]

VERSION = 2
CHECKED_SINCE = 2
"""From this version on there is a checksum."""


def upgraded(members: Json, upgrades: Mapping[int, Callable[[Json], Json]] | None = None) -> Json:
    """The members of a state as the current version has them; ``upgrades`` goes step by step."""
    steps = UPGRADES if upgrades is None else upgrades
    while members["version"] in steps:
        version = members["version"]
        members = {**steps[version](members), "version": version + 1}
    return members


def _from_messages(members: Json) -> Json:
    """Version 1 to 2: messages become blocks. Leading system messages are not stored any more."""
    messages = members["messages"]
    if not isinstance(messages, list) or not all(map(_is_item, cast("list[object]", messages))):
        raise ValueError("messages are objects with a role or a type")
    blocks = [block_from_item(message) for message in cast("list[Json]", messages)]
    lead = 0
    while lead < len(blocks) and isinstance(blocks[lead], SystemBlock):
        lead += 1
    return {
        "provider": members["provider"],
        "processed_length": max(0, members["processed_length"] - lead),
        "id": "",
        "blocks": [{"as_is": dump_block(block)} for block in blocks[lead:]],
        "responses": [],
        "anchors": [],
    }


def _is_item(message: object) -> bool:
    return isinstance(message, dict) and ("role" in message or "type" in message)


UPGRADES: Mapping[int, Callable[[Json], Json]] = {1: _from_messages}
"""What each older version needs to become the next."""
