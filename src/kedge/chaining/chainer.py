"""Decide which body to send for a request of a program: the one that it wrote, or a shorter one on an anchor."""

import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from kedge._internal.arguments import check_positive_int, validate_seconds
from kedge.chaining import rewrite
from kedge.chaining.index import MemoryIndex, ResponseIndex, StoreIndex
from kedge.chaining.program_request import ProgramRequest, decide_way
from kedge.chaining.report import ChainedRequest, ReportBuilder
from kedge.chaining.request_headers import (
    find_body_obstacle,
    find_scope,
    is_idempotency_key,
    list_secret_params,
)
from kedge.chaining.rewrite import ParsedRequest, Rewritten
from kedge.engines.http_errors import find_secrets
from kedge.engines.response_bytes import resolve_limit
from kedge.evidence.judge import EvidenceRegistry, MemoryCheck, is_chaining_enabled
from kedge.evidence.server_evidence import Trust, find_known_host, limit_depth
from kedge.planning import DEFAULT_RETENTION


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
        index: ResponseIndex | None = None,
        *,
        retention: float | None = DEFAULT_RETENTION,
        max_depth: int | None = None,
        trust: Trust = "earned",
        on_request: Callable[[ChainedRequest], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_depth is not None:
            check_positive_int("max_depth", max_depth)
        self.index: ResponseIndex = MemoryIndex() if index is None else index
        self.retention = validate_seconds(retention, "retention")
        self.max_depth = max_depth
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

    def examine(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes, user: str = ""
    ) -> ProgramRequest | None:
        """Decide which body to send for a request.

        Args:
            method: The HTTP method.
            url: The full URL.
            headers: The request headers, with lower-case names.
            content: The body, uncompressed.
            user: The user for whom a proxy sends it.

        Returns:
            The request, or None for one that is neither `POST …/responses` nor a `GET` of a response that is
            generated in the background.
        """
        parts = urlsplit(url)
        path = parts.path.rstrip("/")
        response_id = ""
        if method in ("GET", "DELETE"):  # one response
            path, _, response_id = path.rpartition("/")
        if not path.endswith("/responses") or not (method == "POST" or response_id):
            return None

        scope = find_scope(parts, path, headers, user=user, hash_key=self.index.hash_key)
        if method == "DELETE":
            self.index.mark_lost(scope, response_id)
            return None
        pending = None
        if method == "GET":
            pending = self.index.get(scope, response_id)
            if pending is None or pending.record.status != "incomplete":
                return None

        obstacle = "background" if pending else find_body_obstacle(headers)
        if obstacle:
            parsed = ParsedRequest(blocked=obstacle)
        else:
            parsed = rewrite.parse_request(content)
        check = self._check_memory(parsed, scope, url)
        decision = self._decide(parsed, scope, headers, check)
        return ProgramRequest(
            self,
            scope,
            content,
            parsed,
            check,
            rewritten=decision if isinstance(decision, Rewritten) else None,
            reason=decision if isinstance(decision, str) else "",
            pending=pending,
            credentials=[
                *find_secrets(headers),
                *(value for _, value in list_secret_params(parts)),
            ],
        )

    def _check_memory(self, parsed: ParsedRequest, scope: str, url: str) -> MemoryCheck:
        """Return the check of the server's memory, with the evidence of other processes."""
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
        return check

    def _decide(
        self, parsed: ParsedRequest, scope: str, headers: Mapping[str, str], check: MemoryCheck
    ) -> Rewritten | str:
        """Return the rewritten request, or the reason for sending it as written."""
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
        if isinstance(rewritten, Rewritten) and decide_way(rewritten, parsed, check) == "full":
            return "untrusted"
        return rewritten

    def save_evidence(self, check: MemoryCheck) -> None:
        """Write the evidence of a check to the index, if it changed."""
        for key, form in self.evidence.take_changes(check):
            self.index.save_evidence(key, form)
