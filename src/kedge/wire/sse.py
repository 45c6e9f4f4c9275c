"""Decode server-sent events from a stream of bytes.

Lines may end in LF, CR or CRLF, and a chunk may end anywhere, also between CR and LF or inside a
character: a line is decoded only when it is complete, and no byte of a UTF-8 character looks like a line
end.

Time is linear in the number of bytes however they are split: an incomplete line is stored in a buffer that
grows in place, and only new bytes are searched for its end. The buffer is limited, so that a server that
never ends a line cannot fill the client's memory; beyond the limit ``StreamTooLarge`` is raised.

The SDK's decoder is not used because it takes more than twice the time per event and has no size limits.

Events of the Responses API are numbered consecutively. A number seen before with the same event is a duplicate (a
proxy retried, or a stream was resumed too early); a number from a gap is a late event; a jump is a gap. Some
servers number every event 0, or restart with every item. Once a number was used for two different events, the
numbers are ignored: dropping an apparent duplicate would lose text.
"""

from typing import Literal, NamedTuple

from kedge.errors import StreamTooLarge

MAX_LINE = 64 * 1024 * 1024
"""The default limit of a line, in bytes: enough for a response with a few generated images."""
MAX_MESSAGE = 2 * MAX_LINE
"""The default limit of the data lines of one message, in bytes."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SSEMessage(NamedTuple):
    """A server-sent event.

    Attributes:
        event: The event name; often empty.
        data: The data lines, joined.
    """

    event: str
    data: str


class SSEDecoder:
    """Decodes server-sent events.

    Args:
        max_line: The maximum length of a line, in bytes.
        max_message: The maximum length of a message's data lines, in bytes.
    """

    def __init__(self, *, max_line: int = MAX_LINE, max_message: int = MAX_MESSAGE) -> None:
        self._max_line = max_line
        self._max_message = max_message
        self._unfinished = bytearray()  # the line that is not complete yet
        self._skip_lf = False  # the last line ended in CR, so an LF that follows belongs to it
        self._started = False  # whether the start, where a byte order mark may be, was read
        self._event = ""
        self._data: list[str] = []
        self._message_size = 0

    def feed(self, chunk: bytes) -> list[SSEMessage]:
        """Decode a chunk of the stream.

        Args:
            chunk: Any number of bytes.

        Returns:
            The messages that this chunk completes.

        Raises:
            StreamTooLarge: If a line or message exceeds its limit.
        """
        if self._skip_lf and chunk:
            self._skip_lf = False
            if chunk[0] == 10:
                chunk = chunk[1:]
        if b"\n" not in chunk and b"\r" not in chunk:
            self._append_unfinished(chunk)
            return []
        if self._unfinished:
            self._unfinished += chunk
            chunk = bytes(self._unfinished)
            self._unfinished.clear()
        return self._parse_lines(chunk)

    def close(self) -> list[SSEMessage]:
        """End the stream.

        Returns:
            The message that lacks only its closing blank line, which some servers omit. The caller must
            check whether it is complete: half a JSON object cannot be parsed.
        """
        rest = bytes(self._unfinished)
        self._unfinished.clear()
        return self._parse_lines(rest + b"\n\n")

    def _append_unfinished(self, chunk: bytes) -> None:
        self._unfinished += chunk
        if len(self._unfinished) > self._max_line:
            raise StreamTooLarge("line", self._max_line)

    def _parse_lines(self, text: bytes) -> list[SSEMessage]:
        """Parse ``text``, which contains at least one line end."""
        if not self._started:
            self._started = True
            text = text.removeprefix(BYTE_ORDER_MARK)
        lines = text.splitlines()  # bytes are split at LF, CR and CRLF only
        last = text[-1:]
        self._skip_lf = last == b"\r"
        if last and last not in b"\r\n":
            self._append_unfinished(lines.pop())
        if len(text) > self._max_line and max(map(len, lines)) > self._max_line:
            raise StreamTooLarge("line", self._max_line)
        messages: list[SSEMessage] = []
        for line in lines:
            if not line:
                data = "\n".join(self._data)
                if data:
                    messages.append(SSEMessage(self._event, data))
                self._event = ""
                self._message_size = 0
                self._data.clear()
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._add_data(value)
            elif name == b"event":
                self._event = value.removeprefix(b" ").decode("utf-8", "replace")
            # Comments (no name before the colon), ids, retry times and unknown fields are ignored.
        return messages

    def _add_data(self, value: bytes) -> None:
        self._message_size += len(value) + 1  # an empty line counts as well
        if self._message_size > self._max_message:
            raise StreamTooLarge("message", self._max_message)
        self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))


SequenceStatus = Literal["fresh", "duplicate", "late", "gap"]

WINDOW_SIZE = 1024
"""The number of events that are remembered to distinguish a duplicate from a number used twice, or a late event."""


class SequenceChecker:
    """Checks the sequence numbers of one stream.

    It remembers the newest event for each number modulo the size of the window; older ones count as duplicates.
    """

    def __init__(self) -> None:
        self.reliable = True
        self.last = -1
        """The highest number so far; -1 before the first one."""
        self._numbers = [-1] * WINDOW_SIZE
        self._fingerprints = [0] * WINDOW_SIZE

    def classify(self, number: int, fingerprint: int) -> SequenceStatus:
        """Classify an event by its number; ``fingerprint`` identifies its content."""
        last = self.last
        slot = number % WINDOW_SIZE
        slot_number = self._numbers[slot]
        if slot_number == number and self._fingerprints[slot] != fingerprint:
            self.reliable = False
        if not self.reliable:
            return "fresh"
        if slot_number >= number:
            return "duplicate"
        self._numbers[slot] = number
        self._fingerprints[slot] = fingerprint
        if number < last:
            return "late"
        self.last = number
        # A stream may start with any number: a resumed one starts in the middle.
        if last in (-1, number - 1):
            return "fresh"
        return "gap"
