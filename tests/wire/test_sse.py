"""Decoding server-sent events: chunks, line ends, limits and sequence numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.errors import StreamTooLarge
from kedge.wire.sse import WINDOW_SIZE, SequenceChecker, SSEDecoder, SSEMessage


def decode(*chunks: bytes, **bounds: int) -> list[SSEMessage]:
    decoder = SSEDecoder(**bounds)
    messages = [message for chunk in chunks for message in decoder.feed(chunk)]
    return messages + decoder.close()


def texts(*data: str) -> list[SSEMessage]:
    """Return messages without a name."""
    return [SSEMessage("", each) for each in data]


@for_each(
    ("chunks", "expected"),
    [
        ([b"data: 1\r\n\ndata: 2\r\rdata: 3\n\r\n"], texts("1", "2", "3")),
        ([b"data: 1\r", b"\ndata: 2\r", b"\n\r", b"\n"], texts("1\n2")),
        ([b"data: {\ndata:  1\ndata\ndata:}\n\n"], texts("{\n 1\n\n}")),
        ([b": ping\n\nid: 7\nretry: 10\nevent: lonely\n\n\n\ndata:\n\nbogus\ndata: 1\n\n"], texts("1")),
        ([b"\xef", b"\xbb\xbfdata", b": \xef\xbb\xbf1\n\n"], texts("\ufeff1")),
        (["data: a\x0bb\x0cc\x1cd\x85e\u2028f\n\n".encode()], texts("a\x0bb\x0cc\x1cd\x85e\u2028f")),
        ([b"data: a\xffb\n\ndata: c\n\n"], texts("a\ufffdb", "c")),
        ([b"data: 1\n\ndata: 2\n"], texts("1", "2")),
        ([b"data: 1\n\ndata: 2"], texts("1", "2")),
        ([b"data: 1\n\n"], texts("1")),
        ([], []),
    ],
)  # fmt: skip
def test_lines_are_read_as_the_standard_says(
    chunks: list[bytes], expected: list[SSEMessage]
) -> None:
    """Line ends may be mixed, and split between chunks; other separators are text, and invalid bytes are replaced.

    A byte order mark is dropped at the start only, comments and other fields are ignored, and the last
    message needs no blank line.
    """
    assert decode(*chunks) == expected


def test_message_is_returned_at_its_blank_line() -> None:
    """A message is returned with the chunk that contains its blank line, even after a CR."""
    decoder = SSEDecoder()
    assert decoder.feed(b"data: 1\n\n") == [SSEMessage("", "1")]
    assert decoder.feed(b"data: 2\r\n\r") == [SSEMessage("", "2")]
    assert decoder.feed(b"\ndata: 3\n") == []
    assert decoder.feed(b"\n") == [SSEMessage("", "3")]


@given(st.lists(st.sampled_from([b"data: x", b"data", b"\r", b"\n", b":", b"event: e", b" "])))
def test_any_chunking_of_bytes_gives_the_same_events(chunks: list[bytes]) -> None:
    """The messages of an invalid stream do not depend on how it is split into chunks."""
    complete = b"".join(chunks)
    assert decode(*chunks) == decode(complete) == decode(*(bytes([byte]) for byte in complete))


@for_each("size", [1, 7, 1000])
def test_long_line_is_rejected(size: int) -> None:
    """A line longer than the limit raises ``StreamTooLarge``, so that memory use is bounded."""
    stream = b"data: " + b"x" * 200 + b"\n\n"
    chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
    with pytest.raises(StreamTooLarge) as exc_info:
        decode(*chunks, max_line=100)
    assert (exc_info.value.what, exc_info.value.limit) == ("line", 100)


@for_each("line", [b"data: " + b"x" * 40 + b"\n", b"data\n"])
def test_long_message_is_rejected(line: bytes) -> None:
    """Data lines without a blank line raise ``StreamTooLarge`` at the limit, even if they are empty."""
    with pytest.raises(StreamTooLarge, match="message of more than 100 bytes"):
        decode(*[line] * 200, max_message=100)


def test_limits_are_not_per_stream() -> None:
    """The limits apply to each line and message, not to the stream."""
    decoder = SSEDecoder(max_line=20, max_message=20)
    for _ in range(100):
        assert decoder.feed(b"data: 0123456789\n\n") == [SSEMessage("", "0123456789")]


@for_each(
    ("numbers", "expected"),
    [
        ((0, 1, 2), "fresh fresh fresh"),
        ((7, 8), "fresh fresh"),
        ((0, 0, 1, 0), "fresh duplicate fresh duplicate"),
        ((0, 4, 2, 2, 1, 3, 3, 5), "fresh gap late duplicate late late duplicate fresh"),
        ((1, 0, 2), "fresh late fresh"),
    ],
)
def test_events_are_classified_by_their_numbers(numbers: tuple[int, ...], expected: str) -> None:
    """A skipped number is a gap, and its event is late the first time and then a duplicate."""
    check = SequenceChecker()
    assert [check.classify(number, number) for number in numbers] == expected.split()


def test_reused_number_makes_numbers_unreliable() -> None:
    """After two different events with the same number, every event is fresh."""
    check = SequenceChecker()
    assert check.classify(0, 1) == "fresh"
    assert check.classify(0, 2) == "fresh"
    assert not check.reliable
    assert [check.classify(number, 2) for number in (0, 0, 9, 3)] == ["fresh"] * 4


def test_old_duplicate_is_a_duplicate() -> None:
    """An event older than the window is a duplicate by its number alone."""
    check = SequenceChecker()
    for number in range(3 * WINDOW_SIZE):
        assert check.classify(number, number) == "fresh"
    assert check.classify(1, 999) == "duplicate"
    assert check.classify(3 * WINDOW_SIZE, 0) == "fresh"


def test_late_events_of_many_gaps_are_recognized() -> None:
    """Within the window each event of a gap is late, however many gaps there are; an older one is not."""
    check = SequenceChecker()
    for number in range(0, 4 * WINDOW_SIZE, 2):
        check.classify(number, number)
    assert check.classify(3 * WINDOW_SIZE + 1, 1) == "late"
    assert check.classify(3 * WINDOW_SIZE + 1, 1) == "duplicate"
    assert check.classify(2 * WINDOW_SIZE, 1) == "duplicate"


@given(st.permutations(range(8)))
def test_every_event_is_used_once_in_any_order(order: list[int]) -> None:
    """Each number of a shuffled and duplicated stream is used exactly once."""
    check = SequenceChecker()
    used = [n for n in [*order, *order] if check.classify(n, n) != "duplicate"]
    assert sorted(used) == list(range(8))
