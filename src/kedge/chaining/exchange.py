"""Process one request and its response: rewrite, judge, observe and report.

The transport of a chained client, or of the proxy, owns the connection; this module makes the decisions:

1. `Chainer.begin` returns the body to send first.
2. If the server has not proved yet that it uses stored context, `Exchange.probe` checks the items it lists.
3. For a rewritten request, `ResponseObserver.verdict` is whether the server rejected the chain or answered without
   it. Nothing has been passed to the program at that point, so the body that the program wrote is sent instead, once.
   `Exchange.heal` records the first request.
4. The rest of the response is passed on byte for byte and observed. `Exchange.end` records it.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kedge._internal.arguments import check_positive_int, validate_seconds
from kedge.chaining import rewrite
from kedge.chaining.index import AnchorIndex, IndexedResponse, MemoryIndex, StoreIndex
from kedge.chaining.observer import ResponseObserver
from kedge.chaining.report import ChainedRequest, ReportBuilder
from kedge.chaining.rewrite import ParsedRequest, Rewritten
from kedge.engines.http_errors import CREDENTIAL_HEADERS, GATEWAY_HEADERS, find_secrets
from kedge.engines.request_log import (
    MAX_CODE_LENGTH,
    MAX_ERROR_LENGTH,
    record_healing,
    record_lost_context,
)
from kedge.engines.stored_items import Audit, JsonSource, audit_blocks
from kedge.engines.transport import READABLE_CODINGS, resolve_limit
from kedge.events import Outcome
from kedge.evidence.judge import EvidenceRegistry, Judgment, MemoryCheck, Way, is_chaining_enabled
from kedge.evidence.server_evidence import Trust, find_known_host, limit_depth, read_identity
from kedge.observe import get_logger
from kedge.planning import DEFAULT_RETENTION, AnchorRecord, RequestPlan
from kedge.store.proxied_requests import COUNTED_TOKENS
from kedge.turns import Block

log = get_logger("kedge.chaining")

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
DIGEST_HEADERS = ("content-digest", "content-md5", "digest", "repr-digest", "x-amz-content-sha256")
"""Headers with a digest of the body, which another body would make invalid, as those of a signature."""
ACCOUNT_HEADERS = ("openai-organization", "openai-project")
"""Headers that select the organization and project of a key."""


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
        on_request: Called with a `ChainedRequest` after each `POST /responses` on the wire.
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
        self.max_response_bytes = resolve_limit()
        self.clock = clock
        # A program's stream cannot be held back. Its server is believed if it lists what it stored and reports no
        # counts, because there is no option with which the program could request audits.
        self.evidence = EvidenceRegistry(
            trust=trust, clock=clock, holds_streams=False, believes_probes=True
        )
        self.opened: StoreIndex | None = None
        """The index, if it was opened for this chainer, and is closed with it."""
        self.report = ReportBuilder(on_request)
        """What was sent, saved, healed and passed through."""

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
        parts, is_new, response_id = urlsplit(url), method == "POST", ""
        path = parts.path.rstrip("/")
        if method in ("GET", "DELETE"):  # one response
            path, _, response_id = path.rpartition("/")
        if not (is_new or response_id) or not path.endswith("/responses"):
            return None
        scope = self._find_scope(parts, path, headers, user)
        if method == "DELETE":
            self.index.mark_lost(scope, response_id)
            return None
        pending = None if is_new else self.index.get(scope, response_id)
        if not is_new and (pending is None or pending.record.status != "incomplete"):
            return None
        reason = _find_body_obstacle(headers) if is_new else "background"
        parsed = ParsedRequest(blocked=reason) if reason else rewrite.parse_request(content)
        check = self.evidence.check(
            scope,
            parsed.model,
            streaming=parsed.streaming,
            conversation=parsed.prefixes.digest(1),
            known=find_known_host(url),
        )
        if parsed.blocks:
            for key in self.evidence.list_unread(check):
                self.evidence.restore(check, key, self.index.load_evidence(key))
        decision = self._decide(parsed, scope, headers, check)
        rewritten = decision if isinstance(decision, Rewritten) else None
        reason = "" if isinstance(decision, Rewritten) else decision
        credentials = (*find_secrets(headers), *(value for _, value in _list_secret_params(parts)))
        return Exchange(
            self, scope, content, parsed, check, rewritten, reason, pending, credentials=credentials
        )

    def _decide(
        self, parsed: ParsedRequest, scope: str, headers: Mapping[str, str], check: MemoryCheck
    ) -> Rewritten | str:
        if parsed.blocked:
            return parsed.blocked
        if not is_chaining_enabled():
            return "switched_off"
        # A chained attempt may be the one that failed, so a retry of the client is sent as written.
        if headers.get("x-stainless-retry-count", "0") != "0":
            return "retry"
        # A key belongs to one body, and other attempts of the program may be sent as written.
        if any(headers[name] for name in headers if is_idempotency_key(name)):
            return "idempotency_key"
        if self.evidence.trust == "never":
            return "untrusted"
        if doubt := check.doubt:
            return doubt
        rewritten = rewrite.rewrite(
            parsed,
            self.index,
            scope=scope,
            now=self.clock(),
            max_depth=limit_depth(self.max_depth, check.evidence.max_depth),
            not_before=check.evidence.not_before,
        )
        if isinstance(rewritten, Rewritten) and _decide_way(rewritten, parsed, check) == "full":
            return "untrusted"
        return rewritten

    def _find_scope(
        self, parts: SplitResult, path: str, headers: Mapping[str, str], user: str
    ) -> str:
        """Return the scope in which responses are shared: endpoint, organization, project, account and user.

        Credentials are hashed with the key of the index, which is never logged.
        """
        address = parts.netloc.rpartition("@")[2]  # the HTTP client sends a login as a header
        values = {**headers, "cookie": _drop_routing_cookies(headers.get("cookie", ""))}
        secret = "\0".join(f"{name}={values.get(name, '')}" for name in CREDENTIAL_HEADERS)
        secret += "".join(f"\0{name}={values[name]}" for name in GATEWAY_HEADERS if name in values)
        secret += "".join(f"\0?{k}={v}" for k, v in _list_secret_params(parts))
        secret += f"\0{user}" if user else ""
        account = hashlib.blake2b(secret.encode(), key=self.index.hash_key, digest_size=16)
        owners = [headers.get(name, "") for name in ACCOUNT_HEADERS]
        return "|".join([f"{parts.scheme}://{address}{path}", *owners, account.hexdigest()])

    def save_evidence(self, check: MemoryCheck) -> None:
        """Write the evidence of a check to the index, if it changed."""
        for key, form in self.evidence.take_changes(check):
            self.index.save_evidence(key, form)


@dataclass(slots=True)
class Exchange:
    """One `POST /responses` request of a program, which is one request on the wire, or two if it is healed.

    Attributes:
        chainer: The chainer that started it.
        scope: The endpoint and account.
        original: The body that the program wrote.
        parsed: The parsed body.
        check: The check of the server's memory.
        rewritten: The rewritten request, unless there is none or it was healed.
        reason: Why the request is sent as written; empty if it was rewritten.
        pending: The entry of the response that is fetched, for a `GET`; such a request is not reported.
        healed: The reason if the original body was sent after a rewritten one; otherwise empty.
        credentials: The credentials of the request, which records must not contain.
        sent: The requests on the wire that have ended: their record, their body and the retained bytes of the response.
        observer: The observer of the response, unless there is none yet.
        retained_bytes: The bytes of the response that the observer retains.
        body: The body of the response as received, if it was read completely before it is passed on.
        is_finished: Whether the request was reported.
    """

    chainer: Chainer
    scope: str
    original: bytes
    parsed: ParsedRequest
    check: MemoryCheck
    rewritten: Rewritten | None
    reason: str
    pending: IndexedResponse | None = None
    healed: str = ""
    credentials: Sequence[str] = ()
    retained_bytes: int = 0
    sent: list[tuple[ChainedRequest, bytes, bytearray]] = field(default_factory=list, init=False)
    body: bytes | None = field(default=None, init=False)
    is_finished: bool = field(default=False, init=False)
    observer: ResponseObserver | None = field(default=None, init=False)
    _rejected: tuple[Rewritten, str, float] | None = field(default=None, init=False)
    _judgment: Judgment | None = field(default=None, init=False)
    _outcome: Outcome | None = field(default=None, init=False)
    _problem: str = field(default="", init=False)
    _started: float = field(default_factory=time.perf_counter, init=False)

    @property
    def content(self) -> bytes:
        """The body to send now."""
        return self.rewritten.content if self.rewritten else self.original

    @property
    def anchor_id(self) -> str:
        """The response that the request continues, by the decision of this module or of the program itself."""
        if self.rewritten:
            return self.rewritten.anchor.record.response_id
        return self.parsed.previous_response_id

    @property
    def needs_probe(self) -> bool:
        """Whether the server must first prove that it stores the context that the request relies on."""
        return self.rewritten is not None and self.check.way == "probe"

    async def probe(self, source: JsonSource) -> Audit:
        """Compare the items that the server lists for the anchor with those of the program.

        Args:
            source: The source of JSON below the URL of the responses.

        Returns:
            The result, for `record_probe`.
        """
        if self.rewritten is None:
            return Audit(None)
        return await audit_blocks(
            source,
            self.parsed.blocks,
            self.rewritten.anchor.record,
            lists_items=self.check.evidence.audits,
            normalize=rewrite.normalize_block,
        )

    def record_probe(self, found: Audit) -> None:
        """Record the result of a probe, and decide again whether the request is sent as written."""
        self.check.record_probe(found.agrees)
        self.chainer.save_evidence(self.check)
        rewritten = self.rewritten
        if rewritten and _decide_way(rewritten, self.parsed, self.check) not in ("direct", "held"):
            log.info("the server is not chained on: %s", found)
            self.distrust()

    def distrust(self) -> None:
        """Send the request as written, because the server has not shown that it remembers."""
        self.rewritten, self.reason = None, "untrusted"

    def observe(self, status: int, headers: Mapping[str, str]) -> ResponseObserver:
        """Return the observer of the response with this status and these headers (lower-case names)."""
        self.chainer.evidence.identify(self.check, read_identity(headers))
        rewritten = self.rewritten
        self.observer = ResponseObserver(
            headers,
            rewritten.anchor.record.response_id if rewritten else "",
            status=status,
            must_judge=rewritten is not None and self.check.way == "held",
            streaming=self.parsed.streaming,
            retained_bytes=self.retained_bytes,
            max_bytes=self.chainer.max_response_bytes,
            credentials=self.credentials,
        )
        return self.observer

    def end(self, *, early: bool = False, problem: str = "") -> None:
        """Record a response that was read to its end, or report a request without one. Later calls have no effect.

        Args:
            early: Whether the program has stopped reading, or the request failed. Clients may stop at the last
                event, and a response that is generated in the background is also generated without a reader.
            problem: The type of the exception for which there is no response.
        """
        observer = self.observer
        if self.is_finished:
            return
        if observer and early and not (observer.is_complete or self.reason == "background"):
            observer = None
        outcome = self._outcome = observer.finish() if observer else None
        if observer and outcome and self.rewritten:
            judgment = self._judgment = self.check.judge(outcome)
            if judgment.resend:
                observer.resend(judgment.reason)
            observer.release()
        if early or observer is None or observer.verdict != "resend":
            self._problem = problem
            self._finish(outcome)

    def heal(self) -> None:
        """Record the request and abandon its anchor; from now on `content` is the body that the program wrote.

        The reason is `rejected` if the server rejected the anchor, `forgot` if it answered without the
        stored context, and `unproven` if it did not show that it used it.
        """
        observer, rewritten, judgment = self.observer, self.rewritten, self._judgment
        if observer is None or rewritten is None:
            return
        # A stream that rejects the anchor is not read to its end.
        record = self._make_record(self._outcome or observer.finish(), is_resent=True)
        self.healed, self.rewritten = observer.reason, None
        self.observer = self._judgment = self.body = None
        response_id = rewritten.anchor.record.response_id
        record_healing(self.healed, response_id)
        if self.healed == "rejected":
            # If the original request is rejected as well, this was not because of the anchor.
            self._rejected = rewritten, observer.rejection, self.chainer.clock()
        elif self.healed == "forgot":
            if judgment is None:
                self.check.record_forgotten()
            self.chainer.index.mark_lost(self.scope, response_id)
        self.chainer.save_evidence(self.check)
        self.chainer.report.add(record)

    def _record_rejection(self, rewritten: Rewritten, rejection: str, now: float) -> None:
        """Record that the server rejected the anchor at this time."""
        record, index = rewritten.anchor.record, self.chainer.index
        # After a total loss, each older response would cost another rejected request.
        is_gone = rejection == "gone"
        older = rewrite.find_shorter(self.parsed, index, rewritten.anchor) if is_gone else []
        self.check.record_rejection(rejection, record.created_at, now)
        index.mark_lost(self.scope, record.response_id, *older)

    def _finish(self, outcome: Outcome | None) -> None:
        """Record the response, if it became an anchor, and report the request with the tokens that were counted."""
        self.is_finished = True
        if self.pending is not None:
            is_partial = self.observer is not None and self.observer.is_partial
            entry = (
                rewrite.complete_response(self.pending, outcome)
                if outcome and not is_partial
                else None
            )
            if entry is not None:
                self.chainer.index.add(entry)
            return
        is_lost = outcome is not None and not self._record(outcome) and self.rewritten is not None
        record = self._make_record(outcome, is_lost=is_lost)
        if self.observer:
            self._record_failure(self.observer)
        self.chainer.save_evidence(self.check)
        self.chainer.report.add(record)

    def _make_record(self, outcome: Outcome | None, **flags: bool) -> ChainedRequest:
        """Make the record of the request on the wire that has ended."""
        rewritten, blocks, ended = self.rewritten, len(self.parsed.blocks), time.perf_counter()
        observer = self.observer
        error = observer.error if observer else None
        message = f"no response ({self._problem})" if self._problem and not observer else ""
        if error:
            message = error.message[:MAX_ERROR_LENGTH]
        usage = outcome.usage if outcome else None
        record = ChainedRequest(
            created_at=self.chainer.clock(),
            model=self.parsed.model,
            status=observer.status if observer else 0,
            is_refused=observer is not None and observer.is_refused,
            error_code=error.reported_code[:MAX_CODE_LENGTH] if error else "",
            error=message,
            anchor=self.anchor_id,
            response_id=outcome.response_id if outcome else "",
            sent_blocks=len(rewritten.sent) if rewritten else blocks,
            full_blocks=blocks,
            sent_bytes=len(self.content),
            full_bytes=len(self.original),
            reason=self.reason,
            healed=self.healed,
            seconds=ended - self._started,
            **{name: getattr(usage, name, None) for name in COUNTED_TOKENS},
            **flags,
        )
        received = observer.body_start if observer else bytearray()
        self.sent.append((record, self.content, received))
        self._started = ended
        return record

    def _record_failure(self, observer: ResponseObserver) -> None:
        """Record a failed anchor, if the original request succeeded or the program received the failure."""
        rewritten = self.rewritten
        if self._rejected and not observer.has_failed:
            self._record_rejection(*self._rejected)
        elif rewritten and observer.rejection:
            self._record_rejection(rewritten, observer.rejection, self.chainer.clock())
        elif rewritten and observer.has_server_error:
            self.check.record_error()

    def _record(self, outcome: Outcome) -> bool:
        """Index the response and evaluate its token counts; return False if its context was lost."""
        parsed, check, index = self.parsed, self.check, self.chainer.index
        if not parsed.is_observable:
            return True
        parent = self.rewritten.anchor if self.rewritten else None
        if parent is None:
            if parsed.previous_response_id:
                parent = index.get(self.scope, parsed.previous_response_id)
            plan = _to_plan(parent.record if parent else None, parsed.blocks)
            check.set_request(plan, parsed.values)
        judgment = self._judgment or self.check.judge(outcome)
        if judgment.reason:
            if self.rewritten and parent:
                older = [] if judgment.resend else rewrite.find_shorter(parsed, index, parent)
                index.mark_lost(self.scope, parent.record.response_id, *older)
                record_lost_context(outcome.response_id)
            return False
        entry = rewrite.index_response(
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
            self.chainer.evidence.record_issued(check, entry.record.response_id, known=True)
        return True


def _list_secret_params(parts: SplitResult) -> list[tuple[str, str]]:
    """Return the parameters of a URL that identify an account."""
    query = parse_qsl(parts.query) if parts.query else []
    return [(name, value) for name, value in query if name.lower() in CREDENTIAL_PARAMS]


def _to_plan(anchor: AnchorRecord | None, sent: Sequence[Block]) -> RequestPlan:
    """Return the plan of a request that sends these items of the program on an anchor."""
    return RequestPlan("chained", anchor.scope if anchor else "", anchor, tuple(sent))


def _find_body_obstacle(headers: Mapping[str, str]) -> str:
    """Return why a request with these headers must keep its body, or an empty string."""
    if headers.get("content-encoding", "identity") != "identity":
        return "encoded"
    has_digest = any(name in DIGEST_HEADERS or "signature" in name for name in headers)
    return "signed" if has_digest or headers.get("authorization", "").startswith("AWS4-") else ""


def _decide_way(rewritten: Rewritten, parsed: ParsedRequest, check: MemoryCheck) -> Way:
    plan = _to_plan(rewritten.anchor.record, rewritten.sent)
    return check.decide(plan, parsed.values)


def _drop_routing_cookies(header: str) -> str:
    """Return a `Cookie` header without the cookies of load balancers."""
    cookies = (cookie.strip() for cookie in header.split(";"))
    return "; ".join(each for each in cookies if each.partition("=")[0] not in ROUTING_COOKIES)


def limit_codings(accepted: str) -> str:
    """Return an `Accept-Encoding` header without the compressions that cannot be read here.

    A response that cannot be read is neither an anchor nor recognized as the rejection of one.
    """
    codings = [coding.strip() for coding in accepted.split(",")]
    names = [coding.partition(";")[0].strip().lower() for coding in codings]
    pairs = zip(codings, names, strict=True)
    readable = [coding for coding, name in pairs if name in READABLE_CODINGS]
    if len(readable) == len(codings):
        return accepted
    return ", ".join(readable) or ("identity" if accepted else "")
