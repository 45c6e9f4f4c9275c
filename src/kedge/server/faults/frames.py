"""A stream of server-sent events, taken apart and put together wrongly.

``Frames`` cuts bytes into whole events and passes each through its steps; a step may change an
event, send it twice or hold it back. What comes out is ready to be sent, one frame an event.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kedge.server.json_codec import encode

StreamEvent = dict[str, Any]
FRAME_END = b"\n\n"
DONE = b"data: [DONE]\n\n"


def event_type(event: StreamEvent) -> str:
    """Name the type of an event; the chunks of a chat have only that of their object."""
    return str(event.get("type") or event.get("object") or "")


class StreamStep(Protocol):
    """Something that happens to the events of a stream."""

    def process(self, event: StreamEvent) -> Iterable[StreamEvent]:
        """Let an event pass, changed or not, once, twice or later."""
        ...

    def flush(self) -> Iterable[StreamEvent]:
        """Let go of what was held back."""
        ...


class EditStep:
    """Every event is changed in place."""

    def __init__(self, edit: Callable[[StreamEvent], None]) -> None:
        self._edit = edit

    def process(self, event: StreamEvent) -> Iterable[StreamEvent]:
        """Change the event."""
        self._edit(event)
        return (event,)

    def flush(self) -> Iterable[StreamEvent]:
        """Hold nothing back."""
        return ()


class DuplicateStep:
    """Every event comes twice, or those of one type."""

    def __init__(self, only: str | None) -> None:
        self._only = only

    def process(self, event: StreamEvent) -> Iterable[StreamEvent]:
        """Repeat the event."""
        return (event, event) if self._only in (None, event_type(event)) else (event,)

    def flush(self) -> Iterable[StreamEvent]:
        """Hold nothing back."""
        return ()


class ReorderStep:
    """Every event changes places with the next, or those of one type."""

    def __init__(self, only: str | None) -> None:
        self._only = only
        self._pending: StreamEvent | None = None

    def process(self, event: StreamEvent) -> Iterable[StreamEvent]:
        """Hold an event back until the next has passed."""
        if self._pending is not None:
            held, self._pending = self._pending, None
            return event, held
        if self._only in (None, event_type(event)):
            self._pending = event
            return ()
        return (event,)

    def flush(self) -> Iterable[StreamEvent]:
        """Let go of a last event that nothing followed."""
        return () if self._pending is None else (self._pending,)


class FrameRewriter:
    """Bytes in, frames out."""

    def __init__(self, steps: Sequence[StreamStep]) -> None:
        self._steps = steps
        self._buffer = b""

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Take bytes as they come; give every frame that is whole."""
        *whole, self._buffer = (self._buffer + data).split(FRAME_END)
        for block in whole:
            frame = block + FRAME_END
            if frame == DONE:
                yield from self.flush()
                yield frame
            elif not self._steps:
                yield frame
            else:
                event = json.loads(block.partition(b"data: ")[2])
                yield from map(encode_frame, self._apply_steps([event], self._steps))

    def flush(self) -> Iterable[bytes]:
        """Let go of what the steps held back, once, at the end."""
        steps, self._steps = self._steps, ()
        for number, step in enumerate(steps):
            yield from map(encode_frame, self._apply_steps(step.flush(), steps[number + 1 :]))

    def _apply_steps(
        self, events: Iterable[StreamEvent], steps: Sequence[StreamStep]
    ) -> Iterable[StreamEvent]:
        for step in steps:
            events = [out for event in events for out in step.process(event)]
        return events


def encode_frame(event: StreamEvent) -> bytes:
    """Write one event as the server does."""
    if "type" not in event:
        return b"data: %b\n\n" % encode(event)
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))
