"""AnthropicEngine: the Messages API of Anthropic."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kedge.engines.anthropic.params import PARAM_RULES, SAMPLING_RULES, map_tool, reconcile_body
from kedge.engines.anthropic.render import render_messages
from kedge.engines.base import Request
from kedge.engines.param_mapping import map_params, merge
from kedge.engines.prompt_cache import CacheLifetime, anthropic_rules, place_breakpoints
from kedge.engines.stateless import StatelessEngine
from kedge.engines.transport import Sdk
from kedge.errors import EngineError, ServerFailed
from kedge.events.anthropic import AnthropicDecoder
from kedge.planning import CachePlan, CacheRules, RequestPlan
from kedge.turns import Turn

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

COUNTED_MEMBERS = ("model", "messages", "system", "tools", "tool_choice", "thinking")
"""The members of a request that are sent to count its tokens."""


class AnthropicEngine(StatelessEngine):
    """An engine for the Messages API of Anthropic, or for another server of this API.

    ``make_client`` returns the anthropic client that sends requests. ``sampling`` means that the client
    requests a version of the API that still accepts ``temperature``, ``top_p`` and ``top_k``. Up to four
    cache breakpoints are placed in each request, with a lifetime of ``cache_lifetime``, unless
    ``prompt_cache`` is false.
    """

    path = "/v1/messages"
    sdk: ClassVar[Sdk] = "anthropic"

    def __init__(
        self,
        model: str,
        *,
        make_client: "Callable[[], AsyncAnthropic]",
        scope: str,
        provider: str = "anthropic",
        sampling: bool = False,
        prompt_cache: bool = True,
        cache_lifetime: CacheLifetime = "5m",
        **settings: Any,
    ) -> None:
        super().__init__(
            model,
            make_client=make_client,
            scope=scope,
            provider=provider,
            prompt_cache=prompt_cache,
            **settings,
        )
        self._cache_lifetime: CacheLifetime = cache_lifetime
        self._param_rules = PARAM_RULES if sampling else {**PARAM_RULES, **SAMPLING_RULES}

    async def count_tokens(self, turn: Turn, **options: Any) -> int:
        """Return how many tokens the server counts for this Turn."""
        body = self._build_body(self.plan(turn), Request.of(**options), self.params)
        body = {name: body[name] for name in COUNTED_MEMBERS if body.get(name) is not None}
        if body["messages"] and body["messages"][-1]["role"] == "assistant":
            # The API counts only what it could answer, so a short user message is added.
            body["messages"].append({"role": "user", "content": "."})
        answer = await self.transport.request_json("post", f"{self.path}/count_tokens", json=body)
        tokens = answer.get("input_tokens")
        if not isinstance(tokens, int):
            raise ServerFailed("the server did not say how many tokens", provider=self.name)
        return tokens

    def _make_decoder(self) -> AnthropicDecoder:
        return AnthropicDecoder()

    def _build_body(
        self, plan: RequestPlan, request: Request, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": request.model or self.model,
            "messages": render_messages(plan, self.name),
        }
        if plan.instructions is not None:
            body["system"] = plan.instructions
        if request.tools:
            body["tools"] = [map_tool(each) for each in request.tools]
        if request.streaming:
            body["stream"] = True
        merge(body, map_params(params, self._param_rules))
        return reconcile_body(body)

    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> CacheRules:
        return anthropic_rules(model, self._cache_lifetime)

    def _request_caching(self, body: dict[str, Any], plan: RequestPlan, cache: CachePlan) -> None:
        place_breakpoints(body, plan, self._cache_rules(body["model"], body), self._cache_lifetime)

    def _is_reasoning_rejected(self, error: EngineError) -> bool:
        message = error.message
        return error.status == 400 and "Invalid" in message and "thinking" in message
