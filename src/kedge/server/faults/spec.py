"""Faults on purpose: a small language for what a server may do wrong, and what is armed right now.

A fault is written as its name, its value and its options: ``cut_after_events=3``,
``status=429,retry_after=1,times=2``, ``forget_silently,echo=no``. ``KINDS`` is the whole language;
``effects`` and ``wire`` do what it says. Every fault strikes requests for an answer, at whichever
endpoint; with ``times=k`` it is spent after the k-th request that it changed.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.errors import InvalidFault
from kedge.server.faults.refusals import NOT_FOUND, UNSUPPORTED


@dataclass(frozen=True, slots=True)
class FaultArgument:
    """A value that a fault or one of its options takes: how it is shown, how it is read."""

    placeholder: str
    parse: Callable[[str], Any]
    default: Any = None


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One entry of the language: a fault's value, its options, and what it does in a sentence."""

    description: str
    value: FaultArgument | None = None
    options: Mapping[str, FaultArgument] = field(default_factory=dict[str, FaultArgument])


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a whole number, 0 or more")
    return int(text)


def _parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("a whole number, 1 or more")
    return int(text)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise ValueError("a number of seconds up to 3600")
    return seconds


def _parse_status(text: str) -> int:
    if not text.isdecimal() or not 400 <= int(text) <= 599:
        raise ValueError("an HTTP status from 400 to 599")
    return int(text)


def _choice_parser(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return read


COUNT_ARGUMENT = FaultArgument("N", _parse_count)
SECONDS_ARGUMENT = FaultArgument("SECONDS", _parse_seconds)
ONLY_OPTION: Mapping[str, FaultArgument] = {"only": FaultArgument("TYPE", str)}

KINDS: Mapping[str, FaultKind] = {
    "cut_after_events": FaultKind(
        "The connection breaks after N events of a stream.", COUNT_ARGUMENT
    ),
    "cut_in_event": FaultKind(
        "The connection breaks in the middle of an event, after N whole ones.", COUNT_ARGUMENT
    ),
    "fail_after_events": FaultKind(
        "The stream ends with an error event after N events; the server was overloaded.",
        COUNT_ARGUMENT,
    ),
    "status": FaultKind(
        "The request is refused with this HTTP status; retry_after sends the header of that name.",
        FaultArgument("CODE", _parse_status),
        {"retry_after": SECONDS_ARGUMENT},
    ),
    "slow_first_byte": FaultKind("Nothing is sent for this long.", SECONDS_ARGUMENT),
    "forget_all": FaultKind("All stored responses are deleted before the request is looked at."),
    "forget_silently": FaultKind(
        "The model sees nothing of the past, yet the answer is 200; with echo=no the answer does "
        "not name the previous response either.",
        options={"echo": FaultArgument("yes|no", _choice_parser("yes", "no"), "yes")},
    ),
    "remember": FaultKind(
        "The model sees only what the last N responses of the chain brought; the answer is 200.",
        COUNT_ARGUMENT,
    ),
    "duplicate_events": FaultKind(
        "Every event is sent twice, or those of one type only.", options=ONLY_OPTION
    ),
    "reorder_events": FaultKind(
        "Every event changes places with the next, or those of one type only.", options=ONLY_OPTION
    ),
    "omit_call_id": FaultKind("Calls come without their call_id; their item id answers for it."),
    "empty_call_id": FaultKind("Calls come with an empty call_id; their item id answers for it."),
    "omit_response_id": FaultKind("The response comes without its id."),
    "refuse_encrypted_reasoning": FaultKind("A request with encrypted reasoning is refused."),
    "refuse_previous_response_id": FaultKind(
        "A request with a previous_response_id is refused, in the words of this server.",
        FaultArgument("|".join(UNSUPPORTED), _choice_parser(*UNSUPPORTED)),
    ),
    "refuse_empty_input": FaultKind(
        "A request with empty input is refused, whatever it continues."
    ),
    "not_found": FaultKind(
        "An unknown previous response is refused in the words and the shape of this server.",
        FaultArgument("|".join(NOT_FOUND), _choice_parser(*NOT_FOUND)),
    ),
}
"""Every fault there is."""

TIMES_ARGUMENT = FaultArgument("K", _parse_positive)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, as it was asked for; ``times`` is how many requests it strikes, if not all."""

    name: str
    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    times: int | None = None


def parse(spec: str) -> Fault:
    """Read a fault, or say what is wrong with it and what would be right."""
    first, *rest = [part.strip() for part in spec.split(",")]
    name, *_ = first.partition("=")
    kind = KINDS.get(name)
    if kind is None:
        raise InvalidFault(f"there is no fault {name!r}: choose one of {', '.join(KINDS)}")
    value = _parse_argument(spec, first, kind.value)
    known = {**kind.options, "times": TIMES_ARGUMENT}
    options = {option: argument.default for option, argument in kind.options.items()}
    for part in rest:
        option, *_ = part.partition("=")
        if option not in known:
            raise InvalidFault(
                f"{spec!r}: {name} has no option {option!r}, only {', '.join(known)}"
            )
        options[option] = _parse_argument(spec, part, known[option])
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
    """The faults that are armed. One of each name at most; they may change while serving."""

    def __init__(self, specs: Iterable[str] = ()) -> None:
        self._armed: dict[str, Fault] = {}
        self._lock = threading.Lock()
        for spec in specs:
            self.set(spec)

    def set(self, spec: str, *, times: int | None = None) -> Fault:
        """Arm a fault, in the place of an earlier one of its name; ``times`` as in the language."""
        fault = parse(spec if times is None else f"{spec},times={times}")
        with self._lock:
            self._armed[fault.name] = fault
        return fault

    def clear(self, name: str | None = None) -> None:
        """Disarm one fault, or all."""
        with self._lock:
            if name is None:
                self._armed.clear()
            else:
                self._armed.pop(name, None)

    @property
    def armed(self) -> Mapping[str, Fault]:
        """What is armed right now, by name; ``times`` counts down."""
        with self._lock:
            return dict(self._armed)

    def consume(self, fault: Fault) -> None:
        """Note that a fault has struck one request."""
        with self._lock:
            held = self._armed.get(fault.name)
            if held is None or held.times is None:
                return
            if held.times == 1:
                del self._armed[fault.name]
            else:
                left = held.times - 1
                self._armed[fault.name] = Fault(held.name, held.value, held.options, left)
