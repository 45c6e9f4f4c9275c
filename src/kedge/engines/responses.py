"""ResponsesEngine: an engine for the Responses API that chains requests and heals lost context.

Each request follows a plan, and the server's answer is checked against it. A rejected anchor is healed
once by a full send, as long as no output was shown. A request that was answered without the requested
context is sent again, or at least the loss is reported and the response is not used as an anchor. Only a
finished response becomes an anchor.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from msgspec.structs import replace

from kedge import planning
from kedge._internal.arguments import check_count, check_positive_int, validate_seconds
from kedge.engines import heal_rules
from kedge.engines import responses_endpoints as endpoints
from kedge.engines.base import Engine, require_running, unwrap
from kedge.engines.heal_rules import HealableError, as_healable, is_server_error, lost_context
from kedge.engines.params import ENCRYPTED_REASONING
from kedge.engines.raw_response import RawResponse
from kedge.engines.request import Request
from kedge.engines.request_body import build_input
from kedge.engines.request_engine import EngineSettings, RequestEngine, Session
from kedge.engines.request_log import record_lost_context
from kedge.engines.transport import Transport
from kedge.errors import EngineError, InvalidSetting, RequestRefused, ResendTooLong, ServerFailed
from kedge.events import Outcome, StreamEvent, StreamFailed, Usage
from kedge.events.request_record import find_sent_request
from kedge.events.run import ResendReason, ServerForgot
from kedge.events.types import ResponseFacts, ResponseStarted
from kedge.evidence.judge import EvidenceRegistry, Judgment, MemoryCheck, is_chaining_enabled
from kedge.evidence.object_claims import Claim, ObjectStore, UnusedObject
from kedge.evidence.server_evidence import (
    INCLUDE_REJECTION_STATUSES,
    EvidenceStore,
    KnownServer,
    Trust,
    limit_depth,
)
from kedge.evidence.tokens import identify_settings
from kedge.observe import get_logger, measure
from kedge.planning import (
    AnchorRecord,
    RequestPlan,
    SentRequest,
    get_state,
    record_running,
    set_state,
)
from kedge.planning.anchors import (
    WAITING_STATUSES,
    get_conversation_id,
    has_hidden_context,
    limit_expiry,
)
from kedge.planning.digests import is_compaction, prefix_digest
from kedge.planning.sent_request import restore_foreign_plan
from kedge.turns import AssistantBlock, Block, ToolCallBlock, Turn, block_from_item
from kedge.turns.frozen_json import get_wrapped
from kedge.wire.decoder import StreamDecoder
from kedge.wire.fields import read_usage
from kedge.wire.responses import ResponsesDecoder

if TYPE_CHECKING:
    from kedge.engines.stored_items import Audit, ConversationObjects

log = get_logger(__name__)


RETENTIONS = {"24h": 86_400.0}
"""Seconds for which a prompt stays cached, by ``prompt_cache_retention``."""


FOREIGN_PARAMS = frozenset(
    {
        *("cache_control", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "n"),
        *("output_config", "reasoning_effort", "response_format", "seed", "stop", "stop_sequences"),
        *("thinking", "top_k", "verbosity"),
    }
)
"""Parameters of Chat Completions and Messages that the Responses API rejects."""


class ResponsesEngine(RequestEngine):
    """An engine for any server of the Responses API.

    Args:
        model: The model, unless a request names another.
        retention: The number of seconds for which the server stores a response; None for no limit.
        max_depth: The maximum number of responses of a chain that the server uses; None for no limit.
        audit_every: Audit the stored context before every n-th chained request; 0 for never.
        transport: ``http`` or ``websocket``. Over WebSocket, responses that are not stored can be
            continued while their connection is open.
        connections: The maximum number of WebSocket connections.
        lanes: The number of concurrent responses on each; 1 for a server without lanes.
        trust: Whether the server must show evidence before it is chained on (``earned``), or is
            chained on ``always`` or ``never``.
        known_server: What is known about the server from its host.
        evidence_store: Where evidence is stored; by default it is lost with the engine.
        **settings: See ``EngineSettings``. With ``prompt_cache``, requests have a ``prompt_cache_key`` that is the same
            for all requests of a conversation.

    Raises:
        InvalidSetting: A setting is invalid.
    """

    decoder_type = ResponsesDecoder
    foreign_params = FOREIGN_PARAMS

    def __init__(
        self,
        model: str,
        *,
        retention: float | None = planning.DEFAULT_RETENTION,
        max_depth: int | None = None,
        audit_every: int = 0,
        transport: Literal["http", "websocket"] = "http",
        connections: int = 4,
        lanes: int = 16,
        trust: Trust = "earned",
        known_server: KnownServer | None = None,
        evidence_store: EvidenceStore | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        if transport not in ("http", "websocket"):
            raise InvalidSetting(f"transport must be http or websocket, not {transport!r}")
        open_transport = Transport
        if transport == "websocket":
            from kedge.engines.websocket import SocketTransport

            check_positive_int("connections", connections)
            check_positive_int("lanes", lanes)
            open_transport = partial(SocketTransport, connections=connections, lanes=lanes)
        super().__init__(model, open_transport, **settings)
        self.retention = validate_seconds(retention, "retention")
        self.max_depth = None if max_depth is None else check_positive_int("max_depth", max_depth)
        self.audit_every = check_count("audit_every", audit_every)
        self.evidence = EvidenceRegistry(
            trust, self._clock, transport, evidence_store, believes_probes=audit_every > 0
        )
        self._known_server = known_server
        self._chained_count = 0

    @cached_property
    def objects(self) -> "ConversationObjects":
        """The conversation objects at the server."""
        from kedge.engines.stored_items import ConversationObjects  # which takes time to import

        return ConversationObjects(self.transport, self.scope, lambda: self.evidence.store)

    async def _make_probes(self, plan: RequestPlan, **options: Any) -> None:
        """Load the evidence about the server, and make the probe that a conditional plan depends on."""
        if isinstance(plan.source, Turn):
            session = await self._start(plan.source, self._plan_options(options))
            self._make_plan(session)
            await self._probe(session)

    async def verify(self, turn: Turn) -> "Audit":
        """Fetch the items that the server stores for the anchor, and compare them with the Turn."""
        from kedge.engines.stored_items import Audit

        session = self._open(turn, Request())
        mode: planning.Mode = "chained"
        if session.requested_mode == "conversation":
            mode = "conversation"
        anchor = self._plan_mode(session, mode).anchor
        if anchor is None:
            return Audit(None, difference="there is no anchor; everything would be sent")
        return await self._audit(session, anchor)

    async def count_tokens(self, turn: Turn, **options: Any) -> int:
        """Return how many tokens the server counts for this Turn."""
        request = Request.of(**options)
        members: dict[str, Any] = {"model": request.model or self.model}
        if request.tools:
            members["tools"] = list(request.tools)
        answer = await self._post_apart("/responses/input_tokens", turn, members)
        return self._read_token_count(answer)

    async def compact(self, turn: Turn) -> tuple[list[Block], Usage]:
        """Request a compaction of this Turn; return the replacement blocks and the usage.

        The server returns messages of the user and then its compaction item. A request starts at the newest
        compaction item, so the item is put before the messages, which are sent after it.
        """
        answer = await self._post_apart("/responses/compact", turn, {"model": self.model})
        output = answer.get("output")
        if not isinstance(output, list) or not output:
            raise ServerFailed("the server returned no compacted items", provider=self.name)
        blocks = [block_from_item(item) for item in cast("list[dict[str, Any]]", output)]
        blocks.sort(key=is_compaction, reverse=True)
        return blocks, read_usage(answer) or Usage()

    async def _post_apart(
        self, path: str, turn: Turn, members: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Send a Turn to an endpoint apart from the conversation: on its anchor, if it has one, or else in full."""
        session = self._open(turn, Request())
        session.is_live = False
        if session.mode != "chained":
            session.mode = "stateless"
        while True:
            plan = self._make_plan(session)
            body = {"input": build_input(plan), **members}
            if plan.instructions is not None:
                body["instructions"] = plan.instructions
            if plan.anchor:
                body["previous_response_id"] = plan.previous_response_id
            try:
                return await self.transport.request_json("post", path, json=body)
            except RequestRefused as error:
                if plan.anchor is None or error.status not in (400, 404):
                    raise
            session.full = True

    async def cancel(self, turn: Turn) -> Turn:
        """Stop the response that the server generates in the background; see ``Engine.cancel``."""
        running = require_running(turn, self.scope)
        try:
            response = await self._locate(running.response_id, running.created_at).cancel()
        except RequestRefused as error:
            is_missing = error.status in endpoints.MISSING_STATUSES
            if not is_missing and running.status != "unknown":
                raise
            log.warning(
                "a response in the background is given up; the server did not stop it: %s",
                error,
                response_id=running.response_id,
            )
            return _end_running(turn, running, "cancelled")
        if response.get("status") == "completed":  # before it could be stopped
            return await self.run(turn)
        return _end_running(turn, running, "cancelled")

    def _locate(self, response_id: str, created_at: float) -> endpoints.BackgroundResponse:
        """Return a response in the background that was requested at a time."""
        return endpoints.BackgroundResponse(
            self.transport, response_id, created_at, clock=self._clock, sleep=self._sleep
        )

    async def _start(self, turn: Turn, request: Request) -> Session:
        session = self._open(turn, request)
        if await self.evidence.load(session.check):
            self._choose_mode(session)
        return session

    def _open(self, turn: Turn, request: Request) -> Session:
        session = super()._open(turn, request)
        self._find_running(session)
        self._choose_mode(session)
        return session

    def _find_running(self, session: Session) -> None:
        """Set the response in the background that answers the Turn, its request, and the evidence about its server."""
        session.running = planning.find_running(session.turn, self.scope)
        session.sent = None
        if session.running is not None:
            session.sent = find_sent_request(session.turn)
        session.check = self._open_check(session)

    def _open_check(self, session: Session) -> MemoryCheck:
        """Return the check of the request that was sent, or else of the one that will be."""
        conversation = prefix_digest(session.turn, 1)
        sent = session.sent
        if sent is not None:
            return self.evidence.check(
                self.scope,
                sent.model,
                streaming=sent.streaming,
                objects=sent.requested_mode == "conversation",
                conversation=conversation,
                known=self._known_server,
                transport=sent.transport,
            )
        return self.evidence.check(
            self.scope,
            session.model,
            streaming=session.streaming,
            objects=session.requested_mode == "conversation",
            conversation=conversation,
            known=self._known_server,
        )

    async def attach_evidence(self, store: EvidenceStore) -> None:
        """Use the evidence in a store, unless another store is configured, and load what dry runs need."""
        requests = (Request(streaming=True), Request(streaming=False))
        checks = (self._open(Turn(), each).check for each in requests)
        await self.evidence.attach(store, *checks)

    def _choose_mode(self, session: Session) -> None:
        """Set the mode, why it is not the requested one, and whether encrypted reasoning is requested."""
        session.mode_reason = self._find_mode_reason(session)
        session.mode = session.requested_mode
        if session.mode_reason:
            session.mode = "stateless"

        request = session.request
        if request.keep_reasoning and "include" not in session.healed:
            session.include = session.check.reasoning.should_request(
                encrypts=session.check.encrypts,
                heal=request.heal,
            )
        else:
            session.include = False

    def _find_mode_reason(self, session: Session) -> str:
        """Return why a session is stateless although another mode is requested; empty if it is not."""
        enabled = is_chaining_enabled()
        measure("responses_chained_mode_enabled", int(enabled))
        if not enabled:
            return "switched_off"
        if session.requested_mode == "stateless":
            return ""
        if not session.check.reasoning.stores:
            return "never_stores"
        if self.evidence.trust == "never":
            return "never"
        return session.check.doubt

    async def _prepare(self, session: Session) -> None:
        check = session.check
        session.shown = session.running is not None
        session.held = None
        session.failure = None
        session.owned = ""
        session.is_at_end = True
        if session.running is not None:  # a second answer would be paid for, too
            self._restore_request(session, session.running)
            return
        self._make_plan(session)
        if check.way != "direct":
            await self._probe(session)
        self._check_resend(session)

        claim = await self._claim_object(session)
        if claim == "taken":
            self._make_plan(session)
            self._check_resend(session)
        if self.audit_every and session.plan.anchor:
            await self._audit_regularly(session, session.plan.anchor)

        # The answer of a server that has not shown that it remembers, or in an object that others may continue,
        # is held back until it is judged, because a wrong answer that a user has read cannot be withdrawn.
        if check.way == "held" or claim == "unknown":
            session.held = []
        if claim == "owned":
            session.owned = session.plan.conversation_id

    def _restore_request(self, session: Session, running: AnchorRecord) -> None:
        """Set the request that was sent for a response in the background, whatever this call would send."""
        session.check.way = "direct"  # the answer is shown as it is received
        session.object_id = get_conversation_id(running.scope)
        if session.sent is not None:
            session.plan = session.sent.restore_plan(session.turn)
        else:
            session.plan = restore_foreign_plan(session.turn, running)

    async def _claim_object(self, session: Session) -> Claim:
        """Claim the conversation object of the plan; ``owned`` also if it has none."""
        plan = session.plan
        claim: Claim = "owned"
        if plan.conversation_id and not plan.problems:
            claim = await self.objects.claim(plan.conversation_id, plan.anchor_id)
        # An answer that is not held back cannot be withdrawn, so the object is compared before the request.
        is_shown = claim == "owned" and session.check.way == "direct" and session.streaming
        if is_shown and await self.objects.is_changed(plan, self._clock()):
            return "taken"
        return claim

    async def _audit_regularly(self, session: Session, anchor: AnchorRecord) -> None:
        """Audit the anchor before every n-th chained request; raise if the server stores something else."""
        self._chained_count += 1
        if self._chained_count % self.audit_every:
            return
        audit = await self._audit(session, anchor)
        if audit.agrees is False:
            log.warning("an audit found a difference", response_id=anchor.response_id)
            raise lost_context("audit", self.name)

    async def _probe(self, session: Session) -> None:
        """Make the probes that a plan depends on, and plan again.

        The server may identify itself as a known one in its first response. Otherwise the items that it lists make
        its token counts a better proof.
        """
        check = session.check
        if check.way != "direct" and self.transport.identity is None:
            await endpoints.identify_server(self.transport)
            self.evidence.identify(check, self.transport.identity or "")
            self._make_plan(session)
        if check.way == "probe":
            audit = await self._audit(session, session.plan.rejected[-1].record)
            check.record_probe(audit.agrees)
            self._make_plan(session)

    async def _open_object(self, session: Session) -> None:
        """Create the conversation object of a request if there is none."""
        if not session.object_id:
            session.object_id = await self.objects.create()

    def _assemble_body(self, session: Session) -> dict[str, Any]:
        plan = session.plan
        body = {**session.settings, "input": build_input(plan)}
        if not self.transport.always_streams:
            body["stream"] = session.request.streaming
        if session.object_id:
            body["conversation"] = session.object_id
        elif plan.anchor:
            body["previous_response_id"] = plan.previous_response_id
        if not _should_store(session):
            body["store"] = False
        if plan.cache and self.cache_rules.keyed:
            body.setdefault("prompt_cache_key", plan.cache.key)
        if session.include:
            body["include"] = list(dict.fromkeys([*body.get("include", ()), ENCRYPTED_REASONING]))
        return body

    def _describe_request(self, session: Session) -> SentRequest:
        """Return the request that is about to be sent: all that decides how its answer is judged and recorded."""
        plan = session.plan
        now = self._clock()
        return SentRequest(
            scope=plan.scope,
            model=session.model,
            transport=self.evidence.transport,
            streaming=session.streaming,
            requested_mode=session.requested_mode,
            mode=plan.mode,
            anchor=plan.anchor,
            start=plan.body_start,
            omitted=plan.list_omitted(),
            total_blocks=plan.total_blocks,
            digest=plan.digest,
            block_count=plan.block_count,
            barrier=plan.barrier,
            object_id=session.object_id,
            settings=identify_settings(session.body),
            visible=session.check.visible,
            store=session.body.get("store", True) is not False,
            has_hidden_context=has_hidden_context(session.body),
            include=session.include,
            is_include_rejected="include" in session.healed,
            created_at=now,
            expires_at=limit_expiry(now, None, self.retention),
        )

    async def post(self, session: Session, decoder: StreamDecoder) -> RawResponse:
        """Send the request, or fetch the response that answers the Turn already."""
        session.check.set_sent(session.sent, session.plan)
        decoder = cast("ResponsesDecoder", decoder)
        in_background = session.members.get("background") is True
        if session.running is not None:
            response = self._locate(session.running.response_id, session.running.created_at)
            if session.request.streaming and not in_background:
                return await response.stream(decoder)
            return await response.fetch(wait=not in_background)
        created_at = self._clock()
        send = partial(super().post, session, decoder)
        try:
            if session.object_id:
                reply = await self.objects.send(send)
            else:
                reply = await send()
        except RequestRefused:
            if session.owned and session.plan.anchor:  # nothing was added to the object
                await self.objects.release(session.owned, session.plan.anchor.response_id)
            raise
        if in_background:
            locate = partial(self._locate, created_at=created_at)
            return endpoints.continue_stream(reply, decoder, locate)
        return reply

    def translate_error(self, session: Session, error: EngineError) -> Exception:
        """Return the error, or one that can be healed; see ``HEAL_RULES``."""
        if session.running is not None:
            if error.status in endpoints.MISSING_STATUSES:
                _explain_missing(error, session.turn, session.running)
            return error
        is_refused = isinstance(error, RequestRefused)
        if is_refused:
            failure = as_healable(error, _summarize(session))
            if failure is not None:
                return failure
        if self._may_reject_include(session, error):
            return HealableError("include", error)
        if not is_refused and session.plan.anchor and is_server_error(error.status):
            session.check.record_error()
        return error

    def _may_reject_include(self, session: Session, error: EngineError) -> bool:
        """Return whether the first request for encrypted reasoning may have failed because of it."""
        is_other = error.param and not error.param.startswith("include")
        if is_other or heal_rules.is_format_rejected(error):
            return False  # another member was rejected
        self.evidence.identify(session.check, error.server or self.transport.identity or "")
        if session.check.encrypts is not None:
            return False  # a server that says whether it encrypts does not reject this member
        is_first = session.include and session.check.reasoning.accepted is None
        # After a server error the conversation object may contain the request already.
        is_safe = session.plan.mode != "conversation" or not is_server_error(error.status)
        return is_first and is_safe and error.status in INCLUDE_REJECTION_STATUSES

    def check_event(self, session: Session, event: StreamEvent) -> None:
        """Raise if the server names another context, or rejects the one of the request."""
        if isinstance(event, ResponseFacts):
            check = session.check
            if check.names_another(event):
                check.record_forgotten()
                # A complete response has its token counts, and a stream is left before it has any.
                usage = read_usage(get_wrapped(event.response))
                raise lost_context("forgot", self.name, event.response_id, usage)
            object_id = event.conversation_id
            is_start = isinstance(event, ResponseStarted) or not session.streaming
            if is_start and object_id and object_id == session.object_id:
                check.evidence.names_conversations = True
        if isinstance(event, StreamFailed):
            error = heal_rules.error_from_event(event, self.name)
            failure = as_healable(error, _summarize(session))
            if failure is not None:
                raise failure

    async def _settle(self, session: Session, outcome: Outcome) -> Turn:
        if self.transport.identity:
            self.evidence.identify(session.check, self.transport.identity)
        judgment = session.check.judge(outcome)
        is_finished = outcome.status in ("completed", "incomplete")
        if session.object_id and is_finished and not judgment.reason:
            judgment = await self._check_object(session, outcome, judgment)
        build_failure = partial(
            lost_context, judgment.reason or "forgot", self.name, outcome.response_id, outcome.usage
        )
        if judgment.reason and judgment.resend and not session.shown:
            raise build_failure()

        session.notices = []
        if judgment.reason:
            record_lost_context(outcome.response_id)
            session.notices = [ServerForgot(outcome.response_id)]
        elif session.held and is_finished:
            session.notices = session.held
        finished = await self._record(session, outcome, judgment)
        # Calls that the model made without the context are not run, so the answer is replaced even if it was shown.
        if judgment.reason and any(isinstance(block, ToolCallBlock) for block in outcome.blocks):
            session.failure = build_failure(finished)
        return finished

    async def _check_object(
        self, session: Session, outcome: Outcome, judgment: Judgment
    ) -> Judgment:
        """Check that the conversation object of an answer has the items of its line of history, and no others."""
        plan = session.plan
        added: list[Block] = []
        if _is_stored(session, outcome):
            added = [block_from_item(item) for item in build_input(plan)]
            added += outcome.blocks
        # Where the token count cannot show that items are missing, all of them are compared.
        complete = not _is_counted(plan, judgment)
        agrees = await self.objects.check_end(plan, session.object_id, added, complete=complete)
        session.is_at_end = agrees is True
        is_unknown = agrees is None and session.held is None
        if agrees or is_unknown or plan.anchor is None:
            return judgment
        return Judgment("conversation", resend=True)

    async def _record(self, session: Session, outcome: Outcome, judgment: Judgment) -> Turn:
        """Record an answer in the Turn and in the evidence."""
        turn = session.turn
        running = session.running
        if running is not None and outcome.status == "failed":
            return _end_running(turn, running, "failed")
        stored = _is_stored(session, outcome)
        reused = self._record_issued(session, outcome.response_id)
        if outcome.status == "running":
            if running is not None or session.sent is None:
                return turn  # which has its record
            is_stored = stored and not reused
            return record_running(turn, session.sent, outcome.response_id, is_stored=is_stored)

        if judgment.reason:
            outcome = _drop_calls(outcome)
        finished = self._record_outcome(
            session,
            _mark_lost(turn, session.plan, outcome.response_id, judgment, reused=reused),
            outcome,
            stored=stored,
            lost=bool(judgment.reason) or not session.is_at_end,
            reused=reused,
            counted=judgment.counted,
        )
        if session.object_id:
            finished = await self._release_object(session, finished, outcome.response_id)
        if session.sent is not None:
            session.check.reasoning.record(
                outcome,
                requested=session.sent.include,
                rejected=session.sent.is_include_rejected,
                stored=session.sent.store,
                encrypts=session.check.encrypts,
            )
        elif running is not None:
            finished = _keep_depth(finished, running)
        await self.evidence.save(session.check)
        return finished

    def _record_issued(self, session: Session, response_id: str) -> bool:
        """Record the id of a response, and return whether the server has issued it before."""
        if session.running is not None:
            # A response that is fetched was issued before, once for all that wait for it.
            return False
        anchor = get_state(session.turn).anchor(response_id, session.plan.scope)
        return self.evidence.record_issued(session.check, response_id, known=anchor is not None)

    async def _release_object(self, session: Session, finished: Turn, response_id: str) -> Turn:
        """Release the conversation object; return the Turn without it if it cannot be continued."""
        state = get_state(finished)
        if response_id and state.previous_response_id == response_id:
            await self.objects.release(session.object_id, response_id)
            return finished
        return set_state(finished, replace(state, conversation_id=""))

    async def _heal(self, session: Session, failure: HealableError) -> tuple[str, ...]:
        plan = session.plan
        before = get_state(session.turn)
        state = before
        lost: tuple[str, ...] = ()
        match failure.reason:
            case "gone" | "unsupported" | "forgot" | "audit":
                lost = heal_rules.find_lost(state, plan, all_older=failure.reason == "gone")
                self._record_rejection(session, failure.reason)
                state = state.mark_lost(lost, plan.scope)
                if plan.conversation_id:
                    state = replace(state, conversation_id="")
                session.drop_anchor(plan, "lost")
                if failure.reason in ("unsupported", "forgot") and session.check.doubt:
                    self._choose_mode(session)
            case "unproven":
                session.drop_anchor(plan, "untrusted")
            case "empty_input":
                session.drop_anchor(plan, "empty_input")
            case "conversation":
                state = replace(state, conversation_id="")
                error = failure.error
                is_used = bool(error.response_id) or error.code == heal_rules.OBJECT_LOCKED
                session.drop_anchor(plan, "taken" if is_used else "lost")
            case "reasoning":
                session.reasoning = False
            case "include":
                session.include = False
        if state is not before:
            session.turn = set_state(session.turn, state)
        await self.evidence.save(session.check)
        if session.running is not None:  # the next request has the options of this call
            self._find_running(session)
            self._choose_mode(session)
        if session.full:
            self._make_plan(session)
            self._check_resend(session, failure.error)
        return lost

    def _record_rejection(self, session: Session, reason: ResendReason) -> None:
        """Record that the server does not use the anchor; not if only a connection remembered it."""
        plan = session.plan
        if reason != "unsupported" and heal_rules.is_live_only(get_state(session.turn), plan):
            return
        now = self._clock()
        created_at = now
        if plan.anchor is not None:
            created_at = plan.anchor.created_at
        session.check.record_rejection(reason, created_at, now)

    def _check_resend(self, session: Session, error: EngineError | None = None) -> None:
        """Raise if the plan sends everything in place of a continuation, and that is more than the request allows.

        Args:
            session: The session, with its plan.
            error: Why the last request of the session is healed; None if this is the first one.
        """
        limit = session.request.resend_limit
        plan = session.plan
        if limit is None or plan.fallback is None or not limit.is_exceeded(plan):
            return
        problem = ResendTooLong(
            f"no earlier answer can be continued ({plan.fallback}), and a full send is about "
            f"{plan.full_bytes} bytes in {plan.full_blocks} blocks",
            provider=self.name,
        )
        problem.turn = session.turn
        problem.plan = plan
        if error is not None:
            problem.response_id = error.response_id
            problem.usage = error.usage
        raise problem from error

    def _build_plan(self, session: Session) -> RequestPlan:
        """Plan a request: on a proved anchor, if the server may be relied on."""
        is_stateless = session.full or session.mode == "stateless"
        if is_stateless or has_hidden_context(session.members):
            session.check.way = "direct"
            plan = replace(self._plan_mode(session, "stateless"), rejected=session.rejected)
            if not is_stateless:
                return replace(plan, mode_reason="prompt")
            return replace(plan, mode=session.mode, mode_reason=session.mode_reason)
        plan = self._plan_mode(session, session.mode)
        is_open = plan.conversation_id and session.running is None
        if is_open and self.objects.is_taken(plan):
            session.drop_anchor(plan, "taken")
            return self._build_plan(session)
        way = session.check.decide(plan, session.settings)
        if way in ("direct", "held") or plan.anchor is None:
            return plan
        # The server's answer could not be judged.
        untrusted = planning.RejectedAnchor(plan.anchor.response_id, "untrusted", plan.anchor)
        return replace(
            self._plan_mode(session, "stateless"),
            mode=plan.mode,
            rejected=(*plan.rejected, untrusted),
            conditional=way == "probe" or self.transport.identity is None,
        )

    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> planning.CacheRules:
        retention = str(params.get("prompt_cache_retention"))
        lifetime = RETENTIONS.get(retention, self.cache_rules.lifetime)
        return replace(self.cache_rules, lifetime=lifetime)

    def _plan_mode(self, session: Session, mode: planning.Mode) -> RequestPlan:
        """Plan a request in a mode, whatever the evidence about the server's memory."""
        evidence = session.check.evidence
        extra: tuple[AnchorRecord, ...] = ()
        if mode == "chained":
            extra = session.request.candidates
            # Responses that only a connection remembers are not known to requests outside of it.
            if session.is_live:
                extra = (*extra, *self.transport.live_anchors(session.turn))
        plan = planning.plan_request(
            session.turn,
            scope=self.scope,
            mode=mode,
            now=self._clock(),
            extra=extra,
            max_depth=limit_depth(self.max_depth, evidence.max_depth),
            not_before=evidence.not_before,
        )
        return session.complete_plan(plan)

    async def _audit(self, session: Session, anchor: AnchorRecord) -> "Audit":
        """Audit an anchor, and record whether the server lists what it stores."""
        from kedge.engines.stored_items import audit_blocks

        evidence = session.check.evidence
        audit = await audit_blocks(
            self.transport, session.turn.body, anchor, lists_items=evidence.audits
        )
        evidence.audits = evidence.audits or audit.checked > 0
        return audit


async def delete_unused_objects(engine: Engine, store: ObjectStore) -> dict[UnusedObject, str]:
    """Delete the conversation objects of an engine's server that nothing in a store continues.

    Returns:
        The objects, and why they were not deleted; see ``ConversationObjects.delete_unused``.
    """
    inner = unwrap(engine)
    if not isinstance(inner, ResponsesEngine):
        return {}
    return await inner.objects.delete_unused(store)


def _summarize(session: Session) -> heal_rules.RequestSummary:
    """Return the properties that decide whether a rejection of a request can be healed."""
    body = session.body
    items = body["input"]
    has_reasoning = session.reasoning and any(item["type"] == "reasoning" for item in items)
    return heal_rules.RequestSummary(
        previous_response_id=body.get("previous_response_id", ""),
        conversation_id=body.get("conversation", ""),
        has_reasoning=has_reasoning,
        requests_reasoning=session.include and ENCRYPTED_REASONING in (body.get("include") or ()),
        has_empty_input=not items,
    )


def _should_store(session: Session) -> bool:
    """Return whether the server shall store the answer; in the background it must, unless the caller forbids it."""
    mode = session.mode
    if session.members.get("background"):
        mode = session.requested_mode
    return session.members.get("store", mode != "stateless") is not False


def _is_stored(session: Session, outcome: Outcome) -> bool:
    """Return whether a response can be continued: it was stored, and its context is known."""
    if outcome.stored is False:
        return False
    if session.running is not None and not session.running.stored:
        return False
    return session.sent is None or session.sent.is_continuable


def _keep_depth(turn: Turn, running: AnchorRecord) -> Turn:
    """Return the Turn with the place in its chain of a response whose request is not known."""
    state = get_state(turn)
    record = state.anchor(running.response_id, running.scope)
    if record is None or record.status in WAITING_STATUSES:
        return turn
    placed = replace(record, depth=running.depth, root_created_at=running.root_created_at)
    return set_state(turn, state.with_anchor(placed))


def _explain_missing(error: EngineError, turn: Turn, running: AnchorRecord) -> None:
    """Set the message and the Turn of an error that says that a response in the background is not found."""
    name = running.response_id
    if endpoints.names_response(error, name):
        error.message = (
            f"the server no longer has {name}, which it generated in the "
            "background; send the Turn of this error to request another answer"
        )
        error.turn = _end_running(turn, running, "lost")
        return
    error.message = (
        f"it is not known whether the server still has {name}, which it generates in the background: "
        "the error does not name it; poll again, or give it up with cancel"
    )
    unknown = replace(running, status="unknown")
    error.turn = set_state(turn, get_state(turn).with_anchor(unknown))


def _end_running(turn: Turn, running: AnchorRecord, status: planning.Status) -> Turn:
    """Return the Turn without an answer in the background, so that it can be sent again."""
    return set_state(turn, get_state(turn).with_anchor(replace(running, status=status, request="")))


def _is_counted(plan: RequestPlan, judgment: Judgment) -> bool:
    """Return whether the token count of an answer would show that items of its anchor were missing."""
    if plan.anchor is None:
        return False
    if plan.barrier is not None:
        return True
    base = plan.anchor.counted
    counted = judgment.counted
    return bool(base and counted and base.settings == counted.settings)


def _mark_lost(
    turn: Turn, plan: RequestPlan, response_id: str, judgment: Judgment, *, reused: bool
) -> Turn:
    """Return the Turn with the responses marked that an answer has shown to be lost."""
    before = get_state(turn)
    state = before
    if reused:
        state = state.mark_lost({response_id}, plan.scope)
    if judgment.reason and not judgment.resend:
        state = state.mark_lost(heal_rules.find_lost(state, plan, all_older=True), plan.scope)
    if state is before:
        return turn
    return set_state(turn, state)


def _drop_calls(outcome: Outcome) -> Outcome:
    """Return a completed answer with its text only: calls made without the context are not run."""
    texts = tuple(block for block in outcome.blocks if isinstance(block, AssistantBlock))
    if not outcome.completed or len(texts) == len(outcome.blocks):
        return outcome
    return replace(outcome, blocks=texts)
