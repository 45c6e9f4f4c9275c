"""The path of a request, the same for every API.

    session = open(turn, request)                    the model, parameters, mode and evidence, once for each run
    loop: prepare -> render -> post -> read -> settle -> record
          a failure that can be healed changes the session, and the loop runs again

One generator, ``RequestEngine.events``, sends, reads, judges and yields. A request is healed at most once for each
reason, and only while the caller has seen no output, because output that a user has read cannot be withdrawn.
`ResponsesEngine` and `StatelessEngine` define the differences: the plan, the body, when a response can be trusted,
and how to heal.
"""

import logging
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Required, TypedDict, Unpack

import anyio
from msgspec.structs import replace

from kedge import errors, planning
from kedge._internal.json_schema import infer_tool_name
from kedge._internal.large_json import LARGE_BYTES
from kedge._internal.responsive import MANY_ITEMS, compute
from kedge.engines.base import Engine, Events
from kedge.engines.heal_rules import HealableError
from kedge.engines.http_errors import get_request_id, is_permanent_failure
from kedge.engines.params import check_params
from kedge.engines.raw_response import RawResponse, ResponseReader
from kedge.engines.request import Request
from kedge.engines.request_body import encode_body
from kedge.engines.request_log import PromptMonitor, record_calls, record_error, record_healing
from kedge.engines.transport import AnyClient, Transport
from kedge.errors import EngineError, KedgeError, StreamCut
from kedge.events import Event, Outcome, ResponseFailed, StreamEvent, StreamFailed
from kedge.events import run as run_events
from kedge.events.run import VISIBLE_EVENTS
from kedge.evidence.judge import MemoryCheck
from kedge.evidence.tokens import hash_settings
from kedge.observe import count, get_logger, measure
from kedge.planning import CacheRules, Mode, RequestPlan
from kedge.planning.anchors import is_unusable_status, validate_mode
from kedge.planning.cache_plan import CachePlan, PromptHead, plan_cache
from kedge.planning.render import measure_full_body
from kedge.turns import Block, Turn, system
from kedge.turns.turn import check_turn
from kedge.wire.assembler import Assembler
from kedge.wire.decoder import StreamDecoder

if TYPE_CHECKING:
    from kedge.wire import AnthropicDecoder, ChatDecoder, ResponsesDecoder

log = get_logger("kedge.engines")

MODE_CHANGE_REASON = "stateless_api"
"""The reason why a request is stateless although another mode was requested."""


@dataclass(slots=True)
class Session:
    """What a run has resolved before its first request, and the state of the current request.

    Attributes:
        turn: The Turn to send; healing changes the records in it.
        request: The request.
        model: The model.
        params: The parameters of the engine and of the request, with the format of a typed answer.
        extra: The members of ``extra_body``.
        members: Both, as they are in a body.
        requested_mode: The mode of the request, the conversation or the engine.
        streaming: Whether the answer arrives as a stream.
        running: The response in the background that answers the Turn already, so that nothing is sent.
        mode: The mode in which the request is sent; healing changes it and the next members.
        mode_reason: Why it differs from the requested one.
        full: Whether everything is sent, without an anchor.
        rejected: The responses that a full send does not use, because an earlier attempt could not.
        reasoning: Whether encrypted reasoning is sent.
        include: Whether encrypted reasoning is requested.
        check: The decisions about the server's memory, for the current request and its answer.
        is_live: Whether the request is sent over a connection that may remember responses.
        settings: The members of a body that change how many tokens a server counts, except for the input.
        plan: The plan of the current request.
        head: The part of its prompt before the history, if the provider caches prompts.
        body: Its body.
        content: The bytes of its body.
        sent: The current request as it was sent, by which its answer is judged and recorded; None before that, for an
            API that stores nothing, and for a response in the background that another program requested.
        object_id: The conversation object of the request, or an empty string.
        owned: The conversation object whose end was known when the request claimed it.
        is_at_end: Whether the answer is the end of its conversation object, if it has one.
        shown: Whether the caller has seen output of the response.
        held: The events that are held back until the response is judged; None if they are passed on.
        notices: The events to pass on before the answer, when it is settled.
        failure: Why the recorded answer must be replaced by another one.
        healed: Why requests of this run were sent again.
    """

    turn: Turn
    request: Request
    model: str
    params: Mapping[str, Any]
    extra: Mapping[str, Any]
    members: dict[str, Any]
    requested_mode: Mode
    streaming: bool
    running: planning.AnchorRecord | None = None
    mode: Mode = "stateless"
    mode_reason: str = ""
    full: bool = False
    rejected: tuple[planning.RejectedAnchor, ...] = ()
    reasoning: bool = True
    include: bool = False
    check: MemoryCheck = field(init=False)
    is_live: bool = False
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    plan: RequestPlan = field(init=False)
    head: PromptHead = field(init=False)
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    content: bytes = b""
    sent: planning.SentRequest | None = None
    object_id: str = ""
    owned: str = ""
    is_at_end: bool = True
    shown: bool = False
    held: list[Event] | None = None
    notices: list[Event] = field(default_factory=list[Event])
    failure: HealableError | None = None
    healed: set[run_events.ResendReason] = field(default_factory=set[run_events.ResendReason])

    def complete_plan(self, plan: RequestPlan) -> RequestPlan:
        """Return a plan with the system text of this run behind its instructions; set ``settings``.

        Instructions are sent with every request and are not part of a digest or a stored context. So the
        text does not change what the server remembers, and the response becomes an anchor as usual.
        """
        if self.request.ephemeral:
            block = self.request.filters.apply(system(self.request.ephemeral), ("input",))
            texts = filter(None, (plan.instructions, block.text))
            plan = replace(plan, instructions="\n\n".join(texts))
        settings: dict[str, Any] = {"model": self.model}
        if plan.instructions is not None:
            settings["instructions"] = plan.instructions
        if self.request.tools:
            settings["tools"] = list(self.request.tools)
        self.settings = settings | self.members
        if not self.reasoning:
            return plan.without_reasoning()
        return plan

    def report_mode(self, before: Mode, reason: str) -> list[Event]:
        """Return the event of a mode that differs from ``before``, which was requested or used; none if it does not."""
        if self.mode == before or self.running is not None:  # nothing is sent in this mode
            return []
        count("responses_mode_changed_total", reason=reason)
        log.warning("mode %s instead of %s: %s", self.mode, before, reason)
        return [run_events.ModeChanged(self.mode, before, reason)]

    def drop_anchor(self, plan: RequestPlan, reason: planning.Reason) -> None:
        """Send everything from now on, because the anchor of a plan cannot be used."""
        self.full = True
        if plan.anchor is not None:
            unused = planning.RejectedAnchor(plan.anchor.response_id, reason, plan.anchor)
            self.rejected = (*plan.rejected, unused)


_FAILURES = (StreamFailed, ResponseFailed)


@dataclass(slots=True)
class Answer:
    """The answer to one request while it is read.

    Attributes:
        engine: The engine that sends the request.
        session: The session with the request.
        decoder: The decoder of the answer.
        is_open: Whether more of the answer may arrive.
        cut: The error that ended its connection, if any.
    """

    engine: "RequestEngine"
    session: Session
    decoder: StreamDecoder
    is_open: bool = True
    cut: StreamCut | None = None
    _response: RawResponse | None = None
    _reader: ResponseReader | None = None
    _has_failed: bool = False

    async def receive(self) -> list[StreamEvent]:
        """Send the request, or read the next part of its answer; return its events."""
        try:
            events = await self._read_events()
        except StreamCut as error:  # relevant only if the answer had not ended
            self.cut = error
            self.is_open = False
            events = self._read_end_of_cut()
        except EngineError as error:
            error.provider = error.provider or self.engine.name
            if self._response and not error.request_id:
                error.request_id = get_request_id(self._response.headers)
            record_error(error)
            raise self.engine.translate_error(self.session, error) from error.__cause__
        self._redact_failures(events)
        return events

    async def _read_events(self) -> list[StreamEvent]:
        """Read until there are events, or until the end of the answer."""
        if self._response is None or self._reader is None:
            self._response = await self.engine.post(self.session, self.decoder)
            self._reader = ResponseReader(self.decoder, is_stream=self._response.is_stream)
        reader = self._reader
        while self.is_open:
            if self.decoder.ended or self._has_failed:
                chunk = await self._response.drain()
            else:
                chunk = await self._response.next_chunk()
            if not chunk:
                self.is_open = False
                # A body that is not streamed is decoded now.
                return await compute(reader.close, is_long=reader.size > LARGE_BYTES)
            events = reader.feed(chunk)
            if events:
                return events
        return []

    def _read_end_of_cut(self) -> list[StreamEvent]:
        """Return the events of what arrived before the connection broke."""
        if self._reader is None:
            return []
        return self._reader.close(is_cut=True)

    def _redact_failures(self, events: list[StreamEvent]) -> None:
        """Remove credentials from the errors of a server, because some servers repeat them."""
        for index, event in enumerate(events):
            if isinstance(event, _FAILURES) and self._response is not None:
                redact = self._response.errors.redact
                message = redact(event.message)
                events[index] = replace(event, message=message, code=redact(event.code))
                self._has_failed |= isinstance(event, StreamFailed)

    async def aclose(self) -> None:
        """Release the connection."""
        if self._response is not None:
            await self._response.aclose()


class EngineSettings(TypedDict, total=False):
    """The settings of every engine that sends requests to a provider.

    Attributes:
        make_client: Returns the client that sends requests: Kedge's own, or one of the package of the provider.
        scope: The provider, endpoint and account in which response ids are valid.
        provider: The name of the provider, for errors and stored responses.
        mode: The default mode.
        params: Members of every request body; those of a request override them.
        clock: Returns the time.
        sleep: Waits for a number of seconds, between requests for a response in the background.
        prompt_cache: Whether the provider's prompt cache is used, and plans predict the cached tokens.
        cache_rules: How the provider caches prompts: the minimum length, the granularity and the lifetime.
    """

    make_client: Required[Callable[[], AnyClient]]
    scope: Required[str]
    provider: str
    mode: Mode
    params: Mapping[str, Any] | None
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    prompt_cache: bool
    cache_rules: CacheRules | None


class RequestEngine(Engine):
    """The base of engines that send requests to a provider; a subclass implements one API."""

    decoder_type: ClassVar["type[ResponsesDecoder | ChatDecoder | AnthropicDecoder]"]
    """The decoder of a response."""
    path: ClassVar[str] = "/responses"
    """The path of requests."""
    is_stateful: ClassVar[bool] = True
    """Whether the API stores responses."""
    retention: float | None = None
    """The number of seconds for which the server stores a response; None for no limit."""

    name = "responses"
    mode: Mode = "chained"
    """The default mode."""
    prompt_cache = False
    """Whether prompt caching is used, and plans predict the cached tokens."""

    def __init__(
        self,
        model: str,
        open_transport: Callable[[Callable[[], AnyClient], str], Transport],
        **settings: Unpack[EngineSettings],
    ) -> None:
        setting_names = EngineSettings.__annotations__.keys()
        for name in settings.keys() - setting_names:
            raise errors.UnknownSetting(name, setting_names, f"the engine of {model!r}")
        self.model = model
        self.name = settings.get("provider", self.name)
        self.scope = settings["scope"]
        self.mode = validate_mode(settings.get("mode")) or self.mode
        self.params = dict(settings.get("params") or {})
        check_params(self.params, foreign=self.foreign_params)
        self.transport = open_transport(settings["make_client"], self.name)
        self.prompt_cache = settings.get("prompt_cache", self.prompt_cache)
        self.cache_rules = settings.get("cache_rules") or CacheRules()
        self._prompts = PromptMonitor()
        self._clock = settings.get("clock", time.time)
        self._sleep = settings.get("sleep", anyio.sleep)
        self._last_streaming = False

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self.transport.aclose()

    async def events(self, turn: Turn, request: Request) -> Events:
        """Send the Turn and yield its events; a request that can be healed is sent again."""
        is_streaming = request.streaming
        self._last_streaming = is_streaming
        if request.before_send is not None:
            await request.before_send(turn)
        session = await self._start(turn, request)
        notices = session.report_mode(session.requested_mode, session.mode_reason)
        while True:
            for event in notices:
                yield event
            try:
                await self._prepare(session)
                plan = session.plan
                plan.check()
                for event in _announce_plan(session):
                    yield event
                for event in await self._render(session):
                    yield event

                decoder = self.decoder_type()
                decoder.calls.infer_name = partial(infer_tool_name, request.tools)
                assembler = Assembler(native_api=decoder.NATIVE_API)
                async with aclosing(Answer(self, session, decoder)) as answer:
                    while answer.is_open:
                        for event in await answer.receive():
                            if not session.shown:
                                self.check_event(session, event)
                                is_passed = is_streaming and session.held is None
                                session.shown = is_passed and isinstance(event, VISIBLE_EVENTS)
                            assembler.feed(event)
                            if session.held is None:
                                yield event
                            else:
                                session.held.append(event)
                record_calls(decoder.calls)

                outcome = assembler.finish()
                finished = await self._settle(session, outcome)
                rest = assembler.unstreamed_text() if is_streaming else ()
                for event in (*session.notices, *rest):
                    yield event
                self._raise_for_outcome(session, outcome, finished, answer.cut)
                yield run_events.AnswerFinished(outcome, finished, plan)
                yield run_events.TurnFinished(finished)
                break
            except (HealableError, EngineError) as failure:
                notices = await self._prepare_resend(session, failure)

    async def _render(self, session: Session) -> list[Event]:
        """Set the body of the request that is about to be sent, and return its event; none if nothing is sent."""
        if session.running is not None:
            return []
        if session.plan.mode == "conversation":
            await self._open_object(session)
        is_long = len(session.turn.blocks) > MANY_ITEMS
        session.body = await compute(partial(self._assemble_body, session), is_long=is_long)
        session.content = await compute(partial(encode_body, session.body), is_long=is_long)
        session.sent = self._describe_request(session)
        if session.plan.cache is not None:
            self._prompts.record(session.plan.cache, session.head)
        size = len(session.content)
        full_size = measure_full_body(session.plan, size)
        sent = run_events.RequestSent(size, full_size, session.sent)
        log.debug("request sent: %d of %d bytes", sent.body_bytes, sent.full_bytes)
        return [sent]

    async def _prepare_resend(
        self, session: Session, failure: HealableError | EngineError
    ) -> list[Event]:
        """Heal a session, and return the events of that; raise if it cannot or must not be healed."""
        error = failure.error if isinstance(failure, HealableError) else failure
        error.plan = error.plan or getattr(session, "plan", None)
        error.turn = error.turn or session.turn  # to continue from
        if isinstance(failure, EngineError):
            raise failure
        if failure.reason in session.healed or not session.request.heal:
            raise error from error.__cause__
        session.healed.add(failure.reason)
        session.turn = failure.turn or session.turn
        mode_before = session.mode
        lost = await self._heal(session, failure)
        record_healing(failure.reason, "".join(lost))
        healed = run_events.Healed(
            failure.reason,
            lost,
            response_id=error.response_id,
            usage=error.usage,
            status=error.status,
            code=error.reported_code,
            message=str(error),
        )
        return [healed, *session.report_mode(mode_before, failure.reason)]

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan for sending the Turn now, without sending it.

        Args:
            turn: The Turn.
            **options: The options of ``Request.of``. Evidence about a server applies to streams or to other requests;
                ``streaming`` is by default as in the last request, and at first as in ``run``.

        Returns:
            The plan. If it is ``conditional``, the request first makes a probe, which may change it.
        """
        check_turn(turn)
        session = self._open(turn, self._plan_options(options))
        plan = self._make_plan(session)
        with suppress(KedgeError):  # it cannot be sent
            plan = replace(plan, body_bytes=len(encode_body(self._assemble_body(session))))
        return plan

    def _plan_options(self, options: dict[str, Any]) -> Request:
        """Return the request of a dry run: it streams as the last request did, and at first as ``run`` does not."""
        options.setdefault("streaming", self._last_streaming)
        return self.prompt_for_output(Request.of(foreign=self.foreign_params, **options))

    def _open(self, turn: Turn, request: Request) -> Session:
        """Return a session with the options of its first request, by the evidence in memory."""
        params, extra = request.resolve_params(self.params)
        mode = request.mode or planning.get_state(turn).mode or self.mode
        if request.resend_limit is not None and (mode == "stateless" or not self.is_stateful):
            raise errors.UnsupportedParameter(
                "resend_limit",
                "limit the history with a compactor",
                "nothing is continued here, so every request is a full send",
            )
        return Session(
            turn,
            request,
            model=request.model or self.model,
            params=params,
            extra=extra,
            members={**params, **extra},
            requested_mode=mode,
            mode_reason="" if mode == "stateless" else MODE_CHANGE_REASON,
            streaming=request.streaming or self.transport.always_streams,
            is_live=self.transport.always_streams,
        )

    async def _start(self, turn: Turn, request: Request) -> Session:
        """Return the session of a run."""
        return self._open(turn, request)

    def _make_plan(self, session: Session) -> RequestPlan:
        """Set and return the plan of the next request, with a prediction for the prompt cache."""
        start = time.perf_counter()
        plan = self._build_plan(session)
        if self.prompt_cache:
            plan = replace(plan, cache=self._plan_cache(session, plan))
        measure("responses_anchor_detection_duration_seconds", time.perf_counter() - start)
        if log.isEnabledFor(logging.DEBUG):
            _log_plan(plan)
        session.plan = plan
        session.object_id = plan.conversation_id
        return plan

    @abstractmethod
    def _build_plan(self, session: Session) -> RequestPlan:
        """Return a plan for the Turn and the options of a session."""

    def _plan_cache(self, session: Session, plan: RequestPlan) -> CachePlan:
        """Return what the provider's prompt cache will have of a request; set the head of its prompt."""
        session.head = PromptHead(session.model, plan.instructions or "", session.request.tools)
        rules = self._cache_rules(session.model, session.params)
        settings = hash_settings(session.settings)
        cache = plan_cache(session.turn, plan, rules=rules, settings=settings)
        hints = self._prompts.find_hints(cache.key, session.head)
        if hints:
            cache = replace(cache, hints=hints)
        return cache

    async def _prepare(self, session: Session) -> None:
        """Set the plan of the next request."""
        self._make_plan(session)

    async def _open_object(self, session: Session) -> None:
        """Set the conversation object of a request, if the API has such objects."""

    @abstractmethod
    def _assemble_body(self, session: Session) -> dict[str, Any]:
        """Return the body of a request."""

    async def post(self, session: Session, decoder: StreamDecoder) -> RawResponse:
        """Send the request; the reply, which the decoder will read, is closed by the caller.

        The tap of the caller receives the request with its reply, or with its error.
        """
        tap = None
        if session.request.tap is not None:
            tap = partial(session.request.tap, session.content)
        # A conversation object may contain the first attempt.
        is_repeatable = session.plan.mode != "conversation"
        try:
            reply = await self.transport.send(
                self.path,
                session.content,
                streaming=session.request.streaming,
                retry=is_repeatable,
                parent_id=session.body.get("previous_response_id") or "",
            )
        except EngineError as error:
            if tap is not None:
                tap(error.message.encode(), error.status)
            raise
        reply.tap = tap
        return reply

    def check_event(self, session: Session, event: StreamEvent) -> None:
        """Raise if an event shows, before any output, that the request has to be sent again."""

    def _describe_request(self, session: Session) -> planning.SentRequest | None:
        """Return the request that is about to be sent, by which its answer is judged; None for a stateless API."""
        return None

    @abstractmethod
    async def _settle(self, session: Session, outcome: Outcome) -> Turn:
        """Judge a response; return the Turn with its blocks, and with its anchor if the response can be one.

        Raises:
            HealableError: The request has to be sent again.
        """

    @abstractmethod
    async def _heal(self, session: Session, failure: HealableError) -> tuple[str, ...]:
        """Change a session after a failure so that its next request can succeed.

        Returns:
            The lost responses.

        Raises:
            EngineError: The request must not be sent again.
        """

    def _record_outcome(
        self,
        session: Session,
        turn: Turn,
        outcome: Outcome,
        *,
        stored: bool,
        lost: bool = False,
        reused: bool = False,
        counted: planning.TokenCounts | None = None,
    ) -> Turn:
        """Return the Turn with the blocks of the response, and with its record as an anchor.

        Of a response that can never be continued only the reason is recorded. ``lost`` means that the server's context
        differs from the Turn, ``reused`` that the server has issued the id before.
        """
        if outcome.status not in ("completed", "incomplete"):
            return turn
        blocks: Sequence[Block] = outcome.whole_blocks
        if outcome.completed:
            blocks = outcome.blocks
        status = self._find_anchor_status(outcome, lost=lost, reused=reused)
        if is_unusable_status(status):
            if not self.is_stateful:
                return turn.append(*planning.tag_blocks(blocks, outcome.response_id))
            problem = outcome.anchor_problem if status == "ambiguous" else planning.REASONS[status]
            log.warning(
                "the answer cannot be continued: %s",
                problem,
                response_id=outcome.response_id,
                turn_id=turn.id,
            )
            if status == "no_id":
                count("responses_without_id_total")
        log.debug("the response is %s", status, response_id=outcome.response_id)
        return planning.record_response(
            turn,
            blocks,
            response_id=outcome.response_id,
            plan=session.plan,
            created_at=self._clock(),
            status=status,
            stored=stored,
            retention=self.retention,
            conversation_id=session.object_id,
            head=self.is_stateful,
            counted=counted,
        )

    def _find_anchor_status(self, outcome: Outcome, *, lost: bool, reused: bool) -> planning.Status:
        """Return the status of a response as an anchor; the arguments are those of ``_record_outcome``."""
        if not outcome.response_id:
            return "no_id"
        if reused:
            return "reused_id"
        if not outcome.blocks:
            return "empty"
        if outcome.anchor_problem and self.is_stateful:
            return "ambiguous"
        if not outcome.completed:
            return "incomplete"
        if lost:
            return "lost"
        return "completed"

    def _read_token_count(self, answer: Mapping[str, Any]) -> int:
        """Return the number of tokens that the server counted for a request."""
        tokens = answer.get("input_tokens")
        if not isinstance(tokens, int):
            raise errors.ServerFailed("the server did not return a token count", provider=self.name)
        return tokens

    def translate_error(self, session: Session, error: EngineError) -> Exception:
        """Return the error to raise for a failed request: the given one, or one that can be healed."""
        return error

    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> CacheRules:
        """Return the rules of the provider's prompt cache."""
        return self.cache_rules

    def _raise_for_outcome(
        self, session: Session, outcome: Outcome, turn: Turn, cut: StreamCut | None
    ) -> None:
        """Raise unless the response is complete and used, or continues in the background.

        ``cut`` is the error that ended its connection, if any.
        """
        if session.failure is not None:
            raise session.failure
        error: EngineError
        match outcome.status:
            case "completed" | "running":
                return
            case "incomplete":
                reason = outcome.reason or "no reason given"
                message = f"the response stopped before its end ({reason})"
                error = errors.AnswerIncomplete(message, provider=self.name, code=outcome.reason)
            case "failed":
                message = outcome.message or "the server reported a failure"
                error = errors.ServerFailed(message, provider=self.name, code=outcome.code)
                error.retryable = not is_permanent_failure(outcome.code, message)
            case "cut":
                message = "the stream ended before the response was complete; the Turn is unchanged"
                error = cut or StreamCut(message, provider=self.name, retryable=True)
        error.turn = turn
        error.partial = outcome.blocks
        error.response_id = outcome.response_id
        error.usage = outcome.usage
        raise error


def _announce_plan(session: Session) -> list[Event]:
    """Return the events of the plan of the next request."""
    plan = session.plan
    if session.running is not None:
        return [run_events.RequestPlanned(plan, session.running.response_id)]
    events: list[Event] = [run_events.RequestPlanned(plan, "")]
    if plan.fallback:
        log.warning("no valid anchor (%s); sending everything", plan.fallback)
        events.append(run_events.FellBack(plan.fallback))
    return events


def _log_plan(plan: RequestPlan) -> None:
    for candidate in plan.rejected:
        log.trace("candidate rejected: %s", candidate.reason, response_id=candidate.response_id)
    log.debug(
        "anchor %s; delta of %d among %d blocks",
        plan.anchor_id or "none",
        plan.delta_blocks,
        plan.full_blocks,
        response_id=plan.anchor_id,
    )
