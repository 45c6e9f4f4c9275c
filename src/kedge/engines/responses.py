"""ResponsesEngine: an engine for the Responses API that chains requests and heals lost context.

Each request follows a plan, and the server's answer is checked against it. A rejected anchor is healed
once by a full send, as long as no output was shown. A request that was answered without the requested
context is sent again, or at least the loss is reported and the response is not used as an anchor. Only a
finished response becomes an anchor.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from kedge.config.settings import is_chaining_enabled
from kedge.engines import responses_endpoints
from kedge.engines.attempt import Attempt, RequestEngine
from kedge.engines.audit import Audit, audit
from kedge.engines.background import ContinuedStream, fetch_response, stream_response
from kedge.engines.base import Request, require_running
from kedge.engines.heal_rules import (
    HealableError,
    RequestSummary,
    as_healable,
    error_from_event,
    find_lost,
    is_live_only,
    is_server_error,
    lost_context,
)
from kedge.engines.request_body import (
    SendOptions,
    build_request_body,
    build_settings,
    flatten_params,
    summarize_request,
)
from kedge.engines.response_reader import attach_context, record_outcome, record_running
from kedge.engines.responses_endpoints import ConversationObjects, identify_server
from kedge.engines.telemetry import record_lost_context, record_plan, record_usage
from kedge.engines.transport import RawResponse, Transport
from kedge.errors import EngineError, InvalidSetting, RequestRefused, ResendTooLong
from kedge.events import Event, Outcome, StreamEvent, StreamFailed, Usage
from kedge.events.decoder import StreamDecoder
from kedge.events.fields import read_conversation, read_usage
from kedge.events.responses import ResponsesDecoder
from kedge.events.run import ServerForgot
from kedge.events.types import ResponseFacts, ResponseStarted
from kedge.memory.evidence import EvidenceStore, KnownServer, ServerEvidence, Trust
from kedge.memory.judge import ServerMemory, detect_echo_mismatch
from kedge.memory.tokens import SentTokens
from kedge.observe import get_logger, measure
from kedge.planning import (
    DEFAULT_RETENTION,
    AnchorRecord,
    CacheRules,
    Mode,
    RequestPlan,
    Status,
    find_running,
    get_state,
    plan_request,
    set_state,
)
from kedge.planning.anchors import check_positive_int, has_hidden_context, validate_seconds
from kedge.planning.reusable_items import get_conversation_id
from kedge.turns import AssistantBlock, Block, ToolCallBlock, Turn
from kedge.urls import quote_segment

if TYPE_CHECKING:
    from kedge.engines.transport import AnyClient

log = get_logger(__name__)


RETENTIONS = {"24h": 86_400.0}
"""Seconds for which a prompt stays cached, by ``prompt_cache_retention``."""


@dataclass(slots=True)
class ResponsesAttempt(Attempt):
    """An attempt with its evidence about the server's memory."""

    evidence: ServerEvidence = field(default_factory=ServerEvidence)
    sent: SentTokens | None = None
    forgot: bool = False
    """Whether the server answered without the context that the request continues."""

    @property
    def summary(self) -> RequestSummary:
        """The properties that decide whether a rejection of the request can be healed."""
        return summarize_request(self.body, self.options)


class ResponsesEngine(RequestEngine[ResponsesAttempt]):
    """An engine for any server of the Responses API.

    Args:
        model: The model, unless a request names another.
        make_client: Returns the client that sends requests: Kedge's own, or one of the openai package.
        scope: The provider, endpoint and account in which response ids are valid.
        provider: The name of the provider, for errors and stored responses.
        mode: The default mode.
        retention: The number of seconds for which the server stores a response; None for no limit.
        max_depth: The maximum number of responses of a chain that the server uses; None for no limit.
        verify_every: Audit the stored context before every n-th chained request; 0 for never.
        params: Members of every request body; those of a request override them.
        clock: Returns the time.
        transport: ``http`` or ``websocket``. Over WebSocket, responses that are not stored can be
            continued while their connection is open.
        connections: The maximum number of WebSocket connections.
        lanes: The number of concurrent responses on each; 1 for a server without lanes.
        trust: Whether the server must show evidence before it is chained on (``earned``), or is
            chained on ``always`` or ``never``.
        known_server: What is known about the server from its host.
        evidence_store: Where evidence is stored; by default it is lost with the engine.
        prompt_cache: Whether requests have a ``prompt_cache_key`` that is the same for all requests of a
            conversation, and plans predict the cached tokens.

    Raises:
        InvalidSetting: A setting is invalid.
    """

    def __init__(
        self,
        model: str,
        *,
        make_client: "Callable[[], AnyClient]",
        scope: str,
        provider: str = "responses",
        mode: Mode = "chained",
        retention: float | None = DEFAULT_RETENTION,
        max_depth: int | None = None,
        verify_every: int = 0,
        params: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
        transport: Literal["http", "websocket"] = "http",
        connections: int = 4,
        lanes: int = 16,
        trust: Trust = "earned",
        known_server: KnownServer | None = None,
        evidence_store: EvidenceStore | None = None,
        prompt_cache: bool = False,
    ) -> None:
        if transport not in ("http", "websocket"):
            raise InvalidSetting(f"transport must be http or websocket, not {transport!r}")
        sender = Transport(make_client, provider)
        if transport == "websocket":
            from kedge.engines.websocket import SocketTransport

            sender = SocketTransport(make_client, provider, connections=connections, lanes=lanes)
        super().__init__(
            model,
            transport=sender,
            scope=scope,
            mode=mode,
            params=params,
            prompt_cache=prompt_cache,
            clock=clock,
        )
        self.retention = validate_seconds(retention, "retention")
        self.max_depth = None if max_depth is None else check_positive_int("max_depth", max_depth)
        self.verify_every = verify_every
        self._conversation_objects = ConversationObjects(self.transport)
        self.memory = ServerMemory(
            scope,
            trust=trust,
            transport=transport,
            clock=clock,
            known=known_server,
            store=evidence_store,
        )
        self._skip_include = False
        self._chained_count = 0

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan for sending the Turn now, without sending it."""
        request = Request.of(**options)
        mode, _, reason = self._resolve_mode(turn, request)
        return self._build_plan(turn, request, SendOptions(mode, reason=reason))

    async def verify(self, turn: Turn) -> Audit:
        """Fetch the items that the server stores for the anchor, and compare them with the Turn."""
        request = Request()
        plan = self._plan_chain(turn, request)
        return await self._audit(turn, plan, self._get_evidence(request))

    async def count_tokens(self, turn: Turn, **options: Any) -> int:
        """Return how many tokens the server counts for this Turn."""
        request = Request.of(**options)
        tools = {"tools": list(request.tools)} if request.tools else {}
        model = request.model or self.model
        return await responses_endpoints.count_tokens(
            self.transport, self._plan_out_of_band(turn), model=model, **tools
        )

    async def compact(self, turn: Turn) -> tuple[list[Block], Usage]:
        """Request a compaction of this Turn; return the replacement blocks and the usage."""
        return await responses_endpoints.compact(
            self.transport, self._plan_out_of_band(turn), model=self.model
        )

    async def cancel(self, turn: Turn) -> Turn:
        """Stop the response that the server generates in the background; see ``Engine.cancel``."""
        running = require_running(turn, self.scope)
        path = f"/responses/{quote_segment(running.response_id)}/cancel"
        found = await self.transport.request_json("post", path, json={})
        if found.get("status") == "completed":  # before it could be stopped
            return await self.run(turn)
        return _end_running(turn, running, "cancelled")

    async def _choose_options(self, turn: Turn, request: Request) -> tuple[SendOptions, Mode]:
        await self.memory.load(request.model or self.model, streaming=self._is_streaming(request))
        mode, requested, reason = self._resolve_mode(turn, request)
        return SendOptions(mode, include=not self._skip_include, reason=reason), requested

    async def _prepare(
        self, turn: Turn, request: Request, options: SendOptions
    ) -> ResponsesAttempt:
        running = find_running(turn, self.scope)
        if options.mode == "conversation" and running is None:
            try:
                turn = await self._conversation_objects.detach_if_changed(turn)
            except EngineError as error:
                attach_context(error, turn, self._build_plan(turn, request, options))
                raise
        evidence = self._get_evidence(request)
        if running is not None:  # a second answer would be paid for, too
            plan = self._build_plan(turn, request, options)
            return ResponsesAttempt(
                turn, request, options, plan, shown=True, running=running, evidence=evidence
            )
        await self._find_evidence(turn, request, options, evidence)
        plan = self._build_plan(turn, request, options)
        await self._audit_periodically(turn, plan, evidence)
        # The answer of a server that has not shown that it remembers is held back until it is judged,
        # because a wrong answer that a user has read cannot be withdrawn.
        held: list[Event] | None = [] if self.memory.needs_verdict(plan, evidence) else None
        return ResponsesAttempt(turn, request, options, plan, held=held, evidence=evidence)

    async def _encode(self, attempt: ResponsesAttempt) -> None:
        """Set the body of an attempt; in conversation mode, create the object if there is none."""
        plan, request, options = attempt.plan, attempt.request, attempt.options
        conversation_id = plan.conversation_id
        if attempt.running is not None:
            conversation_id = get_conversation_id(attempt.running.scope)
        elif options.mode == "conversation" and not conversation_id:
            conversation_id = await self._conversation_objects.create()
        attempt.body = build_request_body(
            plan,
            options,
            conversation_id=conversation_id,
            model=request.model or self.model,
            tools=request.tools,
            streaming=request.streaming,
            params=request.resolve_params(self.params),
        )
        attempt.content = self.transport.serialize(attempt.body)

    def _make_decoder(self) -> ResponsesDecoder:
        return ResponsesDecoder()

    async def _post(self, attempt: ResponsesAttempt, decoder: StreamDecoder) -> RawResponse:
        decoder = cast("ResponsesDecoder", decoder)
        in_background = attempt.body.get("background") is True
        if attempt.running is not None:
            response_id = attempt.running.response_id
            if attempt.request.streaming and not in_background:
                return await stream_response(self.transport, response_id, decoder)
            return await fetch_response(self.transport, response_id, wait=not in_background)
        retry = attempt.plan.mode != "conversation"  # the object may contain the first attempt
        reply = await self.transport.create_response(
            attempt.content, attempt.body, retry=retry, tap=attempt.request.tap
        )
        return ContinuedStream(self.transport, reply, decoder) if in_background else reply

    def _translate_error(self, attempt: ResponsesAttempt, error: EngineError) -> Exception:
        if attempt.running is not None:
            if error.status in (404, 410):
                error.message = (
                    f"the server no longer has {attempt.running.response_id}, which it generated in the "
                    "background; send the Turn of this error to request another answer"
                )
                error.turn = _end_running(attempt.turn, attempt.running, "lost")
            return error
        if isinstance(error, RequestRefused):
            return as_healable(error, attempt.summary) or error
        if attempt.plan.anchor and is_server_error(error.status):
            attempt.evidence.record_error(self._clock())
        return error

    def _check_event(self, attempt: ResponsesAttempt, event: StreamEvent) -> None:
        if isinstance(event, ResponseFacts):
            named = read_conversation(event.response)
            if detect_echo_mismatch(event, attempt.plan) or self.memory.is_other_conversation(
                named, attempt.plan, attempt.evidence
            ):
                self.memory.record_loss("lost", attempt.plan, attempt.evidence)
                # A complete response has its token counts, and a stream is left before it has any.
                usage = read_usage(event.response)
                record_usage(usage)
                raise lost_context("forgot", self.name, event.response_id, usage)
            is_start = isinstance(event, ResponseStarted) or not self._is_streaming(attempt.request)
            if is_start and named and named == attempt.body.get("conversation"):
                attempt.evidence.names_conversations = True
        if isinstance(event, StreamFailed):
            failure = as_healable(error_from_event(event, self.name), attempt.summary)
            if failure is not None:
                raise failure

    def _check_outcome(self, attempt: ResponsesAttempt, outcome: Outcome) -> list[Event]:
        if self.transport.identity:
            self.memory.identify(self.transport.identity)
        plan, evidence, memory = attempt.plan, attempt.evidence, self.memory
        attempt.sent = memory.measure(plan, attempt.body, evidence)
        verdict = memory.judge(outcome, plan, attempt.sent, evidence)
        attempt.forgot = verdict in ("lost", "partial")
        if attempt.forgot:
            memory.record_loss(verdict, plan, evidence)
            if not attempt.shown:
                raise lost_context("forgot", self.name, outcome.response_id, outcome.usage)
            record_lost_context(outcome.response_id)
            return [ServerForgot(outcome.response_id)]
        if attempt.held is None or outcome.status not in ("completed", "incomplete"):
            return []
        if verdict != "remembered":
            evidence.record_loss(self._clock(), "no_verdict")
            raise lost_context("unproven", self.name, outcome.response_id, outcome.usage)
        return attempt.held

    def _check_finished(self, attempt: ResponsesAttempt, outcome: Outcome, finished: Turn) -> None:
        if attempt.forgot and any(isinstance(block, ToolCallBlock) for block in outcome.blocks):
            raise lost_context("forgot", self.name, outcome.response_id, outcome.usage, finished)

    async def _record(self, attempt: ResponsesAttempt, outcome: Outcome) -> Turn:
        """Record an answer in the Turn and in the evidence."""
        turn, plan, body, evidence = attempt.turn, attempt.plan, attempt.body, attempt.evidence
        if attempt.running is not None and outcome.status == "failed":
            return _end_running(turn, attempt.running, "failed")
        stored = _is_stored(body, outcome)
        if attempt.running is not None:  # what it was requested with may not be known now
            stored = stored and attempt.running.stored
        if outcome.status == "running":
            return record_running(
                turn,
                outcome,
                plan,
                now=self._clock(),
                stored=stored,
                retention=self.retention,
                conversation_id=body.get("conversation", ""),
            )
        known = attempt.running is None and (
            get_state(turn).anchor(outcome.response_id, plan.scope) is not None
        )
        counted = (
            None if attempt.forgot else self.memory.count(outcome, plan, attempt.sent, evidence)
        )
        reused = self.memory.record_issued(outcome.response_id, counted, evidence, known=known)
        if reused:
            turn = set_state(turn, get_state(turn).mark_lost({outcome.response_id}, plan.scope))
        if attempt.forgot:
            # The model made these calls without the context, so they are not run.
            texts = tuple(b for b in outcome.blocks if isinstance(b, AssistantBlock))
            if len(texts) < len(outcome.blocks) and outcome.completed:
                outcome = replace(outcome, blocks=texts, response_id="")
        finished = record_outcome(
            turn,
            outcome,
            plan,
            now=self._clock(),
            stored=stored,
            retention=self.retention,
            conversation_id=body.get("conversation", ""),
            lost=attempt.forgot,
            reused=reused,
            counted=counted,
        )
        await self.memory.save(evidence)
        return finished

    def _heal(
        self, turn: Turn, request: Request, options: SendOptions, failure: HealableError
    ) -> tuple[Turn, SendOptions, tuple[str, ...]]:
        evidence = self._get_evidence(request)
        reason, lost = failure.reason, ()
        state = get_state(turn)
        plan = failure.error.plan
        match reason:
            case "gone" | "unsupported" | "forgot" | "audit":
                lost = find_lost(state, plan, all_older=reason == "gone")
                turn = set_state(turn, state.mark_lost(lost, plan.scope if plan else None))
                if plan is not None and plan.conversation_id:
                    turn = set_state(turn, replace(get_state(turn), conversation_id=""))
                options = replace(options, full=True)
                if reason == "gone" and not is_live_only(state, plan):
                    now = self._clock()
                    created_at = plan.anchor.created_at if plan and plan.anchor else now
                    evidence.record_missing(now, created_at)
                if reason == "unsupported":
                    evidence.record_unsupported()
                if reason in ("unsupported", "forgot") and (doubt := self._open_doubt(evidence)):
                    options = replace(options, mode="stateless", reason=doubt)
                    options = options if doubt == "unsupported" else replace(options, include=False)
            case "unproven" | "empty_input":
                options = replace(options, full=True)
            case "conversation":
                turn = set_state(turn, replace(state, conversation_id=""))
                options = replace(options, full=True)
            case "reasoning":
                options = replace(options, reasoning=False)
            case "include":
                self._skip_include = True
                options = replace(options, include=False)
        return turn, options, lost

    async def _before_resend(
        self, turn: Turn, request: Request, options: SendOptions, failure: HealableError
    ) -> None:
        """Save the evidence; raise if healing would send more than the request allows."""
        await self.memory.save(self._get_evidence(request))
        if options.full and request.resend_limit is not None:
            plan = self._build_plan(turn, request, options)
            if plan.full_bytes > request.resend_limit:
                message = f"the server no longer has the context, and a full send is about {plan.full_bytes} bytes"
                error = ResendTooLong(message, provider=self.name)
                error.response_id, error.usage = failure.error.response_id, failure.error.usage
                raise attach_context(error, turn, plan) from failure.error

    def _resolve_mode(self, turn: Turn, request: Request) -> tuple[Mode, Mode, str]:
        """Return the mode to send in, the requested one, and why they differ."""
        requested = request.mode or get_state(turn).mode or self.mode
        enabled = is_chaining_enabled()
        measure("responses_chained_mode_enabled", int(enabled))
        if not enabled:
            return "stateless", requested, "switched_off"
        if requested == "chained" and self.memory.trust == "never":
            return "stateless", requested, "never"
        if requested == "chained" and (doubt := self._open_doubt(self._get_evidence(request))):
            return "stateless", requested, doubt
        return requested, requested, ""

    def _open_doubt(self, evidence: ServerEvidence) -> str:
        return evidence.open_doubt(self._clock())

    def _get_evidence(self, request: Request) -> ServerEvidence:
        return self.memory.get(request.model or self.model, streaming=self._is_streaming(request))

    def _is_streaming(self, request: Request) -> bool:
        return request.streaming or self.transport.always_streams

    def _build_plan(
        self, turn: Turn, request: Request, options: SendOptions, *, out_of_band: bool = False
    ) -> RequestPlan:
        """Plan a request: on a proved anchor, if the server may be relied on."""
        start = time.perf_counter()
        if options.full or options.mode != "chained":
            plan = self._plan_mode(turn, request, "stateless" if options.full else options.mode)
            plan = replace(plan, mode=options.mode, mode_reason=options.reason)
        elif has_hidden_context(flatten_params(request.resolve_params(self.params))):
            plan = replace(self._plan_mode(turn, request, "stateless"), mode_reason="prompt")
        else:
            plan = self._plan_chain(turn, request, out_of_band=out_of_band)
            plan = self._check_trust(turn, request, plan)
        if not options.reasoning:
            plan = plan.without_reasoning()
        plan = self._plan_cache(turn, plan, request)
        record_plan(plan, time.perf_counter() - start)
        return plan

    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> CacheRules:
        retention = str(params.get("prompt_cache_retention"))
        return CacheRules(lifetime=RETENTIONS.get(retention, CacheRules().lifetime))

    def _plan_mode(
        self, turn: Turn, request: Request, mode: Mode, extra: tuple[AnchorRecord, ...] = ()
    ) -> RequestPlan:
        evidence = self._get_evidence(request)
        plan = plan_request(
            turn,
            scope=self.scope,
            mode=mode,
            now=self._clock(),
            extra=extra,
            max_depth=self.memory.max_depth(evidence, self.max_depth),
            not_before=evidence.not_before,
        )
        return request.add_ephemeral(plan)

    def _plan_chain(
        self, turn: Turn, request: Request, *, out_of_band: bool = False
    ) -> RequestPlan:
        """Plan a chained request, whatever the evidence."""
        # Responses that only a connection remembers are not known to requests outside of it.
        live = () if out_of_band else self.transport.live_anchors(reversed(get_state(turn).anchors))
        return self._plan_mode(turn, request, "chained", (*request.candidates, *live))

    def _check_trust(self, turn: Turn, request: Request, plan: RequestPlan) -> RequestPlan:
        """Return the plan, or a full one if the server's answer to it could not be judged."""
        evidence, memory = self._get_evidence(request), self.memory
        is_checked = memory.needs_verdict(plan, evidence) or memory.needs_count(plan, evidence)
        if not is_checked or plan.problems:
            return plan
        params = request.resolve_params(self.params)
        settings = build_settings(
            plan, model=request.model or self.model, tools=request.tools, params=params
        )
        sent = memory.measure(plan, settings, evidence)
        full = self._plan_mode(turn, request, "stateless")
        return memory.reject_untrusted(plan, full, evidence, sent)

    async def _find_evidence(
        self, turn: Turn, request: Request, options: SendOptions, evidence: ServerEvidence
    ) -> None:
        """Look for evidence about an unproven server if the request could be chained.

        The server may identify itself as a known one in its first response. If audits are enabled, the
        items that it lists prove its memory as well.
        """
        if options.mode != "chained" or options.full or not self.memory.may_need_verdict(evidence):
            return
        plan = self._plan_chain(turn, request)
        if not self.memory.needs_verdict(plan, evidence):
            return
        if self.transport.identity is None:
            await identify_server(self.transport)
            self.memory.identify(self.transport.identity or "")
        if self.verify_every and not evidence.is_proven:
            await self._audit(turn, plan, evidence)

    def _plan_out_of_band(self, turn: Turn) -> tuple[RequestPlan, ...]:
        """Return plans to send a Turn outside of the conversation: on its anchor, if it has one, and in full."""
        mode: Mode = (
            "chained" if self._resolve_mode(turn, Request())[0] == "chained" else "stateless"
        )
        attempts = (SendOptions(mode), SendOptions(mode, full=True))
        plans = tuple(
            self._build_plan(turn, Request(), each, out_of_band=True) for each in attempts
        )
        return plans if plans[0].anchor else plans[1:]

    async def _audit_periodically(
        self, turn: Turn, plan: RequestPlan, evidence: ServerEvidence
    ) -> None:
        if not plan.anchor or plan.mode != "chained":
            return
        self._chained_count += 1
        if not self.verify_every or self._chained_count % self.verify_every:
            return
        result = await self._audit(turn, plan, evidence)
        if result.agrees is False:
            log.warning("an audit found a difference", response_id=plan.previous_response_id)
            failure = lost_context("audit", self.name)
            attach_context(failure.error, turn, plan)
            raise failure

    async def _audit(self, turn: Turn, plan: RequestPlan, evidence: ServerEvidence) -> Audit:
        """Audit a plan's anchor, and record the result as evidence."""
        result = await audit(self.transport, turn, plan, lists_items=evidence.audits)
        evidence.audits = evidence.audits or result.checked > 0
        if result.agrees and not evidence.is_proven:
            evidence.record_success("audit")
        return result


def _is_stored(body: Mapping[str, Any], outcome: Outcome) -> bool:
    """Return whether a response can be continued: it was stored, and its context is known."""
    was_stored = body.get("store", True) is not False and outcome.stored is not False
    return was_stored and not has_hidden_context(body)


def _end_running(turn: Turn, running: AnchorRecord, status: Status) -> Turn:
    """Return the Turn without an answer in the background, so that it can be sent again."""
    return set_state(turn, get_state(turn).with_anchor(replace(running, status=status)))
