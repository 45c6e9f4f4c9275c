"""Engines for APIs that remember nothing: every request sends everything.

The plan is that of the stateless mode, with what is sent and what is left out. A response is recorded as
not stored: no request can be chained on it, but what the provider encrypted or signed in it (reasoning)
can be proved later, and is sent again while it is proved.
"""

import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kedge.engines.base import Engine, Events, Request
from kedge.engines.prompt_cache import PromptMonitor, count_prompt
from kedge.engines.request_options import check_params, split_extra_body
from kedge.engines.response_reader import (
    attach_context,
    raise_for_outcome,
    read_response,
    record_outcome,
)
from kedge.engines.telemetry import (
    record_completion,
    record_error,
    record_healing,
    record_mode_change,
    record_plan,
    record_request,
)
from kedge.engines.tool_name_inference import infer_tool_name
from kedge.engines.transport import Sdk, Transport, encode_body
from kedge.errors import EngineError, RequestRefused, StreamCut, Unreachable
from kedge.events import StreamEvent
from kedge.events.assembler import Assembler
from kedge.events.decoder import StreamDecoder
from kedge.events.run import (
    AnswerFinished,
    Healed,
    ModeChanged,
    RequestPlanned,
    RequestSent,
    TurnFinished,
)
from kedge.planning import (
    CachePlan,
    CacheRules,
    Mode,
    RequestPlan,
    get_state,
    plan_request,
)
from kedge.turns import ReasoningBlock, Turn

if TYPE_CHECKING:
    from kedge.engines.transport import Client

MODE_CHANGE_REASON = "stateless_api"
"""Why a request is stateless although another mode was requested."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do if a server is not running, or does not have the model."""

    unreachable: str = ""
    no_model: str = ""


class StatelessEngine(Engine):
    """The base of engines for stateless APIs; a subclass renders requests for its API.

    A ``mode`` other than ``stateless`` is reported as changed with every request.
    With ``prompt_cache`` requests use the provider's prompt cache, and plans predict what is read from it.
    """

    path: ClassVar[str]
    sdk: ClassVar[Sdk] = "openai"

    def __init__(
        self,
        model: str,
        *,
        make_client: "Callable[[], Client]",
        scope: str,
        provider: str,
        mode: Mode = "stateless",
        prompt_cache: bool = False,
        params: Mapping[str, Any] | None = None,
        advice: Advice | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = provider
        self.model = model
        self.scope = scope
        self.mode: Mode = mode
        self.params = dict(params or {})
        check_params(self.params)
        self.transport = Transport(make_client, provider, self.sdk)
        self._advice = advice or Advice()
        self._replay_reasoning = (
            False  # whether reasoning is sent that the provider did not encrypt
        )
        self._clock = clock
        self.prompt_cache = prompt_cache
        self._prompts = PromptMonitor()

    @abstractmethod
    def _make_decoder(self) -> StreamDecoder:
        """Return a decoder for one response."""

    @abstractmethod
    def _build_body(
        self, plan: RequestPlan, request: Request, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the body of the request; members that are ``None`` are not sent."""

    def _heal(self, error: RequestRefused, turn: Turn, plan: RequestPlan) -> RequestPlan | None:
        """Return another plan for a request that was rejected because of reasoning, included or missing."""
        if self._is_reasoning_rejected(error) and _has_reasoning(plan):
            return plan.without_reasoning()
        if self._is_reasoning_missing(error) and not self._replay_reasoning:
            self._replay_reasoning = True
            retry = self.plan(turn)
            return replace(retry, cache=plan.cache, instructions=plan.instructions)
        return None

    def _is_reasoning_rejected(self, error: EngineError) -> bool:
        """Return whether the server rejected a request because of the reasoning in it."""
        return False

    def _is_reasoning_missing(self, error: EngineError) -> bool:
        """Return whether the server rejected a request because reasoning of earlier responses is missing."""
        return False

    def _cache_rules(self, model: str) -> CacheRules:
        """Return the rules of the provider's prompt cache."""
        return CacheRules()

    def _request_caching(self, body: dict[str, Any], plan: RequestPlan, cache: CachePlan) -> None:
        """Add to a body what makes the provider cache it."""

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self.transport.aclose()

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return what would be sent now, and why; it is always everything."""
        return self._build_plan(turn, Request.of(**options))

    def _build_plan(self, turn: Turn, request: Request) -> RequestPlan:
        start = time.perf_counter()
        plan = plan_request(
            turn,
            scope=self.scope,
            mode="stateless",
            now=self._clock(),
            unsealed=self._replay_reasoning,
        )
        plan = request.add_ephemeral(plan)
        if self.prompt_cache:
            model = request.model or self.model
            plan = self._prompts.plan(
                turn,
                plan,
                self._cache_rules(model),
                model=model,
                tools=request.tools,
                params=request.resolve_params(self.params),
            )
        record_plan(plan, time.perf_counter() - start)
        return plan

    async def events(self, turn: Turn, request: Request) -> Events:
        """Send the Turn; once more, with less or more of its reasoning, if the server requires that."""
        wanted = request.mode or get_state(turn).mode or self.mode
        if wanted != "stateless":
            record_mode_change("stateless", wanted, MODE_CHANGE_REASON)
            yield ModeChanged("stateless", wanted, MODE_CHANGE_REASON)
        plan = self._build_plan(turn, request)
        try:
            async with self._attempt(turn, request, plan) as events:
                async for event in events:
                    yield event
        except RequestRefused as error:
            healed = self._heal(error, turn, plan) if request.heal else None
            if healed is None:
                raise
        else:
            return
        record_healing("reasoning", "")
        yield Healed("reasoning")
        async with self._attempt(turn, request, healed) as events:
            async for event in events:
                yield event

    @asynccontextmanager
    async def _attempt(
        self, turn: Turn, request: Request, plan: RequestPlan
    ) -> AsyncGenerator[Events]:
        """Provide the events of one request; errors carry the Turn and the plan."""
        plan.check()
        try:
            async with aclosing(self._send_request(turn, plan, request)) as events:
                yield events
        except EngineError as error:
            attach_context(error, turn, plan)
            raise

    async def _send_request(self, turn: Turn, plan: RequestPlan, request: Request) -> Events:
        """Send one request; yield its events, ending with ``TurnFinished``."""
        yield RequestPlanned(plan)
        params, extra = split_extra_body(request.resolve_params(self.params))
        body = {**self._build_body(plan, request, params), **extra}
        if plan.cache:
            self._request_caching(body, plan, plan.cache)
            self._prompts.record(plan, model=body["model"], tools=request.tools)
        content = encode_body({k: v for k, v in body.items() if v is not None})
        record_request(plan, len(content))
        yield RequestSent(len(content))
        assembler, decoder = Assembler(), self._make_decoder()
        decoder.calls.infer_name = partial(infer_tool_name, request.tools)
        cut: StreamCut | None = None
        try:
            async with self._open_response(decoder, content, request) as decoded:
                async for event in decoded:
                    assembler.feed(event)
                    yield event
        except StreamCut as error:
            cut = error  # which matters only if the answer had not ended
        outcome = assembler.finish()
        counted = count_prompt(outcome, plan.cache) if plan.cache else None
        finished = record_outcome(
            turn,
            outcome,
            plan,
            now=self._clock(),
            stored=False,
            retention=None,
            stateful=False,
            counted=counted,
        )
        record_completion(outcome, decoder.calls)
        raise_for_outcome(outcome, self.name, finished, cut)
        yield AnswerFinished(outcome, finished, plan)
        yield TurnFinished(finished)

    @asynccontextmanager
    async def _open_response(
        self, decoder: StreamDecoder, content: bytes, request: Request
    ) -> AsyncGenerator[AsyncGenerator[StreamEvent]]:
        """Send the request and provide the events of the response, as they arrive."""
        try:
            reply = await self.transport.post(
                self.path, content, streaming=request.streaming, tap=request.tap
            )
            async with aclosing(read_response(decoder, reply, self.transport.redact)) as events:
                yield events
        except StreamCut:
            raise  # the assembler decides whether that is a failure
        except EngineError as error:
            error.provider = error.provider or self.name
            record_error(error)
            raise self._add_advice(error) from error.__cause__

    def _add_advice(self, error: EngineError) -> EngineError:
        """Return the error, with what to do about it."""
        advice = ""
        if isinstance(error, Unreachable):
            advice = self._advice.unreachable
        elif error.status == 404:
            advice = self._advice.no_model
        if advice:
            error.message = f"{error.message}; {advice}"
        return error


def _has_reasoning(plan: RequestPlan) -> bool:
    left_out = {block.id for block in plan.left_out}
    reasoning = (block for block in plan.delta if isinstance(block, ReasoningBlock))
    return any(block.id not in left_out for block in reasoning)
