"""Fault injection: make the local server misbehave as real servers do.

A fault is written as its name, its value and its options: ``cut_after_events=3``,
``status=429,retry_after=1,times=2``, ``forget_silently,echo=no``. ``KINDS`` lists them all. A fault
applies to requests for a response, at any endpoint; with ``times=k`` it is removed after the k-th
request that it changed. ``middleware`` applies the active faults to requests, ``effects`` are what they change. See
docs/faults.md.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from kedge.errors import InvalidFault
from kedge.server.faults import effects
from kedge.server.faults.effects import Body, Fault, FaultedRequest, StreamStep


class FaultArgument(Struct, frozen=True):
    """The value of a fault or of an option: its placeholder in the docs, what it must be, parser, bounds, default."""

    placeholder: str
    expected: str
    parse: Callable[[str], Any]
    minimum: float = 0
    maximum: float = inf
    default: Any = None


class FaultKind(Struct, frozen=True):
    """One kind of fault: its description, its value, its options and its effect.

    The effect may be a response instead of that of the server (``override``), a change of a response or of each event
    of its stream (``edit``), a change of the order of events (``step``), or
    the number of earlier responses that the model sees (``history``). ``middleware`` has the effects on the connection.
    """

    description: str
    value: FaultArgument | None = None
    options: Mapping[str, FaultArgument] = {}
    override: Callable[[Fault, FaultedRequest], Response | None] | None = None
    edit: Callable[[Fault, FaultedRequest, Body], None] | None = None
    step: Callable[[Fault], StreamStep] | None = None
    history: Callable[[Fault], int] | None = None
    is_memory: bool = False
    """Whether it is a fault of memory: while one is active, the server does not identify itself."""


def _choice_argument(*choices: str, default: str | None = None) -> FaultArgument:
    values = {choice: choice for choice in choices}
    placeholder, expected = "|".join(choices), f"one of {', '.join(choices)}"
    return FaultArgument(placeholder, expected, values.__getitem__, default=default)


def _parse_integer(text: str) -> int:
    return int(text) if text.isdecimal() else -1


COUNT_ARGUMENT = FaultArgument("N", "an integer, 0 or more", _parse_integer)
STATUS_ARGUMENT = FaultArgument("CODE", "an HTTP status from 400 to 599", _parse_integer, 400, 599)
SECONDS_ARGUMENT = FaultArgument("SECONDS", "a number of seconds up to 3600", float, 0, 3600)
ONLY_OPTION: Mapping[str, FaultArgument] = {"only": FaultArgument("TYPE", "a type", str)}

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
        override=effects.reject_with_status,
    ),
    "slow_first_byte": FaultKind("Nothing is sent for this time.", SECONDS_ARGUMENT),
    "forget_all": FaultKind(
        "All stored responses are deleted before the request is handled.",
        override=effects.forget_all,
        is_memory=True,
    ),
    "forget_silently": FaultKind(
        "The model sees no earlier response, yet the status is 200; with echo=no the response does "
        "not name the previous response or conversation either, with echo=late it does at its start "
        "only, with echo=missing the member is absent.",
        options={"echo": _choice_argument("yes", "no", "late", "missing", default="yes")},
        edit=effects.omit_echo,
        history=lambda _: 0,
        is_memory=True,
    ),
    "remember": FaultKind(
        "The model sees only the last N responses of the chain; the status is 200.",
        COUNT_ARGUMENT,
        history=lambda fault: fault.value,
        is_memory=True,
    ),
    "anonymous": FaultKind("The server does not identify itself to its clients.", is_memory=True),
    "report_usage": FaultKind(
        "The usage is left out, is always the same, counts only the tokens of the request itself, "
        "counts cached tokens apart from the others, or does not count whitespace in the request.",
        _choice_argument("none", "constant", "new", "uncached", "trimmed"),
        edit=effects.change_usage,
        is_memory=True,
    ),
    "report_unstored": FaultKind(
        "The response has store: false, whatever was requested.",
        edit=effects.report_unstored,
        is_memory=True,
    ),
    "reuse_response_id": FaultKind(
        "Every response has the same id, which continues the newest of them.",
        edit=effects.reuse_response_id,
        is_memory=True,
    ),
    "hide_stored": FaultKind(
        "A stored response cannot be fetched: GET is answered with 404.", is_memory=True
    ),
    "change_completed": FaultKind(
        "The completed event of a stream has another text, other arguments of calls, or one output "
        "item less than the events before it.",
        _choice_argument("text", "arguments", "missing"),
        edit=effects.change_completed,
    ),
    "omit_output_index": FaultKind(
        "The events of a stream have no output_index.",
        edit=effects.omit_output_index,
    ),
    "stream_content_type": FaultKind(
        "A stream is sent without a content type, or as text/plain.",
        _choice_argument("none", "plain"),
    ),
    "repeat_after_finish": FaultKind(
        "The deltas of a chat completion are sent again after its finish_reason.",
        step=lambda _: effects.repeat_deltas(),
    ),
    "lone_surrogate": FaultKind(
        "The text of the answer has half of a surrogate pair in place of each '.', '!' and '?'.",
        edit=effects.break_surrogates,
    ),
    "duplicate_events": FaultKind(
        "Every event is sent twice, or those of one type only.",
        options=ONLY_OPTION,
        step=lambda fault: effects.duplicate_events(fault.options["only"]),
    ),
    "reorder_events": FaultKind(
        "Every event is swapped with the next, or those of one type only.",
        options=ONLY_OPTION,
        step=lambda fault: effects.reorder_events(fault.options["only"]),
    ),
    "omit_call_id": FaultKind(
        "Calls have no call_id; outputs may name the call's item id instead.",
        edit=effects.remove_call_ids,
    ),
    "empty_call_id": FaultKind(
        "Calls have an empty call_id; outputs may name the call's item id instead.",
        edit=effects.remove_call_ids,
    ),
    "omit_call_name": FaultKind("Calls have no name.", edit=effects.omit_call_names),
    "omit_response_id": FaultKind("The response has no id.", edit=effects.omit_response_id),
    "refuse_encrypted_reasoning": FaultKind(
        "A request with encrypted reasoning is rejected.",
        override=effects.reject_encrypted_reasoning,
    ),
    "refuse_previous_response_id": FaultKind(
        "A request with a previous_response_id is rejected with the message of this server.",
        _choice_argument(*effects.UNSUPPORTED),
        override=effects.reject_previous_response,
        is_memory=True,
    ),
    "refuse_empty_input": FaultKind(
        "A request with empty input is rejected, also if it continues a response.",
        override=effects.reject_empty_input,
    ),
    "refuse_output_format": FaultKind(
        "A request for an answer that matches a JSON schema is rejected: the model has no structured output.",
        override=effects.reject_output_format,
    ),
    "not_found": FaultKind(
        "An unknown previous response is rejected with the message and body of this server.",
        _choice_argument(*effects.NOT_FOUND),
    ),
}
"""Every kind of fault, by name."""


def iter_effects(armed: Mapping[str, Fault], effect: str) -> Iterator[tuple[Fault, Any]]:
    """Yield the active faults with an effect of this name, each with the effect, in the order of ``KINDS``."""
    for name, kind in KINDS.items():
        if name in armed and getattr(kind, effect) is not None:
            yield armed[name], getattr(kind, effect)


TIMES_ARGUMENT = FaultArgument("K", "an integer, 1 or more", _parse_integer, 1)


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
    with suppress(ValueError, KeyError):
        value = argument.parse(text)
        if isinstance(value, str) or argument.minimum <= value <= argument.maximum:
            return value
    raise InvalidFault(f"{spec!r}: {name} must be {argument.expected}, not {text!r}")


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
        self.armed: Mapping[str, Fault] = {}
        """The active faults by name, replaced by every change; ``times`` counts down."""
        self.hides_server = False
        """Whether the server does not identify itself, because a fault of memory is active."""
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
            self._arm({**self.armed, fault.name: fault})
        return fault

    def clear(self, name: str | None = None) -> None:
        """Deactivate faults.

        Args:
            name: The kind to deactivate; None for all.
        """
        with self._lock:
            self._arm({} if name is None else self._list_others(name))

    def consume(self, fault: Fault) -> None:
        """Count down the ``times`` of a fault that applied to one request."""
        with self._lock:
            active = self.armed.get(fault.name)
            if active is None or active.times is None:
                return
            left = {fault.name: replace(active, times=active.times - 1)} if active.times > 1 else {}
            self._arm(self._list_others(fault.name) | left)

    def _list_others(self, name: str) -> dict[str, Fault]:
        return {other: fault for other, fault in self.armed.items() if other != name}

    def _arm(self, armed: Mapping[str, Fault]) -> None:
        self.armed = armed
        self.hides_server = any(KINDS[name].is_memory for name in armed)
