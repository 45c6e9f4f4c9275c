"""One request and its response on their way through: rewrite, judge, observe, report.

The entry points own the connection; this module owns the decisions. They hand over what they are about to
send and what arrives, and are details what to do:

1. `Chainer.begin` gives the body to send first.
2. For a rewritten request, `Exchange.is_chain_error` and `ResponseObserver.verdict` say whether the server
   rejected the chain or answered without it. Nothing has been passed to the program at that point, so the
   body that the program wrote is sent instead, once.
3. The rest of the response is passed on byte for byte and observed. `Exchange.finish` records it.
"""

import hashlib
import json
import secrets
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from kedge.config.settings import is_chaining_enabled
from kedge.engines.evidence import Trust
from kedge.engines.healing import RequestSummary, classify_error
from kedge.engines.known_servers import (
    KNOWN_IDENTITIES,
    KnownServer,
    find_known_host,
    read_identity,
)
from kedge.engines.transport import parse_error
from kedge.errors import RequestRefused
from kedge.events import (
    AnomalyNoted,
    OpaqueEvent,
    Outcome,
    ResponseFailed,
    ResponseStarted,
    StreamEvent,
    StreamFailed,
)
from kedge.events.assembler import Assembler
from kedge.events.responses import ResponsesDecoder
from kedge.incremental.index import AnchorIndex, MemoryIndex
from kedge.incremental.report import ChainedRequest, ChainReport, ReportBuilder
from kedge.incremental.rewrite import (
    ParsedRequest,
    PassThroughReason,
    Rewritten,
    parse_request,
    record_response,
    rewrite,
)
from kedge.observe import count, get_logger
from kedge.planning import DEFAULT_RETENTION

log = get_logger("kedge.incremental")

CREDENTIAL_HEADERS = ("authorization", "api-key", "x-api-key", "cookie", "proxy-authorization")
"""Headers that identify an account; their values are only ever hashed."""
ACCOUNT_HEADERS = ("openai-organization", "openai-project")
"""Headers that select what an account's key is used for."""

Verdict = Literal["waiting", "release", "resend"]


class Chainer:
    """Rewrites requests to one or several servers, and remembers what their responses hold.

    Args:
        index: Where responses are looked up by content; in memory by default.
        retention: How many seconds a server stores a response; None if it does not expire.
        max_depth: How many responses of a chain the server passes to the model, if it is limited.
        trust: Which servers are chained on: `earned` for those known to remember, `always` for all,
            `never` for none.
        on_request: Called with a `ChainedRequest` after each `POST /responses`.
        clock: Returns Unix time.
    """

    def __init__(
        self,
        index: AnchorIndex | None = None,
        *,
        retention: float | None = DEFAULT_RETENTION,
        max_depth: int | None = None,
        trust: Trust = "earned",
        on_request: Callable[[ChainedRequest], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.index: AnchorIndex = MemoryIndex() if index is None else index
        self.retention = retention
        self.max_depth = max_depth
        self.trust: Trust = trust
        self.clock = clock
        # An index that several processes share has a key of its own, so that their scopes agree.
        self._hash_key: bytes = getattr(self.index, "hash_key", None) or secrets.token_bytes(32)
        self._identified: dict[str, KnownServer] = {}
        self._report = ReportBuilder(on_request)

    @property
    def report(self) -> ChainReport:
        """What was sent, saved, healed and passed through so far."""
        return self._report.build()

    def begin(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes
    ) -> "Exchange | None":
        """Decide what to send for a request.

        Args:
            method: The HTTP method.
            url: The full URL.
            headers: The request headers, with lower-case names.
            content: The body, uncompressed.

        Returns:
            The exchange, or None for a request that is not `POST …/responses`.
        """
        parts = urlsplit(url)
        path = parts.path.rstrip("/")
        scope_path, _, response_id = path.rpartition("/")
        if method == "DELETE" and scope_path.endswith("/responses"):
            self.index.mark_lost(self.scope(url, headers, scope_path), response_id)
            return None
        if method != "POST" or not path.endswith("/responses"):
            return None
        scope = self.scope(url, headers, path)
        parsed = self._parse(headers, content)
        if not isinstance(parsed, ParsedRequest):
            return Exchange(self, scope, content, None, parsed)
        decision = self._decide(parsed, scope, url, headers)
        return Exchange(self, scope, content, parsed, decision)

    def _parse(
        self, headers: Mapping[str, str], content: bytes
    ) -> ParsedRequest | PassThroughReason:
        if headers.get("content-encoding", "identity") != "identity":
            return "encoded"
        if headers.get("authorization", "").startswith("AWS4-"):
            return "signed"
        return parse_request(content)

    def _decide(
        self, parsed: ParsedRequest, scope: str, url: str, headers: Mapping[str, str]
    ) -> Rewritten | PassThroughReason:
        if not is_chaining_enabled():
            return "switched_off"
        if parsed.blocked:
            return parsed.blocked
        # A chained attempt may have been what failed: the client's own retry goes out as written.
        if headers.get("x-stainless-retry-count", "0") != "0":
            return "retry"
        known = find_known_host(url) or self._identified.get(scope, KnownServer())
        if self.trust == "never" or (self.trust == "earned" and not known.remembers):
            return "untrusted"
        depths = [depth for depth in (self.max_depth, known.max_depth) if depth is not None]
        return rewrite(
            parsed,
            self.index,
            scope=scope,
            now=self.clock(),
            max_depth=min(depths, default=None),
        )

    def identify(self, scope: str, headers: Mapping[str, str]) -> None:
        """Learn from response headers whether the server is one whose memory is known."""
        if known := KNOWN_IDENTITIES.get(read_identity(headers)):
            self._identified[scope] = known

    def scope(self, url: str, headers: Mapping[str, str], path: str) -> str:
        """Return the name of what shares one memory: endpoint, organization, project and account.

        Credentials are hashed with a key of this process, which is never logged or stored.
        """
        parts = urlsplit(url)
        secret = "\0".join(f"{name}={headers.get(name, '')}" for name in CREDENTIAL_HEADERS)
        account = hashlib.blake2b(secret.encode(), key=self._hash_key, digest_size=16).hexdigest()
        owners = [headers.get(name, "") for name in ACCOUNT_HEADERS]
        return "|".join(
            [f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}", *owners, account]
        )

    def complete(self, request: ChainedRequest) -> None:
        """Add a finished request to the report."""
        self._report.add(request)


@dataclass(slots=True)
class Exchange:
    """One `POST /responses` request.

    Attributes:
        chainer: Decides and remembers.
        scope: The endpoint and account.
        original: The body that the program wrote.
        parsed: The same, parsed; None if it could not be read.
        decision: The rewritten request, or why there is none.
        healed: Why the original body was sent after a rewritten one; empty if it was not.
    """

    chainer: Chainer
    scope: str
    original: bytes
    parsed: ParsedRequest | None
    decision: Rewritten | PassThroughReason
    healed: str = ""
    observer: "ResponseObserver | None" = field(default=None, init=False)
    _is_finished: bool = field(default=False, init=False)

    @property
    def content(self) -> bytes:
        """The body to send now."""
        rewritten = self.rewritten
        return rewritten.content if rewritten else self.original

    @property
    def rewritten(self) -> Rewritten | None:
        """The rewritten request, unless it was healed."""
        return self.decision if isinstance(self.decision, Rewritten) and not self.healed else None

    def is_chain_error(self, status: int, body: bytes) -> bool:
        """Whether this error response rejects the anchor rather than the request.

        Args:
            status: The HTTP status.
            body: The decoded body.
        """
        if not self.rewritten:
            return False
        details = parse_error(body.decode(errors="replace"))
        error = RequestRefused(
            details["message"], status=status, code=details["code"], param=details["param"]
        )
        summary = RequestSummary(previous_response_id=self.rewritten.anchor.record.response_id)
        return classify_error(error, summary) is not None

    def heal(self, reason: str) -> bytes:
        """Give up the anchor and return the body that the program wrote.

        Args:
            reason: `rejected` if the server refused to chain, `forgot` if it answered without the
                stored context.
        """
        if self.rewritten:
            record = self.rewritten.anchor.record
            self.chainer.index.mark_lost(self.scope, record.response_id)
            log.info("resending in full: %s", reason, response_id=record.response_id)
            count("responses_healed_total", reason=reason)
        self.healed = reason
        return self.original

    def observe(self, headers: Mapping[str, str]) -> "ResponseObserver":
        """Start reading a successful response with these headers (lower-case names)."""
        self.chainer.identify(self.scope, headers)
        expected = self.rewritten.anchor.record.response_id if self.rewritten else ""
        self.observer = ResponseObserver(headers, expected)
        return self.observer

    def finish(self, outcome: Outcome | None = None) -> None:
        """Record the response, if it became an anchor, and report the request. Later calls do nothing."""
        if self._is_finished:
            return
        self._is_finished = True
        rewritten = self.rewritten
        entry = None
        if outcome is not None and self.parsed is not None:
            entry = record_response(
                self.parsed,
                outcome,
                self.chainer.index,
                scope=self.scope,
                now=self.chainer.clock(),
                anchor=rewritten.anchor if rewritten else None,
                retention=self.chainer.retention,
            )
            if entry is not None:
                self.chainer.index.add(entry)
        items = len(self.parsed.items) if self.parsed else 0
        self.chainer.complete(
            ChainedRequest(
                at=self.chainer.clock(),
                model=self.parsed.model if self.parsed else "",
                previous_response_id=rewritten.anchor.record.response_id if rewritten else "",
                response_id=outcome.response_id if outcome else "",
                sent_items=rewritten.sent_items if rewritten else items,
                full_items=items,
                sent_bytes=len(self.content),
                full_bytes=len(self.original),
                reason=self.decision if isinstance(self.decision, str) else "",
                healed=self.healed,
            )
        )


class ResponseObserver:
    """Reads a copy of a response while it is passed on.

    Args:
        headers: The response headers, with lower-case names.
        expected: The `previous_response_id` that was sent in place of the program's history, if any.
    """

    def __init__(self, headers: Mapping[str, str], expected: str = "") -> None:
        self.is_stream = "text/event-stream" in headers.get("content-type", "")
        self.verdict: Verdict = "waiting" if expected else "release"
        self._expected = expected
        self._decoder = ResponsesDecoder()
        self._assembler = Assembler()
        self._body = bytearray()
        self._inflate = _make_inflater(headers.get("content-encoding", ""))

    def feed(self, chunk: bytes) -> Verdict:
        """Read more of the response, as it came over the wire.

        Args:
            chunk: Bytes of the body, compressed if the server compresses it.

        Returns:
            `waiting` while nothing may be passed on, `release` once it may be, `resend` if the server
            rejected the anchor or started without it.
        """
        if self._inflate is None:  # a compression that is not read here: no verdict, no record
            return self._settle("release")
        try:
            data = self._inflate(chunk)
        except zlib.error:
            self._inflate = None
            return self._settle("release")
        if self.is_stream:
            for event in self._decoder.feed(data):
                self._handle(event)
        else:
            self._body += data
        return self.verdict

    @property
    def is_complete(self) -> bool:
        """Whether the end of the response has been read; clients may stop reading a stream there."""
        return self.is_stream and self._decoder.ended

    def finish(self) -> Outcome | None:
        """Return the complete response, or None if it could not be read."""
        if self._inflate is None:
            return None
        if self.is_stream:
            events = self._decoder.close()
        else:
            try:
                response: Any = json.loads(bytes(self._body))
            except ValueError:
                return None
            if not isinstance(response, dict):
                return None
            events = self._decoder.feed_whole(response)  # pyright: ignore[reportUnknownArgumentType]
        for event in events:
            self._handle(event)
        outcome = self._assembler.finish()
        if self._expected and outcome.echoed and outcome.previous_response_id != self._expected:
            self._settle("resend")
            return None
        self._settle("release")
        return None if self._decoder.calls.has_fallback_ids else outcome

    def _handle(self, event: StreamEvent) -> None:
        self._assembler.feed(event)
        if isinstance(event, ResponseStarted):
            if event.echoed and self._expected and event.previous_response_id != self._expected:
                self._settle("resend")
        elif isinstance(event, StreamFailed | ResponseFailed):
            # Gateways report errors of the upstream inside the stream.
            self._settle("resend" if self._rejects_chain(event) else "release")
        elif not isinstance(event, OpaqueEvent | AnomalyNoted):  # progress before any output
            self._settle("release")

    def _rejects_chain(self, event: StreamFailed | ResponseFailed) -> bool:
        error = RequestRefused(event.message, code=event.code)
        if isinstance(event, StreamFailed):
            error.status, error.param = event.status, event.param
        summary = RequestSummary(previous_response_id=self._expected)
        return bool(self._expected) and classify_error(error, summary) is not None

    def _settle(self, verdict: Verdict) -> Verdict:
        if self.verdict == "waiting":
            self.verdict = verdict
        return self.verdict


def _make_inflater(encoding: str) -> Callable[[bytes], bytes] | None:
    if encoding in ("", "identity"):
        return bytes
    if encoding in ("gzip", "x-gzip"):
        return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress
    if encoding == "deflate":
        return zlib.decompressobj().decompress
    return None
