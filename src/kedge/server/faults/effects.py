"""What each fault does: to a request before it is answered, to what is recalled, to the answer.

The connection itself is the business of ``wire``, the order of events that of ``frames``.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.server import errors
from kedge.server.access import Exchange
from kedge.server.coherence import CALLS, OUTPUTS
from kedge.server.faults.frames import Duplicated, Reordered, Step
from kedge.server.faults.language import Fault
from kedge.server.faults.refusals import NOT_FOUND, UNSUPPORTED
from kedge.server.wire import encode

Body = dict[str, Any]
Headers = list[tuple[bytes, bytes]]

MOST_NAMELESS = 10_000


@dataclass(slots=True)
class Asked:
    """One request that faults may strike: its bytes, its JSON, and what has struck it so far.

    ``nameless`` are the calls whose ``call_id`` was withheld, by the ids of their items.
    """

    raw: bytes
    body: Body
    forget: Callable[[], None]
    spend: Callable[[Fault], None]
    nameless: dict[str, str]
    exchange: Exchange | None = None
    struck: set[str] = field(default_factory=set[str])

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


def _refused(error: errors.ApiError) -> Answer:
    return Answer(error.status, error.body())


def _status(fault: Fault, _: Asked) -> Answer:
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
    return Answer(fault.value, refused.body(), headers)


def _forget_all(fault: Fault, asked: Asked) -> None:
    asked.strike(fault)
    asked.forget()


def _refuse_previous(fault: Fault, asked: Asked) -> Answer | None:
    if asked.body.get("previous_response_id") is None:
        return None
    refusal = UNSUPPORTED[fault.value]
    return Answer(refusal.status, refusal.body)


def _refuse_empty(_: Fault, asked: Asked) -> Answer | None:
    if asked.body.get("input") not in ([], ""):
        return None
    return _refused(errors.NOTHING_TO_ANSWER())


def _refuse_encrypted(_: Fault, asked: Asked) -> Answer | None:
    for item in _items(asked.body.get("input")):
        if item.get("type") == "reasoning" and item.get("encrypted_content"):
            content = f"{item['encrypted_content'][:4]}..."
            return _refused(errors.ENCRYPTED_CONTENT_REFUSED(content=content))
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
    changed = False
    for item in _said(event):
        if _is_call(item) and item.get("call_id"):
            asked.nameless[item["id"]] = item.pop("call_id")
            if len(asked.nameless) > MOST_NAMELESS:
                del asked.nameless[next(iter(asked.nameless))]
            if empty:
                item["call_id"] = ""
            changed = True
    return changed


def _omit_response_id(event: Body) -> bool:
    return event.get("response", {}).pop("id", None) is not None


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
