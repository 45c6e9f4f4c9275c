"""The normal form in which the laws compare a server's context with the content of a Turn.

Independent of ``kedge.planning.digests`` and ``kedge.turns.responses_items``: an item and a block
have the same tuple if a model sees no difference. Reasoning and leading system text have no normal form.
A compaction item created by a server is replaced by the items it was made from.
"""

import json
from collections.abc import Iterable
from typing import Any, TypeGuard

import normalization
from kedge.turns import Block, OpaqueBlock, ReasoningBlock, Turn
from normalization import NormalForm
from planning import reference_server
from planning.reference_server import ID_IS_CONTENT, STATUS_IS_CONTENT, Item, ReferenceServer


def normalize_items(items: list[Item], server: ReferenceServer) -> list[NormalForm]:
    """Return the normal forms of the items a server uses, with compactions expanded."""
    forms: list[NormalForm] = []
    for item in reference_server.effective_items(items):
        replaced = server.compacted.get(item.get("encrypted_content", ""))
        if item["type"] == "compaction" and replaced is not None:
            forms += normalize_items(replaced, server)
        elif item["type"] != "reasoning":
            forms.append(normalize_item(item))
    return forms


def normalize_turn(turn: Turn, servers: Iterable[ReferenceServer]) -> list[NormalForm]:
    """Return the normal forms of a Turn, starting at the last compaction added by the caller."""
    contents = {content for memory in servers for content in memory.compacted}
    reported: list[NormalForm] = []
    for block in turn.body:
        if is_compaction(block):
            if block.item["encrypted_content"] not in contents:
                reported = [normalize_block(block)]
        elif not isinstance(block, ReasoningBlock):
            reported.append(normalize_block(block))
    return reported


def normalize_visible(turn: Turn) -> list[NormalForm]:
    """Return the normal forms of all body blocks except reasoning, without expanding compactions."""
    return [normalize_block(block) for block in turn.body if not isinstance(block, ReasoningBlock)]


def is_compaction(block: Block) -> TypeGuard[OpaqueBlock]:
    """Return whether a block is a compaction item."""
    return isinstance(block, OpaqueBlock) and block.item["type"] == "compaction"


def normalize_item(item: Item) -> NormalForm:
    """Return the normal form of an item, with the content of one that Kedge does not interpret."""
    form = normalization.normalize_item(item)
    return (*form, _normalize_opaque(item)) if form[0] == "opaque" else form


def normalize_block(block: Block) -> NormalForm:
    """Return the normal form of a block, which equals that of its item."""
    form = normalization.normalize_block(block)
    if not isinstance(block, OpaqueBlock):
        return form
    return (*form, _normalize_opaque(_thaw(block.item)))


def _normalize_opaque(item: Item) -> str:
    hidden = {
        *(() if item["type"] in ID_IS_CONTENT else ("id",)),
        *(() if item["type"] in STATUS_IS_CONTENT else ("status",)),
    }
    visible = {name: value for name, value in item.items() if name not in hidden}
    return json.dumps(_without_nulls(visible), sort_keys=True)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_nulls(member) for name, member in value.items() if member is not None
        }
    return value


def _thaw(value: Any) -> Any:
    if hasattr(value, "items"):
        return {name: _thaw(member) for name, member in value.items()}
    return [_thaw(member) for member in value] if isinstance(value, tuple) else value
