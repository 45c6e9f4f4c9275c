"""Decoding server-sent events: chunks, line ends and limits."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import StreamTooLarge
from kedge.events.sse import SSEDecoder, SSEMessage


def decode(*chunks: bytes, **bounds: int) -> list[SSEMessage]:
    decoder = SSEDecoder(**bounds)
    messages = [message for chunk in chunks for message in decoder.feed(chunk)]
    return messages + decoder.close()


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"], ids=["LF", "CR", "CRLF"])
def test_all_line_ends_are_accepted(end: str) -> None:
    """LF, CR and CRLF give the same messages."""
    text = "event: a\ndata: 1\n\ndata: 2\n\n".replace("\n", end)
    assert decode(text.encode()) == [SSEMessage("a", "1"), SSEMessage("", "2")]


def test_line_ends_can_be_mixed() -> None:
    """Different line ends in one stream, as a proxy may produce them, are accepted."""
    assert decode(b"data: 1\r\n\ndata: 2\r\rdata: 3\n\r\n") == [
        SSEMessage("", "1"),
        SSEMessage("", "2"),
        SSEMessage("", "3"),
    ]


def test_a_chunk_may_end_between_cr_and_lf() -> None:
    """The LF of a CRLF at the start of the next chunk is not a second line end."""
    assert decode(b"data: 1\r", b"\ndata: 2\r", b"\n\r", b"\n") == [SSEMessage("", "1\n2")]


def test_message_is_returned_at_its_blank_line() -> None:
    """A message is returned with the chunk that contains its blank line, even after a CR."""
    decoder = SSEDecoder()
    assert decoder.feed(b"data: 1\n\n") == [SSEMessage("", "1")]
    assert decoder.feed(b"data: 2\r\n\r") == [SSEMessage("", "2")]
    assert decoder.feed(b"\ndata: 3\n") == []
    assert decoder.feed(b"\n") == [SSEMessage("", "3")]


def test_data_lines_are_joined_with_line_feeds() -> None:
    """Several data lines are joined to one text, and one blank after the colon is dropped."""
    assert decode(b"data: {\ndata:  1\ndata\ndata:}\n\n") == [SSEMessage("", "{\n 1\n\n}")]


def test_comments_other_fields_and_empty_messages_are_ignored() -> None:
    """Comments, ids, retry times and messages without data are ignored."""
    stream = b": ping\n\nid: 7\nretry: 10\nevent: lonely\n\n\n\ndata:\n\nbogus\ndata: 1\n\n"
    assert decode(stream) == [SSEMessage("", "1")]


def test_a_byte_order_mark_is_dropped_at_the_start_only() -> None:
    """A BOM at the start of the stream is dropped, even if it is split over chunks."""
    assert decode(b"\xef", b"\xbb\xbfdata", b": \xef\xbb\xbf1\n\n") == [SSEMessage("", "\ufeff1")]


def test_other_separators_are_text() -> None:
    """Vertical tab, form feed, NEL and U+2028 are not line ends."""
    text = "a\x0bb\x0cc\x1cd\x85e\u2028f"
    assert decode(f"data: {text}\n\n".encode()) == [SSEMessage("", text)]


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    """An invalid byte becomes one replacement character, and the stream continues."""
    assert decode(b"data: a\xffb\n\ndata: c\n\n") == [
        SSEMessage("", "a\ufffdb"),
        SSEMessage("", "c"),
    ]


def test_last_message_without_a_blank_line_is_returned_at_the_end() -> None:
    """A last message without a blank line is returned when the stream is closed."""
    assert decode(b"data: 1\n\ndata: 2\n") == [SSEMessage("", "1"), SSEMessage("", "2")]
    assert decode(b"data: 1\n\ndata: 2") == [SSEMessage("", "1"), SSEMessage("", "2")]
    assert decode(b"data: 1\n\n") == [SSEMessage("", "1")]
    assert decode() == []


STREAM = (
    "\ufeffevent: x\r\ndata: h\u00e9 \U0001f600\r\n\r\n: c\ndata: 1\rdata: 2\r\rdata: [DONE]\n\n"
).encode()


def test_a_stream_fed_byte_by_byte_gives_the_same_messages() -> None:
    """Characters and line ends split over chunks are joined."""
    assert decode(*(bytes([byte]) for byte in STREAM)) == decode(STREAM)
    assert decode(STREAM) == [
        SSEMessage("x", "h\u00e9 \U0001f600"),
        SSEMessage("", "1\n2"),
        SSEMessage("", "[DONE]"),
    ]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_chunking_gives_the_same_messages(positions: list[int]) -> None:
    """The messages do not depend on how the stream is split into chunks, including empty ones."""
    edges = [0, *sorted(positions), len(STREAM)]
    chunks = [STREAM[a:b] for a, b in pairwise(edges)]
    assert decode(*chunks) == decode(STREAM)


@given(st.lists(st.sampled_from([b"data: x", b"data", b"\r", b"\n", b":", b"event: e", b" "])))
def test_any_chunking_of_bytes_gives_the_same_events(chunks: list[bytes]) -> None:
    """The messages of an invalid stream do not depend on how it is split into chunks."""
    complete = b"".join(chunks)
    assert decode(*chunks) == decode(complete) == decode(*(bytes([byte]) for byte in complete))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_long_line_is_rejected(size: int) -> None:
    """A line longer than the limit raises ``StreamTooLarge``, so that memory use is bounded."""
    stream = b"data: " + b"x" * 200 + b"\n\n"
    chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
    with pytest.raises(StreamTooLarge) as exc_info:
        decode(*chunks, max_line=100)
    assert (exc_info.value.what, exc_info.value.limit) == ("line", 100)


@pytest.mark.parametrize("line", [b"data: " + b"x" * 40 + b"\n", b"data\n"], ids=["long", "empty"])
def test_long_message_is_rejected(line: bytes) -> None:
    """Data lines without a blank line raise ``StreamTooLarge`` at the limit, even if they are empty."""
    with pytest.raises(StreamTooLarge, match="message of more than 100 bytes"):
        decode(*[line] * 200, max_message=100)


def test_limits_are_not_per_stream() -> None:
    """The limits apply to each line and message, not to the stream."""
    decoder = SSEDecoder(max_line=20, max_message=20)
    for _ in range(100):
        assert decoder.feed(b"data: 0123456789\n\n") == [SSEMessage("", "0123456789")]
