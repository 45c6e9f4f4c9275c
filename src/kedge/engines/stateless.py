"""Engines for stateless APIs: every request sends everything.

Requests follow a plan of the stateless mode. A response is recorded as not stored: no request can be chained
on it, but reasoning in it that the provider encrypted or signed can be matched with the record later, and is
sent again as long as it matches.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace

from kedge.engines.base import Request
from kedge.engines.heal_rules import HealableError
from kedge.engines.prompt_cache import count_prompt
from kedge.engines.request_engine import RequestEngine, Session, record_outcome
from kedge.engines.request_options import convert_tool
from kedge.engines.response import RawResponse
from kedge.engines.transport import Transport, encode_body
from kedge.errors import EngineError, KedgeError, RequestRefused, Unreachable, UnsupportedBlock
from kedge.events import Outcome
from kedge.events.decoder import StreamDecoder
from kedge.planning import CachePlan, Mode, RequestPlan, plan_request
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


class StatelessEngine(RequestEngine):
    """The base of engines for stateless APIs; a subclass renders requests for its API.

    A ``mode`` other than ``stateless`` is reported as changed with every request.
    With ``prompt_cache`` requests use the provider's prompt cache, and plans predict what is read from it by
    ``cache_rules``.
    """

    path: ClassVar[str]
    sdk: ClassVar["Sdk"] = "openai"
    map_tool: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]]
    """Converts the definition of a tool from the Responses API."""
    can_replay_reasoning: ClassVar[bool] = False
    """Whether a server may require reasoning that it did not encrypt."""

    def __init__(
        self,
        model: str,
        *,
        make_client: "Callable[[], AnyClient]",
        provider: str,
        mode: Mode = "stateless",
        advice: Advice | None = None,
        **settings: Any,
    ) -> None:
        transport = Transport(make_client, provider, self.sdk)
        super().__init__(model, transport=transport, mode=mode, **settings)
        self._advice = advice or Advice()
        self._replay_reasoning = False
        """Whether reasoning that the provider did not encrypt is sent."""

    @abstractmethod
    def _render_messages(self, plan: RequestPlan) -> list[dict[str, Any]]:
        """Return the messages of a plan."""

    @abstractmethod
    def _add_params(
        self, body: dict[str, Any], plan: RequestPlan, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a body with the parameters of a request; members that are ``None`` are not sent."""

    def _concerns_reasoning(self, error: EngineError) -> bool:
        """Return whether the server rejected a request because of reasoning in it, or missing from it."""
        return False

    def _build_body(
        self, plan: RequestPlan, request: Request, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": request.model or self.model,
            "messages": self._render_messages(plan),
        }
        if request.tools:
            convert = type(self).map_tool
            body["tools"] = [convert_tool(each, convert) for each in request.tools]
        if request.streaming:
            body["stream"] = True
        return self._add_params(body, plan, params)

    def _request_caching(self, body: dict[str, Any], plan: RequestPlan, cache: CachePlan) -> None:
        """Add the members to a body that make the provider cache it."""

    def _choose_mode(self, session: Session) -> None:
        is_changed = session.requested_mode != "stateless"
        session.mode_reason = MODE_CHANGE_REASON if is_changed else ""

    def _build_plan(self, session: Session) -> RequestPlan:
        plan = plan_request(
            session.turn,
            scope=self.scope,
            mode="stateless",
            now=self._clock(),
            unsealed=self._replay_reasoning,
        )
        return replace(session.request.add_ephemeral(plan), mode_reason=session.mode_reason)

    def _assemble_body(self, session: Session, conversation_id: str = "") -> None:
        plan = session.plan
        body = {**self._build_body(plan, session.request, session.params), **session.extra}
        if plan.cache:
            self._request_caching(body, plan, plan.cache)
        session.body = {k: v for k, v in body.items() if v is not None}
        session.content = encode_body(session.body)

    def find_unsupported(self, plan: RequestPlan) -> str:
        """Return the id of the first block of a plan that this API cannot express; empty if there is none."""
        try:
            self._build_body(plan, Request(), {})
        except UnsupportedBlock as error:
            return error.block_id
        except KedgeError:
            return ""  # the request itself reports it
        return ""

    async def post(self, session: Session, decoder: StreamDecoder) -> RawResponse:
        """Send the request."""
        request = session.request
        return await self.transport.send(
            self.path, session.content, streaming=request.streaming, tap=request.tap
        )

    async def _settle(self, session: Session, outcome: Outcome) -> Turn:
        plan = session.plan
        return record_outcome(
            session.turn,
            outcome,
            plan,
            now=self._clock(),
            stored=False,
            retention=None,
            stateful=False,
            counted=count_prompt(outcome, plan.cache) if plan.cache else None,
        )

    def translate_error(self, session: Session, error: EngineError) -> Exception:
        """Return the error with advice, or one that can be healed by sending more or less reasoning."""
        error = self._add_advice(error)
        if not isinstance(error, RequestRefused):
            return error
        plan = session.plan
        is_missing = self.can_replay_reasoning and not plan.unsealed
        if self._concerns_reasoning(error) and (is_missing or _has_reasoning(plan)):
            return HealableError("reasoning", error)
        return error

    async def _heal(self, session: Session, failure: HealableError) -> tuple[str, ...]:
        """Send the reasoning of earlier responses from now on if it is missing, or else omit it."""
        if self.can_replay_reasoning and not session.plan.unsealed:
            self._replay_reasoning = True
        else:
            session.reasoning = False
        return ()

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
