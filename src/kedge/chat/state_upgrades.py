"""Upgrades of chat states written by older versions.

Version 1 is the plain form: a list of messages that any program may have written. They are items of the
Responses API or messages of the Chat Completions API, in any mixture. Any other message makes the state
unusable: if it were passed on, the provider would reject it at every call, and the conversation could never
continue.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from kedge.turns import SystemBlock, dump_block
from kedge.turns.chat_messages import blocks_from_message

Json = dict[str, Any]


def upgrade_members(
    members: Json, upgrades: Mapping[int, Callable[[Json], Json]] | None = None
) -> Json:
    """Return the members of a state in the form of the current version.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: The members cannot be converted.
    """
    steps = UPGRADES if upgrades is None else upgrades
    while members["version"] in steps:
        version = members["version"]
        members = {**steps[version](members), "version": version + 1}
    return members


def _upgrade_from_v1(members: Json) -> Json:
    """Convert version 1 to 2: messages become blocks. Leading system messages are no longer stored."""
    messages = members["messages"]
    if not isinstance(messages, list) or not all(map(_is_message, cast("list[object]", messages))):
        raise ValueError("messages are objects with a role or a type")
    converted = [blocks_from_message(each) for each in cast("list[Json]", messages)]
    processed = members["processed_length"]
    if type(processed) is not int or not 0 <= processed <= len(converted):
        raise ValueError("processed_length is not a number of messages")
    seen = sum(map(len, converted[:processed]))
    blocks = [block for each in converted for block in each]
    lead = 0
    while lead < len(blocks) and isinstance(blocks[lead], SystemBlock):
        lead += 1
    return {
        "provider": members["provider"],
        "processed_length": max(0, seen - lead),
        "id": "",
        "blocks": [{"as_is": dump_block(block)} for block in blocks[lead:]],
        "responses": [],
        "anchors": [],
    }


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and ("role" in message or "type" in message)


UPGRADES: Mapping[int, Callable[[Json], Json]] = {1: _upgrade_from_v1}
"""The conversion from each older version to the next."""
