"""Engines for stateless APIs: every request sends everything.

Requests follow a plan of the stateless mode. A response is recorded as not stored: no request can be chained
on it, but reasoning in it that the provider encrypted or signed can be matched with the record later, and is
sent again as long as it matches.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace

from kedge.engines.attempt import Attempt, RequestEngine
from kedge.engines.base import Request
from kedge.engines.cache_control import count_prompt
from kedge.engines.heal_rules import HealableError
from kedge.engines.request_body import SendOptions, split_extra_body
from kedge.engines.request_metrics import record_plan
from kedge.engines.response_reader import record_outcome
from kedge.engines.transport import RawResponse, Transport, encode_body
from kedge.errors import EngineError, KedgeError, RequestRefused, Unreachable, UnsupportedBlock
from kedge.events import Outcome
from kedge.events.decoder import StreamDecoder
from kedge.planning import CachePlan, CacheRules, Mode, RequestPlan, get_state, plan_request
from kedge.turns import ReasoningBlock, Turn

if TYPE_CHECKING:
    from kedge.engines.sdk_client import Sdk
    from kedge.engines.transport import AnyClient

MODE_CHANGE_REASON = "stateless_api"
"""The reason why a request is stateless although another mode was requested."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Instructions for the user if a server is not running, or does not have the model."""

    unreachable: str = ""
    no_model: str = ""


class _ReasoningMissingError(HealableError):
    """The server requires the reasoning of earlier responses."""


class StatelessEngine(RequestEngine):
    """The base of engines for stateless APIs; a subclass renders requests for its API.

    A ``mode`` other than ``stateless`` is reported as changed with every request.
    With ``prompt_cache`` requests use the provider's prompt cache, and plans predict what is read from it by
    ``cache_rules``.
    """

    path: ClassVar[str]
    sdk: ClassVar["Sdk"] = "openai"

    def __init__(
        self,
        model: str,
        *,
        make_client: "Callable[[], AnyClient]",
        scope: str,
        provider: str,
        mode: Mode = "stateless",
        prompt_cache: bool = False,
        cache_rules: CacheRules | None = None,
        params: Mapping[str, Any] | None = None,
        advice: Advice | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(
            model,
            transport=Transport(make_client, provider, self.sdk),
            scope=scope,
            mode=mode,
            params=params,
            prompt_cache=prompt_cache,
            cache_rules=cache_rules,
            clock=clock,
        )
        self._advice = advice or Advice()
        self._replay_reasoning = False
        """Whether reasoning that the provider did not encrypt is sent."""

    @abstractmethod
    def _build_body(
        self, plan: RequestPlan, request: Request, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the body of the request; members that are ``None`` are not sent."""

    def _is_reasoning_rejected(self, error: EngineError) -> bool:
        """Return whether the server rejected a request because of the reasoning in it."""
        return False

    def _is_reasoning_missing(self, error: EngineError) -> bool:
        """Return whether the server rejected a request because reasoning of earlier responses is missing."""
        return False

    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> CacheRules:
        return self.cache_rules

    def _request_caching(self, body: dict[str, Any], plan: RequestPlan, cache: CachePlan) -> None:
        """Add the members to a body that make the provider cache it."""

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan for sending the Turn now, which always sends everything."""
        request = self._plan_options(options)
        send_options = self._resolve_options(turn, request)[0]
        plan = self._build_plan(turn, request, send_options)
        return self._measure(Attempt(turn, request, send_options, plan))

    def _build_plan(self, turn: Turn, request: Request, options: SendOptions) -> RequestPlan:
        start = time.perf_counter()
        plan = plan_request(
            turn,
            scope=self.scope,
            mode="stateless",
            now=self._clock(),
            unsealed=self._replay_reasoning,
        )
        plan = replace(request.add_ephemeral(plan), mode_reason=options.reason)
        if not options.reasoning:
            plan = plan.without_reasoning()
        plan = self._plan_cache(turn, plan, request)
        record_plan(plan, time.perf_counter() - start)
        return plan

    async def _choose_options(self, turn: Turn, request: Request) -> tuple[SendOptions, Mode]:
        return self._resolve_options(turn, request)

    def _resolve_options(self, turn: Turn, request: Request) -> tuple[SendOptions, Mode]:
        requested = request.mode or get_state(turn).mode or self.mode
        reason = "" if requested == "stateless" else MODE_CHANGE_REASON
        return SendOptions("stateless", reason=reason), requested

    async def _prepare(self, turn: Turn, request: Request, options: SendOptions) -> Attempt:
        return Attempt(turn, request, options, self._build_plan(turn, request, options))

    async def _encode(self, attempt: Attempt) -> None:
        self._assemble_body(attempt)

    def _assemble_body(self, attempt: Attempt, conversation_id: str = "") -> None:
        plan, request = attempt.plan, attempt.request
        params, extra = split_extra_body(request.resolve_params(self.params))
        body = {**self._build_body(plan, request, params), **extra}
        if plan.cache:
            self._request_caching(body, plan, plan.cache)
        attempt.body = {k: v for k, v in body.items() if v is not None}
        attempt.content = encode_body(attempt.body)

    def find_unsupported(self, plan: RequestPlan) -> str:
        """Return the id of the first block of a plan that this API cannot express; empty if there is none."""
        try:
            self._build_body(plan, Request(), {})
        except UnsupportedBlock as error:
            return error.block_id
        except KedgeError:
            return ""  # the request itself reports it
        return ""

    async def _post(self, attempt: Attempt, decoder: StreamDecoder) -> RawResponse:
        request = attempt.request
        return await self.transport.post(
            self.path, attempt.content, streaming=request.streaming, tap=request.tap
        )

    async def _record(self, attempt: Attempt, outcome: Outcome) -> Turn:
        plan = attempt.plan
        return record_outcome(
            attempt.turn,
            outcome,
            plan,
            now=self._clock(),
            stored=False,
            retention=None,
            stateful=False,
            counted=count_prompt(outcome, plan.cache) if plan.cache else None,
        )

    def _translate_error(self, attempt: Attempt, error: EngineError) -> Exception:
        """Return the error with advice, or one that can be healed by sending more or less reasoning."""
        error = self._add_advice(error)
        if not isinstance(error, RequestRefused):
            return error
        if self._is_reasoning_rejected(error) and _has_reasoning(attempt.plan):
            return HealableError("reasoning", error)
        if self._is_reasoning_missing(error) and not self._replay_reasoning:
            return _ReasoningMissingError("reasoning", error)
        return error

    def _heal(
        self, turn: Turn, request: Request, options: SendOptions, failure: HealableError
    ) -> tuple[Turn, SendOptions, tuple[str, ...]]:
        """Send the reasoning of earlier responses from now on if it is missing, or else omit it."""
        if isinstance(failure, _ReasoningMissingError):
            self._replay_reasoning = True
            return turn, options, ()
        return turn, replace(options, reasoning=False), ()

    def _add_advice(self, error: EngineError) -> EngineError:
        """Return the error with advice added to its message."""
        advice = ""
        if isinstance(error, Unreachable):
            advice = self._advice.unreachable
        elif error.status == 404:
            advice = self._advice.no_model
        if advice:
            error.message = f"{error.message}; {advice}"
        return error


def _has_reasoning(plan: RequestPlan) -> bool:
    return any(isinstance(block, ReasoningBlock) for block in plan.sent)
