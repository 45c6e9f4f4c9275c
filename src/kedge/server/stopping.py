"""Stop sequences: an answer ends before the first of them, whichever model writes it.

A stop sequence may come in pieces, so the end of what was written is held back for as long as it could
be the beginning of one. When one is whole, the model is told to stop.
"""

from collections.abc import AsyncIterator

from kedge.server.models import Closed, Grown, Opened, Piece, Stopped


async def stopping(pieces: AsyncIterator[Piece], stops: tuple[str, ...]) -> AsyncIterator[Piece]:
    """Pass an answer on, up to the first stop sequence in its text."""
    held: str | None = None  # the end of the open text; None where no text is open
    async for piece in pieces:
        if isinstance(piece, Opened):
            held = "" if piece.kind == "text" else None
        elif held is not None and isinstance(piece, Grown):
            held += piece.text
            told, found = _first(held, stops)
            if found:
                yield Grown(told)
                yield Closed(found)
                return
            keep = len(held) - _beginning(held, stops)
            told, held = held[:keep], held[keep:]
            if told:
                yield Grown(told)
            continue
        elif held and isinstance(piece, Closed | Stopped):
            yield Grown(held)
            held = None
        yield piece


def _first(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """Find the first stop sequence in a text, and what stands before it."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, stop = min(found, default=(len(text), ""))
    return text[:at], stop


def _beginning(text: str, stops: tuple[str, ...]) -> int:
    """Say how much of the end of a text may be the beginning of a stop sequence."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
