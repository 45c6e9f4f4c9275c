"""Blocks and Turns: immutable values, their JSON form, and their forms in the APIs of providers."""

from kedge.turns.attachments import audio, file, image
from kedge.turns.blocks import (
    NATIVE_API,
    AssistantBlock,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    Source,
    SystemBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
    UserBlock,
    assistant,
    opaque,
    reasoning,
    system,
    tool_call,
    tool_result,
    user,
)
from kedge.turns.chat_messages import blocks_from_messages
from kedge.turns.frozen_json import FrozenMap, thaw
from kedge.turns.ids import new_id
from kedge.turns.json_codec import dump, dump_block, dumps, load, load_block, loads
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart
from kedge.turns.responses_items import block_from_item, item_from_block
from kedge.turns.turn import Turn, TurnDiff, diff, new_blocks_not_in, snapshot_block_ids

__all__ = [
    "NATIVE_API",
    "AssistantBlock",
    "Block",
    "FilePart",
    "FrozenMap",
    "ImagePart",
    "OpaqueBlock",
    "OpaquePart",
    "Part",
    "ReasoningBlock",
    "RefusalPart",
    "Source",
    "SystemBlock",
    "TextPart",
    "ToolCallBlock",
    "ToolResultBlock",
    "Turn",
    "TurnDiff",
    "UnknownBlock",
    "UserBlock",
    "assistant",
    "audio",
    "block_from_item",
    "blocks_from_messages",
    "diff",
    "dump",
    "dump_block",
    "dumps",
    "file",
    "image",
    "item_from_block",
    "load",
    "load_block",
    "loads",
    "new_blocks_not_in",
    "new_id",
    "opaque",
    "reasoning",
    "snapshot_block_ids",
    "system",
    "thaw",
    "tool_call",
    "tool_result",
    "user",
]
