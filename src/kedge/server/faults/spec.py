"""Fault specifications, and the set of active faults.

A fault is written as its name, its value and its options: ``cut_after_events=3``,
``status=429,retry_after=1,times=2``, ``forget_silently,echo=no``. ``KINDS`` lists them all. A fault
applies to requests for a response, at any endpoint; with ``times=k`` it is removed after the k-th
request that it changed.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from kedge.errors import InvalidFault
from kedge.server.error_response import JSON_HEADERS
from kedge.server.errors import PREVIOUS_RESPONSE_NOT_FOUND, ZERO_DATA_RETENTION
from kedge.text.json_text import encode


@dataclass(frozen=True, slots=True)
class ChainRejection:
    """A rejection; ``body`` is a template with the requested id."""

    status: int
    body: Mapping[str, Any]

    def build_response(self, id: str) -> Response:
        """Build the response for this id, which is a valid identifier."""
        body = encode(self.body).replace(b"{id}", id.encode())
        return Response(body, self.status, JSON_HEADERS)


def _error_body(message: str, *, param: str | None, code: str | int | None) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": param,
            "code": code,
        }
    }


NOT_FOUND: Mapping[str, ChainRejection] = {
    "openai": ChainRejection(400, PREVIOUS_RESPONSE_NOT_FOUND(id="{id}").body()),
    "vllm": ChainRejection(
        404, _error_body("Response with id '{id}' not found.", param="response_id", code=404)
    ),
    "ogx": ChainRejection(404, {"detail": "Response '{id}' not found."}),
    "smg": ChainRejection(
        400,
        _error_body(
            "Previous response with id '{id}' not found.",
            param=None,
            code="previous_response_not_found",
        ),
    ),
    "xai": ChainRejection(
        404,
        {"code": "not-found", "error": ZERO_DATA_RETENTION().message},
    ),
    # No real server uses this message, so only the code can be recognized.
    "code": ChainRejection(
        400,
        _error_body(
            "We have no recollection of that.", param=None, code="previous_response_not_found"
        ),
    ),
}
"""The rejection of an unknown previous response, by server."""

UNSUPPORTED: Mapping[str, ChainRejection] = {
    "llama.cpp": ChainRejection(
        400,
        {
            "error": {
                "code": 400,
                "message": "llama.cpp does not support 'previous_response_id'.",
                "type": "invalid_request_error",
            }
        },
    ),
    "zdr": ChainRejection(ZERO_DATA_RETENTION().status, ZERO_DATA_RETENTION().body()),
}
"""The rejection of any previous response, by servers that support none."""


@dataclass(frozen=True, slots=True)
class FaultArgument:
    """The value of a fault or of an option: its placeholder in the docs, its parser, its default."""

    placeholder: str
    parse: Callable[[str], Any]
    default: Any = None


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault: its description, its value and its options."""

    description: str
    value: FaultArgument | None = None
    options: Mapping[str, FaultArgument] = field(default_factory=dict[str, FaultArgument])


def _integer_parser(minimum: int, maximum: float, description: str) -> Callable[[str], int]:
    def parse_integer(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) <= maximum:
            raise ValueError(description)
        return int(text)

    return parse_integer


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise ValueError("a number of seconds up to 3600")
    return seconds


def _choice_argument(*choices: str, default: str | None = None) -> FaultArgument:
    def parse_choice(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return FaultArgument("|".join(choices), parse_choice, default)


COUNT_ARGUMENT = FaultArgument("N", _integer_parser(0, inf, "an integer, 0 or more"))
STATUS_ARGUMENT = FaultArgument("CODE", _integer_parser(400, 599, "an HTTP status from 400 to 599"))
SECONDS_ARGUMENT = FaultArgument("SECONDS", _parse_seconds)
ONLY_OPTION: Mapping[str, FaultArgument] = {"only": FaultArgument("TYPE", str)}

KINDS: Mapping[str, FaultKind] = {
    "cut_after_events": FaultKind(
        "The connection breaks after N events of a stream.", COUNT_ARGUMENT
    ),
    "cut_in_event": FaultKind(
        "The connection breaks in the middle of an event, after N complete ones.", COUNT_ARGUMENT
    ),
    "fail_after_events": FaultKind(
        "The stream ends with an error event after N events; the server was overloaded.",
        COUNT_ARGUMENT,
    ),
    "status": FaultKind(
        "The request is rejected with this HTTP status; retry_after sends the header of that name.",
        STATUS_ARGUMENT,
        {"retry_after": SECONDS_ARGUMENT},
    ),
    "slow_first_byte": FaultKind("Nothing is sent for this time.", SECONDS_ARGUMENT),
    "forget_all": FaultKind("All stored responses are deleted before the request is handled."),
    "forget_silently": FaultKind(
        "The model sees no earlier response, yet the status is 200; with echo=no the response does "
        "not name the previous response or conversation either, with echo=late it does at its start "
        "only, with echo=missing the member is absent.",
        options={"echo": _choice_argument("yes", "no", "late", "missing", default="yes")},
    ),
    "remember": FaultKind(
        "The model sees only the last N responses of the chain; the status is 200.",
        COUNT_ARGUMENT,
    ),
    "anonymous": FaultKind("The server does not identify itself to its clients."),
    "report_usage": FaultKind(
        "The usage is left out, is always the same, counts only the tokens of the request itself, "
        "counts cached tokens apart from the others, or does not count whitespace in the request.",
        _choice_argument("none", "constant", "new", "uncached", "trimmed"),
    ),
    "report_unstored": FaultKind("The response has store: false, whatever was requested."),
    "reuse_response_id": FaultKind(
        "Every response has the same id, which continues the newest of them."
    ),
    "hide_stored": FaultKind("A stored response cannot be fetched: GET is answered with 404."),
    "change_completed": FaultKind(
        "The completed event of a stream has another text, other arguments of calls, or one output "
        "item less than the events before it.",
        _choice_argument("text", "arguments", "missing"),
    ),
    "omit_output_index": FaultKind("The events of a stream have no output_index."),
    "stream_content_type": FaultKind(
        "A stream is sent without a content type, or as text/plain.",
        _choice_argument("none", "plain"),
    ),
    "repeat_after_finish": FaultKind(
        "The deltas of a chat completion are sent again after its finish_reason."
    ),
    "lone_surrogate": FaultKind(
        "The text of the answer has half of a surrogate pair in place of each '.', '!' and '?'."
    ),
    "duplicate_events": FaultKind(
        "Every event is sent twice, or those of one type only.", options=ONLY_OPTION
    ),
    "reorder_events": FaultKind(
        "Every event is swapped with the next, or those of one type only.", options=ONLY_OPTION
    ),
    "omit_call_id": FaultKind(
        "Calls have no call_id; outputs may name the call's item id instead."
    ),
    "empty_call_id": FaultKind(
        "Calls have an empty call_id; outputs may name the call's item id instead."
    ),
    "omit_call_name": FaultKind("Calls have no name."),
    "omit_response_id": FaultKind("The response has no id."),
    "refuse_encrypted_reasoning": FaultKind("A request with encrypted reasoning is rejected."),
    "refuse_previous_response_id": FaultKind(
        "A request with a previous_response_id is rejected with the message of this server.",
        _choice_argument(*UNSUPPORTED),
    ),
    "refuse_empty_input": FaultKind(
        "A request with empty input is rejected, also if it continues a response."
    ),
    "refuse_output_format": FaultKind(
        "A request for an answer that matches a JSON schema is rejected: the model has no structured output."
    ),
    "not_found": FaultKind(
        "An unknown previous response is rejected with the message and body of this server.",
        _choice_argument(*NOT_FOUND),
    ),
}
"""Every kind of fault, by name."""

TIMES_ARGUMENT = FaultArgument("K", _integer_parser(1, inf, "an integer, 1 or more"))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        name: Its kind.
        value: Its value, if its kind has one.
        options: Its options by name.
        times: The number of requests that it applies to; None for all.
    """

    name: str
    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    times: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))


def parse(spec: str) -> Fault:
    """Parse a fault specification.

    Args:
        spec: For example ``status=429,retry_after=1``.

    Returns:
        The fault.

    Raises:
        InvalidFault: If it is invalid; the message lists what is valid.
    """
    first, *rest = [part.strip() for part in spec.split(",")]
    name, *_ = first.partition("=")
    kind = KINDS.get(name)
    if kind is None:
        raise InvalidFault(f"unknown fault {name!r}; choose one of {', '.join(KINDS)}")
    value = _parse_argument(spec, first, kind.value)
    arguments = {**kind.options, "times": TIMES_ARGUMENT}
    options = {option: argument.default for option, argument in kind.options.items()}
    for part in rest:
        option, *_ = part.partition("=")
        if option not in arguments:
            raise InvalidFault(
                f"{spec!r}: {name} has no option {option!r}, only {', '.join(arguments)}"
            )
        options[option] = _parse_argument(spec, part, arguments[option])
    times = options.pop("times", None)
    return Fault(name, value, options, times)


def _parse_argument(spec: str, part: str, argument: FaultArgument | None) -> Any:
    name, equals, text = part.partition("=")
    if argument is None:
        if equals:
            raise InvalidFault(f"{spec!r}: {name} takes no value")
        return None
    if not text:
        raise InvalidFault(f"{spec!r}: {name} needs a value: {name}={argument.placeholder}")
    try:
        return argument.parse(text)
    except ValueError as problem:
        raise InvalidFault(f"{spec!r}: {name} must be {problem}, not {text!r}") from None


class Faults:
    """The active faults, at most one of each kind. They may change while the server runs.

    Args:
        specs: Specifications of the first faults.

    Raises:
        InvalidFault: If a specification is invalid.

    Example:
        >>> faults = Faults(["cut_after_events=3"])
        >>> faults.set("status=429,retry_after=1", times=2)
    """

    def __init__(self, specs: Iterable[str] = ()) -> None:
        self._armed: dict[str, Fault] = {}
        self._lock = threading.Lock()
        for spec in specs:
            self.set(spec)

    def set(self, spec: str, *, times: int | None = None) -> Fault:
        """Activate a fault, replacing an earlier one of its kind.

        Args:
            spec: The specification.
            times: The number of requests that it applies to; None for all.

        Returns:
            The fault.

        Raises:
            InvalidFault: If the specification is invalid.
        """
        fault = parse(spec if times is None else f"{spec},times={times}")
        with self._lock:
            self._armed[fault.name] = fault
        return fault

    def clear(self, name: str | None = None) -> None:
        """Deactivate faults.

        Args:
            name: The kind to deactivate; None for all.
        """
        with self._lock:
            if name is None:
                self._armed.clear()
            else:
                self._armed.pop(name, None)

    @property
    def armed(self) -> Mapping[str, Fault]:
        """The active faults by name; ``times`` counts down."""
        with self._lock:
            return dict(self._armed)

    def consume(self, fault: Fault) -> None:
        """Count down the ``times`` of a fault that applied to one request."""
        with self._lock:
            active = self._armed.get(fault.name)
            if active is None or active.times is None:
                return
            if active.times == 1:
                del self._armed[fault.name]
            else:
                self._armed[fault.name] = replace(active, times=active.times - 1)
