"""Engines for stateless APIs: every request sends everything.

Requests follow a plan of the stateless mode. A response is recorded as not stored: no request can be chained
on it, but reasoning in it that the provider encrypted or signed can be matched with the record later, and is
sent again as long as it matches.

These APIs have no items, only messages of two roles, and they require the results of calls directly after the
message with the calls. So a ``MessageRenderer`` groups blocks into alternating output and input of the model, and the
results come first in the input.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from kedge import turns
from kedge.engines.heal_rules import HealableError
from kedge.engines.params import Params
from kedge.engines.prompt_cache import count_prompt
from kedge.engines.request import Request
from kedge.engines.request_body import hash_call_id
from kedge.engines.request_engine import RequestEngine, Session
from kedge.engines.transport import Sdk, Transport
from kedge.errors import EngineError, KedgeError, Unreachable, UnsupportedBlock
from kedge.events import Outcome
from kedge.planning import CachePlan, RequestPlan, plan_request
from kedge.planning.digests import get_members
from kedge.tools.definitions import convert_tool


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

    def _start_body(self, messages: list["Message"], request: Request) -> dict[str, Any]:
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


Message = dict[str, Any]
Results = Sequence[turns.ToolResultBlock]
Inputs = Sequence[turns.UserBlock | turns.SystemBlock]


class MessageRenderer(ABC):
    """Renders a plan as the messages of one API.

    Args:
        provider: The name of the provider, for errors.
        call_ids: A pattern of the call ids that the provider accepts; others are replaced.
    """

    has_unique_ids: ClassVar[bool] = False
    """Whether the provider accepts an id only once."""

    def __init__(self, provider: str, call_ids: str) -> None:
        self.provider = provider
        self._allowed_ids = re.compile(call_ids, re.DOTALL)
        self._assigned_ids: dict[str, str] = {}
        self._used_ids: set[str] = set()

    def render(self, plan: RequestPlan) -> list[Message]:
        """Return the messages of the blocks that a plan sends; the results follow their calls directly.

        Raises:
            UnsupportedBlock: The API has no form for a block.
        """
        plan.check()
        for block in plan.sent:
            self._check_block(block)
        messages: list[Message] = []
        calls: list[turns.ToolCallBlock] = []
        for is_output, group in groupby(plan.sent, _is_output):
            blocks = list(group)
            if is_output:
                calls = [each for each in blocks if isinstance(each, turns.ToolCallBlock)]
                messages += self._render_assistant(blocks)
                continue
            results = [each for each in blocks if isinstance(each, turns.ToolResultBlock)]
            self._check_tool_results(calls, results)
            inputs = [b for b in blocks if isinstance(b, turns.UserBlock | turns.SystemBlock)]
            calls = []
            messages += self._render_user(results, inputs)
        self._check_tool_results(calls, [])
        return messages

    @abstractmethod
    def _render_assistant(self, blocks: Sequence[turns.Block]) -> list[Message]:
        """Return the messages of consecutive output: text, calls, reasoning, and opaque items of its provider."""

    @abstractmethod
    def _render_user(self, results: Results, inputs: Inputs) -> list[Message]:
        """Return the messages of the input between two outputs."""

    def _reject(self, block: turns.Block, remedy: str, detail: str = "") -> UnsupportedBlock:
        """Return the error for a block that the provider cannot express, with the reason and the remedy."""
        kind = block.kind
        if isinstance(block, turns.OpaqueBlock):
            kind = f"opaque {block.type}"
        description = f"block {block.id} ({kind})"
        if detail:
            description += f": {detail}"
        message = f"{self.provider} cannot express {description}; {remedy} before sending"
        return UnsupportedBlock(message, block.id)

    def _assign_id(self, call: turns.ToolCallBlock) -> str:
        """Return the id for a call; it is unchanged if the provider accepts it."""
        call_id = call.call_id
        is_used = call_id in self._used_ids
        if not self._allowed_ids.fullmatch(call_id) or (self.has_unique_ids and is_used):
            # Their number makes the id of a repeated call another one.
            position = len(self._used_ids) if is_used else ""
            call_id = hash_call_id(f"kedge.call/1 {position} {call_id}")
        self._used_ids.add(call_id)
        self._assigned_ids[call.call_id] = call_id
        return call_id

    def _resolve_id(self, result: turns.ToolResultBlock) -> str:
        """Return the id for the result of a call."""
        return self._assigned_ids.get(result.call_id, result.call_id)

    def _check_block(self, block: turns.Block) -> None:
        if isinstance(block, turns.UnknownBlock):
            raise UnsupportedBlock(
                f"block {block.id} is of a kind that this version of Kedge does not know "
                f"({block.form.get('kind')!r}); remove it or upgrade Kedge",
                block.id,
            )
        if _is_output(block):
            return
        members = get_members(block)
        if members:
            names = ", ".join(sorted(members))
            detail = f"it has members of an item of another API ({names})"
            raise self._reject(block, "remove them from its extra", detail)

    def _check_tool_results(
        self, calls: Sequence[turns.ToolCallBlock], results: Sequence[turns.ToolResultBlock]
    ) -> None:
        """Reject results that come after further model output, which these APIs cannot express."""
        paired = {call.call_id for call in calls} & {result.call_id for result in results}
        for block in (*calls, *results):
            if block.call_id not in paired:
                remedy = "move the result directly after its call, or remove both"
                raise self._reject(block, remedy, f"the result of {block.call_id} comes later")


def _is_output(block: turns.Block) -> bool:
    return block.kind in ("assistant", "tool_call", "reasoning", "opaque")
