"""Separate the content of a provider item from fields that the server adds to it.

An item that Kedge does not interpret is stored unchanged. Its provider id, its status and null members
are not visible to the model: they are ignored when items are compared, and are not sent again. The tables
list the exceptions.

The members of a known item that Kedge does not interpret are stored in the block's ``extra["item"]``. In input
(messages of the user, results) these members are content. In output, only ``RESENT_FIELDS`` and the members that
Anthropic's API requires are content.
"""

from collections.abc import Iterable
from typing import Any, cast

from kedge.turns.frozen_json import EMPTY, FrozenMap, freeze

ID_IS_CONTENT = frozenset(
    {
        "item_reference",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "server_tool_use",
    }
)
"""Item types whose ``id`` is referenced by other items, so that it is part of their content."""

STATUS_IS_CONTENT = frozenset({"apply_patch_call_output"})
"""Item types whose ``status`` is the result itself: whether the patch could be applied."""

RESENT_FIELDS = ("phase", "namespace", "caller", "async")
"""Fields of a model's message or call that matter to the model and are sent again unchanged."""
CHAT_MESSAGE = "chat_message"
"""The field with the members of a message that only some servers of the Chat Completions API have."""
CHAT_CALL = "chat_call"
"""The field with the members of a call that only some of these servers have."""
ANNOTATION_TYPES = frozenset(
    {"file_citation", "url_citation", "container_file_citation", "file_path"}
)
"""Types of annotations of a text that are sent again."""
NATIVE_KEY = "anthropic"
"""The field with the members of a call or of reasoning that only Anthropic's API has."""


def select_members(extra: FrozenMap, names: Iterable[str] | None = None) -> FrozenMap:
    """Return the uninterpreted members of a provider's item with these names, without nulls; all by default."""
    item = extra.get("item")
    if not isinstance(item, FrozenMap):
        return EMPTY
    if names is None:
        selected = item.keys() - {"id", "status"}
    else:
        selected = item.keys() & set(names)
    if not selected:
        return EMPTY
    return drop_nulls(FrozenMap({name: item[name] for name in selected}))


def select_annotations(extra: FrozenMap) -> tuple[FrozenMap, ...]:
    """Return the annotations of a text that have the form of the Responses API, without nulls; others are not sent."""
    annotations = extra.get("annotations")
    if not isinstance(annotations, tuple):
        return ()
    return tuple(
        drop_nulls(annotation)
        for annotation in cast("tuple[Any, ...]", annotations)
        if isinstance(annotation, FrozenMap)
        and annotation.get("type") in ANNOTATION_TYPES
        and annotation["type"] not in annotation  # where the Chat Completions API has the members
    )


def strip_server_fields(item: FrozenMap) -> FrozenMap:
    """Return the item without provider id, status and nulls, except where they are content."""
    kind = item.get("type")
    members = dict(item)
    if kind not in ID_IS_CONTENT and not is_image_reference(item):
        members.pop("id", None)
    if kind not in STATUS_IS_CONTENT:
        members.pop("status", None)
    return drop_nulls(FrozenMap(members))


def is_image_reference(item: FrozenMap) -> bool:
    """Return whether the item refers to a generated image by its id instead of containing it."""
    return item.get("type") == "image_generation_call" and item.get("result") is None


def drop_nulls(value: Any) -> Any:
    """Return the frozen value without members that are null; nulls in lists remain."""
    if isinstance(value, FrozenMap):
        return FrozenMap({k: drop_nulls(v) for k, v in value.items() if v is not None})
    if isinstance(value, tuple):
        return tuple(map(drop_nulls, cast("tuple[Any, ...]", value)))
    if hasattr(value, "to_json"):
        return drop_nulls(freeze(value.to_json()))
    return value
