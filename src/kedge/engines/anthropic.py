"""AnthropicEngine: the Messages API of Anthropic.

Messages alternate: output of the model is one assistant message, its input one user message with the
results first. Leading system text is a separate member. A later system block is a separate message
after the user's message, where this API accepts one (since Claude Opus 4.8; older models reject it). A
system block that is not next to a user block cannot be expressed.

Reasoning is sent only with its signature, and only where the plan proves it.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from kedge import turns
from kedge._internal.json_schema import has_type, is_open_ended, map_subschemas
from kedge.engines import param_rules
from kedge.engines.param_rules import STATELESS_PARAMS, Members, ParamRule, ParamRules
from kedge.engines.params import Params
from kedge.engines.prompt_cache import CacheLifetime, anthropic_rules, place_breakpoints
from kedge.engines.request import Request
from kedge.engines.stateless import Inputs, Message, MessageRenderer, Results, StatelessEngine
from kedge.engines.transport import Sdk
from kedge.errors import UnsupportedBlock, UnsupportedParameter
from kedge.planning import CachePlan, CacheRules, RequestPlan
from kedge.planning.digests import CITATIONS
from kedge.turns import Turn
from kedge.turns.attachments import split_data_url
from kedge.turns.frozen_json import thaw
from kedge.turns.server_fields import NATIVE_KEY
from kedge.wire.anthropic import REDACTED_REASONING, AnthropicDecoder

CALL_ID_PATTERN = r"[a-zA-Z0-9_-]+"
"""The call ids that the API accepts. Each may be used only once; other ids are replaced."""
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
FILE_TYPES = ("application/pdf",)
NATIVE_PART_TYPES = ("document", "search_result", "container_upload", "image", "text")
"""Parts of the user's content that may be passed in the form of this API."""


NATIVE_TYPES = ("server_tool_use", "mcp_tool_use", *NATIVE_PART_TYPES)


def render_messages(plan: RequestPlan, provider: str) -> list[Message]:
    """Return the messages of a plan; a block that cannot be expressed raises ``UnsupportedBlock``."""
    return _AnthropicRenderer(provider, CALL_ID_PATTERN).render(plan)


class _AnthropicRenderer(MessageRenderer):
    has_unique_ids = True

    def _render_assistant(self, blocks: Sequence[turns.Block]) -> list[Message]:
        content: list[Members] = []
        for block in blocks:
            match block:
                case turns.AssistantBlock():
                    parts = filter(_has_content, block.parts)
                    content += [self._render_output_part(part, block) for part in parts]
                case turns.ToolCallBlock():
                    content.append(self._render_call(block))
                case turns.ReasoningBlock():
                    content.append(_render_reasoning(block))
                case turns.OpaqueBlock():
                    content.append(self._render_native(block))
                case _:
                    pass
        if not content:
            return []
        return [{"role": "assistant", "content": content}]

    def _render_user(self, results: Results, inputs: Inputs) -> list[Message]:
        content = [self._render_result(block) for block in results]
        for block in inputs:
            if isinstance(block, turns.UserBlock):
                parts = self._render_input_parts(block)
                if not parts:
                    raise self._reject(block, "give it text", "it is empty")
                content += parts
        if not content:
            remedy = "move it directly before or after a user block"
            raise self._reject(inputs[0], remedy, "it is not beside a user block")
        messages: list[Message] = [{"role": "user", "content": content}]
        texts = [block.text for block in inputs if isinstance(block, turns.SystemBlock)]
        if texts:
            messages.append({"role": "system", "content": "\n\n".join(texts)})
        return messages

    def _render_call(self, block: turns.ToolCallBlock) -> Members:
        return {
            "type": "tool_use",
            "id": self._assign_id(block),
            "name": block.name,
            "input": self._parse_arguments(block),
            **_get_native_members(block),
        }

    def _parse_arguments(self, block: turns.ToolCallBlock) -> Members:
        value: object
        try:
            value = json.loads(block.arguments.strip() or "{}")
            json.dumps(value, allow_nan=False)
        except ValueError:
            value = None
        if isinstance(value, dict) and not block.custom:
            return cast("Members", value)
        remedy = "correct the arguments, or remove the call and its result"
        raise self._reject(block, remedy, "its arguments are not a JSON object")

    def _render_native(self, block: turns.OpaqueBlock) -> Members:
        """Convert a block of a kind that only this API has: one of its own answers, or of a known type."""
        is_native = block.metadata.get(turns.NATIVE_API) == NATIVE_KEY
        is_known = block.type in NATIVE_TYPES or block.type.endswith("_tool_result")
        is_summary = block.type == "compaction" and "encrypted_content" not in block.item
        if is_native or is_known or is_summary:
            return thaw(block.item)
        raise self._reject(block, "remove it or write it as text")

    def _render_result(self, block: turns.ToolResultBlock) -> Members:
        content: str | list[Members] = block.text
        if len(block.parts) != 1 or not isinstance(block.parts[0], turns.TextPart):
            content = self._render_input_parts(block)
        call_id = self._resolve_id(block)
        return {"type": "tool_result", "tool_use_id": call_id, "content": content}

    def _render_input_parts(self, block: turns.UserBlock | turns.ToolResultBlock) -> list[Members]:
        parts = filter(_has_content, block.parts)
        return [self._render_input_part(part, block) for part in parts]

    def _render_output_part(self, part: turns.Part, block: turns.Block) -> Members:
        match part:
            case turns.TextPart():
                return {"type": "text", "text": part.text, **_render_citations(part)}
            case turns.RefusalPart():  # this API can express a refusal only as text
                return {"type": "text", "text": part.text}
            case _:
                raise self._reject(block, "write it as text")

    def _render_input_part(self, part: turns.Part, block: turns.Block) -> Members:
        match part:
            case turns.TextPart():
                return {"type": "text", "text": part.text}
            case turns.ImagePart():
                return {"type": "image", "source": self._render_source(part, block)}
            case turns.FilePart():
                document = {"type": "document", "source": self._render_source(part, block)}
                if part.filename:
                    document["title"] = part.filename
                return document
            case turns.OpaquePart() if part.content.get("type") in NATIVE_PART_TYPES:
                return thaw(part.content)
            case _:
                raise self._reject_part(block, "it contains a part of another API")

    def _render_source(self, part: turns.ImagePart | turns.FilePart, block: turns.Block) -> Members:
        if part.file_id:
            return {"type": "file", "file_id": part.file_id}
        if isinstance(part, turns.ImagePart):
            return self._render_image_source(part, block)
        return self._render_file_source(part, block)

    def _render_image_source(self, part: turns.ImagePart, block: turns.Block) -> Members:
        if part.url and not part.url.startswith("data:"):
            return {"type": "url", "url": part.url}
        media_type, data = split_data_url(part.url)
        if media_type not in IMAGE_TYPES:
            detail = f"it contains an image of type {media_type or 'unknown'}"
            raise self._reject_part(block, detail)
        return {"type": "base64", "media_type": media_type, "data": data}

    def _render_file_source(self, part: turns.FilePart, block: turns.Block) -> Members:
        if part.url:
            return {"type": "url", "url": part.url}
        media_type, data = split_data_url(part.data)
        if media_type in FILE_TYPES:
            return {"type": "base64", "media_type": media_type, "data": data}
        if not media_type.startswith("text/"):
            detail = f"it contains a file of type {media_type or 'unknown'}"
            raise self._reject_part(block, detail)
        try:
            text = base64.b64decode("".join(data.split()), validate=True).decode()
        except ValueError:  # not base64, or not UTF-8
            detail = "it contains a text file that cannot be decoded"
            raise self._reject_part(block, detail) from None
        return {"type": "text", "media_type": "text/plain", "data": text}

    def _reject_part(self, block: turns.Block, detail: str) -> UnsupportedBlock:
        return self._reject(block, "remove that part", detail)


def _render_reasoning(block: turns.ReasoningBlock) -> Members:
    if _get_native_item(block) == REDACTED_REASONING:
        return {"type": "redacted_thinking", "data": block.encrypted_content}
    text = "".join(block.texts)
    return {"type": "thinking", "thinking": text, "signature": block.encrypted_content}


def _get_native_members(block: turns.Block) -> Members:
    """Return the fields of a call that only this API has."""
    item = _get_native_item(block)
    if not isinstance(item, turns.FrozenMap):
        return {}
    return thaw(item)


def _get_native_item(block: turns.Block) -> object:
    item = block.extra.get("item")
    if not isinstance(item, turns.FrozenMap):
        return None
    return item.get(NATIVE_KEY)


def _render_citations(part: turns.TextPart) -> Members:
    citations = part.extra.get(CITATIONS)
    if not isinstance(citations, tuple):
        return {}
    return {CITATIONS: thaw(citations)}


def _has_content(part: turns.Part) -> bool:
    """Return whether a part is not empty: this API rejects empty text."""
    return not isinstance(part, turns.TextPart) or bool(part.text.strip())


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
