"""ResponsesEngine: an engine for the Responses API that chains requests and heals lost context.

Each request follows a plan, and the server's answer is checked against it. A rejected anchor is healed
once by a full send, as long as no output was shown. A request that was answered without the requested
context is sent again, or at least the loss is reported and the response is not used as an anchor. Only a
finished response becomes an anchor.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec.structs import replace

from kedge.config.settings import is_chaining_enabled
from kedge.engines import responses_endpoints
from kedge.engines.attempt import Attempt, RequestEngine
from kedge.engines.audit import Audit, audit, audit_blocks
from kedge.engines.background import ContinuedStream, fetch_response, stream_response
from kedge.engines.base import Engine, Request, require_running, unwrap
from kedge.engines.conversation_objects import ConversationObjects, list_earlier
from kedge.engines.heal_rules import (
    OBJECT_LOCKED,
    HealableError,
    RequestSummary,
    as_healable,
    error_from_event,
    find_lost,
    is_format_rejected,
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
from kedge.engines.request_metrics import record_lost_context, record_plan
from kedge.engines.request_options import to_resend_limit
from kedge.engines.response_reader import attach_context, record_outcome
from kedge.engines.responses_endpoints import identify_server
from kedge.engines.transport import RawResponse, Transport
from kedge.errors import EngineError, InvalidSetting, RequestRefused, ResendTooLong
from kedge.events import Event, Outcome, StreamEvent, StreamFailed, Usage
from kedge.events.decoder import StreamDecoder
from kedge.events.fields import read_conversation_id, read_usage
from kedge.events.responses import ResponsesDecoder
from kedge.events.run import ServerForgot
from kedge.events.types import ResponseFacts, ResponseStarted
from kedge.memory.evidence import EvidenceStore, KnownServer, Trust, limit_depth
from kedge.memory.judge import Judgment, MemoryCheck
from kedge.memory.object_claims import ObjectStore, UnusedObject
from kedge.memory.reasoning_evidence import REJECTION_STATUSES
from kedge.memory.server_memory import ServerMemory
from kedge.observe import get_logger, measure
from kedge.planning import (
    DEFAULT_RETENTION,
    AnchorRecord,
    CacheRules,
    Mode,
    RejectedAnchor,
    RequestPlan,
    Status,
    find_running,
    get_state,
    plan_request,
    set_state,
)
from kedge.planning.anchors import check_positive_int, has_hidden_context, validate_seconds
from kedge.planning.digests import prefix_digest
from kedge.planning.reusable_items import get_conversation_id
from kedge.security.urls import quote_segment
from kedge.turns import AssistantBlock, Block, ToolCallBlock, Turn

if TYPE_CHECKING:
    from kedge.engines.transport import AnyClient

log = get_logger(__name__)


RETENTIONS = {"24h": 86_400.0}
"""Seconds for which a prompt stays cached, by ``prompt_cache_retention``."""


@dataclass(slots=True)
class ResponsesAttempt(Attempt):
    """An attempt with the check of the server's memory."""

    check: MemoryCheck = field(kw_only=True)
    owned: str = field(default="", kw_only=True)
    """The conversation object whose end was known when the request claimed it."""
    judgment: Judgment = field(default=Judgment(), init=False)
    is_at_end: bool = field(default=True, init=False)
    """Whether the answer is the end of its conversation object, if it has one."""

    @property
    def forgot(self) -> bool:
        """Whether the server answered from another context than the request continues."""
        return self.judgment.reason in ("forgot", "conversation")

    @property
    def object_id(self) -> str:
        """The conversation object of the request, or an empty string."""
        return self.body.get("conversation", "")

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
        cache_rules: How the provider caches prompts: the minimum length, the granularity and the lifetime.

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
        cache_rules: CacheRules | None = None,
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
            cache_rules=cache_rules,
            clock=clock,
        )
        self.retention = validate_seconds(retention, "retention")
        self.max_depth = None if max_depth is None else check_positive_int("max_depth", max_depth)
        self.verify_every = verify_every
        self.objects = ConversationObjects(self.transport, scope, lambda: self.memory.store)
        self.memory = ServerMemory(
            trust=trust,
            transport=transport,
            clock=clock,
            store=evidence_store,
            believes_probes=verify_every > 0,
        )
        self._known_server = known_server
        self._chained_count = 0

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan for sending the Turn now, without sending it.

        Args:
            turn: The Turn.
            **options: The options of ``Request.of``. Evidence about a server applies to streams or to other requests;
                ``streaming`` is by default as in the last request, and at first as in ``run``.

        Returns:
            The plan. If it is ``conditional``, the request first makes a probe, which may change it.
        """
        request = self._plan_options(options)
        check = self._open_check(turn, request)
        send_options, _ = self._resolve_options(turn, request, check)
        plan = self._build_plan(turn, request, send_options, check)
        return self._measure(ResponsesAttempt(turn, request, send_options, plan, check=check))

    async def _make_probes(self, plan: RequestPlan, **options: Any) -> None:
        """Load the evidence about the server, and make the probe that a conditional plan depends on."""
        request, turn = self._plan_options(options), plan.source
        if isinstance(turn, Turn):
            check = await self._load_check(turn, request)
            send_options, _ = self._resolve_options(turn, request, check)
            await self._plan_with_probe(turn, request, send_options, check)

    async def verify(self, turn: Turn) -> Audit:
        """Fetch the items that the server stores for the anchor, and compare them with the Turn."""
        request = Request()
        check = self._open_check(turn, request)
        plan = self._plan_anchor(turn, request, self._get_mode(turn, request), check)
        return await self._audit(turn, plan, check)

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
        return self._resolve_options(turn, request, await self._load_check(turn, request))

    def _resolve_options(
        self, turn: Turn, request: Request, check: MemoryCheck
    ) -> tuple[SendOptions, Mode]:
        """Return the options of the first attempt, and the mode that was requested."""
        mode, requested, reason = self._resolve_mode(turn, request, check)
        include = self._should_include(request, mode, check)
        return SendOptions(mode, include=include, reason=reason), requested

    def _should_include(self, request: Request, mode: Mode, check: MemoryCheck) -> bool:
        """Return whether to request encrypted reasoning with the answer."""
        params = flatten_params(request.resolve_params(self.params))
        unstored = params.get("store", mode != "stateless") is False
        return request.keep_reasoning and check.reasoning.should_request(
            known=self._known_server is not None, unstored=unstored, heal=request.heal
        )

    async def _load_check(self, turn: Turn, request: Request) -> MemoryCheck:
        check = self._open_check(turn, request)
        await self.memory.load(check)
        return check

    async def _prepare(
        self, turn: Turn, request: Request, options: SendOptions
    ) -> ResponsesAttempt:
        check = self._open_check(turn, request)
        running = find_running(turn, self.scope)
        if running is not None:  # a second answer would be paid for, too
            plan = self._build_plan(turn, request, options, check)
            check.way = "direct"
            return ResponsesAttempt(
                turn, request, options, plan, shown=True, running=running, check=check
            )
        plan = await self._plan_with_probe(turn, request, options, check)
        claim = "owned"
        if plan.conversation_id and not plan.problems:
            claim = await self.objects.claim(plan)
        is_shown = claim == "owned" and check.way == "direct" and self._is_streaming(request)
        if is_shown and await self.objects.is_changed(plan, self._clock()):
            claim = "taken"
        if claim == "taken":
            plan = self._build_plan(turn, request, options, check)
        await self._audit_periodically(turn, plan, check)
        # The answer of a server that has not shown that it remembers, or in an object that others may continue,
        # is held back until it is judged, because a wrong answer that a user has read cannot be withdrawn.
        is_held = check.way == "held" or claim == "unknown"
        held: list[Event] | None = [] if is_held else None
        owned = plan.conversation_id if claim == "owned" else ""
        return ResponsesAttempt(turn, request, options, plan, held=held, check=check, owned=owned)

    async def _plan_with_probe(
        self, turn: Turn, request: Request, options: SendOptions, check: MemoryCheck
    ) -> RequestPlan:
        """Return the plan, after the probes that it depends on.

        The server may identify itself as a known one in its first response. Otherwise the items that it lists make
        its token counts a better proof.
        """
        plan = self._build_plan(turn, request, options, check)
        if check.way != "direct" and self.transport.identity is None:
            await identify_server(self.transport)
            self.memory.identify(check, self.transport.identity or "")
            plan = self._build_plan(turn, request, options, check)
        if check.way == "probe":
            record = plan.rejected[-1].record
            found = await audit_blocks(
                self.transport, turn.body, record, lists_items=check.evidence.audits
            )
            check.record_probe(found.agrees)
            plan = self._build_plan(turn, request, options, check)
        return plan

    async def _encode(self, attempt: ResponsesAttempt) -> None:
        """Set the body of an attempt; in conversation mode, create the object if there is none."""
        conversation_id = attempt.plan.conversation_id
        if attempt.running is not None:
            conversation_id = get_conversation_id(attempt.running.scope)
        elif attempt.options.mode == "conversation" and not conversation_id:
            conversation_id = await self.objects.create()
        self._assemble_body(attempt, conversation_id)
        attempt.check.describe(attempt.plan, attempt.body)

    def _assemble_body(self, attempt: ResponsesAttempt, conversation_id: str = "") -> None:
        plan, request, options = attempt.plan, attempt.request, attempt.options
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
        send = partial(
            self.transport.create_response,
            attempt.content,
            attempt.body,
            retry=retry,
            tap=attempt.request.tap,
        )
        try:
            reply = await self.objects.send(send)
        except RequestRefused:
            if attempt.owned and attempt.plan.anchor:  # nothing was added to the object
                await self.objects.release(attempt.owned, attempt.plan.anchor.response_id)
            raise
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
        is_refused = isinstance(error, RequestRefused)
        if is_refused and (failure := as_healable(error, attempt.summary)):
            return failure
        if self._may_reject_include(attempt, error):
            return HealableError("include", error)
        if is_refused:
            return error
        if attempt.plan.anchor and is_server_error(error.status):
            attempt.check.record_error()
        return error

    def _may_reject_include(self, attempt: ResponsesAttempt, error: EngineError) -> bool:
        """Return whether the first request for encrypted reasoning may have failed because of it."""
        if (error.param and not error.param.startswith("include")) or is_format_rejected(error):
            return False  # another member was rejected
        is_first = attempt.options.include and attempt.check.reasoning.accepted is None
        # After a server error the conversation object may contain the request already.
        is_safe = attempt.plan.mode != "conversation" or not is_server_error(error.status)
        return is_first and is_safe and error.status in REJECTION_STATUSES

    def _check_event(self, attempt: ResponsesAttempt, event: StreamEvent) -> None:
        if isinstance(event, ResponseFacts):
            named = read_conversation_id(event.response)
            check = attempt.check
            if check.names_another(event, named):
                check.record_forgotten()
                # A complete response has its token counts, and a stream is left before it has any.
                usage = read_usage(event.response)
                raise lost_context("forgot", self.name, event.response_id, usage)
            is_start = isinstance(event, ResponseStarted) or not self._is_streaming(attempt.request)
            if is_start and named and named == attempt.body.get("conversation"):
                check.evidence.names_conversations = True
        if isinstance(event, StreamFailed):
            failure = as_healable(error_from_event(event, self.name), attempt.summary)
            if failure is not None:
                raise failure

    async def _check_outcome(self, attempt: ResponsesAttempt, outcome: Outcome) -> list[Event]:
        if self.transport.identity:
            self.memory.identify(attempt.check, self.transport.identity)
        judgment = attempt.check.judge(outcome)
        is_finished = outcome.status in ("completed", "incomplete")
        if attempt.object_id and is_finished and not judgment.reason:
            judgment = await self._check_object(attempt, outcome, judgment)
        attempt.judgment = judgment
        if judgment.reason and judgment.resend and not attempt.shown:
            raise lost_context(judgment.reason, self.name, outcome.response_id, outcome.usage)
        if attempt.forgot:
            record_lost_context(outcome.response_id)
            return [ServerForgot(outcome.response_id)]
        return attempt.held if attempt.held and is_finished else []

    async def _check_object(
        self, attempt: ResponsesAttempt, outcome: Outcome, judgment: Judgment
    ) -> Judgment:
        """Check that the conversation object of an answer has the items of its line of history, and no others."""
        plan, is_stored = attempt.plan, _is_stored(attempt.body, outcome)
        # Where the token count cannot show that items are missing, all of them are compared.
        base, counted = plan.anchor and plan.anchor.counted, judgment.counted
        is_comparable = base and counted and base.settings == counted.settings
        is_counted = plan.barrier is not None or is_comparable
        complete = plan.anchor is None or not is_counted
        found = await self.objects.check_end(
            attempt.object_id,
            list_earlier(plan, complete=complete),
            attempt.body["input"] if is_stored else (),
            outcome.blocks if is_stored else (),
            complete=complete,
        )
        attempt.is_at_end = found is True
        if plan.anchor is None or (found is None and attempt.held is None):
            return judgment
        return judgment if found else Judgment("conversation", resend=True)

    def _check_finished(self, attempt: ResponsesAttempt, outcome: Outcome, finished: Turn) -> None:
        if attempt.forgot and any(isinstance(block, ToolCallBlock) for block in outcome.blocks):
            reason = "conversation" if attempt.judgment.reason == "conversation" else "forgot"
            raise lost_context(reason, self.name, outcome.response_id, outcome.usage, finished)

    async def _record(self, attempt: ResponsesAttempt, outcome: Outcome) -> Turn:
        """Record an answer in the Turn and in the evidence."""
        turn, plan, body, check = attempt.turn, attempt.plan, attempt.body, attempt.check
        if attempt.running is not None and outcome.status == "failed":
            return _end_running(turn, attempt.running, "failed")
        stored = _is_stored(body, outcome)
        if attempt.running is not None:  # what it was requested with may not be known now
            stored = stored and attempt.running.stored
        record = partial(
            record_outcome,
            plan=plan,
            now=self._clock(),
            stored=stored,
            retention=self.retention,
            conversation_id=attempt.object_id,
        )
        if outcome.status == "running":
            return record(turn, outcome)
        known = attempt.running is None and (
            get_state(turn).anchor(outcome.response_id, plan.scope) is not None
        )
        reused = self.memory.record_issued(check, outcome.response_id, known=known)
        if reused:
            turn = set_state(turn, get_state(turn).mark_lost({outcome.response_id}, plan.scope))
        if attempt.forgot and not attempt.judgment.resend:
            lost = find_lost(get_state(turn), plan, all_older=True)
            turn = set_state(turn, get_state(turn).mark_lost(lost, plan.scope))
        if attempt.forgot:
            # The model made these calls without the context, so they are not run.
            texts = tuple(b for b in outcome.blocks if isinstance(b, AssistantBlock))
            if len(texts) < len(outcome.blocks) and outcome.completed:
                outcome = replace(outcome, blocks=texts, response_id="")
        finished = record(
            turn,
            outcome,
            lost=attempt.forgot or not attempt.is_at_end,
            reused=reused,
            counted=attempt.judgment.counted,
        )
        if attempt.object_id:
            finished = await self._end_object(attempt, finished, outcome.response_id)
        check.reasoning.record(
            outcome,
            requested=attempt.options.include,
            rejected=attempt.options.include_rejected,
            stored=body.get("store", True) is not False,
        )
        await self.memory.save(check)
        return finished

    async def _end_object(
        self, attempt: ResponsesAttempt, finished: Turn, response_id: str
    ) -> Turn:
        """Release the conversation object of an answer, or return the Turn without it if it cannot be continued."""
        state = get_state(finished)
        if not response_id or state.previous_response_id != response_id:
            return set_state(finished, replace(state, conversation_id=""))
        await self.objects.release(attempt.object_id, response_id)
        return finished

    def _heal(
        self, turn: Turn, request: Request, options: SendOptions, failure: HealableError
    ) -> tuple[Turn, SendOptions, tuple[str, ...]]:
        check = self._open_check(turn, request)
        reason, lost = failure.reason, ()
        state = get_state(turn)
        plan = failure.error.plan
        match reason:
            case "gone" | "unsupported" | "forgot" | "audit":
                lost = find_lost(state, plan, all_older=reason == "gone")
                turn = set_state(turn, state.mark_lost(lost, plan.scope if plan else None))
                if plan is not None and plan.conversation_id:
                    turn = set_state(turn, replace(get_state(turn), conversation_id=""))
                options = options.without_anchor(plan, "lost")
                if reason == "unsupported" or not is_live_only(state, plan):
                    now = self._clock()
                    created_at = plan.anchor.created_at if plan and plan.anchor else now
                    check.record_rejection(reason, created_at, now)
                if reason in ("unsupported", "forgot") and (doubt := check.doubt):
                    options = replace(options, mode="stateless", reason=doubt)
                    options = replace(
                        options, include=self._should_include(request, "stateless", check)
                    )
            case "unproven":
                options = options.without_anchor(plan, "untrusted")
            case "empty_input":
                options = options.without_anchor(plan, "empty_input")
            case "conversation":
                turn = set_state(turn, replace(state, conversation_id=""))
                is_used = bool(failure.error.response_id) or failure.error.code == OBJECT_LOCKED
                options = options.without_anchor(plan, "taken" if is_used else "lost")
            case "reasoning":
                options = replace(options, reasoning=False)
            case "include":
                options = replace(options, include=False, include_rejected=True)
        return turn, options, lost

    async def _before_resend(
        self, turn: Turn, request: Request, options: SendOptions, failure: HealableError
    ) -> None:
        """Save the evidence; raise if healing would send more than the request allows."""
        check = self._open_check(turn, request)
        await self.memory.save(check)
        if options.full and request.resend_limit is not None:
            plan = self._build_plan(turn, request, options, check)
            if to_resend_limit(request.resend_limit).is_exceeded(plan):
                message = (
                    "the server no longer has the context, and a full send is about "
                    f"{plan.full_bytes} bytes in {plan.full_blocks} blocks"
                )
                error = ResendTooLong(message, provider=self.name)
                error.response_id, error.usage = failure.error.response_id, failure.error.usage
                raise attach_context(error, turn, plan) from failure.error

    def _resolve_mode(
        self, turn: Turn, request: Request, check: MemoryCheck
    ) -> tuple[Mode, Mode, str]:
        """Return the mode to send in, the requested one, and why they differ."""
        requested = self._get_mode(turn, request)
        enabled = is_chaining_enabled()
        measure("responses_chained_mode_enabled", int(enabled))
        if not enabled:
            return "stateless", requested, "switched_off"
        if requested == "stateless":
            return requested, requested, ""
        if not check.reasoning.stores:
            return "stateless", requested, "never_stores"
        if self.memory.trust == "never":
            return "stateless", requested, "never"
        if doubt := check.doubt:
            return "stateless", requested, doubt
        return requested, requested, ""

    def _get_mode(self, turn: Turn, request: Request) -> Mode:
        """Return the mode that is requested: of the request, the conversation or the engine."""
        return request.mode or get_state(turn).mode or self.mode

    def _open_check(self, turn: Turn, request: Request) -> MemoryCheck:
        return self.memory.check(
            self.scope,
            request.model or self.model,
            streaming=self._is_streaming(request),
            objects=self._get_mode(turn, request) == "conversation",
            conversation=prefix_digest(turn, 1),
            known=self._known_server,
        )

    async def attach_evidence(self, store: EvidenceStore) -> None:
        """Use the evidence in a store, unless another store is configured, and load what dry runs need."""
        requests = (Request(streaming=True), Request(streaming=False))
        await self.memory.attach(store, *(self._open_check(Turn(), each) for each in requests))

    def _is_streaming(self, request: Request) -> bool:
        return request.streaming or self.transport.always_streams

    def _build_plan(
        self,
        turn: Turn,
        request: Request,
        options: SendOptions,
        check: MemoryCheck,
        *,
        out_of_band: bool = False,
    ) -> RequestPlan:
        """Plan a request: on a proved anchor, if the server may be relied on."""
        start = time.perf_counter()
        if options.full or options.mode == "stateless":
            plan = self._plan_mode(turn, request, "stateless", check)
            plan = replace(
                plan,
                mode=options.mode,
                mode_reason=options.reason,
                rejected=options.rejected if options.full else plan.rejected,
            )
            check.way = "direct"
        elif has_hidden_context(flatten_params(request.resolve_params(self.params))):
            plan = self._plan_mode(turn, request, "stateless", check)
            plan = replace(plan, mode_reason="prompt")
            check.way = "direct"
        else:
            plan = self._plan_anchor(turn, request, options.mode, check, out_of_band=out_of_band)
            if self._is_taken(turn, plan):
                unused = options.without_anchor(plan, "taken")
                return self._build_plan(turn, request, unused, check)
            plan = self._apply_evidence(turn, request, plan, check)
        if not options.reasoning:
            plan = plan.without_reasoning()
        plan = self._plan_cache(turn, plan, request)
        record_plan(plan, time.perf_counter() - start)
        return plan

    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> CacheRules:
        retention = str(params.get("prompt_cache_retention"))
        lifetime = RETENTIONS.get(retention, self.cache_rules.lifetime)
        return replace(self.cache_rules, lifetime=lifetime)

    def _plan_mode(
        self,
        turn: Turn,
        request: Request,
        mode: Mode,
        check: MemoryCheck,
        extra: tuple[AnchorRecord, ...] = (),
    ) -> RequestPlan:
        plan = plan_request(
            turn,
            scope=self.scope,
            mode=mode,
            now=self._clock(),
            extra=extra,
            max_depth=limit_depth(self.max_depth, check.evidence.max_depth),
            not_before=check.evidence.not_before,
        )
        return request.add_ephemeral(plan)

    def _is_taken(self, turn: Turn, plan: RequestPlan) -> bool:
        """Return whether a plan continues a conversation object that another line of history continues."""
        if not plan.conversation_id or find_running(turn, self.scope) is not None:
            return False
        return self.objects.is_taken(plan)

    def _plan_anchor(
        self,
        turn: Turn,
        request: Request,
        mode: Mode,
        check: MemoryCheck,
        *,
        out_of_band: bool = False,
    ) -> RequestPlan:
        """Plan a request on a response or a conversation object, whatever the evidence."""
        if mode == "conversation":
            return self._plan_mode(turn, request, mode, check)
        # Responses that only a connection remembers are not known to requests outside of it.
        live = () if out_of_band else self.transport.live_anchors(reversed(get_state(turn).anchors))
        return self._plan_mode(turn, request, "chained", check, (*request.candidates, *live))

    def _apply_evidence(
        self, turn: Turn, request: Request, plan: RequestPlan, check: MemoryCheck
    ) -> RequestPlan:
        """Return the plan, or a full one if the server's answer to it could not be judged."""
        params = request.resolve_params(self.params)
        model = request.model or self.model
        settings = build_settings(plan, model=model, tools=request.tools, params=params)
        way = check.decide(plan, settings)
        if way in ("direct", "held") or plan.anchor is None:
            return plan
        untrusted = RejectedAnchor(plan.anchor.response_id, "untrusted", plan.anchor)
        return replace(
            self._plan_mode(turn, request, "stateless", check),
            mode=plan.mode,
            rejected=(*plan.rejected, untrusted),
            conditional=way == "probe" or self.transport.identity is None,
        )

    def _plan_out_of_band(self, turn: Turn) -> tuple[RequestPlan, ...]:
        """Return plans to send a Turn outside of the conversation: on its anchor, if it has one, and in full."""
        request = Request()
        check = self._open_check(turn, request)
        is_chained = self._resolve_mode(turn, request, check)[0] == "chained"
        mode: Mode = "chained" if is_chained else "stateless"
        attempts = (SendOptions(mode), SendOptions(mode, full=True))
        plans = tuple(
            self._build_plan(turn, request, each, check, out_of_band=True) for each in attempts
        )
        return plans if plans[0].anchor else plans[1:]

    async def _audit_periodically(self, turn: Turn, plan: RequestPlan, check: MemoryCheck) -> None:
        if not plan.anchor:
            return
        self._chained_count += 1
        if not self.verify_every or self._chained_count % self.verify_every:
            return
        result = await self._audit(turn, plan, check)
        if result.agrees is False:
            log.warning("an audit found a difference", response_id=plan.anchor_id)
            failure = lost_context("audit", self.name)
            attach_context(failure.error, turn, plan)
            raise failure

    async def _audit(self, turn: Turn, plan: RequestPlan, check: MemoryCheck) -> Audit:
        """Audit a plan's anchor, and record whether the server lists what it stores."""
        evidence = check.evidence
        result = await audit(self.transport, turn, plan, lists_items=evidence.audits)
        evidence.audits = evidence.audits or result.checked > 0
        return result


async def delete_unused_objects(engine: Engine, store: ObjectStore) -> dict[UnusedObject, str]:
    """Delete the conversation objects of an engine's server that nothing in a store continues.

    Returns:
        The objects, and why they were not deleted; see ``ConversationObjects.delete_unused``.
    """
    inner = unwrap(engine)
    return await inner.objects.delete_unused(store) if isinstance(inner, ResponsesEngine) else {}


def _is_stored(body: Mapping[str, Any], outcome: Outcome) -> bool:
    """Return whether a response can be continued: it was stored, and its context is known."""
    was_stored = body.get("store", True) is not False and outcome.stored is not False
    return was_stored and not has_hidden_context(body)


def _end_running(turn: Turn, running: AnchorRecord, status: Status) -> Turn:
    """Return the Turn without an answer in the background, so that it can be sent again."""
    return set_state(turn, get_state(turn).with_anchor(replace(running, status=status)))
