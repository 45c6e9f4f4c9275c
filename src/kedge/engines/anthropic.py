"""AnthropicEngine: an engine for Anthropic's Messages API."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from kedge._internal.json_schema import has_type, is_open_ended, map_subschemas
from kedge.engines import param_rules
from kedge.engines.param_rules import STATELESS_PARAMS, Members, ParamRule, ParamRules
from kedge.engines.params import Params
from kedge.engines.prompt_cache import CacheLifetime, anthropic_rules, place_breakpoints
from kedge.engines.request import Request
from kedge.engines.stateless import StatelessEngine
from kedge.engines.transport import Sdk
from kedge.errors import UnsupportedParameter
from kedge.planning import CachePlan, CacheRules, RequestPlan
from kedge.turns import Turn
from kedge.wire.anthropic import AnthropicDecoder
from kedge.wire.anthropic_renderer import render_messages

DEFAULT_MAX_TOKENS = 16_384
"""The default output limit: this API requires one. All models since Claude 4 allow it."""

UNSUPPORTED_LIMITS = (
    "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum",
    "multipleOf", "uniqueItems",
)  # fmt: skip
"""Constraints that this API does not accept in a schema; of ``minItems`` it accepts 0 and 1."""
NO_SAMPLING = (
    "the newest version of the API has no sampling parameters; omit it, or request an older version with "
    "default_headers={'anthropic-version': '2023-06-01'}"
)
NO_SAMPLING_VERSION = "2026-10-21"
"""The version of the API that no longer accepts sampling parameters."""


def map_tool(definition: Mapping[str, Any]) -> Members:
    """Convert a function of the Responses API; a tool in the form of this API is sent unchanged."""
    match definition.get("type"):
        case "function":
            converted = param_rules.omit(definition, "type", "parameters", "strict")
            converted["input_schema"] = definition.get("parameters") or {"type": "object"}
            if definition.get("strict"):
                converted["strict"] = True
            return converted
        case "custom" if "input_schema" not in definition:
            name = definition.get("name")
            raise UnsupportedParameter(f"the free-form tool {name!r}", "define it as a function")
        case _:
            return dict(definition)


def _map_choice(kind: str) -> ParamRule:
    return lambda _: {"tool_choice": {"type": kind}}


def _map_named_choice(choice: Mapping[str, Any]) -> Members:
    return {"tool_choice": {"type": "tool", "name": choice.get("name")}}


def _map_format(text_format: Mapping[str, Any]) -> Members:
    schema = map_schema(text_format.get("schema") or {})
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def map_schema(schema: Members) -> Members:
    """Return a schema in the subset that this API enforces.

    A constraint that it rejects becomes part of the description, so that the model knows it.

    Raises:
        UnsupportedParameter: An object has arbitrary member names.
    """
    limits = {key: schema[key] for key in schema if key in UNSUPPORTED_LIMITS}
    if schema.get("minItems") in (0, 1):
        limits.pop("minItems", None)
    mapped: Members = {key: value for key, value in schema.items() if key not in limits}
    if limits:
        described = json.dumps(limits, ensure_ascii=False)
        mapped["description"] = f"{schema.get('description', '')} {described}".strip()
    if has_type(mapped, "object"):
        if is_open_ended(mapped):
            remedy = "use objects whose members have names, such as a list of pairs"
            raise UnsupportedParameter("text.format", remedy)
        mapped["additionalProperties"] = False
    if "oneOf" in mapped:
        mapped["anyOf"] = mapped.pop("oneOf")
    return map_subschemas(mapped, map_schema)


def _map_effort(effort: Any) -> Members:
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    if effort == "minimal":
        effort = "low"
    return {"output_config": {"effort": effort}, "thinking": {"type": "adaptive"}}


def _map_budget(tokens: Any) -> Members:
    return {"thinking": {"type": "enabled", "budget_tokens": tokens}}


def _map_metadata(metadata: Any) -> Members:
    for name in sorted(set(metadata) - {"user_id"}):
        raise UnsupportedParameter(f"metadata.{name}", "only user_id is accepted, so omit it")
    return {"metadata": dict(metadata)}


_NO_JSON = "pass a schema: {'type': 'json_schema', 'schema': …}"
_NO_VERBOSITY = "request it in a system block"
_CHOICES: ParamRules = {
    "auto": _map_choice("auto"),
    "none": _map_choice("none"),
    "required": _map_choice("any"),
    "function": _map_named_choice,
    "any": param_rules.rename("tool_choice"),
    "tool": param_rules.rename("tool_choice"),
}
_FORMATS: ParamRules = {
    "text": lambda _: {},
    "json_schema": _map_format,
    "json_object": param_rules.reject_unless("text.format 'json_object'", _NO_JSON),
}
_REASONING: ParamRules = {
    "effort": _map_effort,
    "budget_tokens": _map_budget,
    "max_tokens": _map_budget,
    "summary": lambda _: {"thinking": {"display": "summarized"}},
}


def _map_parallel_calls(allowed: Any) -> Members:
    if allowed:
        return {}
    return {"tool_choice": {"disable_parallel_tool_use": True}}


def _map_stop(stop: Any) -> Members:
    sequences: list[Any] = [stop]
    if not isinstance(stop, str):
        sequences = list(stop)
    return {"stop_sequences": sequences}


PARAM_RULES: ParamRules = {
    **param_rules.STATELESS_RULES,
    "max_output_tokens": param_rules.rename("max_tokens"),
    "tool_choice": param_rules.map_by_type("tool_choice", _CHOICES),
    "parallel_tool_calls": _map_parallel_calls,
    "text": param_rules.map_members(
        "text",
        {
            "format": param_rules.map_by_type("text.format", _FORMATS),
            "verbosity": param_rules.reject_unless("text.verbosity", _NO_VERBOSITY, "medium"),
        },
    ),
    "reasoning": param_rules.map_members("reasoning", _REASONING),
    "stop": _map_stop,
    "metadata": _map_metadata,
    "user": lambda user: {"metadata": {"user_id": user}},
    "safety_identifier": lambda user: {"metadata": {"user_id": user}},
    "store": param_rules.reject_unless("store", param_rules.NO_SERVER_STATE, False),
    "include": param_rules.reject_unless("include", param_rules.NO_SERVER_STATE, [], ()),
    "top_logprobs": param_rules.reject_unless("top_logprobs", "leave it out", 0),
}
"""The conversion of each parameter."""
SAMPLING_RULES: ParamRules = {
    name: param_rules.reject_unless(name, NO_SAMPLING, 1, 1.0)
    for name in ("temperature", "top_p", "top_k")
}
"""Parameters that only older versions of the API accept."""


def reconcile_body(body: Members) -> Members:
    """Return the body with the members adjusted that depend on each other."""
    choice: Members = {"type": "auto", **(body.get("tool_choice") or {})}
    thinking: Members = {"type": "adaptive", **(body.get("thinking") or {})}
    budget = thinking.get("budget_tokens")
    max_tokens = body.get("max_tokens")
    if not max_tokens:
        max_tokens = DEFAULT_MAX_TOKENS
        if isinstance(budget, int):
            max_tokens += budget
    if isinstance(budget, int) and budget >= max_tokens:
        remedy = f"it must be smaller than max_output_tokens, which is {max_tokens}"
        raise UnsupportedParameter(f"reasoning.budget_tokens {budget}", remedy)
    reconciled: Members = {**body, "max_tokens": max_tokens}
    if "tool_choice" in body:
        reconciled["tool_choice"] = choice
        if not body.get("tools") and choice["type"] in ("auto", "none"):
            reconciled["tool_choice"] = None  # the API rejects it without tools
    if "thinking" in body:
        if budget is not None:
            thinking["type"] = "enabled"
        if thinking["type"] == "disabled":
            thinking.pop("display", None)
        reconciled["thinking"] = thinking
    return reconciled


COUNTED_MEMBERS = ("model", "messages", "system", "tools", "tool_choice", "thinking")
"""The members of a request that are sent to count its tokens."""


FOREIGN_PARAMS = frozenset(
    {
        *STATELESS_PARAMS,
        *(
            "frequency_penalty",
            "logit_bias",
            "logprobs",
            "max_completion_tokens",
            "moderation",
            "n",
        ),
        *("presence_penalty", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort"),
        *("response_format", "seed", "store", "stream_options", "top_logprobs", "verbosity"),
    }
)
"""Parameters of Responses and Chat Completions that the Messages API rejects."""


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
    foreign_params = FOREIGN_PARAMS
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
        self._param_rules = PARAM_RULES
        if not sampling:
            self._param_rules = {**PARAM_RULES, **SAMPLING_RULES}
            self.foreign_params = FOREIGN_PARAMS | SAMPLING_RULES.keys()

    async def count_tokens(self, turn: Turn, **options: Any) -> int:
        """Return how many tokens the server counts for this Turn."""
        body = self._build_body(self.plan(turn), Request.of(**options), self.params)
        body = {name: body[name] for name in COUNTED_MEMBERS if body.get(name) is not None}
        if body["messages"] and body["messages"][-1]["role"] == "assistant":
            # The API counts only requests that it could answer, so a short user message is added.
            body["messages"].append({"role": "user", "content": "."})
        answer = await self.transport.request_json("post", f"{self.path}/count_tokens", json=body)
        return self._read_token_count(answer)

    def _build_body(self, plan: RequestPlan, request: Request, params: Params) -> Members:
        body = self._start_body(render_messages(plan, self.name), request)
        if plan.instructions is not None:
            body["system"] = plan.instructions
        param_rules.merge(body, param_rules.map_params(params, self._param_rules))
        return reconcile_body(body)

    def _cache_rules(self, model: str, params: Params) -> CacheRules:
        return anthropic_rules(model, self._cache_lifetime)

    def _request_caching(self, body: Members, plan: RequestPlan, cache: CachePlan) -> None:
        place_breakpoints(body, plan, self._cache_rules(body["model"], body))
