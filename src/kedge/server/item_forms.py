"""Items, and the normalization of input items: every item in its full form, with an id and a status.

Clients send items in short forms (a bare string, a message without a type, content as a string).
They are normalized once, before they are stored, so that the model, the list of input items and the
next turn all read the same form.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from kedge.server.storage.ids import make_item_id

Item = Mapping[str, Any]
"""One item of a conversation in the format of the API: a message, a call, an output, reasoning…"""

TYPES_WITHOUT_STATUS = frozenset(
    {"reasoning", "compaction", "additional_tools", "configuration_update"}
)
"""Types of items that have no ``status``."""


def normalize_items(items: Sequence[Item], key: str) -> list[Item]:
    """Return the items in full form; ids of items without one are derived from ``key``."""
    return [_normalize_item(item, key, number) for number, item in enumerate(items)]


def _normalize_item(item: Item, key: str, number: int) -> Item:
    type: str = item.get("type") or "message"
    full: dict[str, Any] = {
        "id": item.get("id") or make_item_id(type, key, number),
        "type": type,
    }
    full |= {name: value for name, value in item.items() if value is not None}
    if type == "message":
        full["content"] = _normalize_content(full["role"], full.get("content", ""))
    if type not in TYPES_WITHOUT_STATUS:
        full.setdefault("status", "completed")
    return full


def _normalize_content(role: str, content: object) -> list[Mapping[str, Any]]:
    if not isinstance(content, str):
        return [_normalize_part(part) for part in cast("list[Mapping[str, Any]]", content)]
    if role == "assistant":
        return [build_output_text(content)]
    return [{"type": "input_text", "text": content}]


def _normalize_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] != "output_text":
        return part
    return {"annotations": [], "logprobs": [], **part}


def build_output_text(text: str) -> dict[str, Any]:
    """Build a text part of a model's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
