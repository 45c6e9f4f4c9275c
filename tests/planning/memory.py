"""A server's memory, as small as it can be: responses, what each remembers, and what is refused.

It deals in wire items only and imports nothing of Kedge, so it can judge what planning sends. It is a
strict server: it resolves ``previous_response_id`` itself, forgets what is past its time together
with everything chained on it, pairs calls with results over the whole context, verifies every
piece of encrypted content, and knows which reasoning stood before which item. One thing it does
silently, as some servers do: past ``remembers`` responses it no longer sees the beginning.
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


class Refused(Exception):
    """The server does not accept a request."""


class Gone(Refused):
    """The server does not know the previous response (any more)."""


@dataclass
class Response:
    """What the server keeps of one response."""

    id: str
    parent: "Response | None"
    items: list[Item]
    output: list[Item]
    created_at: float
    status: str = "completed"
    stored: bool = True
    forgotten: bool = False


@dataclass
class Memory:
    """One server: its scope, how long it keeps what, and how far back it sees."""

    scope: str
    word: Callable[[], str]
    """Makes a word that was never said before."""
    retention: float = 30 * DAY
    remembers: int | None = None
    responses: dict[str, Response] = field(default_factory=dict[str, Response])
    conversations: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    issued: dict[str, tuple[Item, str]] = field(default_factory=dict[str, tuple[Item, str]])
    """Items by their id, with the response that made them."""
    before: dict[str, str] = field(default_factory=dict[str, str])
    """The item directly before one in its response's output, where that is reasoning."""
    after: dict[str, str] = field(default_factory=dict[str, str])
    folded: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    """What a compaction item stands for, by its encrypted content."""
    sources: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """The words that encrypted content was made from."""

    def context(self, previous: str, now: float) -> list[Item]:
        """All that the server sees of a response and what came before it."""
        chain: list[Response] = []
        at: Response | None = self._alive(previous, now)
        while at is not None:
            chain.append(at)
            if self._is_gone(at, now):
                raise Gone(at.id)
            at = at.parent
        seen = chain if self.remembers is None else chain[: self.remembers]
        return effective([item for response in reversed(seen) for item in response.items])

    def respond(
        self,
        given: list[Item],
        *,
        previous: str = "",
        conversation: str = "",
        now: float,
        store: bool = True,
        status: str = "completed",
        shape: tuple[str, ...] = ("message",),
    ) -> Response:
        """Answer a request with an output of this shape, or refuse it."""
        parent = self._alive(previous, now) if previous else None
        context = self.context(previous, now) if previous else []
        if conversation:
            context = effective(self.conversations[conversation])
        if not given and not context:
            raise Refused("nothing to answer")
        self._check_new(given, {item["id"] for item in context if "id" in item})
        check_pairs(effective([*context, *given]))
        name = f"resp_{self.scope}_{len(self.responses)}"
        output = self._write(shape, name, [*context, *given])
        if status == "incomplete":
            output = output[:-1]
        response = Response(name, parent, [*given, *output], output, now, status, store)
        self.responses[name] = response
        if conversation and store and status == "completed":
            self.conversations[conversation] += response.items
        return response

    def open_conversation(self) -> str:
        """Begin a conversation object."""
        name = f"conv_{len(self.conversations)}"
        self.conversations[name] = []
        return name

    def _alive(self, name: str, now: float) -> Response:
        response = self.responses.get(name)
        if response is None or self._is_gone(response, now):
            raise Gone(name)
        if response.status != "completed":
            raise Refused(f"{name} never finished")
        return response

    def _is_gone(self, response: Response, now: float) -> bool:
        too_old = now >= response.created_at + self.retention
        return response.forgotten or not response.stored or too_old

    def _check_new(self, given: list[Item], known: set[str]) -> None:
        for index, item in enumerate(given):
            check_plain(item)
            following = given[index + 1] if index + 1 < len(given) else {}
            if item.get("encrypted_content"):
                self._check_sealed(item, following)
            name = item.get("id")
            if name is None or item["type"] in ID_IS_CONTENT:
                continue
            if name in known:
                raise Refused(f"duplicate item {name}")
            known.add(name)
            if name not in self.issued:
                raise Refused(f"no item {name} of mine")
            needed = self.before.get(name)
            if needed and (not index or given[index - 1].get("id") != needed):
                raise Refused(f"{name} came without its reasoning {needed}")

    def _check_sealed(self, item: Item, following: Item) -> None:
        content = item["encrypted_content"]
        if item["type"] == "compaction":
            if content not in self.folded and not content.startswith("by hand"):
                raise Refused("a compaction that is not mine")
            return
        mine = self.issued.get(item.get("id", ""))
        if mine is None or mine[0] != item:
            raise Refused("encrypted content that is not mine, or not as I wrote it")
        needed = self.after.get(item["id"])
        if needed is None or following.get("id") != needed:
            raise Refused(f"{item['id']} came without the item that follows it")

    def _write(self, shape: tuple[str, ...], response: str, seen: list[Item]) -> list[Item]:
        output: list[Item] = []
        for kind in shape:
            item = self._item(kind, [*effective(seen), *output])
            if output and output[-1]["type"] == "reasoning":
                self.before[item["id"]] = output[-1]["id"]
                self.after[output[-1]["id"]] = item["id"]
            self.issued[item["id"]] = (item, response)
            output.append(item)
        return output

    def _item(self, kind: str, seen: list[Item]) -> Item:
        word, name = self.word(), f"it_{self.scope}_{len(self.issued)}"
        match kind:
            case "message":
                content = [{"type": "output_text", "text": f"answer {word}", "annotations": []}]
                item: Item = {"type": "message", "role": "assistant", "content": content}
            case "reasoning":
                sealed = f"sealed {word}"
                self.sources[sealed] = words(i for i in seen if i["type"] != "reasoning")
                summary = [{"type": "summary_text", "text": f"thought {self.word()}"}]
                item = {"type": "reasoning", "summary": summary, "encrypted_content": sealed}
            case "compaction":
                folded = f"folded {word}"
                self.folded[folded] = effective(seen)
                self.sources[folded] = words(i for i in seen if i["type"] != "reasoning")
                item = {"type": "compaction", "encrypted_content": folded}
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


def effective(items: list[Item]) -> list[Item]:
    """What is left of items: those from the newest compaction on."""
    for index in range(len(items) - 1, -1, -1):
        if items[index]["type"] == "compaction":
            return items[index:]
    return items


def check_pairs(items: list[Item]) -> None:
    """Refuse a context in which a call has no result, or a result no call."""
    waiting: set[tuple[str, str]] = set()
    for item in items:
        kind = item["type"]
        if kind in CALLS:
            key = (kind, item[CALLS[kind]])
            if key in waiting:
                raise Refused(f"called twice: {key}")
            waiting.add(key)
        elif kind in RESULTS:
            call, member = RESULTS[kind]
            if (call, item[member]) not in waiting:
                raise Refused(f"no call for {item[member]}")
            waiting.remove((call, item[member]))
    if waiting:
        raise Refused(f"no result for {min(waiting)}")


def check_plain(value: Any) -> None:
    """Refuse nulls anywhere, and the status of an item."""
    if value is None:
        raise Refused("a null")
    if isinstance(value, dict):
        if "status" in value and value.get("type") not in STATUS_IS_CONTENT:
            raise Refused("a status")
        for member in value.values():
            check_plain(member)
    elif isinstance(value, list):
        for member in value:
            check_plain(member)


def words(items: Iterable[Any]) -> frozenset[str]:
    """All marked words in these values."""
    return frozenset(re.findall(r"<\d+>", json.dumps(list(items))))
