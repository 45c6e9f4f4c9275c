"""ResponsesEngine: the Responses API, chained by proof and healed when the server forgets.

Each request follows a plan, and the server's answer is checked against it: a rejected anchor is healed
once by a full send, as long as no output was shown; a request that was answered without the requested
context is sent again, or at least reported and never used as an anchor. Only a finished response becomes an anchor.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from kedge.config.settings import is_chaining_enabled
from kedge.engines import responses_endpoints
from kedge.engines.audit import Audit, audit
from kedge.engines.base import Engine, Events, Request, WireTap
from kedge.engines.evidence import EvidenceStore, ServerEvidence, Trust
from kedge.engines.healing import RequestSummary, classify_error, detect_echo_mismatch
from kedge.engines.known_servers import KnownServer
from kedge.engines.prompt_cache import PromptMonitor
from kedge.engines.request_body import (
    SendOptions,
    build_request_body,
    build_settings,
    summarize_request,
)
from kedge.engines.request_options import check_params
from kedge.engines.response_reader import (
    attach_context,
    raise_for_outcome,
    read_response,
    record_outcome,
)
from kedge.engines.responses_endpoints import ConversationObjects, identify_server
from kedge.engines.server_memory import ServerMemory
from kedge.engines.telemetry import (
    record_completion,
    record_error,
    record_healing,
    record_lost_context,
    record_mode_change,
    record_plan,
    record_request,
)
from kedge.engines.token_accounting import SentTokens
from kedge.engines.tool_name_inference import infer_tool_name
from kedge.engines.transport import Transport
from kedge.errors import ChainRefused, EngineError, RequestRefused, ResendTooLong, StreamCut
from kedge.events import Event, Outcome, StreamEvent, StreamFailed, Usage
from kedge.events.assembler import Assembler
from kedge.events.responses import ResponsesDecoder
from kedge.events.run import (
    VISIBLE_EVENTS,
    AnswerFinished,
    FellBack,
    Healed,
    HealReason,
    ModeChanged,
    RequestPlanned,
    RequestSent,
    ServerForgot,
    TurnFinished,
)
from kedge.events.types import ResponseFacts
from kedge.observe import get_logger, measure
from kedge.planning import (
    DEFAULT_RETENTION,
    AnchorRecord,
    CacheRules,
    ConversationState,
    Mode,
    RequestPlan,
    get_state,
    plan_request,
    set_state,
)
from kedge.turns import AssistantBlock, Block, ToolCallBlock, Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = get_logger(__name__)


RETENTIONS = {"24h": 86_400.0}
"""Seconds for which a prompt stays cached, by ``prompt_cache_retention``."""


class _HealableError(Exception):
    """The server rejected the anchor or forgot it before any output: the request may be healed."""

    def __init__(self, reason: HealReason, error: EngineError, turn: Turn | None = None) -> None:
        super().__init__(reason)
        self.reason: HealReason = reason
        self.error = error
        self.turn = turn
        """The Turn to heal, where it is not the one that was sent."""


class ResponsesEngine(Engine):
    """An engine for any server of the Responses API.

    ``make_client`` returns the openai client that sends requests. ``scope`` names what shares one memory.
    ``retention`` is how many seconds the server stores a response (``None``: no limit), ``max_depth`` how
    many responses of a chain it is known to remember. With ``verify_every=n`` every n-th chained
    request is preceded by an audit of what the server holds.

    With ``transport="websocket"`` responses travel over a few WebSocket ``connections``, each with
    ``lanes`` for several at once (1 for a server that knows no lanes), and what is not stored can be
    continued for as long as its connection lives.

    With ``prompt_cache`` requests carry a ``prompt_cache_key`` that is the same for all requests of a
    conversation, and plans predict what the provider reads from its cache.
    """

    def __init__(
        self,
        model: str,
        *,
        make_client: "Callable[[], AsyncOpenAI]",
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
        self.name = provider
        self.model = model
        self.scope = scope
        self.mode: Mode = mode
        self.retention = retention
        self.max_depth = max_depth
        self.verify_every = verify_every
        self.params = dict(params or {})
        check_params(self.params)
        self.transport = Transport(make_client, provider)
        if transport == "websocket":
            from kedge.engines.websocket import SocketTransport

            self.transport = SocketTransport(
                make_client, provider, connections=connections, lanes=lanes
            )
        self._conversation_objects = ConversationObjects(self.transport)
        self._clock = clock
        self.memory = ServerMemory(
            scope,
            trust=trust,
            transport=transport,
            clock=clock,
            known=known_server,
            store=evidence_store,
        )
        self.prompt_cache = prompt_cache
        self._prompts = PromptMonitor()
        self._skip_include = False
        self._chained_count = 0

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self.transport.aclose()

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return what would be sent now, and why, without sending it."""
        request = Request.of(**options)
        mode, _, reason = self._resolve_mode(turn, request)
        return self._build_plan(turn, request, SendOptions(mode, reason=reason))

    async def verify(self, turn: Turn) -> Audit:
        """Fetch what the server stores for the anchor, and compare it with the Turn."""
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

    async def events(self, turn: Turn, request: Request) -> Events:
        """Send the Turn, healing what can be healed; see the module docstring."""
        evidence = await self.memory.load(
            request.model or self.model, streaming=self._is_streaming(request)
        )
        mode, wanted, reason = self._resolve_mode(turn, request)
        if mode != wanted:
            record_mode_change(mode, wanted, reason)
            yield ModeChanged(mode, wanted, reason)
        way = SendOptions(mode, include=not self._skip_include, reason=reason)
        healed: set[HealReason] = set()
        while True:
            try:
                async with self._attempt(turn, request, way) as events:
                    async for event in events:
                        yield event
                    return
            except _HealableError as failure:
                if failure.reason in healed or not request.heal:
                    raise failure.error from None
                healed.add(failure.reason)
                turn, way, event = self._heal(failure.turn or turn, way, failure, evidence)
                await self.memory.save(evidence)
                self._check_resend_limit(turn, request, way, failure.error)
                yield event
                if way.mode != mode:
                    record_mode_change(way.mode, mode, failure.reason)
                    yield ModeChanged(way.mode, mode, failure.reason)

    @asynccontextmanager
    async def _attempt(
        self, turn: Turn, request: Request, options: SendOptions
    ) -> AsyncGenerator[Events]:
        """Plan a request and provide its events; errors carry the Turn and the plan.

        A context manager and no generator of events, as `_open_response` is: each generator between the
        server and the caller costs time for every event.
        """
        if options.mode == "conversation":
            try:
                turn = await self._conversation_objects.detach_if_changed(turn)
            except EngineError as error:
                attach_context(error, turn, self._build_plan(turn, request, options))
                raise
        evidence = self._get_evidence(request)
        await self._find_evidence(turn, request, options, evidence)
        plan = self._build_plan(turn, request, options)
        await self._audit_periodically(turn, plan, evidence)
        try:
            plan.check()
            async with aclosing(
                self._send_request(turn, plan, request, options, evidence)
            ) as events:
                yield events
        except _HealableError as failure:
            attach_context(failure.error, turn, plan)
            raise
        except EngineError as error:
            attach_context(error, turn, plan)
            raise

    async def _build_body(
        self, plan: RequestPlan, request: Request, options: SendOptions
    ) -> dict[str, Any]:
        """Return the body of a request; in conversation mode, create the object if there is none."""
        conversation_id = plan.conversation_id
        if options.mode == "conversation" and not conversation_id:
            conversation_id = await self._conversation_objects.create()
        self._prompts.record(plan, model=request.model or self.model, tools=request.tools)
        return build_request_body(
            plan,
            options,
            conversation_id=conversation_id,
            model=request.model or self.model,
            tools=request.tools,
            streaming=request.streaming,
            params=request.resolve_params(self.params),
        )

    async def _send_request(
        self,
        turn: Turn,
        plan: RequestPlan,
        request: Request,
        options: SendOptions,
        evidence: ServerEvidence,
    ) -> Events:
        """Send one request; yield its events, ending with ``TurnFinished``.

        The answer of a server that has not shown that it remembers is held back: a user who has read
        an answer that was made without memory cannot be made to forget it.
        """
        for event in _describe_plan(plan):
            yield event
        body = await self._build_body(plan, request, options)
        content = self.transport.serialize(body)
        record_request(plan, len(content))
        yield RequestSent(len(content))
        summary = summarize_request(body, options)
        assembler, decoder, shown = Assembler(), ResponsesDecoder(), False
        decoder.calls.infer_name = partial(infer_tool_name, request.tools)
        held: list[Event] | None = [] if self.memory.needs_verdict(plan, evidence) else None
        cut: StreamCut | None = None
        try:
            async with self._open_response(
                decoder, plan, body, content, summary, request.tap
            ) as decoded:
                async for event in decoded:
                    if not shown:
                        self._heal_early(event, plan, summary, evidence)
                    assembler.feed(event)
                    if held is not None:
                        held.append(event)
                        continue
                    shown = shown or (body["stream"] and isinstance(event, VISIBLE_EVENTS))
                    yield event
        except StreamCut as error:
            cut = error  # which matters only if the answer had not ended
        self._identify_server()
        outcome = assembler.finish()
        sent = self.memory.measure(plan, body, evidence)
        verdict = self.memory.judge(outcome, plan, sent, evidence)
        forgot = verdict in ("lost", "partial")
        if forgot:
            self.memory.record_loss(verdict, plan, evidence)
            if not shown:
                raise _HealableError("forgot", _lost_context_error(self.name))
            record_lost_context(outcome.response_id)
            yield ServerForgot(outcome.response_id)
        if held is not None and outcome.status in ("completed", "incomplete"):
            if verdict != "remembered":
                evidence.record_loss(self._clock(), "no_verdict")
                raise _HealableError("unproven", _lost_context_error(self.name))
            for event in held:
                yield event
        finished = self._record(turn, outcome, plan, body, sent, evidence, forgot)
        await self.memory.save(evidence)
        record_completion(outcome, decoder.calls)
        if forgot and any(isinstance(block, ToolCallBlock) for block in outcome.blocks):
            raise _HealableError("forgot", _lost_context_error(self.name), finished)
        raise_for_outcome(outcome, self.name, finished, cut)
        yield AnswerFinished(outcome, finished, plan)
        yield TurnFinished(finished)

    def _identify_server(self) -> None:
        if self.transport.identity:
            self.memory.identify(self.transport.identity)

    def _heal_early(
        self,
        event: StreamEvent,
        plan: RequestPlan,
        summary: RequestSummary,
        evidence: ServerEvidence,
    ) -> None:
        """Raise if an event shows, before any output, that the request has to be sent again."""
        if isinstance(event, ResponseFacts) and detect_echo_mismatch(event, plan):
            self.memory.record_loss("lost", plan, evidence)
            raise _HealableError("forgot", _lost_context_error(self.name))
        if isinstance(event, StreamFailed):
            self._raise_if_healable(_error_from_event(event, self.name), summary)

    def _record(
        self,
        turn: Turn,
        outcome: Outcome,
        plan: RequestPlan,
        body: dict[str, Any],
        sent: SentTokens | None,
        evidence: ServerEvidence,
        forgot: bool,
    ) -> Turn:
        """Record an answer in the Turn and in the evidence."""
        known = get_state(turn).anchor(outcome.response_id, plan.scope) is not None
        counted = None if forgot else self.memory.count(outcome, plan, sent, evidence)
        reused = self.memory.record_issued(outcome.response_id, counted, evidence, known=known)
        if reused:
            turn = set_state(turn, get_state(turn).mark_lost({outcome.response_id}, plan.scope))
        if forgot:
            # Its calls were made without the context, and are not run.
            texts = tuple(b for b in outcome.blocks if isinstance(b, AssistantBlock))
            if len(texts) < len(outcome.blocks) and outcome.completed:
                outcome = replace(outcome, blocks=texts, response_id="")
        return record_outcome(
            turn,
            outcome,
            plan,
            now=self._clock(),
            stored=body.get("store", True) is not False and outcome.stored is not False,
            retention=self.retention,
            conversation_id=body.get("conversation", ""),
            lost=forgot,
            reused=reused,
            counted=counted,
        )

    @asynccontextmanager
    async def _open_response(
        self,
        decoder: ResponsesDecoder,
        plan: RequestPlan,
        body: dict[str, Any],
        content: bytes,
        summary: RequestSummary,
        tap: WireTap | None,
    ) -> AsyncGenerator[AsyncGenerator[StreamEvent]]:
        """Send the request and provide the events of the response, as they arrive."""
        retry = plan.mode != "conversation"  # the first try may have been taken down already
        try:
            reply = await self.transport.create_response(content, body, retry=retry, tap=tap)
            async with aclosing(read_response(decoder, reply, self.transport.redact)) as events:
                yield events
        except StreamCut:
            raise  # the assembler decides whether that is a failure
        except EngineError as error:
            error.provider = error.provider or self.name
            record_error(error)
            if isinstance(error, RequestRefused):
                self._raise_if_healable(error, summary)
            raise

    def _raise_if_healable(self, error: EngineError, summary: RequestSummary) -> None:
        reason = classify_error(error, summary)
        if reason in ("gone", "unsupported", "conversation"):
            error = _as_chain_refused(error)
        if reason:
            raise _HealableError(reason, error) from error

    def _heal(
        self, turn: Turn, options: SendOptions, failure: _HealableError, evidence: ServerEvidence
    ) -> tuple[Turn, SendOptions, Healed]:
        """Decide how to go on after a failure that can be healed.

        Returns:
            The Turn with what was learned, the options of the next attempt, and the event.
        """
        reason, lost = failure.reason, ()
        state = get_state(turn)
        plan = failure.error.plan
        match reason:
            case "gone" | "unsupported" | "forgot" | "audit":
                lost = _find_lost(state, plan, all_older=reason == "gone")
                turn = set_state(turn, state.mark_lost(lost, plan.scope if plan else None))
                options = replace(options, full=True)
                if reason == "gone" and not _is_live_only(state, plan):
                    evidence.record_missing(self._clock())
                if reason == "unsupported":
                    evidence.record_unsupported()
                if reason in ("unsupported", "forgot") and (doubt := self._open_doubt(evidence)):
                    options = replace(options, mode="stateless", reason=doubt)
                    options = options if doubt == "unsupported" else replace(options, include=False)
            case "unproven":
                options = replace(options, full=True)
            case "conversation":
                turn = set_state(turn, replace(state, conversation_id=""))
                options = replace(options, full=True)
            case "empty_input":
                options = replace(options, full=True)
            case "reasoning":
                options = replace(options, reasoning=False)
            case "include":
                self._skip_include = True
                options = replace(options, include=False)
            case "format":
                pass  # kedge.engines.reply heals it
        record_healing(reason, "".join(lost))
        return turn, options, Healed(reason, lost)

    def _check_resend_limit(
        self, turn: Turn, request: Request, options: SendOptions, error: EngineError
    ) -> None:
        """Raise the error after all, if healing would send more than the request allows."""
        if options.full and request.resend_limit is not None:
            plan = self._build_plan(turn, request, options)
            if plan.full_bytes > request.resend_limit:
                message = f"the server no longer has the context, and a full send is about {plan.full_bytes} bytes"
                raise attach_context(
                    ResendTooLong(message, provider=self.name), turn, plan
                ) from error

    def _resolve_mode(self, turn: Turn, request: Request) -> tuple[Mode, Mode, str]:
        """Return the mode to send in, the requested one, and why they differ."""
        wanted = request.mode or get_state(turn).mode or self.mode
        enabled = is_chaining_enabled()
        measure("responses_chained_mode_enabled", int(enabled))
        if not enabled:
            return "stateless", wanted, "switched_off"
        if wanted == "chained" and self.memory.trust == "never":
            return "stateless", wanted, "never"
        if wanted == "chained" and (doubt := self._open_doubt(self._get_evidence(request))):
            return "stateless", wanted, doubt
        return wanted, wanted, ""

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
        else:
            plan = self._plan_chain(turn, request, out_of_band=out_of_band)
            plan = self._check_trust(turn, request, plan)
        if not options.reasoning:
            plan = plan.without_reasoning()
        if self.prompt_cache:
            params = request.resolve_params(self.params)
            retention = str(params.get("prompt_cache_retention"))
            plan = self._prompts.plan(
                turn,
                plan,
                CacheRules(lifetime=RETENTIONS.get(retention, CacheRules().lifetime)),
                model=request.model or self.model,
                tools=request.tools,
                params=params,
            )
        record_plan(plan, time.perf_counter() - start)
        return plan

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
        # What a connection remembers is known only there, not to requests beside it.
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
        """Look for evidence about a server that has shown none, where it would be used.

        A server without requests so far may be a known one. Where audits were asked for, the items
        that it lists prove its memory as well.
        """
        if options.mode != "chained" or options.full:
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
        """Return how to send a Turn outside of the conversation: on its anchor, if it has one, or in full."""
        mode: Mode = (
            "chained" if self._resolve_mode(turn, Request())[0] == "chained" else "stateless"
        )
        ways = (SendOptions(mode), SendOptions(mode, full=True))
        plans = tuple(self._build_plan(turn, Request(), way, out_of_band=True) for way in ways)
        return plans if plans[0].anchor else plans[1:]

    async def _audit_periodically(
        self, turn: Turn, plan: RequestPlan, evidence: ServerEvidence
    ) -> None:
        if not plan.anchor or plan.mode != "chained":
            return
        self._chained_count += 1
        if not self.verify_every or self._chained_count % self.verify_every:
            return
        found = await self._audit(turn, plan, evidence)
        if found.agrees is False:
            log.warning("an audit found a difference", response_id=plan.previous_response_id)
            raise _HealableError(
                "audit", attach_context(_lost_context_error(self.name), turn, plan)
            )

    async def _audit(self, turn: Turn, plan: RequestPlan, evidence: ServerEvidence) -> Audit:
        """Audit a plan's anchor, and record the result as evidence."""
        found = await audit(self.transport, turn, plan, lists_items=evidence.audits)
        evidence.audits = evidence.audits or found.checked > 0
        if found.agrees and not evidence.is_proven:
            evidence.record_success("audit")
        return found


def _find_lost(
    state: ConversationState, plan: RequestPlan | None, *, all_older: bool
) -> tuple[str, ...]:
    """Return the responses that are lost with a plan's anchor.

    A server that does not have a response is likely to have lost the older ones as well; asking for
    each of them would cost a rejected request every time.
    """
    if plan is None or plan.anchor is None:
        return ()
    anchor = plan.anchor
    if not all_older or _is_live_only(state, plan):
        return (anchor.response_id,)
    older = (
        each.response_id
        for each in state.anchors
        if each.scope == anchor.scope
        and each.status == "completed"
        and each.created_at <= anchor.created_at
    )
    return tuple(dict.fromkeys((anchor.response_id, *older)))


def _is_live_only(state: ConversationState, plan: RequestPlan | None) -> bool:
    """Return whether the anchor was remembered by a connection only and never stored."""
    if plan is None or plan.anchor is None:
        return False
    record = state.anchor(plan.anchor.response_id, plan.anchor.scope)
    return record is not None and not record.stored


def _error_from_event(event: StreamFailed, provider: str) -> EngineError:
    return RequestRefused(
        event.message,
        provider=provider,
        status=event.status,
        code=event.code,
        param=event.param,
    )


def _describe_plan(plan: RequestPlan) -> list[Event]:
    """Return the events that report a plan."""
    return [RequestPlanned(plan), *([FellBack(plan.fallback)] if plan.fallback else [])]


def _lost_context_error(provider: str) -> EngineError:
    message = "the server answered without the context that the request continues"
    return ChainRefused(message, provider=provider)


def _as_chain_refused(error: EngineError) -> EngineError:
    rejection = ChainRefused(
        error.message,
        provider=error.provider,
        status=error.status,
        code=error.code,
        param=error.param,
        request_id=error.request_id,
        body=error.body,
    )
    rejection.__cause__ = error.__cause__
    return rejection
