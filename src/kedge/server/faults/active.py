"""The faults that are active: parse their specification, choose and count them."""

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kedge.errors import InvalidFault
from kedge.server.faults.effects import KINDS, TIMES_ARGUMENT, Fault, FaultArgument


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
            armed: Mapping[str, Fault] = {}
            if name is not None:
                armed = self._list_others(name)
            self._arm(armed)

    def consume(self, fault: Fault) -> None:
        """Count down the ``times`` of a fault that applied to one request."""
        with self._lock:
            active = self.armed.get(fault.name)
            if active is None or active.times is None:
                return
            armed = self._list_others(fault.name)
            if active.times > 1:
                armed[fault.name] = replace(active, times=active.times - 1)
            self._arm(armed)

    def _list_others(self, name: str) -> dict[str, Fault]:
        return {other: fault for other, fault in self.armed.items() if other != name}

    def _arm(self, armed: Mapping[str, Fault]) -> None:
        self.armed = armed
        self.hides_server = any(KINDS[name].is_memory for name in armed)
