"""ChatCompletionsEngine: any server of the Chat Completions API, OpenAI's own or one on this machine."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kedge.engines.base import Request
from kedge.engines.chat_completions.params import build_param_rules, check_choice_count, map_tool
from kedge.engines.chat_completions.render import render_messages
from kedge.engines.param_mapping import map_params
from kedge.engines.prompt_cache import anthropic_rules, mark_chat_messages
from kedge.engines.stateless import StatelessEngine
from kedge.errors import EngineError
from kedge.events.chat_completions import ChatDecoder
from kedge.planning import CachePlan, CacheRules, RequestPlan

if TYPE_CHECKING:
    from openai import AsyncOpenAI

DEFAULT_LIMIT_PARAM = "max_tokens"
TOOL_ONLY_PARAMS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
}
"""Members without a meaning unless there are tools, which servers reject without them."""


class ChatCompletionsEngine(StatelessEngine):
    """An engine for any server of the Chat Completions API.

    ``make_client`` returns the openai client that sends requests. ``max_tokens`` is the server's name for
    the output limit: nearly all servers use ``max_tokens``, OpenAI's newer models only
    ``max_completion_tokens``. ``max_call_id`` is the maximum length of call ids (40 characters at
    OpenAI); longer ones are replaced. With ``replay_reasoning`` the reasoning of earlier answers is sent
    as ``reasoning_content``, as DeepSeek, Kimi and others require between calls; a server that rejects
    a request because it is missing receives it from then on.

    With ``prompt_cache`` requests carry a ``prompt_cache_key``, or, with ``cache_control``, breakpoints as
    Anthropic's API has them, for gateways that pass them on.
    """

    path = "/chat/completions"
    text_only_results = True

    def __init__(
        self,
        model: str,
        *,
        make_client: "Callable[[], AsyncOpenAI]",
        scope: str,
        provider: str = "chat",
        max_tokens: str = DEFAULT_LIMIT_PARAM,
        max_call_id: int | None = None,
        replay_reasoning: bool = False,
        cache_control: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(model, make_client=make_client, scope=scope, provider=provider, **settings)
        self._param_rules = build_param_rules(max_tokens)
        self._max_call_id = max_call_id
        self._replay_reasoning = replay_reasoning
        self._cache_control = cache_control

    def _make_decoder(self) -> ChatDecoder:
        return ChatDecoder()

    def _build_body(
        self, plan: RequestPlan, request: Request, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        check_choice_count(params)
        body: dict[str, Any] = {
            "model": request.model or self.model,
            "messages": render_messages(plan, self.name, self._max_call_id),
        }
        if request.tools:
            body["tools"] = [map_tool(each) for each in request.tools]
        if request.streaming:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        more = map_params(params, self._param_rules)
        if "tools" not in {**body, **more}:
            more = {
                k: v
                for k, v in more.items()
                if k not in TOOL_ONLY_PARAMS or v not in TOOL_ONLY_PARAMS[k]
            }
        return {**body, **more, **self._build_stream_options(body, more, params)}

    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> CacheRules:
        return anthropic_rules(model, "5m") if self._cache_control else CacheRules()

    def _request_caching(self, body: dict[str, Any], plan: RequestPlan, cache: CachePlan) -> None:
        if self._cache_control:
            mark_chat_messages(body, plan, self._cache_rules(body["model"], body), "5m")
        else:
            body.setdefault("prompt_cache_key", cache.key)

    def _is_reasoning_rejected(self, error: EngineError) -> bool:
        return self._replay_reasoning and self._mentions_reasoning(error)

    def _is_reasoning_missing(self, error: EngineError) -> bool:
        return not self._replay_reasoning and self._mentions_reasoning(error)

    @staticmethod
    def _mentions_reasoning(error: EngineError) -> bool:
        return error.status in (400, 422) and "reasoning_content" in error.message

    @staticmethod
    def _build_stream_options(body: Any, more: Any, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a stream with usage included, unless the caller disabled it."""
        if "stream_options" not in body:
            return {}
        if "stream_options" in params and params["stream_options"] is None:
            return {"stream_options": None}
        return {"stream_options": {**body["stream_options"], **more.get("stream_options", {})}}
