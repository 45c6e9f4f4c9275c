"""Check that the items of a request fit the stored context: calls and outputs, ids, reasoning.

A chain is coherent if every call that the client must answer has an output, every output has an earlier
call, no item occurs twice, and reasoning is directly before the item that the model wrote after it. The
first two rules apply to the complete resolved chain, the last two to the items that the client sends.

    before = EMPTY_COHERENCE.extend(context)   or the value stored for the previous response
    check_request(before, body_items, lookup)  raises the ApiError of the first violation
    after = before.extend([*input, *output])   to be stored for the new response

``Coherence`` is an immutable value, and ``extend`` shares everything except the new part. So one can be
stored for every response, and the cost of the next turn depends on its items, not on the length of the chain.

The lookup finds stored items by id. ``check_request`` gets the items before they are normalized: an id in them was sent
by the client.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from kedge.server import errors
from kedge.server.object_forms import Item

CALL_TYPES: Mapping[str, tuple[str, ...]] = {
    "function_call": ("call_id",),
    "custom_tool_call": ("call_id",),
    "apply_patch_call": ("call_id",),
    "shell_call": ("call_id",),
    "computer_call": ("call_id",),
    # Its output has no call_id: clients send the call's id or, as often, its call_id.
    "local_shell_call": ("call_id", "id"),
    "mcp_approval_request": ("id",),
}
"""The types of calls that the client must answer, and their keys."""

OUTPUT_TYPES: Mapping[str, tuple[str, str]] = {
    **{f"{call}_output": (call, "call_id") for call in CALL_TYPES if call.endswith("_call")},
    "local_shell_call_output": ("local_shell_call", "id"),
    "mcp_approval_response": ("mcp_approval_request", "approval_request_id"),
}
"""The types of call outputs, each with the type of its call, and its key."""

CLIENT_ITEM_TYPES = frozenset(
    {*OUTPUT_TYPES, "additional_tools", "configuration_update", "compaction_trigger", "message"}
)
"""Types of items that no model writes, except messages of the assistant."""


class ItemLookup(Protocol):
    """Protocol of lookups of stored items by id."""

    def find_item(self, id: str) -> Item | None:
        """Return a stored item, or None."""

    def find_reasoning_before(self, id: str) -> str | None:
        """Return the id of the reasoning item directly before this item in its model's output."""


MAX_LISTED_CALLS = 5
"""The maximum number of open calls in an error."""

_get_id = methodcaller("get", "id")


class IdSet(Struct, frozen=True):
    """The ids of the items of a context: those of its last part, and the set of the context before it.

    Every ancestor of a context stays in memory with it, so separate complete sets would take memory that grows with
    the square of the length of a chain. A lookup visits every part. That is cheap, because only ids that a client
    sent are looked up.
    """

    own: frozenset[str] = frozenset()
    before: "IdSet | None" = None

    def __contains__(self, id: str) -> bool:
        part: IdSet | None = self
        while part is not None:
            if id in part.own:
                return True
            part = part.before
        return False

    def add(self, ids: Collection[str]) -> "IdSet":
        """Return a set that also contains these ids."""
        if not ids:
            return self
        return IdSet(frozenset(ids), self)


class OpenCall(Struct, frozen=True):
    """A call that has no output yet."""

    keys: tuple[str, ...]
    is_async: bool


OpenCalls = Mapping[tuple[str, str], OpenCall]
"""Calls without an output, by their type and each of their keys."""

OrphanOutput = tuple[str, str]
"""An output without a call: its type and its key."""


class Coherence(NamedTuple):
    """The properties of a context that are needed to check the items after it."""

    ids: IdSet
    open_calls: OpenCalls
    orphan: OrphanOutput | None = None

    def extend(self, items: Sequence[Item]) -> "Coherence":
        """Return the value for the context extended by these items."""
        ids = filter(None, map(_get_id, items))
        return Coherence(self.ids.add(tuple(ids)), *self.track_calls(items))

    def track_calls(self, items: Iterable[Item]) -> "tuple[OpenCalls, OrphanOutput | None]":
        """Return the calls that are open after these items, and the first output without a call."""
        open = dict(self.open_calls)
        orphan = self.orphan
        for item in items:
            unmatched = track_call(item, open)
            orphan = orphan or unmatched
        return open, orphan


def check_outputs_called(
    orphan: OrphanOutput | None,
    open_calls: OpenCalls,
    new: Sequence[Item],
    lookup: ItemLookup,
) -> None:
    """Reject an output without a call; the error has the key that was meant, if it is known."""
    if orphan is None:
        return
    type, key = orphan
    hint = find_meant_call(orphan, open_calls, new, lookup)
    if hint:
        hint = f" {hint}"
    raise errors.NO_TOOL_CALL(output=type.replace("_", " "), call_id=key, hint=hint)


def find_meant_call(
    orphan: OrphanOutput, open_calls: OpenCalls, new: Sequence[Item], lookup: ItemLookup
) -> str:
    """Return a sentence with the open call that an output without a call is for, or with all open calls.

    Clients send the id of the item of a call in place of its ``call_id``, or an output of another type.
    """
    output_type, key = orphan
    item = next((item for item in new if item.get("id") == key), None) or lookup.find_item(key)
    if item is not None and item.get("type") in CALL_TYPES:
        type = item["type"]
        member = CALL_TYPES[type][0]
        if (type, item.get(member)) in open_calls:
            return f"{key} is the id of the item of this call; use its {member}, {item[member]}."
    for type, open_key in open_calls:
        if open_key == key and type == OUTPUT_TYPES[output_type][0]:
            return "Its call comes after it."
        if open_key == key:
            return f"{key} is a {type}, whose output has another type."
    ids = list(dict.fromkeys(call.keys[0] for call in open_calls.values()))
    if not ids:
        return ""
    names = ids[:MAX_LISTED_CALLS]
    if len(ids) > MAX_LISTED_CALLS:
        names.append("…")
    return f"Calls without an output: {', '.join(names)}."


def check_calls_answered(open_calls: OpenCalls) -> None:
    """Reject a call without an output."""
    for (type, _), call in open_calls.items():
        if not call.is_async:
            raise errors.NO_TOOL_OUTPUT(call=type.replace("_", " "), call_id=call.keys[0])


def track_call(item: Item, open_calls: dict[tuple[str, str], OpenCall]) -> OrphanOutput | None:
    """Update the open calls with one item, and return it if it is an output without a call."""
    type: str = item.get("type") or "message"
    if type in CALL_TYPES:
        keys = tuple(item[key] for key in CALL_TYPES[type] if item.get(key))
        opened = OpenCall(keys, item.get("async") is True)
        open_calls.update({(type, key): opened for key in keys})
    if type in OUTPUT_TYPES:
        call, member = OUTPUT_TYPES[type]
        key: str = item[member]
        answered = open_calls.get((call, key))
        if answered is None:
            return type, key
        for name in answered.keys:
            open_calls.pop((call, name), None)
    if type == "compaction":
        # Earlier items are removed, so none of their calls can be open.
        open_calls.clear()
    return None


EMPTY_COHERENCE = Coherence(IdSet(), {})
"""The value for an empty context."""


def check_request(before: Coherence, new: Sequence[Item], lookup: ItemLookup) -> None:
    """Reject a request whose items do not fit the context before them."""
    check_duplicate_ids(before, new)
    check_reasoning(new, lookup)
    for index, item in enumerate(new[:-1]):
        if item.get("type") == "compaction_trigger":
            raise errors.COMPACTION_TRIGGER_NOT_LAST(path=f"input[{index}]")
    open_calls, orphan = before.track_calls(new)
    check_outputs_called(orphan, open_calls, new, lookup)
    check_calls_answered(open_calls)


def check_duplicate_ids(before: Coherence, new: Sequence[Item]) -> None:
    """Reject an item that occurs twice, in the context or among the new items."""
    ids: set[str] = set()
    for item in new:
        id = item.get("id")
        # The output of a local shell call has the id of its call.
        if id is None or item.get("type") == "local_shell_call_output":
            continue
        if id in ids or id in before.ids:
            raise errors.DUPLICATE_ITEM(id=id)
        ids.add(id)


def check_reasoning(new: Sequence[Item], lookup: ItemLookup) -> None:
    """Reject unknown reasoning, reasoning without its item, and an item without its reasoning."""
    for index, item in enumerate(new):
        id = item.get("id")
        if item.get("type") == "reasoning":
            if (
                id is not None
                and not item.get("encrypted_content")
                and lookup.find_item(id) is None
            ):
                raise errors.ITEM_NOT_FOUND(id=id)
            if index + 1 == len(new) or not is_model_output(new[index + 1]):
                raise errors.REASONING_WITHOUT_ITEM(id=id or "")
        elif id is not None and is_model_output(item):
            needed = lookup.find_reasoning_before(id)
            if needed is not None and (index == 0 or new[index - 1].get("id") != needed):
                type = item.get("type") or "message"
                raise errors.REASONING_MISSING(id=id, type=type, reasoning=needed)


def is_model_output(item: Item) -> bool:
    """Return whether a model wrote this item."""
    type = item.get("type") or "message"
    return type not in CLIENT_ITEM_TYPES or item.get("role") == "assistant"


def check_encrypted_content(new: Sequence[Item], decrypt: Callable[[str], Any]) -> None:
    """Reject encrypted content for which ``decrypt`` returns None."""
    for item in new:
        content = item.get("encrypted_content")
        if content and decrypt(content) is None:
            raise errors.INVALID_ENCRYPTED_CONTENT(content=f"{content[:4]}...")


def resolve_references(new: Sequence[Item], lookup: ItemLookup) -> Sequence[Item]:
    """Replace references by the stored items, and reject the first that is not found."""
    if not any(map(is_reference, new)):
        return new
    return [_find_referenced(item["id"], lookup) if is_reference(item) else item for item in new]


def is_reference(item: Item) -> bool:
    """Return whether an input item refers to a stored item by its id."""
    type = item.get("type")
    return type == "item_reference" or (type is None and "role" not in item)


def _find_referenced(id: str, lookup: ItemLookup) -> Item:
    item = lookup.find_item(id)
    if item is None:
        raise errors.ITEM_NOT_FOUND(id=id)
    return item
