"""ChatCompletionsEngine: an engine for any server of the Chat Completions API, hosted or local."""

from collections.abc import Callable, Mapping
from typing import Any

from kedge.engines.chat_completions.render import messages_from_blocks, render_messages
from kedge.engines.param_rules import (
    NO_SERVER_STATE,
    STATELESS_RULES,
    Members,
    ParamRules,
    map_by_type,
    map_members,
    map_params,
    omit,
    reject_unless,
    rename,
)
from kedge.engines.prompt_cache import anthropic_rules, mark_chat_messages
from kedge.engines.request_options import LOGPROBS
from kedge.engines.stateless import StatelessEngine
from kedge.engines.transport import AnyClient
from kedge.errors import EngineError, UnsupportedParameter
from kedge.events.chat_completions import ChatDecoder
from kedge.planning import CachePlan, CacheRules, RequestPlan

__all__ = ["ChatCompletionsEngine", "messages_from_blocks"]


def map_tool(definition: Mapping[str, Any]) -> Members:
    """Convert a tool of the Responses API; a tool in the form of this API is sent unchanged."""
    match definition.get("type"):
        case "function" if "function" not in definition:
            function = omit(definition, "type")
            if not function.get("strict"):
                function.pop("strict", None)
            return {"type": "function", "function": function}
        case "custom" if "custom" not in definition:
            return {"type": "custom", "custom": _map_custom_tool(omit(definition, "type"))}
        case _:
            return dict(definition)


def _map_custom_tool(definition: Members) -> Members:
    form: Members = definition.get("format") or {}
    if form.get("type") == "grammar" and "grammar" not in form:
        return {**definition, "format": {"type": "grammar", "grammar": omit(form, "type")}}
    return definition


def _map_named_choice(choice: Mapping[str, Any]) -> Members:
    """Convert a tool choice by name, in the form of either API."""
    kind = choice["type"]
    return dict(choice) if kind in choice else {"type": kind, kind: {"name": choice.get("name")}}


def _map_allowed_tools(choice: Mapping[str, Any]) -> Members:
    if "allowed_tools" in choice:
        return {"tool_choice": dict(choice)}
    tools = [_map_named_choice(each) for each in choice.get("tools", ())]
    allowed = {"mode": choice.get("mode", "auto"), "tools": tools}
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}


def _map_json_schema(text_format: Mapping[str, Any]) -> Members:
    schema = {"type": "json_schema", "json_schema": omit(text_format, "type")}
    return {"response_format": schema}


_CHOICES: ParamRules = {
    "auto": rename("tool_choice"),
    "none": rename("tool_choice"),
    "required": rename("tool_choice"),
    "function": lambda choice: {"tool_choice": _map_named_choice(choice)},
    "custom": lambda choice: {"tool_choice": _map_named_choice(choice)},
    "allowed_tools": _map_allowed_tools,
}
_FORMATS: ParamRules = {
    "text": lambda _: {},
    "json_object": lambda _: {"response_format": {"type": "json_object"}},
    "json_schema": _map_json_schema,
}


def _map_include(names: Any) -> Members:
    if names in ([LOGPROBS], (LOGPROBS,)):
        return {"logprobs": True}
    return reject_unless("include", NO_SERVER_STATE, [], ())(names)


def build_param_rules(max_tokens: str) -> ParamRules:
    """Return the conversion of each parameter; ``max_tokens`` is the server's name for the output limit."""
    return {
        **STATELESS_RULES,
        "max_output_tokens": rename(max_tokens),
        "tool_choice": map_by_type("tool_choice", _CHOICES),
        "text": map_members(
            "text",
            {"format": map_by_type("text.format", _FORMATS), "verbosity": rename("verbosity")},
        ),
        "reasoning": map_members(
            "reasoning",
            {
                "effort": rename("reasoning_effort"),
                "summary": reject_unless("reasoning.summary", NO_SUMMARY),
            },
        ),
        "top_logprobs": lambda count: {"logprobs": True, "top_logprobs": count} if count else {},
        "store": lambda store: {"store": True} if store else {},
        "include": _map_include,
        "context_management": reject_unless("context_management", "compact the Turn instead", []),
    }


NO_SUMMARY = "this API has no reasoning summaries, so omit it"


def check_choice_count(params: Mapping[str, Any]) -> None:
    """Reject a request for several answers: a Turn continues with one."""
    if params.get("n") not in (None, 1):
        raise UnsupportedParameter("n", "a Turn has one answer; send it several times")


DEFAULT_LIMIT_PARAM = "max_tokens"
TOOL_ONLY_PARAMS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
}
"""Members that have a meaning only with tools; servers reject them without tools."""


class ChatCompletionsEngine(StatelessEngine):
    """An engine for any server of the Chat Completions API.

    Args:
        model: The model, unless a request names another.
        make_client: Returns the client that sends requests: Kedge's own, or one of the openai package.
        scope: The provider, endpoint and account.
        provider: The name of the provider, for errors and stored responses.
        max_tokens: The server's name for the output limit: nearly all servers use ``max_tokens``, OpenAI's
            newer models only ``max_completion_tokens``.
        max_call_id: The maximum length of call ids (40 characters at OpenAI); longer ones are replaced.
        replay_reasoning: Whether the reasoning of earlier answers is sent as ``reasoning_content``, as
            DeepSeek, Kimi and others require between calls. A server that rejects a request without it
            receives it from then on.
        cache_control: Whether requests have breakpoints as in Anthropic's API instead of a
            ``prompt_cache_key``, for gateways that forward them.
        **settings: ``mode``, ``params``, ``clock``, ``prompt_cache``: whether prompt caching is used, and
            ``cache_rules``: how the provider caches prompts.
    """

    decoder_type = ChatDecoder
    path = "/chat/completions"
    map_tool = staticmethod(map_tool)
    can_replay_reasoning = True
    text_only_results = True

    def __init__(
        self,
        model: str,
        *,
        make_client: Callable[[], AnyClient],
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

    def _render_messages(self, plan: RequestPlan) -> list[dict[str, Any]]:
        return render_messages(plan, self.name, self._max_call_id)

    def _add_params(
        self, body: dict[str, Any], plan: RequestPlan, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        check_choice_count(params)
        more = map_params(params, self._param_rules)
        if "tools" not in {**body, **more}:
            more = {
                k: v
                for k, v in more.items()
                if k not in TOOL_ONLY_PARAMS or v not in TOOL_ONLY_PARAMS[k]
            }
        if "stream" in body:
            # With usage included, unless the caller disabled it.
            chosen = params.get("stream_options", {})
            options = None if chosen is None else {"include_usage": True, **chosen}
            more["stream_options"] = options
        return {**body, **more}

    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> CacheRules:
        return anthropic_rules(model, "5m") if self._cache_control else self.cache_rules

    def _request_caching(self, body: dict[str, Any], plan: RequestPlan, cache: CachePlan) -> None:
        if self._cache_control:
            mark_chat_messages(body, plan, self._cache_rules(body["model"], body), "5m")
        elif cache.key:
            body.setdefault("prompt_cache_key", cache.key)

    def _concerns_reasoning(self, error: EngineError) -> bool:
        return error.status in (400, 422) and "reasoning_content" in error.message
