"""ChatCompletionsEngine: an engine for any server of the Chat Completions API, hosted or local."""

from collections.abc import Mapping
from typing import Any

from kedge.engines import param_rules
from kedge.engines.param_rules import STATELESS_PARAMS, Members, ParamRules, omit
from kedge.engines.params import LOGPROBS, Params
from kedge.engines.prompt_cache import anthropic_rules, mark_chat_messages
from kedge.engines.request import Request
from kedge.engines.stateless import StatelessEngine
from kedge.errors import UnsupportedParameter
from kedge.planning import CachePlan, CacheRules, RequestPlan
from kedge.wire.chat_completions import ChatDecoder
from kedge.wire.chat_renderer import render_messages


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
    if kind in choice:
        return dict(choice)
    return {"type": kind, kind: {"name": choice.get("name")}}


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
    "auto": param_rules.rename("tool_choice"),
    "none": param_rules.rename("tool_choice"),
    "required": param_rules.rename("tool_choice"),
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
    return param_rules.reject_unless("include", param_rules.NO_SERVER_STATE, [], ())(names)


def build_param_rules(max_tokens_name: str) -> ParamRules:
    """Return the conversion of each parameter; ``max_tokens_name`` is the server's name for the output limit."""
    return {
        **param_rules.STATELESS_RULES,
        "max_output_tokens": param_rules.rename(max_tokens_name),
        "tool_choice": param_rules.map_by_type("tool_choice", _CHOICES),
        "text": param_rules.map_members(
            "text",
            {
                "format": param_rules.map_by_type("text.format", _FORMATS),
                "verbosity": param_rules.rename("verbosity"),
            },
        ),
        "reasoning": param_rules.map_members(
            "reasoning",
            {
                "effort": param_rules.rename("reasoning_effort"),
                "summary": param_rules.reject_unless("reasoning.summary", NO_SUMMARY),
            },
        ),
        "top_logprobs": lambda count: {"logprobs": True, "top_logprobs": count} if count else {},
        "store": lambda store: {"store": True} if store else {},
        "include": _map_include,
        "context_management": param_rules.reject_unless(
            "context_management", "compact the Turn instead", []
        ),
    }


NO_SUMMARY = "this API has no reasoning summaries, so omit it"


DEFAULT_LIMIT_PARAM = "max_tokens"
TOOL_ONLY_PARAMS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
}
"""Members that have a meaning only with tools; servers reject them without tools."""


FOREIGN_PARAMS = frozenset(
    {
        *STATELESS_PARAMS,
        *(
            "cache_control",
            "context_management",
            "n",
            "output_config",
            "stop_sequences",
            "thinking",
        ),
        "top_k",
    }
)
"""Parameters of Responses and Messages that Chat Completions rejects."""


class ChatCompletionsEngine(StatelessEngine):
    """An engine for any server of the Chat Completions API.

    Args:
        model: The model, unless a request names another.
        max_tokens_name: The server's name for the output limit: nearly all servers use ``max_tokens``, OpenAI's
            newer models only ``max_completion_tokens``.
        max_call_id_length: The maximum length of call ids (40 characters at OpenAI); longer ones are replaced.
        replay_reasoning: Whether the reasoning of earlier answers is sent as ``reasoning_content``, as
            DeepSeek, Kimi and others require between calls. A server that rejects a request without it
            receives it from then on.
        cache_control: Whether requests have breakpoints as in Anthropic's API instead of a
            ``prompt_cache_key``, for gateways that forward them.
        **settings: See ``EngineSettings``.
    """

    name = "chat"
    decoder_type = ChatDecoder
    foreign_params = FOREIGN_PARAMS
    path = "/chat/completions"
    map_tool = staticmethod(map_tool)
    can_replay_reasoning = True
    reasoning_errors = (400, 422), ("reasoning_content",)
    text_only_results = True

    def __init__(
        self,
        model: str,
        *,
        max_tokens_name: str = DEFAULT_LIMIT_PARAM,
        max_call_id_length: int | None = None,
        replay_reasoning: bool = False,
        cache_control: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(model, **settings)
        self._param_rules = build_param_rules(max_tokens_name)
        self._max_call_id_length = max_call_id_length or ""
        self._replay_reasoning = replay_reasoning
        self._cache_control = cache_control

    def _build_body(self, plan: RequestPlan, request: Request, params: Params) -> Members:
        body = self._start_body(render_messages(plan, self.name, self._max_call_id_length), request)
        if params.get("n") not in (None, 1):
            raise UnsupportedParameter("n", "a Turn has one answer; send it several times")
        members = param_rules.map_params(params, self._param_rules)
        if "tools" not in {**body, **members}:
            members = {k: v for k, v in members.items() if v not in TOOL_ONLY_PARAMS.get(k, ())}
        if "stream" in body:
            stream_options = params.get("stream_options", {})
            if stream_options is not None:  # with usage included, unless the caller disabled it
                stream_options = {"include_usage": True, **stream_options}
            members["stream_options"] = stream_options
        return {**body, **members}

    def _cache_rules(self, model: str, params: Params) -> CacheRules:
        if self._cache_control:
            return anthropic_rules(model, "5m")
        return self.cache_rules

    def _request_caching(self, body: Members, plan: RequestPlan, cache: CachePlan) -> None:
        if self._cache_control:
            mark_chat_messages(body, plan, self._cache_rules(body["model"], body))
        elif self.cache_rules.keyed:
            body.setdefault("prompt_cache_key", cache.key)
