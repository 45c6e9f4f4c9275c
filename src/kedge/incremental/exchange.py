"""Process one request and its response: rewrite, judge, observe and report.

The entry points (the chained client and the proxy) own the connection; this module makes the decisions:

1. `Chainer.begin` returns the body to send first.
2. If the server has not proved yet that it uses stored context, `Exchange.probe` checks the items it lists.
3. For a rewritten request, `Exchange.is_chain_error` and `ResponseObserver.verdict` determine whether the
   server rejected the chain or answered without it. Nothing has been passed to the program at that point, so
   the body that the program wrote is sent instead, once.
4. The rest of the response is passed on byte for byte and observed. `Exchange.finish` records it.
"""

import hashlib
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from kedge.config.settings import is_chaining_enabled
from kedge.engines.audit import Audit, audit_blocks
from kedge.engines.conversation_objects import JsonSource
from kedge.engines.heal_rules import (
    REJECTION_STATUSES,
    RequestSummary,
    classify_error,
    is_server_error,
)
from kedge.engines.http_errors import CREDENTIAL_HEADERS, GATEWAY_HEADERS, parse_error
from kedge.engines.request_metrics import record_healing, record_lost_context
from kedge.engines.response_limit import (
    READABLE_CODINGS,
    SizeLimit,
    make_inflater,
    resolve_limit,
)
from kedge.errors import RequestRefused, StreamTooLarge
from kedge.events import (
    AnomalyNoted,
    OpaqueEvent,
    Outcome,
    ResponseCompleted,
    ResponseFailed,
    ResponseStarted,
    StreamEvent,
    StreamFailed,
)
from kedge.events.assembler import Assembler
from kedge.events.responses import ResponsesDecoder
from kedge.incremental.index import AnchorIndex, IndexedResponse, MemoryIndex
from kedge.incremental.report import ChainedRequest, ChainReport, ReportBuilder
from kedge.incremental.rewrite import (
    ParsedRequest,
    PassThroughReason,
    Rewritten,
    complete_response,
    find_shorter,
    index_response,
    normalize_block,
    parse_request,
    rewrite,
)
from kedge.memory.evidence import Trust, find_known_host, limit_depth, read_identity
from kedge.memory.judge import Judgment, MemoryCheck, Way, names_other_response
from kedge.memory.server_memory import ServerMemory
from kedge.observe import get_logger
from kedge.planning import DEFAULT_RETENTION, AnchorRecord, RequestPlan
from kedge.planning.anchors import check_positive_int, validate_seconds
from kedge.text.json_text import decode
from kedge.turns import Block

log = get_logger("kedge.incremental")

ROUTING_COOKIES = frozenset(
    {
        *("__cf_bm", "_cfuvid", "__cfruid", "__cflb", "cf_clearance"),
        *("AWSALB", "AWSALBCORS", "AWSALBTG", "AWSALBTGCORS", "AWSELB", "AWSELBCORS"),
        *("ARRAffinity", "ARRAffinitySameSite", "ApplicationGatewayAffinity"),
        *("ApplicationGatewayAffinityCORS", "ASLBSA", "ASLBSACORS", "GCLB"),
    }
)
"""Cookies of load balancers, which identify a connection, not an account, and change often."""
CREDENTIAL_PARAMS = frozenset(
    {"api-key", "api_key", "apikey", "key", "code", "token", "access_token", "subscription-key"}
)
"""Parameters of a URL that identify an account; their values are stored as a hash only."""
SIGNATURE_HEADERS = (
    "content-digest",
    "content-md5",
    "digest",
    "repr-digest",
    "signature",
    "x-amz-content-sha256",
)
"""Headers with a signature or a digest of the body, which another body would make invalid."""
ACCOUNT_HEADERS = ("openai-organization", "openai-project")
"""Headers that select the organization and project of a key."""

SERVER_ERROR_CODES = frozenset({"server_error", "internal_error", "internal_server_error"})
"""The codes with which a stream reports an error of the server, which has no HTTP status there."""

_DUPLICATE_PATTERN = re.compile(r"\bduplicate item\b", re.IGNORECASE)
"""The rejection of an item that the context already contains, by its id."""
_TOO_LONG_PATTERN = re.compile(r"\bcontext[_ ](length|window)", re.IGNORECASE)
"""The rejection of a context that is too long. The server's may be longer than the program's, by reasoning and by
the results of hosted tools."""

Verdict = Literal["waiting", "release", "resend"]


def is_idempotency_key(header: str) -> bool:
    """Return whether a header identifies one request, so that a server rejects it with another body."""
    return header.lower().endswith("idempotency-key")


class Chainer:
    """The rewriting of requests to one or several servers, with an index of their responses.

    Args:
        index: Where responses are looked up by content; in memory by default.
        retention: The seconds for which a server stores a response; None if it does not expire.
        max_depth: The number of responses of a chain that the server passes to the model, if it is limited.
        trust: Which servers are chained on: `earned` for those that are known or proved to use stored
            context, `always` for all, `never` for none.
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
        self.retention = validate_seconds(retention, "retention")
        self.max_depth = None if max_depth is None else check_positive_int("max_depth", max_depth)
        self.clock = clock
        # A program's stream cannot be held back. Its server is believed if it lists what it stored and reports no
        # counts, because there is no option with which the program could request audits.
        self.memory = ServerMemory(
            trust=trust, clock=clock, holds_streams=False, believes_probes=True
        )
        self._hash_key = self.index.hash_key
        self._report = ReportBuilder(on_request)

    @property
    def report(self) -> ChainReport:
        """The report so far: what was sent, saved, healed and passed through."""
        return self._report.build()

    def continue_report(self, previous: "Chainer") -> None:
        """Add to the report of another chainer, with the `on_request` of this one."""
        previous._report.on_request, self._report = self._report.on_request, previous._report  # noqa: SLF001

    def begin(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes, user: str = ""
    ) -> "Exchange | None":
        """Decide which body to send for a request.

        Args:
            method: The HTTP method.
            url: The full URL.
            headers: The request headers, with lower-case names.
            content: The body, uncompressed.
            user: The user for whom a proxy sends it.

        Returns:
            The exchange, or None for a request that is neither `POST …/responses` nor a `GET` of a
            response that is generated in the background.
        """
        path = urlsplit(url).path.rstrip("/")
        parent_path, _, response_id = path.rpartition("/")
        if method == "DELETE" and parent_path.endswith("/responses"):
            self.index.mark_lost(self.scope(method, url, headers, user), response_id)
            return None
        if method == "GET" and parent_path.endswith("/responses"):
            scope = self.scope(method, url, headers, user)
            pending = self.index.get(scope, response_id)
            if pending is None or pending.record.status != "incomplete":
                return None
            return Exchange(self, scope, content, None, "background", pending=pending)
        if method != "POST" or not path.endswith("/responses"):
            return None
        scope = self.scope(method, url, headers, user)
        parsed = self._parse(headers, content)
        if not isinstance(parsed, ParsedRequest):
            return Exchange(self, scope, content, None, parsed)
        check = self.memory.check(
            scope,
            parsed.model,
            streaming=parsed.streaming,
            conversation=parsed.prefixes.digest(1),
            known=find_known_host(url),
        )
        for key in self.memory.list_unread(check):
            self.memory.restore(check, key, self.index.load_evidence(key))
        decision = self._decide(parsed, scope, headers, check)
        return Exchange(self, scope, content, parsed, decision, check)

    def _parse(
        self, headers: Mapping[str, str], content: bytes
    ) -> ParsedRequest | PassThroughReason:
        if headers.get("content-encoding", "identity") != "identity":
            return "encoded"
        if headers.get("authorization", "").startswith("AWS4-"):
            return "signed"
        if any(name in headers for name in SIGNATURE_HEADERS):
            return "signed"
        return parse_request(content)

    def _decide(
        self, parsed: ParsedRequest, scope: str, headers: Mapping[str, str], check: MemoryCheck
    ) -> Rewritten | PassThroughReason:
        if not is_chaining_enabled():
            return "switched_off"
        if parsed.blocked:
            return parsed.blocked
        # A chained attempt may be the one that failed, so a retry of the client is sent as written.
        if headers.get("x-stainless-retry-count", "0") != "0":
            return "retry"
        # A key belongs to one body, and other attempts of the program may be sent as written.
        if any(headers[name] for name in headers if is_idempotency_key(name)):
            return "idempotency_key"
        if self.memory.trust == "never":
            return "untrusted"
        if doubt := check.doubt:
            return doubt
        rewritten = rewrite(
            parsed,
            self.index,
            scope=scope,
            now=self.clock(),
            max_depth=limit_depth(self.max_depth, check.evidence.max_depth),
            not_before=check.evidence.not_before,
        )
        if not isinstance(rewritten, Rewritten):
            return rewritten
        way = _decide_way(rewritten, parsed, check)
        return "untrusted" if way == "full" else rewritten

    def scope(self, method: str, url: str, headers: Mapping[str, str], user: str = "") -> str:
        """Return the scope in which responses are shared: endpoint, organization, project, account and user.

        Credentials are hashed with the key of the index, which is never logged. The arguments are those of
        `begin`.
        """
        parts = urlsplit(url)
        path = parts.path.rstrip("/")
        if method != "POST":  # the URL of one response
            path = path.rpartition("/")[0]
        login, _, address = parts.netloc.rpartition("@")
        values = {**headers, "cookie": _drop_routing_cookies(headers.get("cookie", ""))}
        secret = "\0".join(f"{name}={values.get(name, '')}" for name in CREDENTIAL_HEADERS)
        secret += "".join(f"\0{name}={values[name]}" for name in GATEWAY_HEADERS if name in values)
        secret += f"\0@{login}" if login else ""
        query = parse_qsl(parts.query) if parts.query else []
        secret += "".join(f"\0?{k}={v}" for k, v in query if k.lower() in CREDENTIAL_PARAMS)
        secret += f"\0{user}" if user else ""
        account = hashlib.blake2b(secret.encode(), key=self._hash_key, digest_size=16).hexdigest()
        owners = [headers.get(name, "") for name in ACCOUNT_HEADERS]
        return "|".join([f"{parts.scheme}://{address}{path}", *owners, account])

    def save_evidence(self, check: MemoryCheck) -> None:
        """Write the evidence of a check to the index, if it changed."""
        for key, form in self.memory.take_changes(check):
            self.index.save_evidence(key, form)

    def complete(self, request: ChainedRequest) -> None:
        """Add a finished request to the report."""
        self._report.add(request)


@dataclass(slots=True)
class Exchange:
    """One `POST /responses` request.

    Attributes:
        chainer: The chainer that started it.
        scope: The endpoint and account.
        original: The body that the program wrote.
        parsed: The parsed body; None if it could not be read.
        decision: The rewritten request, or the reason if there is none.
        check: The check of the server's memory; None if the request could not be read.
        pending: The entry of the response that is fetched, for a `GET`; such a request is not reported.
        healed: The reason if the original body was sent after a rewritten one; otherwise empty.
        result: The reported request, after it is finished.
    """

    chainer: Chainer
    scope: str
    original: bytes
    parsed: ParsedRequest | None
    decision: Rewritten | PassThroughReason
    check: MemoryCheck | None = None
    pending: IndexedResponse | None = None
    healed: str = ""
    observer: "ResponseObserver | None" = field(default=None, init=False)
    result: ChainedRequest | None = field(default=None, init=False)
    _rejection: str = field(default="", init=False)
    _rejected: tuple[Rewritten, str, float] | None = field(default=None, init=False)
    _is_judged: bool = field(default=False, init=False)
    _judgment: Judgment = field(default=Judgment(), init=False)
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

    @property
    def anchor_id(self) -> str:
        """The response that the request continues, by the decision of this module or of the program itself."""
        if rewritten := self.rewritten:
            return rewritten.anchor.record.response_id
        return self.parsed.previous_response_id if self.parsed else ""

    @property
    def reason(self) -> str:
        """Why the request is sent as written; empty if it was rewritten."""
        return self.decision if isinstance(self.decision, str) else ""

    @property
    def is_background(self) -> bool:
        """Whether the response is generated in the background, also after its stream is closed."""
        return self.decision == "background"

    @property
    def is_finished(self) -> bool:
        """Whether the request was reported."""
        return self._is_finished

    @property
    def needs_probe(self) -> bool:
        """Whether the server must first prove that it stores the context that the request relies on."""
        return bool(self.rewritten and self.check and self.check.way == "probe")

    async def probe(self, source: JsonSource) -> Audit:
        """Compare the items that the server lists for the anchor with those of the program.

        Args:
            source: The source of JSON below the URL of the responses.

        Returns:
            The result, for `record_probe`.
        """
        if self.parsed is None or self.check is None or self.rewritten is None:
            return Audit(None)
        return await audit_blocks(
            source,
            self.parsed.blocks,
            self.rewritten.anchor.record,
            lists_items=self.check.evidence.audits,
            normalize=normalize_block,
        )

    def record_probe(self, found: Audit) -> None:
        """Record the result of a probe, and decide again whether the request is sent as written."""
        rewritten, check, parsed = self.rewritten, self.check, self.parsed
        if rewritten is None or check is None or parsed is None:
            return
        check.record_probe(found.agrees)
        self.chainer.save_evidence(check)
        if _decide_way(rewritten, parsed, check) not in ("direct", "held"):
            log.info("the server is not chained on: %s", found)
            self.decision = "untrusted"

    def detach(self) -> None:
        """Record nothing about the response: event hooks of the program sent the request to another account.

        If it was sent on an anchor, which belongs to the account that was known before, the body that the
        program wrote must be sent.
        """
        if rewritten := self.rewritten:
            self.healed = "unproven"
            record_healing(self.healed, rewritten.anchor.record.response_id)
        self.decision, self.check = "credentials", None

    def is_chain_error(self, status: int, body: bytes | None) -> bool:
        """Return whether this error response rejects the anchor rather than the request.

        Args:
            status: The HTTP status.
            body: The decoded body; None if it is unknown. Then each status of a rejection counts as one.
        """
        if not self.rewritten:
            return False
        if body is None:
            return status in REJECTION_STATUSES
        details = parse_error(body.decode(errors="replace"))
        error = RequestRefused(
            details["message"], status=status, code=details["code"], param=details["param"]
        )
        self._rejection = _classify_rejection(error, self.rewritten.anchor.record.response_id)
        if self.check and not self._rejection and is_server_error(status):
            self.check.record_error()
            self.chainer.save_evidence(self.check)
        return bool(self._rejection)

    def heal(self) -> bytes:
        """Abandon the anchor and return the body that the program wrote.

        The reason is `rejected` if the server rejected the anchor, `forgot` if it answered without the
        stored context, and `unproven` if it did not show that it used it.
        """
        observer = self.observer
        reason = (observer.reason if observer else "") or "rejected"
        rejection = self._rejection or (observer.rejection if observer else "")
        rewritten, check, was_judged = self.rewritten, self.check, self._is_judged
        self.healed, self.observer, self._is_judged = reason, None, False
        if rewritten and check:
            response_id = rewritten.anchor.record.response_id
            record_healing(reason, response_id)
            if reason == "rejected":
                # If the original request is rejected as well, this was not because of the anchor.
                self._rejected = rewritten, rejection, self.chainer.clock()
            elif reason == "forgot":
                if not was_judged:
                    check.record_forgotten()
                    self.chainer.save_evidence(check)
                self.chainer.index.mark_lost(self.scope, response_id)
        return self.original

    def _record_rejection(self, rewritten: Rewritten, rejection: str, now: float) -> None:
        """Record that the server rejected the anchor at this time."""
        parsed, check, index = self.parsed, self.check, self.chainer.index
        if parsed is None or check is None:
            return
        lost = [rewritten.anchor.record.response_id]
        # After a total loss, each older response would cost another rejected request.
        if rejection == "gone":
            lost += find_shorter(parsed, index, rewritten.anchor)
        check.record_rejection(rejection, rewritten.anchor.record.created_at, now)
        self.chainer.save_evidence(check)
        index.mark_lost(self.scope, *lost)

    def observe(self, headers: Mapping[str, str]) -> "ResponseObserver":
        """Return an observer for a successful response with these headers (lower-case names)."""
        if self.check:
            self.chainer.memory.identify(self.check, read_identity(headers))
        streaming = self.parsed is not None and self.parsed.streaming
        if self.rewritten and self.check:
            self.observer = ResponseObserver(
                headers,
                self.rewritten.anchor.record.response_id,
                judge=self._judge,
                must_judge=self.check.way == "held",
                streaming=streaming,
            )
        else:
            self.observer = ResponseObserver(headers, streaming=streaming)
        return self.observer

    def _judge(self, outcome: Outcome) -> Judgment:
        """Return what an answer shows about the server's memory; called once."""
        self._is_judged = True
        if self.check is None:
            return Judgment()
        self._judgment = self.check.judge(outcome)
        if self._judgment.reason:
            self.chainer.save_evidence(self.check)
        return self._judgment

    def finish(self, outcome: Outcome | None = None) -> None:
        """Record the response, if it became an anchor, and report the request. Later calls have no effect."""
        if self._is_finished:
            return
        self._is_finished = True
        if self.pending is not None:
            is_partial = self.observer is not None and self.observer.is_partial
            entry = complete_response(self.pending, outcome) if outcome and not is_partial else None
            if entry is not None:
                self.chainer.index.add(entry)
            return
        rewritten = self.rewritten
        is_lost = outcome is not None and not self._record(outcome) and rewritten is not None
        blocks = len(self.parsed.blocks) if self.parsed else 0
        self.result = ChainedRequest(
            created_at=self.chainer.clock(),
            model=self.parsed.model if self.parsed else "",
            anchor=self.anchor_id,
            response_id=outcome.response_id if outcome else "",
            sent_blocks=len(rewritten.sent) if rewritten else blocks,
            full_blocks=blocks,
            sent_bytes=len(self.content),
            full_bytes=len(self.original),
            reason=self.reason,
            healed=self.healed,
            is_lost=is_lost,
        )
        self.chainer.complete(self.result)
        if self.observer:
            self._record_failure(self.observer)

    def _record_failure(self, observer: "ResponseObserver") -> None:
        """Record a failed anchor, if the original request succeeded or the program received the failure."""
        rewritten = self.rewritten
        if self._rejected and not observer.has_failed:
            self._record_rejection(*self._rejected)
        elif rewritten and observer.rejection:
            self._record_rejection(rewritten, observer.rejection, self.chainer.clock())
        elif rewritten and observer.has_server_error and self.check:
            self.check.record_error()
            self.chainer.save_evidence(self.check)

    def _record(self, outcome: Outcome) -> bool:
        """Index the response and evaluate its token counts; return False if its context was lost."""
        parsed, check, index = self.parsed, self.check, self.chainer.index
        if parsed is None or check is None or not parsed.is_observable:
            return True
        parent = self.rewritten.anchor if self.rewritten else None
        if parent is None:
            if parsed.previous_response_id:
                parent = index.get(self.scope, parsed.previous_response_id)
            plan = _to_plan(parent.record if parent else None, parsed.blocks)
            check.describe(plan, parsed.values)
        judgment = self._judgment if self._is_judged else self._judge(outcome)
        if judgment.reason:
            if self.rewritten and parent:
                older = [] if judgment.resend else find_shorter(parsed, index, parent)
                index.mark_lost(self.scope, parent.record.response_id, *older)
                record_lost_context(outcome.response_id)
            return False
        entry = index_response(
            parsed,
            outcome,
            scope=self.scope,
            now=self.chainer.clock(),
            parent=parent,
            retention=self.chainer.retention,
            counted=judgment.counted,
        )
        if entry is not None and index.add(entry):
            # It is unknown which of the two responses the server has stored under this id.
            index.mark_lost(self.scope, entry.record.response_id)
            self.chainer.memory.record_issued(check, entry.record.response_id, known=True)
        self.chainer.save_evidence(check)
        return True


class ResponseObserver:
    """An observer that reads a copy of a response while it is passed on.

    Args:
        headers: The response headers, with lower-case names.
        expected: The `previous_response_id` that was sent instead of the program's history, if any.
        judge: Returns what a complete response shows about the server's memory.
        must_judge: Whether the response must be judged before any of it is passed on.
        streaming: Whether a stream was requested; some servers send it without its content type.

    Attributes:
        verdict: `waiting` while nothing may be passed on, `release` when it may be, `resend` if the
            original request must be sent instead.
        reason: The reason for sending it: `rejected`, `forgot` or `unproven`.
        rejection: How the server rejected the anchor; see `kedge.engines.heal_rules`.
        has_failed: Whether the response reports an error.
        has_server_error: Whether this is an error of the server.
        is_partial: Whether this is the rest of a stream whose end does not list the complete output.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        expected: str = "",
        *,
        judge: Callable[[Outcome], Judgment] | None = None,
        must_judge: bool = False,
        streaming: bool = False,
    ) -> None:
        content_type = headers.get("content-type", "")
        self.is_stream = "text/event-stream" in content_type or (
            streaming and "json" not in content_type
        )
        self.verdict: Verdict = "waiting" if expected else "release"
        self.reason = ""
        self.rejection = ""
        self.has_failed = self.has_server_error = False
        self.is_partial = False
        self._has_start = self._has_output = False
        self._expected = expected
        self._judge = judge
        self._must_judge = must_judge
        length = headers.get("content-length", "")
        self._missing_bytes = int(length) if length.isdigit() else None
        self._decoder = ResponsesDecoder()
        self._assembler = Assembler()
        self._body = bytearray()
        self._inflate = make_inflater(headers.get("content-encoding", ""))
        self._limit = SizeLimit(resolve_limit())

    def feed(self, chunk: bytes) -> Verdict:
        """Read more of the response, as received.

        Args:
            chunk: Bytes of the body, compressed if the server compresses it.

        Returns:
            The verdict.
        """
        if self._missing_bytes is not None:
            self._missing_bytes -= len(chunk)
        if self._inflate is None:  # a compression that is not read here: no verdict, no record
            return self._give_up()
        try:
            for piece in self._inflate(chunk):
                self._limit.add(piece)
                self._read(piece)
        except (zlib.error, StreamTooLarge):
            self._inflate = None
            self._decoder, self._body = ResponsesDecoder(), bytearray()
            return self._give_up()
        return self.verdict

    def _read(self, data: bytes) -> None:
        if not self.is_stream:
            self._body += data
            return
        for event in self._decoder.feed(data):
            self._handle(event)
        if self._has_output:  # an error in the same chunk can still be healed
            self._release()

    @property
    def is_complete(self) -> bool:
        """Whether the end of the response has been read; clients may stop reading there."""
        return self._decoder.ended if self.is_stream else self._missing_bytes == 0

    def finish(self) -> Outcome | None:
        """Return the complete response, or None if it could not be read."""
        if self._inflate is None:
            self._give_up()
            return None
        if self.is_stream:
            events = self._decoder.close()
        else:
            try:
                response: Any = decode(self._body)
            except ValueError:
                response = None
            if not isinstance(response, dict):
                self._give_up()
                return None
            # Only an escape can contain a lone surrogate.
            repair = b"\\u" in self._body
            events = self._decoder.feed_whole(response, repair=repair)  # pyright: ignore[reportUnknownArgumentType]
        for event in events:
            self._handle(event)
        outcome = self._assembler.finish()
        if self.verdict == "waiting" and self._judge is not None:
            judgment = self._judge(outcome)
            if judgment.resend:
                self._resend(judgment.reason)
                return None
        if self.verdict == "waiting":
            self.verdict = "release"
        return None if self._decoder.calls.has_fallback_ids else outcome

    def _handle(self, event: StreamEvent) -> None:
        self._assembler.feed(event)
        if isinstance(event, ResponseCompleted) and self.is_stream:
            self.is_partial = not (self._has_start or event.output)
        if isinstance(event, ResponseStarted):
            self._has_start = True
            if names_other_response(event, self._expected):
                self._resend("forgot")
        elif isinstance(event, StreamFailed | ResponseFailed) and self._rejects_chain(event):
            self._resend("rejected")  # gateways report errors of the upstream inside the stream
        elif not isinstance(event, OpaqueEvent | AnomalyNoted):  # progress before any output
            self._has_output = True

    def _rejects_chain(self, event: StreamFailed | ResponseFailed) -> bool:
        error = RequestRefused(event.message, code=event.code)
        if isinstance(event, StreamFailed):
            error.status, error.param = event.status, event.param
        self.has_failed = True
        self.has_server_error |= is_server_error(error.status) or event.code in SERVER_ERROR_CODES
        # An `error` event may be followed by a `response.failed` event with less information.
        if self._expected and not self.rejection:
            self.rejection = _classify_rejection(error, self._expected)
        return bool(self.rejection)

    def _release(self) -> None:
        # A response that is not streamed is judged when it is complete, without additional delay.
        if self.verdict == "waiting" and self.is_stream and not self._must_judge:
            self.verdict = "release"

    def _resend(self, reason: str) -> None:
        if self.verdict == "waiting":
            self.verdict, self.reason = "resend", reason

    def _give_up(self) -> Verdict:
        """Pass on a response that cannot be read, unless it must be judged."""
        if self._must_judge:
            self._resend("unproven")
        if self.verdict == "waiting":
            self.verdict = "release"
        return self.verdict


def _to_plan(anchor: AnchorRecord | None, sent: Sequence[Block]) -> RequestPlan:
    """Return the plan of a request that sends these items of the program on an anchor."""
    return RequestPlan(
        mode="chained",
        scope=anchor.scope if anchor else "",
        anchor=anchor,
        source=tuple(sent),
        start=0,
        rejected=(),
        problems=(),
        total_blocks=0,
        full_bytes=0,
        delta_bytes=0,
        instructions=None,
    )


def _decide_way(rewritten: Rewritten, parsed: ParsedRequest, check: MemoryCheck) -> Way:
    plan = _to_plan(rewritten.anchor.record, rewritten.sent)
    return check.decide(plan, parsed.values)


def _classify_rejection(error: RequestRefused, response_id: str) -> str:
    """Return why the original request may succeed where one on this anchor failed; empty if it would not."""
    summary = RequestSummary(previous_response_id=response_id)
    if reason := classify_error(error, summary):
        return reason
    # Two responses with the same text have other ids: one may be the anchor, the other a new item.
    if _DUPLICATE_PATTERN.search(error.message):
        return "duplicate"
    is_too_long = _TOO_LONG_PATTERN.search(f"{error.code} {error.message}")
    return "too_long" if is_too_long and not is_server_error(error.status) else ""


def _drop_routing_cookies(header: str) -> str:
    """Return a `Cookie` header without the cookies of load balancers."""
    cookies = (cookie.strip() for cookie in header.split(";"))
    return "; ".join(each for each in cookies if each.partition("=")[0] not in ROUTING_COOKIES)


def limit_codings(accepted: str) -> str:
    """Return an `Accept-Encoding` header without the compressions that cannot be read here.

    A response that cannot be read is neither an anchor nor recognized as the rejection of one.
    """
    codings = [coding.strip() for coding in accepted.split(",")]
    readable = [each for each in codings if _get_name(each) in READABLE_CODINGS]
    if len(readable) == len(codings):
        return accepted
    return ", ".join(readable) or ("identity" if accepted else "")


def _get_name(coding: str) -> str:
    return coding.partition(";")[0].strip().lower()
