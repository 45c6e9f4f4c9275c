"""Change the events of a server-sent event stream.

``FrameRewriter`` splits bytes into events and passes each through its steps; a step may change an
event, send it twice or delay it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kedge.json_codec import encode_text
from kedge.server.json_codec import decode

StreamEvent = dict[str, Any]
FRAME_END = b"\n\n"
DONE = b"data: [DONE]\n\n"


def event_type(event: StreamEvent) -> str:
    """Return the type of an event; for chunks of a chat completion, that of their object."""
    return str(event.get("type") or event.get("object") or "")


class StreamStep:
    """A change to the events of a stream; ``only`` limits it to one type of events."""

    def __init__(self, only: str | None = None) -> None:
        self._only = only

    def _applies_to(self, event: StreamEvent) -> bool:
        return self._only in (None, event_type(event))

    def process(self, event: StreamEvent) -> Iterable[StreamEvent]:
        """Return the events that replace this one: none, one or several."""
        return (event,)

    def flush(self) -> Iterable[StreamEvent]:
        """Return the events that are still delayed, at the end of the stream."""
        return ()


class EditStep(StreamStep):
    """A step that changes every event in place."""

    def __init__(self, edit: Callable[[StreamEvent], None]) -> None:
        super().__init__()
        self._edit = edit

    def process(self, event: StreamEvent) -> Iterable[StreamEvent]:
        """Change the event."""
        self._edit(event)
        return (event,)


class DuplicateStep(StreamStep):
    """A step that sends events twice."""

    def process(self, event: StreamEvent) -> Iterable[StreamEvent]:
        """Repeat the event."""
        return (event, event) if self._applies_to(event) else (event,)


class ReorderStep(StreamStep):
    """A step that swaps an event with the next one."""

    _pending: StreamEvent | None = None

    def process(self, event: StreamEvent) -> Iterable[StreamEvent]:
        """Delay an event until the next one is sent."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            return event, pending
        if self._applies_to(event):
            self._pending = event
            return ()
        return (event,)

    def flush(self) -> Iterable[StreamEvent]:
        """Return the last event if it is delayed."""
        return () if self._pending is None else (self._pending,)


class RepeatStep(StreamStep):
    """A step that sends the deltas of a chat completion again after its finish reason."""

    def __init__(self) -> None:
        super().__init__()
        self._deltas: list[StreamEvent] = []

    def process(self, event: StreamEvent) -> Iterable[StreamEvent]:
        """Return the event, followed by the earlier deltas if it has the finish reason."""
        choices: list[StreamEvent] = event.get("choices") or []
        if any(choice.get("finish_reason") for choice in choices):
            deltas, self._deltas = self._deltas, []
            return (event, *deltas)
        if any(choice["delta"].get("content") for choice in choices):
            self._deltas.append(event)
        return (event,)


class FrameRewriter:
    """A parser of frames that applies steps to their events."""

    def __init__(self, steps: Sequence[StreamStep]) -> None:
        self._steps = steps
        self._buffer = b""

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Yield the frames that are complete after these bytes."""
        *complete, self._buffer = (self._buffer + data).split(FRAME_END)
        for block in complete:
            frame = block + FRAME_END
            if frame == DONE:
                yield from self.flush()
                yield frame
            elif not self._steps:
                yield frame
            else:
                event = decode(block.partition(b"data: ")[2])
                yield from map(encode_frame, self._apply_steps([event], self._steps))

    def flush(self) -> Iterable[bytes]:
        """Yield the events that the steps delayed, once, at the end."""
        steps, self._steps = self._steps, ()
        for number, step in enumerate(steps):
            yield from map(encode_frame, self._apply_steps(step.flush(), steps[number + 1 :]))

    def _apply_steps(
        self, events: Iterable[StreamEvent], steps: Sequence[StreamStep]
    ) -> Iterable[StreamEvent]:
        for step in steps:
            events = [out for event in events for out in step.process(event)]
        return events


def encode_json(value: object) -> bytes:
    """Encode a value as the server does, with lone surrogates escaped."""
    return encode_text(value).encode("utf-8", "backslashreplace")


def encode_frame(event: StreamEvent) -> bytes:
    """Encode one event as the server does."""
    if "type" not in event:
        return b"data: %b\n\n" % encode_json(event)
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))
