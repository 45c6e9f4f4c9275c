"""Do a request's items fit what the server holds? Calls with their outputs, ids, reasoning.

A chain is coherent if every call that the client owns is answered, every output answers a call
that came before it, no item comes twice, and reasoning stands directly before the item it led to.
The first two range over the whole resolved chain, the last two over what the client sends.

    before = START.extend(context)            or the value kept for the previous response
    check_request(before, body_items, known)  raises the ApiError of what does not fit
    after = before.extend([*input, *output])  to be kept for the new response

``Coherence`` is a value: ``extend`` shares all but the new part, so one can be kept for every
stored response and the next turn pays for its own items only, however long the chain is.

``known`` is what the server can tell of items by their ids, wherever they are stored. The items
given to ``check_request`` are the client's own, before they are written out: an id that is there
is one that the client sent. ``resolve`` replaces references by the items they refer to.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kedge.server import errors
from kedge.server.wire import Item


@dataclass(frozen=True, slots=True)
class Call:
    """A type of call that the client must answer: its name in English and its keys."""

    words: str
    keys: tuple[str, ...] = ("call_id",)


@dataclass(frozen=True, slots=True)
class Output:
    """A type of answer: the type of call it answers, its name in English and its key."""

    call: str
    words: str
    key: str = "call_id"


CALLS: Mapping[str, Call] = {
    "function_call": Call("function call"),
    "custom_tool_call": Call("custom tool call"),
    "apply_patch_call": Call("apply patch call"),
    "shell_call": Call("shell call"),
    "computer_call": Call("computer call"),
    # Its output has no call_id: clients send the call's id or, as often, its call_id.
    "local_shell_call": Call("local shell call", ("call_id", "id")),
    "mcp_approval_request": Call("mcp approval request", ("id",)),
}
OUTPUTS: Mapping[str, Output] = {
    "function_call_output": Output("function_call", "function call output"),
    "custom_tool_call_output": Output("custom_tool_call", "custom tool call output"),
    "apply_patch_call_output": Output("apply_patch_call", "apply patch call output"),
    "shell_call_output": Output("shell_call", "shell call output"),
    "computer_call_output": Output("computer_call", "computer call output"),
    "local_shell_call_output": Output("local_shell_call", "local shell call output", "id"),
    "mcp_approval_response": Output(
        "mcp_approval_request", "mcp approval response", "approval_request_id"
    ),
}

NOT_BY_MODEL = frozenset(
    {*OUTPUTS, "additional_tools", "configuration_update", "compaction_trigger", "message"}
)
"""Types of items that no model writes, but for a message of the assistant."""


class Known(Protocol):
    """What the server can tell of an item by its id alone."""

    def item(self, id: str) -> Item | None:
        """Find a stored item."""

    def reasoning_before(self, id: str) -> str | None:
        """Name the reasoning item that stood directly before this one when a model wrote it."""


class Nothing:
    """A server that has stored nothing."""

    def item(self, id: str) -> Item | None:
        """Find nothing."""

    def reasoning_before(self, id: str) -> str | None:
        """Know of no reasoning."""


NOTHING = Nothing()


FEW = 8


@dataclass(frozen=True, slots=True)
class Ids:
    """A set that only grows, in versions that share what they have in common.

    The ids lie in several sets, small ones last; whenever eight of about the same size have come
    together they are merged, so a lookup asks a handful and each id is copied a handful of times.
    """

    sets: tuple[frozenset[str], ...] = ()

    def __contains__(self, id: str) -> bool:
        return any(id in one for one in self.sets)

    def plus(self, new: Collection[str]) -> "Ids":
        """Return a version that holds these too."""
        if not new:
            return self
        sets = (*self.sets, frozenset(new))
        while len(sets) >= FEW and len(sets[-FEW]) <= 2 * len(sets[-1]):
            sets = (*sets[:-FEW], frozenset[str]().union(*sets[-FEW:]))
        return Ids(sets)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call without an answer yet."""

    type: str
    keys: tuple[str, ...]
    may_wait: bool


Open = Mapping[tuple[str, str], OpenCall]
"""Calls without an answer yet, by their type and each of their keys."""

Orphan = tuple[str, str]
"""An output without a call: its type and its key."""


@dataclass(frozen=True, slots=True)
class Coherence:
    """What must be known of a context to judge what comes after it."""

    ids: Ids
    open: Open
    orphan: Orphan | None = None

    def extend(self, items: Sequence[Item]) -> "Coherence":
        """Return what is known after these items."""
        ids = [id for item in items if (id := item.get("id")) is not None]
        return Coherence(self.ids.plus(ids), *self.followed(items))

    def followed(self, items: Iterable[Item]) -> "tuple[Open, Orphan | None]":
        """Return which calls are open after these items, and the first output without a call."""
        open = dict(self.open)
        orphan = self.orphan
        for item in items:
            missed = follow(item, open)
            orphan = orphan or missed
        return open, orphan


def check_complete(open: Open, orphan: Orphan | None) -> None:
    """Refuse an output without a call, then a call without an output."""
    if orphan is not None:
        type, key = orphan
        raise errors.NO_TOOL_CALL(output=OUTPUTS[type].words, call_id=key)
    for call in open.values():
        if not call.may_wait:
            raise errors.NO_TOOL_OUTPUT(call=CALLS[call.type].words, call_id=call.keys[0])


def follow(item: Item, open: dict[tuple[str, str], OpenCall]) -> Orphan | None:
    """Open or close a call as this item does; name an output that answers none."""
    type: str = item.get("type") or "message"
    call = CALLS.get(type)
    if call is not None:
        keys = tuple(item[key] for key in call.keys if item.get(key))
        opened = OpenCall(type, keys, item.get("async") is True)
        open.update({(type, key): opened for key in keys})
    output = OUTPUTS.get(type)
    if output is not None:
        key: str = item[output.key]
        answered = open.get((output.call, key))
        if answered is None:
            return type, key
        for name in answered.keys:
            open.pop((output.call, name), None)
    if type == "compaction":
        # What came before is no longer there, so nothing of it can wait for an answer.
        open.clear()
    return None


START = Coherence(Ids(), {})
"""Before anything was said."""


def check_context(context: Sequence[Item], new: Sequence[Item], known: Known = NOTHING) -> None:
    """Check new items against a whole context; ``check_request`` does so without reading it."""
    check_request(START.extend(context), new, known)


def check_request(before: Coherence, new: Sequence[Item], known: Known = NOTHING) -> None:
    """Refuse a request whose items do not fit what came before."""
    check_ids(before, new)
    check_reasoning(new, known)
    check_trigger(new)
    check_complete(*before.followed(new))


def check_ids(before: Coherence, new: Sequence[Item]) -> None:
    """Refuse an item that is there already, in the context or among the new ones."""
    seen: set[str] = set()
    for item in new:
        id = item.get("id")
        # The id of a local shell's output is that of the call it answers.
        if id is None or item.get("type") == "local_shell_call_output":
            continue
        if id in seen or id in before.ids:
            raise errors.DUPLICATE_ITEM(id=id)
        seen.add(id)


def check_reasoning(new: Sequence[Item], known: Known) -> None:
    """Refuse reasoning that is unknown or leads nowhere, and an item that lost its reasoning."""
    for index, item in enumerate(new):
        id = item.get("id")
        if item.get("type") == "reasoning":
            if id is not None and not item.get("encrypted_content") and known.item(id) is None:
                raise errors.ITEM_NOT_FOUND(id=id)
            if index + 1 == len(new) or not by_model(new[index + 1]):
                raise errors.REASONING_LAST(id=id or "")
        elif id is not None and by_model(item):
            needed = known.reasoning_before(id)
            if needed is not None and (index == 0 or new[index - 1].get("id") != needed):
                type = item.get("type") or "message"
                raise errors.REASONING_MISSING(id=id, type=type, reasoning=needed)


def by_model(item: Item) -> bool:
    """Tell whether a model wrote this item."""
    type = item.get("type") or "message"
    return type not in NOT_BY_MODEL or item.get("role") == "assistant"


def check_trigger(new: Sequence[Item]) -> None:
    """Refuse a compaction trigger that is not the last item."""
    for index, item in enumerate(new):
        if item.get("type") == "compaction_trigger" and index + 1 < len(new):
            raise errors.TRIGGER_NOT_LAST(path=f"input[{index}]")


def check_sealed(new: Sequence[Item], opens: Callable[[str], Any]) -> None:
    """Refuse encrypted content that this server cannot read: ``opens`` gives None for it."""
    for item in new:
        content = item.get("encrypted_content")
        if content and opens(content) is None:
            raise errors.ENCRYPTED_CONTENT_REFUSED(content=f"{content[:4]}...")


def resolve(new: Sequence[Item], known: Known) -> Sequence[Item]:
    """Replace references by the items they refer to, or refuse the first that is not there."""
    if not any(_is_reference(item) for item in new):
        return new
    return [_referred(item["id"], known) if _is_reference(item) else item for item in new]


def _is_reference(item: Item) -> bool:
    type = item.get("type")
    return type == "item_reference" or (type is None and "role" not in item)


def _referred(id: str, known: Known) -> Item:
    found = known.item(id)
    if found is None:
        raise errors.ITEM_NOT_FOUND(id=id)
    return found
