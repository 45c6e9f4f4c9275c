"""A stream of server-sent events, taken apart and put together wrongly.

``Frames`` cuts bytes into whole events and passes each through its steps; a step may change an
event, send it twice or hold it back. What comes out is ready to be sent, one frame an event.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kedge.server.wire import encode

Event = dict[str, Any]
END = b"\n\n"
DONE = b"data: [DONE]\n\n"


def kind_of(event: Event) -> str:
    """Name the type of an event; the chunks of a chat have only that of their object."""
    return str(event.get("type") or event.get("object") or "")


class Step(Protocol):
    """Something that happens to the events of a stream."""

    def take(self, event: Event) -> Iterable[Event]:
        """Let an event pass, changed or not, once, twice or later."""
        ...

    def rest(self) -> Iterable[Event]:
        """Let go of what was held back."""
        ...


class Edited:
    """Every event is changed in place."""

    def __init__(self, edit: Callable[[Event], None]) -> None:
        self._edit = edit

    def take(self, event: Event) -> Iterable[Event]:
        """Change the event."""
        self._edit(event)
        return (event,)

    def rest(self) -> Iterable[Event]:
        """Hold nothing back."""
        return ()


class Duplicated:
    """Every event comes twice, or those of one type."""

    def __init__(self, only: str | None) -> None:
        self._only = only

    def take(self, event: Event) -> Iterable[Event]:
        """Repeat the event."""
        return (event, event) if self._only in (None, kind_of(event)) else (event,)

    def rest(self) -> Iterable[Event]:
        """Hold nothing back."""
        return ()


class Reordered:
    """Every event changes places with the next, or those of one type."""

    def __init__(self, only: str | None) -> None:
        self._only = only
        self._held: Event | None = None

    def take(self, event: Event) -> Iterable[Event]:
        """Hold an event back until the next has passed."""
        if self._held is not None:
            held, self._held = self._held, None
            return event, held
        if self._only in (None, kind_of(event)):
            self._held = event
            return ()
        return (event,)

    def rest(self) -> Iterable[Event]:
        """Let go of a last event that nothing followed."""
        return () if self._held is None else (self._held,)


class Frames:
    """Bytes in, frames out."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._buffer = b""

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Take bytes as they come; give every frame that is whole."""
        *whole, self._buffer = (self._buffer + data).split(END)
        for block in whole:
            frame = block + END
            if frame == DONE:
                yield from self.rest()
                yield frame
            elif not self._steps:
                yield frame
            else:
                event = json.loads(block.partition(b"data: ")[2])
                yield from map(framed, self._through([event], self._steps))

    def rest(self) -> Iterable[bytes]:
        """Let go of what the steps held back, once, at the end."""
        steps, self._steps = self._steps, ()
        for number, step in enumerate(steps):
            yield from map(framed, self._through(step.rest(), steps[number + 1 :]))

    def _through(self, events: Iterable[Event], steps: Sequence[Step]) -> Iterable[Event]:
        for step in steps:
            events = [out for event in events for out in step.take(event)]
        return events


def framed(event: Event) -> bytes:
    """Write one event as the server does."""
    if "type" not in event:
        return b"data: %b\n\n" % encode(event)
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))
