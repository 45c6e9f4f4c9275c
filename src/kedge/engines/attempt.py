"""One attempt at a request, and the loop that sends a rejected request again in another form.

The order is the same for every API: plan, send, pass on the events, append the response to the Turn, or
raise an error that carries the Turn and the plan. A request is healed at most once for each reason, and only
while the caller has seen no output, because output that a user has read cannot be withdrawn.
`ResponsesEngine` and `StatelessEngine` define the differences: the options, the body, when a response
can be trusted, and how to heal.
"""

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic

from msgspec.structs import replace
from typing_extensions import TypeVar

from kedge.engines.base import Engine, Events, Request
from kedge.engines.heal_rules import HealableError
from kedge.engines.prompt_monitor import PromptMonitor
from kedge.engines.request_body import SendOptions, check_params
from kedge.engines.request_metrics import (
    log_sending,
    record_calls,
    record_error,
    record_healing,
    record_mode_change,
)
from kedge.engines.response_reader import attach_context, raise_for_outcome, read_response
from kedge.engines.tool_name_inference import infer_tool_name
from kedge.engines.transport import RawResponse, Transport
from kedge.errors import EngineError, KedgeError, StreamCut
from kedge.events import Event, Outcome, StreamEvent
from kedge.events.assembler import Assembler
from kedge.events.decoder import StreamDecoder
from kedge.events.run import (
    VISIBLE_EVENTS,
    AnswerFinished,
    FellBack,
    Healed,
    ModeChanged,
    RequestPlanned,
    RequestSent,
    ResendReason,
    TurnFinished,
)
from kedge.planning import AnchorRecord, CacheRules, Mode, RequestPlan
from kedge.planning.render import measure_full_body
from kedge.planning.state import validate_mode
from kedge.turns import Turn


@dataclass(slots=True)
class Attempt:
    """One request of a run, and the state of its response."""

    turn: Turn
    request: Request
    options: SendOptions
    plan: RequestPlan
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    content: bytes = b""
    shown: bool = False
    """Whether the caller has seen output of the response."""
    held: list[Event] | None = None
    """The events that are held back until the response is judged; None if they are passed on."""
    running: AnchorRecord | None = None
    """The response in the background that answers the Turn already, so that nothing is sent."""


AttemptT = TypeVar("AttemptT", bound=Attempt, default=Attempt)


class RequestEngine(Engine, Generic[AttemptT]):
    """The base of engines that send requests to a provider; a subclass implements one API."""

    def __init__(
        self,
        model: str,
        *,
        transport: Transport,
        scope: str,
        mode: Mode,
        params: Mapping[str, Any] | None,
        prompt_cache: bool,
        cache_rules: CacheRules | None,
        clock: Callable[[], float],
    ) -> None:
        self.name = transport.provider
        self.model = model
        self.scope = scope
        validate_mode(mode)
        self.mode: Mode = mode
        self.params = dict(params or {})
        check_params(self.params)
        self.transport = transport
        self.prompt_cache = prompt_cache
        self.cache_rules = cache_rules or CacheRules()
        self._prompts = PromptMonitor()
        self._clock = clock
        self._last_streaming = False

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self.transport.aclose()

    async def events(self, turn: Turn, request: Request) -> Events:
        """Send the Turn and yield its events; a request that can be healed is sent again."""
        self._last_streaming = request.streaming
        if request.before_send is not None:
            await request.before_send(turn)
        options, requested_mode = await self._choose_options(turn, request)
        mode = options.mode
        if mode != requested_mode:
            record_mode_change(mode, requested_mode, options.reason)
            yield ModeChanged(mode, requested_mode, options.reason)
        healed: set[ResendReason] = set()
        while True:
            try:
                attempt = await self._prepare(turn, request, options)
                with _attach_context(attempt):
                    attempt.plan.check()
                    async with aclosing(self._send(attempt)) as events:
                        async for event in events:
                            yield event
                    return
            except HealableError as failure:
                if failure.reason in healed or not request.heal:
                    raise failure.error from failure.error.__cause__
                healed.add(failure.reason)
                turn, options, lost = self._heal(failure.turn or turn, request, options, failure)
                record_healing(failure.reason, "".join(lost))
                await self._before_resend(turn, request, options, failure)
                answer = failure.error
                yield Healed(failure.reason, lost, answer.response_id, answer.usage, answer.status)
                if options.mode != mode:
                    record_mode_change(options.mode, mode, failure.reason)
                    yield ModeChanged(options.mode, mode, failure.reason)

    async def _send(self, attempt: AttemptT) -> Events:
        """Send one request; yield its events, ending with ``TurnFinished``."""
        plan, request = attempt.plan, attempt.request
        running = attempt.running.response_id if attempt.running else ""
        yield RequestPlanned(plan, running)
        if plan.fallback and not running:
            yield FellBack(plan.fallback)
        await self._encode(attempt)
        if not running:
            self._prompts.record(plan, model=request.model or self.model, tools=request.tools)
            size = len(attempt.content)
            sent = RequestSent(size, measure_full_body(plan, size))
            log_sending(plan, sent)
            yield sent
        decoder = self._make_decoder()
        assembler = Assembler(native_api=decoder.NATIVE_API)
        decoder.calls.infer_name = partial(infer_tool_name, request.tools)
        held, shown = attempt.held, attempt.shown
        cut: StreamCut | None = None
        try:
            with self._translate_errors(attempt):
                reply = await self._post(attempt, decoder)
                redact = self.transport.redact
                async with aclosing(read_response(decoder, reply, redact)) as decoded:
                    async for event in decoded:
                        if not shown:
                            self._check_event(attempt, event)
                        assembler.feed(event)
                        if held is not None:
                            held.append(event)
                            continue
                        if not shown and request.streaming and isinstance(event, VISIBLE_EVENTS):
                            shown = attempt.shown = True
                        yield event
        except StreamCut as error:
            cut = error  # relevant only if the answer had not ended
        outcome = assembler.finish()
        record_calls(decoder.calls)
        for event in await self._check_outcome(attempt, outcome):
            yield event
        if request.streaming:
            for event in assembler.unstreamed_text():
                yield event
        finished = await self._record(attempt, outcome)
        self._check_finished(attempt, outcome, finished)
        raise_for_outcome(outcome, self.name, finished, cut)
        yield AnswerFinished(outcome, finished, plan)
        yield TurnFinished(finished)

    @contextmanager
    def _translate_errors(self, attempt: AttemptT) -> Generator[None]:
        """Record and translate the errors of a request; a cut stream is left to the assembler."""
        try:
            yield
        except StreamCut:
            raise
        except EngineError as error:
            error.provider = error.provider or self.name
            record_error(error)
            raise self._translate_error(attempt, error) from error.__cause__

    def _plan_cache(self, turn: Turn, plan: RequestPlan, request: Request) -> RequestPlan:
        """Return the plan with a prediction for the provider's prompt cache, if that is used."""
        if not self.prompt_cache:
            return plan
        model, params = request.model or self.model, request.resolve_params(self.params)
        rules = self._cache_rules(model, params)
        return self._prompts.plan(
            turn, plan, rules, model=model, tools=request.tools, params=params
        )

    @abstractmethod
    async def _choose_options(self, turn: Turn, request: Request) -> tuple[SendOptions, Mode]:
        """Return the options of the first attempt, and the mode that was requested."""

    @abstractmethod
    async def _prepare(self, turn: Turn, request: Request, options: SendOptions) -> AttemptT:
        """Return an attempt with its plan."""

    @abstractmethod
    async def _encode(self, attempt: AttemptT) -> None:
        """Set the body of an attempt and its bytes."""

    @abstractmethod
    def _assemble_body(self, attempt: AttemptT, conversation_id: str = "") -> None:
        """Set the body of an attempt, in a conversation object, and its bytes."""

    def _plan_options(self, options: dict[str, Any]) -> Request:
        """Return the request of a dry run: it streams as the last request did, and at first as ``run`` does not."""
        options.setdefault("streaming", self._last_streaming)
        return Request.of(**options)

    def _measure(self, attempt: AttemptT) -> RequestPlan:
        """Return the plan of a request that is not sent, with the size of its body."""
        with suppress(KedgeError):  # it cannot be sent
            self._assemble_body(attempt, attempt.plan.conversation_id)
        return replace(attempt.plan, body_bytes=len(attempt.content))

    @abstractmethod
    def _make_decoder(self) -> StreamDecoder:
        """Return a decoder for one response."""

    @abstractmethod
    async def _post(self, attempt: AttemptT, decoder: StreamDecoder) -> RawResponse:
        """Send the request; the reply, which the decoder will read, is closed by the caller."""

    @abstractmethod
    async def _record(self, attempt: AttemptT, outcome: Outcome) -> Turn:
        """Return the Turn with the blocks of a response, and with its anchor if the response can be one."""

    @abstractmethod
    def _heal(
        self, turn: Turn, request: Request, options: SendOptions, failure: HealableError
    ) -> tuple[Turn, SendOptions, tuple[str, ...]]:
        """Decide how to continue after a failure that can be healed.

        Returns:
            The updated Turn, the options of the next attempt, and the lost responses.
        """

    @abstractmethod
    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> CacheRules:
        """Return the rules of the provider's prompt cache."""

    def _translate_error(self, attempt: AttemptT, error: EngineError) -> Exception:
        """Return the error to raise for a failed request: the given one, or one that can be healed."""
        return error

    async def _before_resend(
        self, turn: Turn, request: Request, options: SendOptions, failure: HealableError
    ) -> None:
        """Raise if a request that can be healed must not be sent again."""

    def _check_event(self, attempt: AttemptT, event: StreamEvent) -> None:
        """Raise if an event shows, before any output, that the request has to be sent again."""

    async def _check_outcome(self, attempt: AttemptT, outcome: Outcome) -> list[Event]:
        """Return the events to pass on before a response is recorded; raise to send the request again."""
        return []

    def _check_finished(self, attempt: AttemptT, outcome: Outcome, finished: Turn) -> None:
        """Raise if a recorded response must be replaced by another one."""


@contextmanager
def _attach_context(attempt: Attempt) -> Generator[None]:
    """Make errors carry the Turn and the plan of an attempt.

    This is not a generator of events, because each one between the server and the caller costs time for every event.
    """
    try:
        yield
    except HealableError as failure:
        attach_context(failure.error, attempt.turn, attempt.plan)
        raise
    except EngineError as error:
        attach_context(error, attempt.turn, attempt.plan)
        raise
