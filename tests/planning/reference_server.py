"""A minimal model of a Responses server: responses, their stored context, and rejected requests.

It handles wire items only and imports nothing from Kedge, so it is independent of the planner. It is
strict: it resolves ``previous_response_id`` itself, drops expired responses together with everything
chained on them, pairs calls with results over the complete context, verifies all encrypted content,
and checks which reasoning precedes which item. As some servers do, it silently ignores responses
beyond ``max_depth``.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Item = dict[str, Any]
DAY = 24 * 3600.0

CALLS = {
    "function_call": "call_id",
    "custom_tool_call": "call_id",
    "shell_call": "call_id",
    "mcp_approval_request": "id",
}
RESULTS = {
    "function_call_output": ("function_call", "call_id"),
    "custom_tool_call_output": ("custom_tool_call", "call_id"),
    "shell_call_output": ("shell_call", "call_id"),
    "mcp_approval_response": ("mcp_approval_request", "approval_request_id"),
}
ID_IS_CONTENT = frozenset({"mcp_approval_request"})
STATUS_IS_CONTENT = frozenset({"apply_patch_call_output"})


class RequestRejected(Exception):
    """An error for a request that the server does not accept."""


class ResponseNotFound(RequestRejected):
    """An error for a previous response that is unknown or no longer stored."""


@dataclass
class StoredResponse:
    """A response as stored by the server."""

    id: str
    parent: "StoredResponse | None"
    items: list[Item]
    output: list[Item]
    created_at: float
    status: str = "completed"
    stored: bool = True
    forgotten: bool = False


@dataclass
class ReferenceServer:
    """A server with a scope, a retention time and a maximum chain depth."""

    scope: str
    new_word: Callable[[], str]
    """Returns a unique word."""
    retention: float = 30 * DAY
    max_depth: int | None = None
    responses: dict[str, StoredResponse] = field(default_factory=dict[str, StoredResponse])
    conversations: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    issued_items: dict[str, tuple[Item, str]] = field(default_factory=dict[str, tuple[Item, str]])
    """Items by id, with the id of the response that created them."""
    reasoning_before: dict[str, str] = field(default_factory=dict[str, str])
    """The id of the reasoning directly before an item in its response's output."""
    item_after: dict[str, str] = field(default_factory=dict[str, str])
    compacted: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    """The items a compaction item replaces, by its encrypted content."""
    source_words: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """The marked words that encrypted content was made from."""

    def context(self, previous: str, now: float) -> list[Item]:
        """Return the items the server uses for a response and its ancestors."""
        chain: list[StoredResponse] = []
        at: StoredResponse | None = self._get_response(previous, now)
        while at is not None:
            chain.append(at)
            if self._is_unavailable(at, now):
                raise ResponseNotFound(at.id)
            at = at.parent
        visible = chain if self.max_depth is None else chain[: self.max_depth]
        return effective_items([item for response in reversed(visible) for item in response.items])

    def respond(
        self,
        input_items: list[Item],
        *,
        previous: str = "",
        conversation: str = "",
        now: float,
        store: bool = True,
        status: str = "completed",
        shape: tuple[str, ...] = ("message",),
    ) -> StoredResponse:
        """Answer a request with output of this shape, or reject the request."""
        parent = self._get_response(previous, now) if previous else None
        context = self.context(previous, now) if previous else []
        if conversation:
            context = effective_items(self.conversations[conversation])
        if not input_items and not context:
            raise RequestRejected("nothing to answer")
        self._check_input(input_items, {item["id"] for item in context if "id" in item})
        check_pairs(effective_items([*context, *input_items]))
        name = f"resp_{self.scope}_{len(self.responses)}"
        output = self._build_output(shape, name, [*context, *input_items])
        if status == "incomplete":
            output = output[:-1]
        response = StoredResponse(name, parent, [*input_items, *output], output, now, status, store)
        self.responses[name] = response
        if conversation and store and status == "completed":
            self.conversations[conversation] += response.items
        return response

    def open_conversation(self) -> str:
        """Create a conversation object and return its id."""
        name = f"conv_{len(self.conversations)}"
        self.conversations[name] = []
        return name

    def _get_response(self, name: str, now: float) -> StoredResponse:
        response = self.responses.get(name)
        if response is None or self._is_unavailable(response, now):
            raise ResponseNotFound(name)
        if response.status != "completed":
            raise RequestRejected(f"{name} never finished")
        return response

    def _is_unavailable(self, response: StoredResponse, now: float) -> bool:
        too_old = now >= response.created_at + self.retention
        return response.forgotten or not response.stored or too_old

    def _check_input(self, input_items: list[Item], known: set[str]) -> None:
        for index, item in enumerate(input_items):
            check_no_nulls(item)
            following = input_items[index + 1] if index + 1 < len(input_items) else {}
            if item.get("encrypted_content"):
                self._check_encrypted(item, following)
            name = item.get("id")
            if name is None or item["type"] in ID_IS_CONTENT:
                continue
            if name in known:
                raise RequestRejected(f"duplicate item {name}")
            known.add(name)
            if name not in self.issued_items:
                raise RequestRejected(f"no item {name} of mine")
            needed = self.reasoning_before.get(name)
            if needed and (not index or input_items[index - 1].get("id") != needed):
                raise RequestRejected(f"{name} came without its reasoning {needed}")

    def _check_encrypted(self, item: Item, following: Item) -> None:
        content = item["encrypted_content"]
        if item["type"] == "compaction":
            if content not in self.compacted and not content.startswith("by hand"):
                raise RequestRejected("a compaction that is not mine")
            return
        own = self.issued_items.get(item.get("id", ""))
        if own is None or own[0] != item:
            raise RequestRejected("encrypted content that is not mine, or not as I wrote it")
        needed = self.item_after.get(item["id"])
        if needed is None or following.get("id") != needed:
            raise RequestRejected(f"{item['id']} came without the item that follows it")

    def _build_output(
        self, shape: tuple[str, ...], response: str, context: list[Item]
    ) -> list[Item]:
        output: list[Item] = []
        for kind in shape:
            item = self._build_item(kind, [*effective_items(context), *output])
            if output and output[-1]["type"] == "reasoning":
                self.reasoning_before[item["id"]] = output[-1]["id"]
                self.item_after[output[-1]["id"]] = item["id"]
            self.issued_items[item["id"]] = (item, response)
            output.append(item)
        return output

    def _build_item(self, kind: str, context: list[Item]) -> Item:
        word, name = self.new_word(), f"it_{self.scope}_{len(self.issued_items)}"
        match kind:
            case "message":
                content = [{"type": "output_text", "text": f"answer {word}", "annotations": []}]
                item: Item = {"type": "message", "role": "assistant", "content": content}
            case "reasoning":
                encrypted = f"sealed {word}"
                self.source_words[encrypted] = marked_words(
                    i for i in context if i["type"] != "reasoning"
                )
                summary = [{"type": "summary_text", "text": f"thought {self.new_word()}"}]
                item = {"type": "reasoning", "summary": summary, "encrypted_content": encrypted}
            case "compaction":
                compacted = f"folded {word}"
                self.compacted[compacted] = effective_items(context)
                self.source_words[compacted] = marked_words(
                    i for i in context if i["type"] != "reasoning"
                )
                item = {"type": "compaction", "encrypted_content": compacted}
            case "function_call":
                item = {"type": kind, "call_id": f"call{word}", "name": "look", "arguments": word}
            case "custom_tool_call":
                item = {"type": kind, "call_id": f"call{word}", "name": "run", "input": word}
            case "shell_call":
                item = {"type": kind, "call_id": f"call{word}", "action": {"commands": [word]}}
            case "mcp_approval_request":
                item = {"type": kind, "name": "ask", "arguments": word, "server_label": "s"}
            case _:
                item = {"type": kind, "action": {"query": word, "detail": None}}
        return {**item, "id": name}


def effective_items(items: list[Item]) -> list[Item]:
    """Return the items from the newest compaction on."""
    for index in range(len(items) - 1, -1, -1):
        if items[index]["type"] == "compaction":
            return items[index:]
    return items


def check_pairs(items: list[Item]) -> None:
    """Reject a context in which a call has no result, or a result no call."""
    waiting: set[tuple[str, str]] = set()
    for item in items:
        kind = item["type"]
        if kind in CALLS:
            key = (kind, item[CALLS[kind]])
            if key in waiting:
                raise RequestRejected(f"called twice: {key}")
            waiting.add(key)
        elif kind in RESULTS:
            call, member = RESULTS[kind]
            if (call, item[member]) not in waiting:
                raise RequestRejected(f"no call for {item[member]}")
            waiting.remove((call, item[member]))
    if waiting:
        raise RequestRejected(f"no result for {min(waiting)}")


def check_no_nulls(value: Any) -> None:
    """Reject nulls anywhere, and an item's status."""
    if value is None:
        raise RequestRejected("a null")
    if isinstance(value, dict):
        if "status" in value and value.get("type") not in STATUS_IS_CONTENT:
            raise RequestRejected("a status")
        for member in value.values():
            check_no_nulls(member)
    elif isinstance(value, list):
        for member in value:
            check_no_nulls(member)


def marked_words(items: Iterable[Any]) -> frozenset[str]:
    """Return all marked words in these values."""
    return frozenset(re.findall(r"<\d+>", json.dumps(list(items))))
