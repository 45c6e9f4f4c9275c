"""Stop sequences: end an answer before the first of them, for every model.

A stop sequence may be split over several deltas, so the end of the text is buffered while it could be
the beginning of one. When one is complete, the model is stopped.
"""

from collections.abc import AsyncIterator

from kedge.server.models import ItemClosed, ItemDelta, ItemOpened, OutputEvent, OutputTruncated


async def apply_stop_sequences(
    events: AsyncIterator[OutputEvent], stops: tuple[str, ...]
) -> AsyncIterator[OutputEvent]:
    """Yield the events of an answer up to the first stop sequence in its text."""
    pending: str | None = None  # the end of the open text; None if no text is open
    async for piece in events:
        if isinstance(piece, ItemOpened):
            pending = "" if piece.kind == "text" else None
        elif pending is not None and isinstance(piece, ItemDelta):
            pending += piece.text
            text, stop_sequence = _find_first_stop(pending, stops)
            if stop_sequence:
                yield ItemDelta(text)
                yield ItemClosed(stop_sequence)
                return
            end = len(pending) - _partial_stop_length(pending, stops)
            text, pending = pending[:end], pending[end:]
            if text:
                yield ItemDelta(text)
            continue
        elif pending and isinstance(piece, ItemClosed | OutputTruncated):
            yield ItemDelta(pending)
            pending = None
        yield piece


def _find_first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """Return the text before the first stop sequence, and that sequence."""
    positions = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, stop = min(positions, default=(len(text), ""))
    return text[:at], stop


def _partial_stop_length(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the end of a text that may be the beginning of a stop sequence."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
