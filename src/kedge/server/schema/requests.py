"""The parameters of each endpoint, and the functions that validate requests, each raising the first ApiError.

The checks run in the order of the live API: ``model`` is present, ``input`` is present, no parameter is unknown, and
then every parameter in the order of its table: of two wrong ones the first one is reported. The order of the tables
is the observed one (moderation, include; input before the rest; tools, metadata, text, temperature, top_p, …, stream,
stream_options, background, …, truncation, instructions, store, service_tier, top_logprobs, context_management). Null is
accepted wherever the openai package or the Open Responses specification allows it.

References to stored objects are checked later, in ``prepare``: a conversation and a previous response exclude each
other, the conversation is found, there are no stored prompts, the previous response is found, there is input or
something to continue (``check_not_empty``), then coherence, then what the server supports.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, cast

from kedge._internal.json_text import encode
from kedge._internal.large_json import MAX_ITEMS, MAX_VALUES, TooManyValues, decode_strict
from kedge._internal.responsive import MANY_ITEMS
from kedge.server import errors
from kedge.server.object_forms import Item
from kedge.server.schema import validators as v
from kedge.server.schema.items import INPUT_PART, ITEM, ITEMS, NAME, TEXT, TOOL_CHOICE, TOOLS
from kedge.server.schema.json_schemas import check_schemas
from kedge.server.schema.tables import BOOLEAN, STRING, Rules

MOVED_PARAMETERS: Mapping[str, str] = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Parameters of Chat Completions that the live API recognizes, and their names in this API."""

MAX_ITEMS_PER_REQUEST = 20
"""The maximum number of items that one request adds to a conversation."""

INPUT = v.TypeUnion("one of a string or array of input items", {str: TEXT, list: ITEMS})
CONVERSATION = v.TypeUnion(
    "one of a string or object",
    {str: v.Identifier(max_length=256), dict: v.Object({"id!": v.Identifier(max_length=256)})},
)
NO_NULL = v.Rejected(errors.INVALID_TYPE, {"expected": "a string", "got": "an object"})
"""Null as a parameter for which the live API has this message."""
CONTEXT_MANAGEMENT = v.Object({"type!": STRING, "compact_threshold?": v.Integer(minimum=1000)})
SUMMARY = v.StringEnum("concise", "detailed", "auto")
PENALTY = v.Number(minimum=-2, maximum=2)
SHARED_TYPES: Mapping[str, v.Validator | v.Members] = {
    "*.metadata": v.Map(
        v.String(max_length=512), max_properties=16, max_key_length=64, expected="a metadata object"
    ),
    "*.temperature": v.Number(minimum=0, maximum=2),
    "*.top_p": v.Number(minimum=0, maximum=1),
    "*.presence_penalty": PENALTY,
    "*.frequency_penalty": PENALTY,
    "*.stream": BOOLEAN,
    "*.safety_identifier": v.String(max_length=128),
    "*.service_tier": v.StringEnum(
        "auto", "default", "fast", "flex", "priority", unlisted=("scale", "ultrafast")
    ),
    "*.top_logprobs": v.Integer(minimum=0, maximum=20),
}
"""The parameters that Chat Completions have as well."""

CREATE_RESPONSE = Rules(
    # The penalties are in the Open Responses specification, though not in the openai package.
    order={
        "create": (
            "moderation include model! input! previous_response_id conversation prompt tools? "
            "tool_choice? metadata text? temperature top_p presence_penalty? frequency_penalty? "
            "parallel_tool_calls stream? stream_options background max_output_tokens max_tool_calls "
            "reasoning user? safety_identifier prompt_cache_options? prompt_cache_key "
            "prompt_cache_retention truncation instructions store service_tier top_logprobs "
            "context_management image access_programs"
        ),
        "*.text": "format?",
        "*.text.format": "json_object text json_schema",
        "*.reasoning": "effort summary generate_summary context mode",
    },
    types={
        **SHARED_TYPES,
        "*.model": v.TypeUnion("a string", {str: STRING, NoneType: NO_NULL}),
        "*.input": v.TypeUnion(INPUT.expected, {**INPUT.by_type, NoneType: NO_NULL}),
        "*.previous_response_id": v.Identifier(max_length=256),
        "*.conversation": CONVERSATION,
        "*.prompt.variables": v.Map(
            v.TypeUnion("one of a string or object", {str: STRING, dict: INPUT_PART})
        ),
        "*.tools": TOOLS,
        "*.tool_choice": TOOL_CHOICE,
        "*.text.format.json_schema.name": NAME,
        "*.max_output_tokens": v.Integer(minimum=16),
        "*.max_tool_calls": v.Integer(minimum=1),
        "*.reasoning.summary": SUMMARY,
        "*.reasoning.generate_summary": SUMMARY,  # its former name
        "*.context_management": v.Array(CONTEXT_MANAGEMENT, min_length=1),
    },
).build("responses", "parameters")["create"]
"""``POST /v1/responses``."""
INCLUDE_VALUE = cast("v.Array", CREATE_RESPONSE["include?"]).item
INCLUDE = v.Array(INCLUDE_VALUE, of=INCLUDE_VALUE.expected)
CREATE_RESPONSE["include?"] = INCLUDE

SOCKET_CREATE: v.Members = {**CREATE_RESPONSE, "generate?": BOOLEAN}
"""``response.create`` on a WebSocket, without its type and its stream id."""


def select_parameters(names: str) -> v.Members:
    """Return parameters of ``POST /v1/responses`` in this order."""
    return {name: CREATE_RESPONSE[name] for name in names.split()}


INPUT_TOKENS: v.Members = {
    "model?": STRING,
    "input?": INPUT,
    **select_parameters(
        "previous_response_id? conversation? tools? tool_choice? text? parallel_tool_calls? "
        "reasoning? truncation? instructions?"
    ),
    "personality": v.String(max_length=64),
}
"""``POST /v1/responses/input_tokens``."""

COMPACT_RESPONSE: v.Members = {
    "model!?": STRING,
    "input?": INPUT,
    **select_parameters(
        "previous_response_id? instructions? prompt_cache_options? prompt_cache_key? "
        "prompt_cache_retention? service_tier? image"
    ),
}
"""``POST /v1/responses/compact``."""

NEW_ITEMS = v.Array(ITEM, of="input items", max_length=MAX_ITEMS_PER_REQUEST)

CONVERSATION_CREATE: v.Members = {"items?": NEW_ITEMS, **select_parameters("metadata?")}
"""``POST /v1/conversations``."""

CONVERSATION_UPDATE: v.Members = {"metadata!?": CREATE_RESPONSE["metadata?"]}
"""``POST /v1/conversations/{id}``."""

CONVERSATION_ITEMS: v.Members = {"items!": NEW_ITEMS, "include?": INCLUDE}
"""``POST /v1/conversations/{id}/items``."""


ToolParam = Mapping[str, Any]

TOOL_ITEM_TYPES = frozenset({"additional_tools", "tool_search_output"})
"""Types of items that define tools."""

TOOL_NAME_KEYS = {"function": "name", "custom": "name", "mcp": "server_label"}
"""The member by which a tool of this type is chosen; others are chosen by their type."""


def check_tool_choice(body: Mapping[str, Any], context: Sequence[Item]) -> None:
    """Reject a choice of a tool that neither the request nor an item of the context defines."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return
    offered = _OfferedTools(_flatten_namespaces(body.get("tools") or ()))
    if choice == "required":
        if not offered and not any(_iter_item_tools(context)):
            raise errors.TOOLS_MISSING()
        return
    chosen: Sequence[ToolParam] = [choice]
    if choice["type"] == "allowed_tools":
        chosen = choice["tools"]
    missing = [tool for tool in chosen if tool not in offered]
    if not missing:
        return
    in_context = _OfferedTools(_iter_item_tools(context))
    for tool in missing:
        if tool not in in_context:
            raise errors.TOOL_NOT_OFFERED(choice=tool.get(_get_name_key(tool)))


class _OfferedTools:
    """Tools by what a choice names: their name, or their type."""

    def __init__(self, tools: Iterable[ToolParam]) -> None:
        self._types: set[str] = set()
        self._names: set[tuple[str, object]] = set()
        for tool in tools:
            self._types.add(tool["type"])
            self._names.add((tool["type"], tool.get(_get_name_key(tool))))

    def __bool__(self) -> bool:
        return bool(self._types)

    def __contains__(self, choice: ToolParam) -> bool:
        chosen_type = str(choice.get("type"))
        key = _get_name_key(choice)
        if key != "type":
            return (chosen_type, choice.get(key)) in self._names
        # Versions of a tool share the beginning of their type: web_search_preview_2025_03_11.
        return any(
            chosen_type.startswith(offered_type) or offered_type.startswith(chosen_type)
            for offered_type in self._types
        )


def _get_name_key(tool: ToolParam) -> str:
    """Return the member by which a tool is chosen."""
    return TOOL_NAME_KEYS.get(str(tool.get("type")), "type")


def _iter_item_tools(context: Sequence[Item]) -> Iterator[ToolParam]:
    for item in context:
        if item.get("type") in TOOL_ITEM_TYPES:
            yield from _flatten_namespaces(item["tools"])


def _flatten_namespaces(tools: Sequence[ToolParam]) -> Iterator[ToolParam]:
    for tool in tools:
        if tool["type"] == "namespace":
            yield from tool["tools"]
        else:
            yield tool


def check_json_mentioned(
    body: Mapping[str, Any],
    context: Sequence[Item],
    error: errors.ErrorTemplate = errors.JSON_NOT_MENTIONED,
) -> None:
    """Reject the format ``json_object`` if no item of the context mentions JSON; instructions do not count."""
    text_format = v.get_object(v.get_object(body, "text"), "format")
    if text_format.get("type") == "json_object" and not any(
        b"json" in encode(item).lower() for item in context
    ):
        raise error()


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse a request body as a JSON object; reject NaN, invalid UTF-8, too deep nesting and too many items.

    Of two equal keys the last one is used.
    """
    try:
        body = decode_strict(raw)
    except TooManyValues:
        raise errors.TOO_MANY_VALUES(most=MAX_VALUES, items=MAX_ITEMS) from None
    except (ValueError, RecursionError):
        # ValueError covers invalid UTF-8, invalid JSON and integers of thousands of digits.
        raise errors.INVALID_JSON() from None
    if type(body) is not dict:
        raise errors.BODY_NOT_OBJECT(got=v.describe_json_type(body))
    members = cast("dict[str, Any]", body)
    for name, value in members.items():
        if isinstance(value, list):
            v.check_length(cast("list[Any]", value), (None, name))
    return members


def has_many_items(body: Mapping[str, Any]) -> bool:
    """Return whether a body has a list of many items."""
    lists = (cast("list[Any]", value) for value in body.values() if isinstance(value, list))
    return any(len(items) > MANY_ITEMS for items in lists)


class RequestSchema(v.Object):
    """The body of one endpoint: its parameters, and the parameters that were moved.

    ``legacy`` parameters are not supported and never ignored, because the answer would be wrong without them.
    """

    def __init__(
        self, table: v.Members, moved: Mapping[str, str] | None = None, legacy: Sequence[str] = ()
    ) -> None:
        super().__init__(table)
        self.moved = moved or {}
        self.legacy = legacy

    def check_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """Check for missing and unknown parameters, then each parameter in order."""
        self.check(body, None)
        return body

    def missing_error(
        self, name: str, members: Mapping[str, Any], path: v.JsonPath
    ) -> errors.ApiError:
        """Build the error of a missing parameter, which may have its old name."""
        for old, new in self.moved.items():
            if new == name and old in members:
                return errors.MOVED_PARAMETER(path=old, to=new)
        return v.Object.missing_error(self, name, members, path)

    def check_unknown(self, members: dict[str, Any], path: v.JsonPath) -> None:
        """Reject an unknown parameter, unless unknown parameters are ignored."""
        for name in members:
            is_ignored = v.is_ignoring_unknown() and name not in (*self.moved, *self.legacy)
            if name not in self.members and not is_ignored:
                raise self._unknown_error(name, members)
        v.Object.check_unknown(self, members, path)

    def _unknown_error(self, name: str, body: Mapping[str, Any]) -> errors.ApiError:
        if name in self.moved:
            return errors.MOVED_PARAMETER(path=name, to=self.moved[name])
        near = find_similar(name, [other for other in self.members if other not in body])
        if near:
            suggestion = " or ".join(f"'{other}'" for other in near)
            return errors.UNKNOWN_WITH_SUGGESTION(path=name, suggestion=suggestion)
        return errors.UNKNOWN_PARAMETER(path=name)


CREATE = RequestSchema(CREATE_RESPONSE, moved=MOVED_PARAMETERS)
_SOCKET_CREATE = RequestSchema(SOCKET_CREATE, moved=MOVED_PARAMETERS)
check_input_tokens = RequestSchema(INPUT_TOKENS).check_body
check_compact = RequestSchema(COMPACT_RESPONSE).check_body
check_conversation_create = RequestSchema(CONVERSATION_CREATE).check_body
check_conversation_update = RequestSchema(CONVERSATION_UPDATE).check_body
check_conversation_items = RequestSchema(CONVERSATION_ITEMS).check_body


def check_create(body: dict[str, Any], *, on_socket: bool = False) -> None:
    """Check a request to ``POST /v1/responses``, or the same request as a WebSocket message."""
    schema = _SOCKET_CREATE if on_socket else CREATE
    fields = schema.check_body(body)
    for entry in fields.get("context_management") or ():
        if entry["type"] != "compaction":
            raise errors.CONTEXT_MANAGEMENT_UNSUPPORTED(type=entry["type"])
    check_schemas(fields)


def check_not_empty(body: Mapping[str, Any]) -> None:
    """Reject a request with neither input nor anything to continue."""
    if body.get("input"):
        return
    if body.get("previous_response_id") is None and body.get("conversation") is None:
        raise errors.INPUT_REQUIRED()


MAX_DISTANCE = 2


def find_similar(name: str, candidates: Sequence[str]) -> list[str]:
    """Return at most two names with at most two edits from this one, the nearest first."""
    distances = {candidate: edit_distance(name, candidate) for candidate in candidates}
    near = [candidate for candidate in candidates if distances[candidate] <= MAX_DISTANCE]
    return sorted(near, key=distances.__getitem__)[:2]


def edit_distance(one: str, other: str) -> int:
    """Count the insertions, deletions and substitutions between two names (up to three)."""
    if abs(len(one) - len(other)) > MAX_DISTANCE:
        return MAX_DISTANCE + 1
    # Each row has the distances of a beginning of one name from all beginnings of the other name.
    row = list(range(len(other) + 1))
    for number, char in enumerate(one, start=1):
        above = row
        row = [number]
        for column, other_char in enumerate(other, start=1):
            deleted = above[column] + 1
            inserted = row[-1] + 1
            substituted = above[column - 1] + (char != other_char)
            row.append(min(deleted, inserted, substituted))
    return row[-1]
