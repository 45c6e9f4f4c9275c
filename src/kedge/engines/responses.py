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

from kedge.config.switch import chaining_enabled
from kedge.engines import asides
from kedge.engines.accounts import (
    note_forgetting,
    note_healing,
    note_mode,
    note_outcome,
    note_plan,
    note_refusal,
    note_request,
)
from kedge.engines.audit import Audit, audit
from kedge.engines.objects import ConversationObjects
from kedge.engines.outcomes import carrying, raise_for, taken_down
from kedge.engines.protocol import Engine, Events, Request, Tap
from kedge.engines.reading import read_answer
from kedge.engines.refusals import Sent, classify
from kedge.engines.transport import Transport
from kedge.engines.trust import Trust
from kedge.engines.ways import Way, make_body, what_matters
from kedge.engines.witness import forgot_by_echo, forgot_by_usage
from kedge.errors import ChainRefused, EngineError, RequestRefused, ResendTooLong, StreamCut
from kedge.events import ResponseStarted, StreamEvent, StreamFailed, Usage
from kedge.events.assembler import Assembler
from kedge.events.responses import ResponsesDecoder
from kedge.events.run import (
    SHOWN,
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
    RETENTION,
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


class _Refused(Exception):
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
        retention: float | None = RETENTION,
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
        self.transport = Transport(make_client, provider)
        if transport == "websocket":
            from kedge.engines.sockets import SocketTransport

            self.transport = SocketTransport(
                make_client, provider, connections=connections, lanes=lanes
            )
        self._objects = ConversationObjects(self.transport)
        self._clock = clock
        self._trust = Trust(clock)
        self._no_include = False
        self._chained = 0

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self.transport.aclose()

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """What would be sent now, and why: a dry run."""
        request = Request.of(**options)
        return self._plan(turn, request, Way(self._mode(turn, request)[0]))

    async def verify(self, turn: Turn) -> Audit:
        """Fetch what the server holds for the anchor, and compare it with the Turn."""
        return await audit(self.transport, turn, self.plan(turn))

    async def count_tokens(self, turn: Turn, **options: Any) -> int:
        """Ask the server how many tokens this Turn is."""
        request = Request.of(**options)
        tools = {"tools": list(request.tools)} if request.tools else {}
        model = request.model or self.model
        return await asides.count_tokens(self.transport, self._aside(turn), model=model, **tools)

    async def compact(self, turn: Turn) -> tuple[list[Block], Usage]:
        """Have the server compact this Turn: the blocks that stand for it, and what that took."""
        return await asides.compact(self.transport, self._aside(turn), model=self.model)

    async def events(self, turn: Turn, request: Request) -> Events:
        """Send the Turn, healing what can be healed; see the module."""
        mode, wanted, reason = self._mode(turn, request)
        if mode != wanted:
            note_mode(mode, wanted, reason)
            yield ModeChanged(mode, wanted, reason)
        way = Way(mode, include=not self._no_include)
        healed: set[HealReason] = set()
        while True:
            try:
                async with aclosing(self._attempt(turn, request, way)) as events:
                    async for event in events:
                        yield event
                    return
            except _Refused as refused:
                if refused.reason in healed:
                    raise refused.error from None
                healed.add(refused.reason)
                turn, way, event = self._healed(turn, way, refused)
                self._check_resend(turn, request, way, refused.error)
                yield event
                if way.mode != mode:
                    note_mode(way.mode, mode, refused.reason)
                    yield ModeChanged(way.mode, mode, refused.reason)

    async def _attempt(self, turn: Turn, request: Request, way: Way) -> Events:
        """Plan, send, and take the answer down."""
        if way.mode == "conversation":
            try:
                turn = await self._objects.check(turn)
            except EngineError as error:
                carrying(error, turn, self._plan(turn, request, way))
                raise
        plan = self._plan(turn, request, way)
        await self._audit_now_and_then(turn, plan)
        try:
            plan.check()
            yield RequestPlanned(plan)
            if plan.fallback:
                yield FellBack(plan.fallback)
            conversation_id = plan.conversation_id
            if way.mode == "conversation" and not conversation_id:
                conversation_id = await self._objects.create()
            body = make_body(
                plan,
                way,
                conversation_id=conversation_id,
                model=request.model or self.model,
                tools=request.tools,
                streaming=request.streaming,
                params={**self.params, **request.params},
            )
            sent = what_matters(body, way)
            async with aclosing(self._exchange(turn, plan, body, sent, request.tap)) as events:
                async for event in events:
                    if isinstance(event, AnswerFinished):
                        turn = event.turn
                    yield event
        except _Refused as refused:
            carrying(refused.error, turn, plan)
            raise
        except EngineError as error:
            carrying(error, turn, plan)
            raise
        yield TurnFinished(turn)

    async def _exchange(
        self, turn: Turn, plan: RequestPlan, body: dict[str, Any], sent: Sent, tap: Tap | None
    ) -> Events:
        """Send one request; tell what comes back; end with ``AnswerFinished``."""
        assembler, decoder, shown = Assembler(), ResponsesDecoder(), False
        cut: StreamCut | None = None
        try:
            async with aclosing(self._decoded(decoder, plan, body, sent, tap)) as decoded:
                async for event in decoded:
                    if isinstance(event, ResponseStarted) and forgot_by_echo(event, plan):
                        raise _Refused("forgot", _forgotten(self.name))
                    if isinstance(event, StreamFailed) and not shown:
                        self._raise_if_healable(_failure(event, self.name), sent)
                    assembler.feed(event)
                    shown = shown or (body["stream"] and isinstance(event, SHOWN))
                    yield event
        except StreamCut as error:
            cut = error  # which matters only if the answer had not ended
        outcome = assembler.finish()
        forgot = outcome.completed and forgot_by_usage(outcome.usage, plan, body)
        if forgot and not shown:
            raise _Refused("forgot", _forgotten(self.name))
        if forgot:
            self._trust.forgot()
            note_forgetting(outcome.response_id)
            yield ServerForgot(outcome.response_id)
        elif outcome.completed and plan.anchor:
            self._trust.remembered()
        finished = taken_down(
            turn,
            outcome,
            plan,
            now=self._clock(),
            stored=body.get("store", True) is not False,
            retention=self.retention,
            conversation_id=body.get("conversation", ""),
            lost=forgot or decoder.calls.renamed,
        )
        note_outcome(outcome, decoder.calls)
        raise_for(outcome, self.name, finished, cut)
        yield AnswerFinished(outcome, finished, plan)

    async def _decoded(
        self,
        decoder: ResponsesDecoder,
        plan: RequestPlan,
        body: dict[str, Any],
        sent: Sent,
        tap: Tap | None,
    ) -> AsyncGenerator[StreamEvent]:
        """The events of the answer, as they come."""
        content = self.transport.packed(body)
        note_request(plan, len(content))
        retry = plan.mode != "conversation"  # the first try may have been taken down already
        try:
            reply = await self.transport.respond(content, body, retry=retry, tap=tap)
            async with aclosing(read_answer(decoder, reply, self.transport.clean)) as events:
                async for event in events:
                    yield event
        except StreamCut:
            raise  # whether that is a failure, the assembler will tell
        except EngineError as error:
            error.provider = error.provider or self.name
            note_refusal(error)
            if isinstance(error, RequestRefused):
                self._raise_if_healable(error, sent)
            raise

    def _raise_if_healable(self, error: EngineError, sent: Sent) -> None:
        reason = classify(error, sent)
        if reason in ("gone", "unsupported", "conversation"):
            error = _as_chain_refused(error)
        if reason:
            raise _Refused(reason, error) from error

    def _healed(self, turn: Turn, way: Way, refused: _Refused) -> tuple[Turn, Way, Healed]:
        """How to go on after a refusal: the Turn with what was learnt, and another way to send."""
        reason, lost = refused.reason, ()
        state = get_state(turn)
        plan = refused.error.plan
        match reason:
            case "gone" | "unsupported" | "forgot" | "audit":
                lost = (plan.previous_response_id,) if plan and plan.anchor else ()
                turn = set_state(turn, state.without(lost))
                way = replace(way, full=True)
                if reason == "unsupported":
                    self._trust.refused()
                    way = replace(way, mode="stateless")
                if reason == "forgot":
                    self._trust.forgot()
                    way = replace(way, mode="stateless", include=False)
            case "conversation":
                turn = set_state(turn, replace(state, conversation_id=""))
                way = replace(way, full=True)
            case "empty_input":
                way = replace(way, full=True)
            case "reasoning":
                way = replace(way, reasoning=False)
            case "include":
                self._no_include = True
                way = replace(way, include=False)
        note_healing(reason, "".join(lost))
        return turn, way, Healed(reason, lost)

    def _check_resend(self, turn: Turn, request: Request, way: Way, error: EngineError) -> None:
        """Raise the error after all, if healing would send more than the request allows."""
        if way.full and request.resend_limit is not None:
            plan = self._plan(turn, request, way)
            if plan.full_bytes > request.resend_limit:
                words = f"the server forgot, and everything is about {plan.full_bytes} bytes"
                raise carrying(ResendTooLong(words, provider=self.name), turn, plan) from error

    def _mode(self, turn: Turn, request: Request) -> tuple[Mode, Mode, str]:
        """The mode to send in, the one that was asked for, and why they differ."""
        wanted = request.mode or get_state(turn).mode or self.mode
        enabled = chaining_enabled()
        measure("responses_chained_mode_enabled", int(enabled))
        if not enabled:
            return "stateless", wanted, "switched_off"
        if wanted == "chained" and (doubt := self._trust.doubt):
            return "stateless", wanted, doubt
        return wanted, wanted, ""

    def _plan(self, turn: Turn, request: Request, way: Way, *, aside: bool = False) -> RequestPlan:
        start = time.perf_counter()
        # What a connection remembers is known only there, not to requests beside it.
        live = () if aside else self.transport.remembered(reversed(get_state(turn).anchors))
        plan = plan_request(
            turn,
            scope=self.scope,
            mode="stateless" if way.full else way.mode,
            now=self._clock(),
            extra=(*request.candidates, *live),
            max_depth=self.max_depth,
        )
        if way.full:
            plan = replace(plan, mode=way.mode)
        if not way.reasoning:
            plan = plan.without_reasoning()
        note_plan(plan, time.perf_counter() - start)
        return plan

    def _aside(self, turn: Turn) -> tuple[RequestPlan, ...]:
        """How to send a Turn beside the conversation: on its anchor, if it has one, or whole."""
        mode: Mode = "chained" if self._mode(turn, Request())[0] == "chained" else "stateless"
        ways = (Way(mode), Way(mode, full=True))
        plans = tuple(self._plan(turn, Request(), way, aside=True) for way in ways)
        return plans if plans[0].anchor else plans[1:]

    async def _audit_now_and_then(self, turn: Turn, plan: RequestPlan) -> None:
        if not plan.anchor or plan.mode != "chained":
            return
        self._chained += 1
        if not self.verify_every or self._chained % self.verify_every:
            return
        found = await audit(self.transport, turn, plan)
        if found.agrees is False:
            log.warning("an audit found a difference", response_id=plan.previous_response_id)
            raise _Refused("audit", carrying(_forgotten(self.name), turn, plan))


def _failure(event: StreamFailed, provider: str) -> EngineError:
    return RequestRefused(
        event.message,
        provider=provider,
        status=event.status,
        code=event.code,
        param=event.param,
    )


def _forgotten(provider: str) -> EngineError:
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
