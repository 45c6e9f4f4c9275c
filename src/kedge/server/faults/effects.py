"""What each fault does: to a request before it is answered, to what is recalled, to the answer.

The connection itself is the business of ``wire``, the order of events that of ``frames``.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.types import Scope

from kedge.server import errors
from kedge.server.access import Exchange
from kedge.server.coherence import CALLS, OUTPUTS
from kedge.server.faults.frames import Duplicated, Reordered, Step
from kedge.server.faults.language import Fault
from kedge.server.faults.refusals import NOT_FOUND, UNSUPPORTED
from kedge.server.messages.order import THOUGHTS
from kedge.server.messages.refusals import SIGNATURE_REFUSED
from kedge.server.refusing import refusal
from kedge.server.wire import encode

Body = dict[str, Any]
Headers = list[tuple[bytes, bytes]]

MOST_NAMELESS = 10_000


RESPONSES = "/v1/responses"
"""The one endpoint that remembers."""


@dataclass(slots=True)
class Asked:
    """One request that faults may strike: its bytes, its JSON, and what has struck it so far.

    ``nameless`` are the calls whose ``call_id`` was withheld, by the ids of their items.
    """

    scope: Scope
    raw: bytes
    body: Body
    forget: Callable[[], None]
    spend: Callable[[Fault], None]
    nameless: dict[str, str]
    exchange: Exchange | None = None
    struck: set[str] = field(default_factory=set[str])

    @property
    def remembers(self) -> bool:
        """Whether the endpoint has a memory that can fail."""
        return self.scope["path"] == RESPONSES

    def strike(self, fault: Fault) -> Fault:
        """Note, once, that a fault changes this request or its answer."""
        if fault.name not in self.struck:
            self.struck.add(fault.name)
            self.spend(fault)
        return fault

    def record(self) -> None:
        """Let the record of this request show what was sent, not what the server was given."""
        if self.exchange is not None:
            self.exchange.raw, self.exchange.body = self.raw, self.body

    def request(self) -> bytes:
        """Return what the server shall read: an output may name a nameless call by its item."""
        given = self.body.get("input")
        if not self.nameless or not isinstance(given, list):
            return self.raw
        # A call that the client replays under the item's id needs no help.
        replayed = {
            str(item.get("call_id")) for item in _items(self.body["input"]) if _is_call(item)
        }
        items = [self._named(item, replayed) for item in cast("list[Any]", given)]
        with suppress(ValueError):  # what cannot be written the server will refuse as it came
            return encode(self.body | {"input": items})
        return self.raw

    def _named(self, item: Any, replayed: set[str]) -> Any:
        if not isinstance(item, dict):
            return item
        held = cast("Body", item)
        output = OUTPUTS.get(str(held.get("type")))
        given = str(output and held.get(output.key))
        name = None if given in replayed else self.nameless.get(given)
        return held if output is None or name is None else held | {output.key: name}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer given in the server's place."""

    status: int
    body: Mapping[str, Any]
    headers: Headers = field(default_factory=Headers)


def _refused(asked: Asked, error: errors.ApiError) -> Answer:
    return Answer(*refusal(asked.scope, error))


def _status(fault: Fault, asked: Asked) -> Answer:
    after = fault.options["retry_after"]
    situations = {
        429: errors.RATE_LIMITED(seconds=f"{after or 0:g}"),
        500: errors.SERVER_FAILED(),
    }
    refused = situations.get(fault.value) or errors.ApiError(
        "The server refuses this request on purpose.",
        status=fault.value,
        type="server_error" if fault.value >= 500 else "invalid_request_error",
    )
    headers = [] if after is None else [(b"retry-after", f"{after:g}".encode())]
    return Answer(fault.value, refusal(asked.scope, refused)[1], headers)


def _forget_all(fault: Fault, asked: Asked) -> None:
    if asked.remembers:
        asked.strike(fault)
        asked.forget()


def _refuse_previous(fault: Fault, asked: Asked) -> Answer | None:
    if not asked.remembers or asked.body.get("previous_response_id") is None:
        return None
    refusal = UNSUPPORTED[fault.value]
    return Answer(refusal.status, refusal.body)


def _refuse_empty(_: Fault, asked: Asked) -> Answer | None:
    if not asked.remembers or asked.body.get("input") not in ([], ""):
        return None
    return _refused(asked, errors.NOTHING_TO_ANSWER())


def _refuse_encrypted(_: Fault, asked: Asked) -> Answer | None:
    for item in _items(asked.body.get("input")):
        if item.get("type") == "reasoning" and item.get("encrypted_content"):
            content = f"{item['encrypted_content'][:4]}..."
            return _refused(asked, errors.ENCRYPTED_CONTENT_REFUSED(content=content))
    for index, message in enumerate(_items(asked.body.get("messages"))):
        for part, block in enumerate(_items(message.get("content"))):
            if block.get("type") in THOUGHTS:
                return _refused(asked, SIGNATURE_REFUSED(index=index, part=part))
    return None


BEFORE: Mapping[str, Callable[[Fault, Asked], Answer | None]] = {
    "status": _status,
    "forget_all": _forget_all,
    "refuse_previous_response_id": _refuse_previous,
    "refuse_empty_input": _refuse_empty,
    "refuse_encrypted_reasoning": _refuse_encrypted,
}
"""What may happen instead of an answer, in this order."""


def _items(value: object) -> list[Body]:
    held = cast("list[Any]", value) if isinstance(value, list) else []
    return [item for item in held if isinstance(item, dict)]


def _is_call(item: Body) -> bool:
    return str(item.get("type")) in CALLS


def _said(event: Body) -> Iterable[Body]:
    """List the output items that an event carries, alone or within its response."""
    yield from _items([event.get("item")])
    yield from _items(event.get("response", {}).get("output"))


def _unname(event: Body, asked: Asked, *, empty: bool) -> bool:
    """Take the name off every call, under whichever key this API gives it."""
    changed = False
    for call, key in _calls(event):
        if not call.get(key):
            continue
        if asked.remembers:
            asked.nameless[call["id"]] = call[key]
            if len(asked.nameless) > MOST_NAMELESS:
                del asked.nameless[next(iter(asked.nameless))]
        del call[key]
        if empty:
            call[key] = ""
        changed = True
    return changed


def _calls(event: Body) -> Iterable[tuple[Body, str]]:
    """List the calls that an event or a whole answer carries, each with the key of its name."""
    for item in _said(event):
        if _is_call(item):
            yield item, "call_id"
    whole: Body = event.get("response", event)
    for choice in _items(whole.get("choices")):
        for message in _items([choice.get("delta"), choice.get("message")]):
            yield from ((call, "id") for call in _items(message.get("tool_calls")))
    for block in _items([event.get("content_block"), *_items(whole.get("content"))]):
        if block.get("type") == "tool_use":
            yield block, "id"


def _omit_response_id(event: Body) -> bool:
    told = "choices" in event  # a chunk of a chat is the answer itself
    holder = event if told else event.get("response") or event.get("message") or {}
    return holder.pop("id", None) is not None


def _omit_echo(fault: Fault, event: Body) -> bool:
    if fault.options["echo"] == "yes" or not event.get("response", {}).get("previous_response_id"):
        return False
    event["response"]["previous_response_id"] = None
    return True


EDITS: Mapping[str, Callable[[Fault, Asked, Body], bool]] = {
    "forget_silently": lambda fault, _, event: _omit_echo(fault, event),
    "omit_call_id": lambda _, asked, event: _unname(event, asked, empty=False),
    "empty_call_id": lambda _, asked, event: _unname(event, asked, empty=True),
    "omit_response_id": lambda _, __, event: _omit_response_id(event),
}
"""What may happen to the content of an answer; each says whether it changed anything."""


def not_found_as(fault: Fault | None, asked: Asked, body: Body) -> Answer | None:
    """Say in another server's words that the previous response was not found, if it was not."""
    code = cast("Body", body.get("error") or {}).get("code")
    if fault is None or code != errors.PREVIOUS_RESPONSE_NOT_FOUND.code:
        return None
    refusal = NOT_FOUND[asked.strike(fault).value]
    return Answer(refusal.status, refusal.filled(asked.body["previous_response_id"]))


MEMORY: Mapping[str, Callable[[Fault], int]] = {
    "forget_silently": lambda _: 0,
    "remember": lambda fault: fault.value,
}
"""How many responses of the past are left to see."""

ORDER: Mapping[str, Callable[[Fault], Step]] = {
    "duplicate_events": lambda fault: Duplicated(fault.options["only"]),
    "reorder_events": lambda fault: Reordered(fault.options["only"]),
}
"""What may happen to the events of a stream."""
