"""AnthropicEngine: the Messages API of Anthropic."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from kedge.engines import param_rules
from kedge.engines.anthropic.render import render_messages
from kedge.engines.base import Request
from kedge.engines.json_schema import has_type, is_open_ended, map_subschemas
from kedge.engines.prompt_cache import CacheLifetime, anthropic_rules, place_breakpoints
from kedge.engines.stateless import StatelessEngine
from kedge.engines.transport import Sdk
from kedge.errors import UnsupportedParameter
from kedge.events.anthropic import AnthropicDecoder
from kedge.planning import CachePlan, CacheRules, RequestPlan
from kedge.turns import Turn

DEFAULT_MAX_TOKENS = 16_384
"""The default output limit: this API requires one. All models since Claude 4 allow it."""

UNSUPPORTED_LIMITS = frozenset(
    {
        "exclusiveMaximum",
        "exclusiveMinimum",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
        "multipleOf",
        "uniqueItems",
    }
)
"""Constraints that this API does not accept in a schema; of ``minItems`` it accepts 0 and 1."""
NO_SAMPLING = (
    "the newest version of the API has no sampling parameters; omit it, or request an older version with "
    "default_headers={'anthropic-version': '2023-06-01'}"
)
NO_SAMPLING_VERSION = "2026-10-21"
"""The version of the API that no longer accepts sampling parameters."""


def map_tool(definition: Mapping[str, Any]) -> param_rules.Members:
    """Convert a function of the Responses API; a tool in the form of this API is sent unchanged."""
    match definition.get("type"):
        case "function":
            converted = param_rules.omit(definition, "type", "parameters", "strict")
            converted["input_schema"] = definition.get("parameters") or {"type": "object"}
            return {**converted, "strict": True} if definition.get("strict") else converted
        case "custom" if "input_schema" not in definition:
            name = definition.get("name")
            raise UnsupportedParameter(f"the free-form tool {name!r}", "define it as a function")
        case _:
            return dict(definition)


def _map_choice(kind: str) -> param_rules.ParamRule:
    return lambda _: {"tool_choice": {"type": kind}}


def _map_named_choice(choice: Mapping[str, Any]) -> param_rules.Members:
    return {"tool_choice": {"type": "tool", "name": choice.get("name")}}


def _map_format(text_format: Mapping[str, Any]) -> param_rules.Members:
    schema = map_schema(text_format.get("schema") or {})
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def map_schema(schema: param_rules.Members) -> param_rules.Members:
    """Return a schema in the subset that this API enforces.

    A constraint that it rejects becomes part of the description, so that the model knows it.

    Raises:
        UnsupportedParameter: An object has arbitrary member names.
    """
    limits = {key: schema[key] for key in schema if key in UNSUPPORTED_LIMITS}
    if schema.get("minItems") in (0, 1):
        limits.pop("minItems", None)
    mapped: param_rules.Members = {key: value for key, value in schema.items() if key not in limits}
    if limits:
        described = json.dumps(limits, ensure_ascii=False)
        mapped["description"] = f"{schema.get('description', '')} {described}".strip()
    if has_type(mapped, "object"):
        if is_open_ended(mapped):
            raise UnsupportedParameter(
                "text.format", "use objects whose members have names, such as a list of pairs"
            )
        mapped["additionalProperties"] = False
    if "oneOf" in mapped:
        mapped["anyOf"] = mapped.pop("oneOf")
    return map_subschemas(mapped, map_schema)


def _map_effort(effort: Any) -> param_rules.Members:
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    converted = "low" if effort == "minimal" else effort
    return {"output_config": {"effort": converted}, "thinking": {"type": "adaptive"}}


def _map_budget(tokens: Any) -> param_rules.Members:
    return {"thinking": {"type": "enabled", "budget_tokens": tokens}}


def _map_metadata(metadata: Any) -> param_rules.Members:
    unsupported = sorted(set(metadata) - {"user_id"})
    if unsupported:
        raise UnsupportedParameter(
            f"metadata.{unsupported[0]}", "only user_id is accepted, so omit it"
        )
    return {"metadata": dict(metadata)}


_NO_JSON = "pass a schema: {'type': 'json_schema', 'schema': …}"
_CHOICES: param_rules.ParamRules = {
    "auto": _map_choice("auto"),
    "none": _map_choice("none"),
    "required": _map_choice("any"),
    "function": _map_named_choice,
    "any": param_rules.rename("tool_choice"),
    "tool": param_rules.rename("tool_choice"),
}
_FORMATS: param_rules.ParamRules = {
    "text": lambda _: {},
    "json_schema": _map_format,
    "json_object": param_rules.reject_unless("text.format 'json_object'", _NO_JSON),
}
_REASONING: param_rules.ParamRules = {
    "effort": _map_effort,
    "budget_tokens": _map_budget,
    "max_tokens": _map_budget,
    "summary": lambda _: {"thinking": {"display": "summarized"}},
}
PARAM_RULES: param_rules.ParamRules = {
    **param_rules.STATELESS_RULES,
    "max_output_tokens": param_rules.rename("max_tokens"),
    "tool_choice": param_rules.map_by_type("tool_choice", _CHOICES),
    "parallel_tool_calls": lambda allowed: (
        {} if allowed else {"tool_choice": {"disable_parallel_tool_use": True}}
    ),
    "text": param_rules.map_members(
        "text",
        {
            "format": param_rules.map_by_type("text.format", _FORMATS),
            "verbosity": param_rules.reject_unless(
                "text.verbosity", "request it in a system block", "medium"
            ),
        },
    ),
    "reasoning": param_rules.map_members("reasoning", _REASONING),
    "stop": lambda stop: {"stop_sequences": [stop] if isinstance(stop, str) else list(stop)},
    "metadata": _map_metadata,
    "user": lambda user: {"metadata": {"user_id": user}},
    "safety_identifier": lambda user: {"metadata": {"user_id": user}},
    "store": param_rules.reject_unless("store", param_rules.NO_SERVER_STATE, False),
    "include": param_rules.reject_unless("include", param_rules.NO_SERVER_STATE, [], ()),
    "top_logprobs": param_rules.reject_unless("top_logprobs", "leave it out", 0),
}
"""The conversion of each parameter."""
SAMPLING_RULES: param_rules.ParamRules = {
    name: param_rules.reject_unless(name, NO_SAMPLING, 1, 1.0)
    for name in ("temperature", "top_p", "top_k")
}
"""Parameters that only older versions of the API accept."""


def reconcile_body(body: param_rules.Members) -> param_rules.Members:
    """Return the body with the members adjusted that depend on each other."""
    choice: param_rules.Members = {"type": "auto", **(body.get("tool_choice") or {})}
    thinking: param_rules.Members = {"type": "adaptive", **(body.get("thinking") or {})}
    budget = thinking.get("budget_tokens")
    limit = DEFAULT_MAX_TOKENS + (budget if isinstance(budget, int) else 0)
    fit: param_rules.Members = {"max_tokens": body.get("max_tokens") or limit}
    if isinstance(budget, int) and budget >= fit["max_tokens"]:
        raise UnsupportedParameter(
            f"reasoning.budget_tokens {budget}",
            f"it must be smaller than max_output_tokens, which is {fit['max_tokens']}",
        )
    if "tool_choice" in body:
        idle = not body.get("tools") and choice["type"] in ("auto", "none")
        fit["tool_choice"] = None if idle else choice  # the API rejects it without tools
    if "thinking" in body:
        if budget is not None:
            thinking["type"] = "enabled"
        if thinking["type"] == "disabled":
            thinking.pop("display", None)
        fit["thinking"] = thinking
    return {**body, **fit}


COUNTED_MEMBERS = ("model", "messages", "system", "tools", "tool_choice", "thinking")
"""The members of a request that are sent to count its tokens."""


class AnthropicEngine(StatelessEngine):
    """An engine for the Messages API of Anthropic, or for another server of this API.

    Args:
        model: The model, unless a request names another.
        sampling: Whether the client requests a version of the API that accepts ``temperature``, ``top_p``
            and ``top_k``.
        cache_lifetime: The lifetime of cached prompts: ``5m`` or ``1h``.
        **settings: See ``EngineSettings``. With ``prompt_cache``, which is the default, up to four cache breakpoints
            are placed in each request.
    """

    name = "anthropic"
    prompt_cache = True
    decoder_type = AnthropicDecoder
    path = "/v1/messages"
    map_tool = staticmethod(map_tool)
    sdk: ClassVar[Sdk] = "anthropic"
    reasoning_errors = (400,), ("Invalid", "thinking")

    def __init__(
        self,
        model: str,
        *,
        sampling: bool = False,
        cache_lifetime: CacheLifetime = "5m",
        **settings: Any,
    ) -> None:
        super().__init__(model, **settings)
        self._cache_lifetime: CacheLifetime = cache_lifetime
        self._param_rules = PARAM_RULES if sampling else {**PARAM_RULES, **SAMPLING_RULES}

    async def count_tokens(self, turn: Turn, **options: Any) -> int:
        """Return how many tokens the server counts for this Turn."""
        body = self._build_body(self.plan(turn), Request.of(**options), self.params)
        body = {name: body[name] for name in COUNTED_MEMBERS if body.get(name) is not None}
        if body["messages"] and body["messages"][-1]["role"] == "assistant":
            # The API counts only requests that it could answer, so a short user message is added.
            body["messages"].append({"role": "user", "content": "."})
        answer = await self.transport.request_json("post", f"{self.path}/count_tokens", json=body)
        return self._read_token_count(answer)

    def _build_body(
        self, plan: RequestPlan, request: Request, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        body = self._start_body(render_messages(plan, self.name), request)
        if plan.instructions is not None:
            body["system"] = plan.instructions
        param_rules.merge(body, param_rules.map_params(params, self._param_rules))
        return reconcile_body(body)

    def _cache_rules(self, model: str, params: Mapping[str, Any]) -> CacheRules:
        return anthropic_rules(model, self._cache_lifetime)

    def _request_caching(self, body: dict[str, Any], plan: RequestPlan, cache: CachePlan) -> None:
        place_breakpoints(body, plan, self._cache_rules(body["model"], body))
