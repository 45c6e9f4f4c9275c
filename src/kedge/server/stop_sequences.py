"""End answers at the first stop sequence in their text, for models that do not search for stop sequences themselves."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from kedge._internal.responsive import TimeSlice
from kedge.server.models import ItemClosed, ItemDelta, ItemOpened, OutputEvent, OutputTruncated


async def apply_stop_sequences(
    events: AsyncIterator[OutputEvent], stops: tuple[str, ...]
) -> AsyncIterator[OutputEvent]:
    """Yield the events of an answer up to the first stop sequence in its text."""
    scanner: StopScanner | None = None  # of the open text
    time_slice = TimeSlice()
    async for piece in events:
        await time_slice.share()  # not every delta becomes an event
        match piece:
            case ItemDelta() if scanner is not None:
                delta = scanner.feed(piece)
                if delta is not None:
                    yield delta
                if scanner.stop_sequence:
                    yield ItemClosed(scanner.stop_sequence)
                    return
                continue
            case ItemOpened():
                scanner = StopScanner(stops) if piece.kind == "text" else None
            case ItemClosed() | OutputTruncated() if scanner is not None:
                rest = scanner.flush()
                scanner = None
                if rest is not None:
                    yield rest
            case _:
                pass
        yield piece


class StopScanner:
    """A search for stop sequences in one text, which arrives in pieces.

    A stop sequence may be in two pieces, so the end of the text is withheld as long as one may begin there. A token may
    be in two pieces as well: log probabilities are passed on with the last character of their tokens.

    Args:
        stops: The stop sequences.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stop_sequence = ""
        """The stop sequence that was found, if any."""
        self._stops = stops
        self._withheld = ""
        self._logprobs: tuple[Mapping[str, Any], ...] = ()
        """The log probabilities of tokens that end in the withheld text."""
        self._sent_chars = 0
        """The characters of these tokens that were passed on."""

    def feed(self, piece: ItemDelta) -> ItemDelta | None:
        """Return the text up to a stop sequence or, without one, the text in which none can begin any more."""
        text = self._withheld + piece.text
        self._logprobs += piece.logprobs
        before_stop, self.stop_sequence = _find_first_stop(text, self._stops)
        if self.stop_sequence:
            end = self._sent_chars + len(before_stop)
            return ItemDelta(before_stop, _take_logprobs(self._logprobs, end))

        end = len(text) - _partial_stop_length(text, self._stops)
        self._withheld = text[end:]
        if not end:
            return None
        if self._withheld:
            self._sent_chars += end
            return ItemDelta(text[:end])
        complete = ItemDelta(text, self._logprobs)
        self._sent_chars = 0
        self._logprobs = ()
        return complete

    def flush(self) -> ItemDelta | None:
        """Return what is withheld, because the text ends here."""
        if not self._withheld:
            return None
        return ItemDelta(self._withheld, self._logprobs)


def _take_logprobs(
    logprobs: tuple[Mapping[str, Any], ...], end: int
) -> tuple[Mapping[str, Any], ...]:
    """Return the log probabilities of the tokens that start before a position in their text."""
    start = 0
    for index, token_logprobs in enumerate(logprobs):
        if start >= end:
            return logprobs[:index]
        start += len(str(token_logprobs.get("token")))
    return logprobs


def _find_first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """Return the text before the stop sequence that is complete first, and that sequence.

    So the answer does not depend on how its text is divided. If two sequences have the same end, the longer one counts.
    """
    first_stop = ""
    first_end = len(text) + 1
    for stop in stops:
        position = text.find(stop)
        if position < 0:
            continue
        end = position + len(stop)
        if end < first_end or (end == first_end and len(stop) > len(first_stop)):
            first_stop = stop
            first_end = end
    if not first_stop:
        return text, ""
    return text[: first_end - len(first_stop)], first_stop


def _partial_stop_length(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the end of a text that may be the beginning of a stop sequence."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
