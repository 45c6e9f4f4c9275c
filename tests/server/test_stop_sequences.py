"""Stop sequences, for any division of the text into deltas."""

from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from kedge._internal.event_loops import run_sync
from kedge.server.models import ItemClosed, ItemDelta, ItemOpened, OutputEvent
from kedge.server.stop_sequences import apply_stop_sequences


async def stream_text(text: str, size: int, thought: str) -> AsyncIterator[OutputEvent]:
    """Yield an answer with reasoning and one text, in deltas of a size."""
    yield ItemOpened("reasoning")
    yield ItemDelta(thought)
    yield ItemClosed()
    yield ItemOpened("text")
    for at in range(0, len(text), size):
        yield ItemDelta(text[at : at + size])
    yield ItemClosed()


async def apply_stops(text: str, size: int, stops: tuple[str, ...]) -> tuple[str, str]:
    """Return the text before the stop sequence, and the stop sequence that was found."""
    answer = stream_text(text, size, stops[0])
    output = [event async for event in apply_stop_sequences(answer, stops)]
    assert output[:3] == [ItemOpened("reasoning"), ItemDelta(stops[0]), ItemClosed()]
    output_text = "".join(event.text for event in output[3:] if isinstance(event, ItemDelta))
    closed = [event for event in output[3:] if isinstance(event, ItemClosed)]
    assert len(closed) == 1
    return output_text, closed[0].stop_sequence


def test_the_stop_sequence_that_is_complete_first_ends_the_text() -> None:
    """The answer is the same in one delta and in many; of sequences with the same end the longest is found."""
    for size in (1, 2, 6):
        assert run_sync(apply_stops("xyabc!", size, ("abc!", "b"))) == ("xya", "b")
        assert run_sync(apply_stops("xyabc!", size, ("bc", "abc"))) == ("xy", "abc")
        assert run_sync(apply_stops("xyabc!", size, ("abc", "ab"))) == ("xy", "ab")


@given(
    text=st.text("ab", max_size=30),
    size=st.integers(1, 7),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_text_ends_before_the_first_stop_sequence(text: str, size: int, stops: list[str]) -> None:
    """For any delta size, no text before a stop sequence is lost and none after it is sent; reasoning is unchanged."""
    output_text, stop_sequence = run_sync(apply_stops(text, size, tuple(stops)))
    if stop_sequence:
        assert stop_sequence in stops
        assert text.startswith(output_text + stop_sequence)
        assert not any(stop in output_text for stop in stops)
    else:
        assert output_text == text
        assert not any(stop in text for stop in stops)
    assert run_sync(apply_stops(text, len(text) + 1, tuple(stops))) == (output_text, stop_sequence)
