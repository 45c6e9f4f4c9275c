"""Stop sequences: an answer ends before the first of them, whichever model writes it.

A stop sequence may come in pieces, so the end of what was written is held back for as long as it could
be the beginning of one. When one is whole, the model is told to stop.
"""

from collections.abc import AsyncIterator

from kedge.server.models import ItemClosed, ItemDelta, ItemOpened, OutputEvent, OutputTruncated


async def apply_stop_sequences(
    events: AsyncIterator[OutputEvent], stops: tuple[str, ...]
) -> AsyncIterator[OutputEvent]:
    """Pass an answer on, up to the first stop sequence in its text."""
    held: str | None = None  # the end of the open text; None where no text is open
    async for piece in events:
        if isinstance(piece, ItemOpened):
            held = "" if piece.kind == "text" else None
        elif held is not None and isinstance(piece, ItemDelta):
            held += piece.text
            told, found = _find_first_stop(held, stops)
            if found:
                yield ItemDelta(told)
                yield ItemClosed(found)
                return
            keep = len(held) - _partial_stop_length(held, stops)
            told, held = held[:keep], held[keep:]
            if told:
                yield ItemDelta(told)
            continue
        elif held and isinstance(piece, ItemClosed | OutputTruncated):
            yield ItemDelta(held)
            held = None
        yield piece


def _find_first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """Find the first stop sequence in a text, and what stands before it."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, stop = min(found, default=(len(text), ""))
    return text[:at], stop


def _partial_stop_length(text: str, stops: tuple[str, ...]) -> int:
    """Say how much of the end of a text may be the beginning of a stop sequence."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
