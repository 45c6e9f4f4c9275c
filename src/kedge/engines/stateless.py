"""Engines for stateless APIs: every request sends everything.

Requests follow a plan of the stateless mode. A response is recorded as not stored: no request can be chained
on it, but reasoning in it that the provider encrypted or signed can be matched with the record later, and is
sent again as long as it matches.

The messages of a plan are rendered in `kedge.wire`.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from kedge import turns
from kedge.engines.heal_rules import HealableError
from kedge.engines.params import Params
from kedge.engines.prompt_cache import count_prompt
from kedge.engines.request import Request
from kedge.engines.request_engine import RequestEngine, Session
from kedge.engines.transport import Sdk, Transport
from kedge.errors import EngineError, KedgeError, Unreachable, UnsupportedBlock
from kedge.events import Outcome
from kedge.planning import CachePlan, RequestPlan, plan_request
from kedge.tools.definitions import convert_tool
from kedge.wire.message_renderer import Message


class Advice(msgspec.Struct, frozen=True):
    """Instructions for the user if a server is not running, or does not have the model."""

    unreachable: str = ""
    no_model: str = ""


class StatelessEngine(RequestEngine):
    """The base of engines for stateless APIs; a subclass renders requests for its API.

    A ``mode`` other than ``stateless`` is reported as changed with every request.
    With ``prompt_cache`` requests use the provider's prompt cache, and plans predict what is read from it by
    ``cache_rules``.
    """

    is_stateful = False
    sdk: ClassVar[Sdk] = "openai"
    map_tool: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]]
    """Converts the definition of a tool from the Responses API."""
    can_replay_reasoning: ClassVar[bool] = False
    """Whether a server may require reasoning that it did not encrypt."""
    reasoning_errors: ClassVar[tuple[tuple[int, ...], tuple[str, ...]]]
    """The statuses, and the words, of errors because of reasoning in a request, or missing from it."""

    mode = "stateless"

    def __init__(self, model: str, *, advice: Advice | None = None, **settings: Any) -> None:
        super().__init__(model, partial(Transport, sdk=self.sdk), **settings)
        self._advice = advice or Advice()
        self._replay_reasoning = False
        """Whether reasoning that the provider did not encrypt is sent."""

    @abstractmethod
    def _build_body(self, plan: RequestPlan, request: Request, params: Params) -> dict[str, Any]:
        """Return a body with the messages of a plan and parameters; members that are ``None`` are not sent."""

    def _start_body(self, messages: list[Message], request: Request) -> dict[str, Any]:
        """Return a body with messages, and with the options of a request that are not parameters."""
        body: dict[str, Any] = {"model": request.model or self.model, "messages": messages}
        if request.tools:
            convert = type(self).map_tool
            body["tools"] = [convert_tool(each, convert) for each in request.tools]
        if request.streaming:
            body["stream"] = True
        return body

    def _request_caching(self, body: dict[str, Any], plan: RequestPlan, cache: CachePlan) -> None:
        """Add the members to a body that make the provider cache it."""

    def _build_plan(self, session: Session) -> RequestPlan:
        plan = plan_request(
            session.turn,
            scope=self.scope,
            mode="stateless",
            now=self._clock(),
            unsealed=self._replay_reasoning,
        )
        return replace(session.complete_plan(plan), mode_reason=session.mode_reason)

    def _assemble_body(self, session: Session) -> dict[str, Any]:
        plan = session.plan
        body = {**self._build_body(plan, session.request, session.params), **session.extra}
        if plan.cache:
            self._request_caching(body, plan, plan.cache)
        return {k: v for k, v in body.items() if v is not None}

    def find_unsupported(self, plan: RequestPlan) -> str:
        """Return the id of the first block of a plan that this API cannot express; empty if there is none."""
        try:
            self._build_body(plan, Request(), {})
        except UnsupportedBlock as error:
            return error.block_id
        except KedgeError:  # the request itself reports other errors
            return ""
        return ""

    async def _settle(self, session: Session, outcome: Outcome) -> turns.Turn:
        counted = None
        if session.plan.cache is not None:
            counted = count_prompt(outcome, session.plan.cache)
        return self._record_outcome(session, session.turn, outcome, stored=False, counted=counted)

    def translate_error(self, session: Session, error: EngineError) -> Exception:
        """Return the error with advice, or one that can be healed by sending more or less reasoning."""
        statuses, words = self.reasoning_errors
        if error.status in statuses and all(word in error.message for word in words):
            is_missing = self.can_replay_reasoning and not session.plan.unsealed
            kinds = {block.kind for block in session.plan.sent}
            if is_missing or "reasoning" in kinds:
                return HealableError("reasoning", error)
        advice = ""
        if error.status == 404:
            advice = self._advice.no_model
        elif isinstance(error, Unreachable):
            advice = self._advice.unreachable
        if advice:
            error.message = f"{error.message}; {advice}"
        return error

    async def _heal(self, session: Session, failure: HealableError) -> tuple[str, ...]:
        """Send the reasoning of earlier responses from now on if it is missing, or else omit it."""
        if self.can_replay_reasoning and not session.plan.unsealed:
            self._replay_reasoning = True
        else:
            session.reasoning = False
        return ()
