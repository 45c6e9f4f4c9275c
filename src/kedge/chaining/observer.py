"""Read a copy of a response while it is passed on, and detect that the server rejects or ignores the anchor."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from kedge import events
from kedge.engines.heal_rules import RequestSummary, classify_error, is_server_error
from kedge.engines.http_errors import hide_credentials, parse_error
from kedge.engines.raw_response import ResponseReader, is_event_stream
from kedge.engines.response_bytes import MAX_ERROR_BYTES, iter_parts, make_inflater, resolve_limit
from kedge.errors import RequestRefused, ServerFailed, StreamTooLarge
from kedge.events import Outcome
from kedge.evidence.judge import names_other_response
from kedge.wire.assembler import Assembler
from kedge.wire.responses import ResponsesDecoder

SERVER_ERROR_CODES = frozenset({"server_error", "internal_error", "internal_server_error"})
"""The codes with which a stream reports an error of the server, which has no HTTP status there."""

_DUPLICATE_PATTERN = re.compile(r"\bduplicate item\b", re.IGNORECASE)
"""The rejection of an item that the context already contains, by its id."""
_TOO_LONG_PATTERN = re.compile(r"\bcontext[_ ](length|window)", re.IGNORECASE)
"""The rejection of a context that is too long. The server's may be longer than the program's, by reasoning and by
the results of hosted tools."""

Verdict = Literal["waiting", "release", "resend"]


class ResponseObserver:
    """An observer that reads a copy of a response while it is passed on.

    Args:
        headers: The response headers, with lower-case names.
        expected: The `previous_response_id` that was sent instead of the program's history, if any.
        status: The HTTP status.
        must_judge: Whether the response must be judged before any of it is passed on.
        streaming: Whether a stream was requested; some servers send it without its content type.
        retained_bytes: The bytes of the decompressed body that are retained.
        max_bytes: The maximum size of a response that is read; None for that of the environment.
        credentials: The credentials of the request, which an error must not contain.

    Attributes:
        status: The HTTP status.
        verdict: `waiting` while nothing may be passed on, `release` when it may be, `resend` if the
            original request must be sent instead.
        reason: The reason for sending it: `rejected`, `forgot` or `unproven`.
        rejection: How the server rejected the anchor; see `kedge.engines.heal_rules`.
        has_failed: Whether the response reports an error.
        has_server_error: Whether this is an error of the server.
        error: The first error that the response reports, if there is one.
        is_partial: Whether this is the rest of a stream whose end does not list the complete output.
        body_start: The retained bytes.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        expected: str = "",
        *,
        status: int = 200,
        must_judge: bool = False,
        streaming: bool = False,
        retained_bytes: int = 0,
        max_bytes: int | None = None,
        credentials: Sequence[str] = (),
    ) -> None:
        self.status = status
        self.error: RequestRefused | None = None
        self.reason = ""
        self.rejection = ""
        self.has_failed = status >= 400
        self.has_server_error = is_server_error(status)
        self.is_partial = False
        self.verdict: Verdict = "waiting" if expected else "release"
        self.body_start = bytearray()
        self._retained_bytes = retained_bytes
        self._credentials = credentials
        self._expected = expected
        self._must_judge = must_judge
        self._is_error = status >= 400
        self._has_start = False
        self._has_output = False
        self._missing_bytes: int | None = None
        """The bytes that are still to come, if the server announced how many there are."""
        length = headers.get("content-length", "")
        if length.isdigit():
            self._missing_bytes = int(length)
        self._decoder = ResponsesDecoder()
        self._assembler = Assembler()
        self._inflate = make_inflater(headers.get("content-encoding", ""))
        is_stream = not self._is_error and is_event_stream(headers, requested=streaming)
        self._reader = ResponseReader(self._decoder, is_stream=is_stream)
        self._max_bytes = MAX_ERROR_BYTES if self._is_error else resolve_limit(max_bytes)
        self._left = self._max_bytes
        self._error = bytearray()

    def feed(self, chunk: bytes) -> Verdict:
        """Read more of the response, as received.

        Args:
            chunk: Bytes of the body, compressed if the server compresses it.

        Returns:
            The verdict.
        """
        for _ in self.read_in_steps(chunk):
            pass
        return self.verdict

    def read_in_steps(self, chunk: bytes) -> Iterator[None]:
        """Read more of the response as ``feed``, in steps of a few milliseconds at most, however well it is compressed.

        Args:
            chunk: Bytes of the body.

        Yields:
            None after each step.
        """
        if self._missing_bytes is not None:
            self._missing_bytes -= len(chunk)
        if self._inflate is not None:
            try:
                for piece in self._inflate(chunk):
                    self.body_start += piece[: self._retained_bytes - len(self.body_start)]
                    for part in iter_parts(piece):
                        self._read(part)
                        yield
            except (zlib.error, StreamTooLarge):
                self._inflate = None
                self._error.clear()
        if self._inflate is None:  # a compression that is not read here: no verdict, no record
            self._give_up()

    def _read(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise StreamTooLarge("response", self._max_bytes)
        if self._is_error:
            self._error += data
            return
        for event in self._reader.feed(data):
            self._handle(event)
        # A response that is not streamed is judged when it is complete, without additional delay.
        if self._has_output and not self._must_judge:
            self.release()  # an error in the same chunk can still be healed

    @property
    def is_refused(self) -> bool:
        """Whether the server refused the request, by its status or in a stream by rejecting the anchor."""
        return 400 <= self.status < 500 or bool(self.rejection and not self._has_output)

    @property
    def is_complete(self) -> bool:
        """Whether the end of the response has been read; clients may stop reading there."""
        if self._reader.is_stream:
            return self._decoder.ended
        return self._missing_bytes == 0

    def finish(self) -> Outcome | None:
        """Return the complete response, or None if it could not be read or is an error."""
        if not self._is_error and self._inflate is not None:
            with suppress(ServerFailed):
                for event in self._reader.close():
                    self._handle(event)
                return self._assembler.finish()
        self._give_up()
        return None

    def _handle(self, event: events.StreamEvent) -> None:
        self._assembler.feed(event)
        if isinstance(event, events.ResponseCompleted) and self._reader.is_stream:
            self.is_partial = not (self._has_start or event.output)
        match event:
            case events.ResponseStarted():
                self._has_start = True
                if names_other_response(event, self._expected):
                    self.resend("forgot")
            case events.StreamFailed() | events.ResponseFailed():
                self._has_output |= not self._fail(self._build_error(event))
            case events.OpaqueEvent() | events.AnomalyNoted():
                pass  # progress before any output
            case _:
                self._has_output = True

    def _build_error(self, event: events.StreamFailed | events.ResponseFailed) -> RequestRefused:
        """Return the error in a stream, where gateways report the errors of their upstream."""
        message = hide_credentials(event.message, self._credentials)
        code = hide_credentials(event.code, self._credentials)
        if isinstance(event, events.ResponseFailed):
            return RequestRefused(message, code=code)
        return RequestRefused(message, code=code, status=event.status, param=event.param)

    def _fail(self, error: RequestRefused) -> bool:
        """Note an error that the response reports; return whether it rejects the anchor."""
        self.has_failed = True
        self.error = self.error or error
        self.has_server_error |= is_server_error(error.status) or error.code in SERVER_ERROR_CODES
        # An `error` event may be followed by a `response.failed` event with less information.
        if self._expected and not self.rejection:
            self.rejection = _classify_rejection(error, self._expected)
        if self.rejection:
            self.resend("rejected")
        return bool(self.rejection)

    def resend(self, reason: str) -> None:
        """Let the original request be sent instead, unless something was passed on."""
        if self.verdict == "waiting":
            self.verdict = "resend"
            self.reason = reason

    def release(self) -> None:
        """Let the response be passed on, unless the original request is sent instead."""
        if self.verdict == "waiting":
            self.verdict = "release"

    def _give_up(self) -> None:
        """Pass on an error, or a response that cannot be read, unless it rejects the anchor or must be judged."""
        if self._is_error:
            text = hide_credentials(self._error.decode(errors="replace"), self._credentials)
            details = parse_error(text)
            self._fail(
                RequestRefused(
                    details["message"],
                    status=self.status,
                    code=details["code"],
                    param=details["param"],
                )
            )
        elif self._must_judge:
            self.resend("unproven")
        self.release()


def _classify_rejection(error: RequestRefused, response_id: str) -> str:
    """Return why the original request may succeed where one on this anchor failed; empty if it would not."""
    reason = classify_error(error, RequestSummary(previous_response_id=response_id))
    if reason:
        return reason
    # The client may have signed the body that the program wrote, in a header that is not known here.
    if error.status in (401, 403):
        return "unsupported"
    # Two responses with the same text have other ids: one may be the anchor, the other a new item.
    if _DUPLICATE_PATTERN.search(error.message):
        return "duplicate"
    is_too_long = _TOO_LONG_PATTERN.search(f"{error.code} {error.message}")
    if is_too_long and not is_server_error(error.status):
        return "too_long"
    return ""
