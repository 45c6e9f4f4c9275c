"""ResponsesEngine: the Responses API, chained by proof and healed when the server forgets.

Each request follows a plan. What the server says is checked against it: a refusal to chain is healed
once by a full send, as long as nothing was shown; an answer given without the memory that was asked for
is sent again, or at least said so and never built upon. Only a finished response becomes an anchor.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from kedge.config.settings import is_chaining_enabled
from kedge.engines import responses_endpoints
from kedge.engines.audit import Audit, audit
from kedge.engines.base import Engine, Events, Request, WireTap
from kedge.engines.healing import (
    ChainBreaker,
    RequestSummary,
    classify_error,
    detect_echo_mismatch,
    detect_lost_context,
)
from kedge.engines.request_body import SendOptions, build_request_body, summarize_request
from kedge.engines.request_options import check_params, combine_params
from kedge.engines.response_reader import (
    attach_context,
    raise_for_outcome,
    read_response,
    record_outcome,
)
from kedge.engines.responses_endpoints import ConversationObjects
from kedge.engines.telemetry import (
    record_completion,
    record_error,
    record_healing,
    record_lost_context,
    record_mode_change,
    record_plan,
    record_request,
)
from kedge.engines.transport import Transport
from kedge.errors import ChainRefused, EngineError, RequestRefused, ResendTooLong, StreamCut
from kedge.events import ResponseStarted, StreamEvent, StreamFailed, Usage
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
    ServerForgot,
    TurnFinished,
)
from kedge.observe import get_logger, measure
from kedge.planning import (
    DEFAULT_RETENTION,
    Mode,
    RequestPlan,
    get_state,
    plan_request,
    set_state,
)
from kedge.turns import Block, Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = get_logger(__name__)


class _HealableError(Exception):
    """The server refused or forgot, and nothing was shown yet: the request may be healed."""

    def __init__(self, reason: HealReason, error: EngineError) -> None:
        super().__init__(reason)
        self.reason: HealReason = reason
        self.error = error


class ResponsesEngine(Engine):
    """An engine for any server of the Responses API.

    ``make_client`` makes the openai client that carries requests. ``scope`` names what shares one memory.
    ``retention`` is how many seconds the server keeps a response (``None``: for good), ``max_depth`` how
    many responses of a chain it is known to remember. With ``verify_every=n`` every n-th chained
    request is preceded by an audit of what the server holds.

    With ``transport="websocket"`` responses travel over a few WebSocket ``connections``, each with
    ``lanes`` for several at once (1 for a server that knows no lanes), and what is not stored can be
    continued for as long as its connection lives.
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
        self._chain_breaker = ChainBreaker(clock)
        self._skip_include = False
        self._chained_count = 0

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self.transport.aclose()

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """What would be sent now, and why: a dry run."""
        request = Request.of(**options)
        return self._build_plan(turn, request, SendOptions(self._resolve_mode(turn, request)[0]))

    async def verify(self, turn: Turn) -> Audit:
        """Fetch what the server holds for the anchor, and compare it with the Turn."""
        return await audit(self.transport, turn, self.plan(turn))

    async def count_tokens(self, turn: Turn, **options: Any) -> int:
        """Ask the server how many tokens this Turn is."""
        request = Request.of(**options)
        tools = {"tools": list(request.tools)} if request.tools else {}
        model = request.model or self.model
        return await responses_endpoints.count_tokens(
            self.transport, self._plan_out_of_band(turn), model=model, **tools
        )

    async def compact(self, turn: Turn) -> tuple[list[Block], Usage]:
        """Have the server compact this Turn: the blocks that stand for it, and what that took."""
        return await responses_endpoints.compact(
            self.transport, self._plan_out_of_band(turn), model=self.model
        )

    async def events(self, turn: Turn, request: Request) -> Events:
        """Send the Turn, healing what can be healed; see the module."""
        mode, wanted, reason = self._resolve_mode(turn, request)
        if mode != wanted:
            record_mode_change(mode, wanted, reason)
            yield ModeChanged(mode, wanted, reason)
        way = SendOptions(mode, include=not self._skip_include)
        healed: set[HealReason] = set()
        while True:
            try:
                async with aclosing(self._attempt(turn, request, way)) as events:
                    async for event in events:
                        yield event
                    return
            except _HealableError as refused:
                if refused.reason in healed:
                    raise refused.error from None
                healed.add(refused.reason)
                turn, way, event = self._heal(turn, way, refused)
                self._check_resend_limit(turn, request, way, refused.error)
                yield event
                if way.mode != mode:
                    record_mode_change(way.mode, mode, refused.reason)
                    yield ModeChanged(way.mode, mode, refused.reason)

    async def _attempt(self, turn: Turn, request: Request, options: SendOptions) -> Events:
        """Plan, send, and take the answer down."""
        if options.mode == "conversation":
            try:
                turn = await self._conversation_objects.detach_if_changed(turn)
            except EngineError as error:
                attach_context(error, turn, self._build_plan(turn, request, options))
                raise
        plan = self._build_plan(turn, request, options)
        await self._audit_periodically(turn, plan)
        try:
            plan.check()
            yield RequestPlanned(plan)
            if plan.fallback:
                yield FellBack(plan.fallback)
            conversation_id = plan.conversation_id
            if options.mode == "conversation" and not conversation_id:
                conversation_id = await self._conversation_objects.create()
            body = build_request_body(
                plan,
                options,
                conversation_id=conversation_id,
                model=request.model or self.model,
                tools=request.tools,
                streaming=request.streaming,
                params=combine_params(self.params, request.params),
            )
            sent = summarize_request(body, options)
            async with aclosing(self._send_request(turn, plan, body, sent, request.tap)) as events:
                async for event in events:
                    if isinstance(event, AnswerFinished):
                        turn = event.turn
                    yield event
        except _HealableError as refused:
            attach_context(refused.error, turn, plan)
            raise
        except EngineError as error:
            attach_context(error, turn, plan)
            raise
        yield TurnFinished(turn)

    async def _send_request(
        self,
        turn: Turn,
        plan: RequestPlan,
        body: dict[str, Any],
        summary: RequestSummary,
        tap: WireTap | None,
    ) -> Events:
        """Send one request; tell what comes back; end with ``AnswerFinished``."""
        assembler, decoder, shown = Assembler(), ResponsesDecoder(), False
        cut: StreamCut | None = None
        try:
            async with aclosing(
                self._decode_response(decoder, plan, body, summary, tap)
            ) as decoded:
                async for event in decoded:
                    if isinstance(event, ResponseStarted) and detect_echo_mismatch(event, plan):
                        raise _HealableError("forgot", _lost_context_error(self.name))
                    if isinstance(event, StreamFailed) and not shown:
                        self._raise_if_healable(_error_from_event(event, self.name), summary)
                    assembler.feed(event)
                    shown = shown or (body["stream"] and isinstance(event, VISIBLE_EVENTS))
                    yield event
        except StreamCut as error:
            cut = error  # which matters only if the answer had not ended
        outcome = assembler.finish()
        forgot = outcome.completed and (
            detect_echo_mismatch(outcome, plan) or detect_lost_context(outcome.usage, plan, body)
        )
        if forgot and not shown:
            raise _HealableError("forgot", _lost_context_error(self.name))
        if forgot:
            self._chain_breaker.record_loss()
            record_lost_context(outcome.response_id)
            yield ServerForgot(outcome.response_id)
        elif outcome.completed and plan.anchor:
            self._chain_breaker.record_success()
        finished = record_outcome(
            turn,
            outcome,
            plan,
            now=self._clock(),
            stored=body.get("store", True) is not False,
            retention=self.retention,
            conversation_id=body.get("conversation", ""),
            lost=forgot,
        )
        record_completion(outcome, decoder.calls)
        raise_for_outcome(outcome, self.name, finished, cut)
        yield AnswerFinished(outcome, finished, plan)

    async def _decode_response(
        self,
        decoder: ResponsesDecoder,
        plan: RequestPlan,
        body: dict[str, Any],
        summary: RequestSummary,
        tap: WireTap | None,
    ) -> AsyncGenerator[StreamEvent]:
        """The events of the answer, as they come."""
        content = self.transport.serialize(body)
        record_request(plan, len(content))
        retry = plan.mode != "conversation"  # the first try may have been taken down already
        try:
            reply = await self.transport.create_response(content, body, retry=retry, tap=tap)
            async with aclosing(read_response(decoder, reply, self.transport.redact)) as events:
                async for event in events:
                    yield event
        except StreamCut:
            raise  # whether that is a failure, the assembler will tell
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
        self, turn: Turn, options: SendOptions, failure: _HealableError
    ) -> tuple[Turn, SendOptions, Healed]:
        """How to go on after a refusal: the Turn with what was learnt, and another way to send."""
        reason, lost = failure.reason, ()
        state = get_state(turn)
        plan = failure.error.plan
        match reason:
            case "gone" | "unsupported" | "forgot" | "audit":
                lost = (plan.previous_response_id,) if plan and plan.anchor else ()
                turn = set_state(turn, state.mark_lost(lost))
                options = replace(options, full=True)
                if reason == "unsupported":
                    self._chain_breaker.record_unsupported()
                    options = replace(options, mode="stateless")
                if reason == "forgot":
                    self._chain_breaker.record_loss()
                    options = replace(options, mode="stateless", include=False)
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
        record_healing(reason, "".join(lost))
        return turn, options, Healed(reason, lost)

    def _check_resend_limit(
        self, turn: Turn, request: Request, options: SendOptions, error: EngineError
    ) -> None:
        """Raise the error after all, if healing would send more than the request allows."""
        if options.full and request.resend_limit is not None:
            plan = self._build_plan(turn, request, options)
            if plan.full_bytes > request.resend_limit:
                words = f"the server forgot, and everything is about {plan.full_bytes} bytes"
                raise attach_context(
                    ResendTooLong(words, provider=self.name), turn, plan
                ) from error

    def _resolve_mode(self, turn: Turn, request: Request) -> tuple[Mode, Mode, str]:
        """The mode to send in, the one that was asked for, and why they differ."""
        wanted = request.mode or get_state(turn).mode or self.mode
        enabled = is_chaining_enabled()
        measure("responses_chained_mode_enabled", int(enabled))
        if not enabled:
            return "stateless", wanted, "switched_off"
        if wanted == "chained" and (doubt := self._chain_breaker.open_reason):
            return "stateless", wanted, doubt
        return wanted, wanted, ""

    def _build_plan(
        self, turn: Turn, request: Request, options: SendOptions, *, out_of_band: bool = False
    ) -> RequestPlan:
        start = time.perf_counter()
        # What a connection remembers is known only there, not to requests beside it.
        live = () if out_of_band else self.transport.live_anchors(reversed(get_state(turn).anchors))
        plan = plan_request(
            turn,
            scope=self.scope,
            mode="stateless" if options.full else options.mode,
            now=self._clock(),
            extra=(*request.candidates, *live),
            max_depth=self.max_depth,
        )
        if options.full:
            plan = replace(plan, mode=options.mode)
        if not options.reasoning:
            plan = plan.without_reasoning()
        record_plan(plan, time.perf_counter() - start)
        return plan

    def _plan_out_of_band(self, turn: Turn) -> tuple[RequestPlan, ...]:
        """How to send a Turn beside the conversation: on its anchor, if it has one, or whole."""
        mode: Mode = (
            "chained" if self._resolve_mode(turn, Request())[0] == "chained" else "stateless"
        )
        ways = (SendOptions(mode), SendOptions(mode, full=True))
        plans = tuple(self._build_plan(turn, Request(), way, out_of_band=True) for way in ways)
        return plans if plans[0].anchor else plans[1:]

    async def _audit_periodically(self, turn: Turn, plan: RequestPlan) -> None:
        if not plan.anchor or plan.mode != "chained":
            return
        self._chained_count += 1
        if not self.verify_every or self._chained_count % self.verify_every:
            return
        found = await audit(self.transport, turn, plan)
        if found.agrees is False:
            log.warning("an audit found a difference", response_id=plan.previous_response_id)
            raise _HealableError(
                "audit", attach_context(_lost_context_error(self.name), turn, plan)
            )


def _error_from_event(event: StreamFailed, provider: str) -> EngineError:
    return RequestRefused(
        event.message,
        provider=provider,
        status=event.status,
        code=event.code,
        param=event.param,
    )


def _lost_context_error(provider: str) -> EngineError:
    words = "the server answered without the memory it was asked for, even when sent everything"
    return ChainRefused(words, provider=provider)


def _as_chain_refused(error: EngineError) -> EngineError:
    refused = ChainRefused(
        error.message,
        provider=error.provider,
        status=error.status,
        code=error.code,
        param=error.param,
        request_id=error.request_id,
        body=error.body,
    )
    refused.__cause__ = error.__cause__
    return refused
