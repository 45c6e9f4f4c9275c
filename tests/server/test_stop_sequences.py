"""Stop sequences, whichever way a model cuts its text."""

from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from kedge.event_loops import run_sync
from kedge.server.models import ItemClosed, ItemDelta, ItemOpened, OutputEvent
from kedge.server.stop_sequences import apply_stop_sequences


async def stream_text(text: str, size: int) -> AsyncIterator[OutputEvent]:
    """An answer of one text, in chunks."""
    yield ItemOpened("text")
    for at in range(0, len(text), size):
        yield ItemDelta(text[at : at + size])
    yield ItemClosed()


async def apply_stops(text: str, size: int, stops: tuple[str, ...]) -> tuple[str, str]:
    """What is left of a text, and the sequence at which it stopped."""
    pieces = [piece async for piece in apply_stop_sequences(stream_text(text, size), stops)]
    said = "".join(piece.text for piece in pieces if isinstance(piece, ItemDelta))
    closed = [piece for piece in pieces if isinstance(piece, ItemClosed)]
    assert len(closed) == 1
    return said, closed[0].stop_sequence


@given(
    text=st.text("ab", max_size=30),
    size=st.integers(1, 7),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_text_ends_before_the_first_stop_sequence(text: str, size: int, stops: list[str]) -> None:
    """However it is chunked, nothing of it is lost or told too early."""
    said, found = run_sync(apply_stops(text, size, tuple(stops)))
    if found:
        assert found in stops
        assert text.startswith(said + found)
        assert not any(stop in said for stop in stops)
    else:
        assert said == text
        assert not any(stop in text for stop in stops)


async def test_only_what_is_said_is_looked_at() -> None:
    """A thought or a call may hold a stop sequence."""

    async def thought() -> AsyncIterator[OutputEvent]:
        yield ItemOpened("reasoning")
        yield ItemDelta("STOP here")
        yield ItemClosed()

    pieces = [piece async for piece in apply_stop_sequences(thought(), ("STOP",))]
    assert pieces[1] == ItemDelta("STOP here")
