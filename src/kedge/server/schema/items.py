"""Content parts, tools, and items of a conversation: messages, calls and their outputs.

Members follow the types of the openai package, the types of items and the part types of each role the live API. The
error of an unknown part type depends on the type, as observed: for a type that exists nowhere it names
``content[0].type`` and lists all types, for a type that is valid elsewhere it names ``content[0]`` and
lists the types that are valid here.

This server executes no hosted tool, but a request with one is valid, and a conversation that was started with another
server may contain its calls, so each is checked as strictly as the rest. ``coherence`` pairs outputs with calls.

An item without a type is a message or, if it has only an id, a reference to another item. Item ids are optional if a
replay may omit them; they are required if they are the only key that connects two items.
"""

from collections.abc import Mapping
from re import compile as pattern
from typing import Any, cast

from kedge.server.object_forms import ID_PREFIXES
from kedge.server.schema import validators as v
from kedge.server.schema.tables import ANY_OBJECT, STRING, Rules

MAX_TEXT_LENGTH = 10_485_760
"""The maximum length of one text, in characters, as published and observed."""
TEXT = v.String(max_length=MAX_TEXT_LENGTH)
NAME = v.String(min_length=1, max_length=128, pattern=pattern("^[a-zA-Z0-9_-]+$"))
CALL_ID = v.String(min_length=1, max_length=64)

PART_TYPES = (
    "input_text",
    "input_image",
    "input_audio",
    "output_text",
    "refusal",
    "input_file",
    "computer_screenshot",
    "summary_text",
    "encrypted_content",
)
"""Every part type, in the order of the live API."""

PARTS: Mapping[str, v.Validator | v.Members] = {
    **Rules(
        order={
            "input_file": "detail?",
            "output_text": "text! annotations? logprobs? parsed~",
            "output_text.annotations.file_citation": "file_id filename- index",
            "output_text.annotations.url_citation": "start_index end_index title- url",
            "output_text.annotations.container_file_citation": (
                "container_id file_id filename- start_index- end_index-"
            ),
            "output_text.annotations.file_path": "file_id index-",
            "output_text.logprobs": "token bytes? logprob top_logprobs-",
            "output_text.logprobs.top_logprobs": "token bytes? logprob",
        },
        types={"input_text.text": TEXT, "output_text.parsed": v.AnyJson()},
    ).build("responses", "content"),
    # The live API lists this part, but its members are not published.
    "scoped_content": ANY_OBJECT,
    "input_audio": {"input_audio!": {"data!": STRING, "format!": v.StringEnum("mp3", "wav")}},
}


def content_part(*types: str) -> v.TaggedUnion:
    """Build the schema of a content part of one of these types."""
    return v.TaggedUnion({type: PARTS[type] for type in types}, all_tags=PART_TYPES)


INPUT_PART = content_part(
    "input_text", "input_image", "input_file", "scoped_content", "input_audio"
)
OUTPUT_PART = content_part("output_text", "refusal")
TOOL_PART = content_part("input_text", "input_image", "input_file")
AGENT_PART = content_part("input_text", "input_image", "encrypted_content")

TEXT_OR_OBJECTS = "one of an array of objects or string"

INPUT_CONTENT = v.TypeUnion(TEXT_OR_OBJECTS, {str: TEXT, list: v.Array(INPUT_PART)})
OUTPUT_CONTENT = v.TypeUnion(TEXT_OR_OBJECTS, {str: TEXT, list: v.Array(OUTPUT_PART)})
TOOL_OUTPUT = v.TypeUnion(TEXT_OR_OBJECTS, {str: TEXT, list: v.Array(TOOL_PART)})

TOOL_TABLES = Rules(
    order={
        "function": "name description? parameters? strict? async allowed_callers defer_loading",
        "custom": "name description format async",
        "mcp": (
            "server_label server_url server_description connector_id tunnel_id authorization headers "
            "allowed_callers allowed_tools require_approval"
        ),
        "namespace": "name description",
        "shell": "environment",
        "*.environment.container_auto.skills.inline": "name description",
        "*.environment.local.skills": "name description",
        "web_search.user_location": "type",
        "web_search_2025_08_26.user_location": "type",
    },
    types={
        "function.name": NAME,
        "custom.name": NAME,
        # A compound filter contains filters: only its nesting is bounded.
        "*.max_num_results": v.Integer(minimum=1, maximum=50),
        "*.ranking_options.score_threshold": v.Number(minimum=0, maximum=1),
        "*.display_height": v.Integer(minimum=1),
        "*.display_width": v.Integer(minimum=1),
        "*.frame_count": v.Integer(minimum=1),
        "*.frame_duration_ms": v.Integer(minimum=1),
        "*.output_compression": v.Integer(minimum=0, maximum=100),
        "*.partial_images": v.Integer(minimum=0, maximum=3),
        "*.headers": ANY_OBJECT,
        "tool_search.parameters": ANY_OBJECT,
    },
    expected={
        "code_interpreter.container": "one of a string or object",
        "mcp.allowed_tools": "one of an array of strings or object",
        "mcp.require_approval": "one of an object or 'always' or 'never'",
    },
).build("responses", "tools")

TOOL_TABLES["namespace"]["tools!"] = v.Array(
    v.TaggedUnion({type: TOOL_TABLES[type] for type in ("function", "custom")})
)
for tool_type in ("web_search_preview", "web_search_preview_2025_03_11"):
    TOOL_TABLES[tool_type]["user_location?"] = TOOL_TABLES["web_search"]["user_location?"]
TOOL = v.TaggedUnion(TOOL_TABLES, expected="a tool")
TOOLS = v.Array(TOOL, of="tools")

FIRST_CHOICES = ("allowed_tools", "function", "custom", "mcp")
"""The first types of ``tool_choice`` in the list of an error."""
CHOICE_TABLES = Rules().build("responses", "tool_choices")
TOOL_CHOICE = v.TypeUnion(
    "one of an object or 'none', 'auto', or 'required'",
    {
        str: v.StringEnum("none", "auto", "required"),
        dict: v.TaggedUnion(
            {type: CHOICE_TABLES[type] for type in (*FIRST_CHOICES, *CHOICE_TABLES)}
        ),
    },
)

STATUS = v.StringEnum("in_progress", "completed", "incomplete")
ITEM_TABLES = Rules(
    order={
        "*": "id call_id name path",
        "agent_message": "id author recipient content agent",
        "apply_patch_call": "id call_id operation caller status",
        "apply_patch_call_output": "id call_id output caller status",
        "code_interpreter_call": "id!? code? container_id outputs?",
        "computer_call": "id? call_id action? actions? pending_safety_checks status?",
        "*.action.double_click": "x y keys?",
        "*.actions.double_click": "x y keys?",
        "custom_tool_call": "id? call_id name input namespace? async? async_~ caller status?",
        "custom_tool_call_output": "id? call_id output caller status?",
        "file_search_call": "id!?",
        "function_call": (
            "id? call_id name arguments parsed_arguments~ namespace? async? async_~ caller status?"
        ),
        "function_call_output": "id call_id! output name namespace caller status",
        "image_generation_call": "id!? result? status- error? svg_usage?",
        "image_generation_call.error": "type code? message param?",
        "*.svg_usage": "model- input_tokens- output_tokens- reasoning_tokens- total_tokens-",
        "local_shell_call": "id? call_id action status!?",
        "mcp_approval_request": "id!? server_label name arguments",
        "mcp_call": "id!? server_label name arguments approval_request_id output error status?",
        "mcp_list_tools": "id!? server_label tools",
        "program": "id!?",
        "program_output": "id!?",
        # The live API sends a status with reasoning items and rejects it as input.
        "reasoning": "status~ id? summary content? encrypted_content",
        "shell_call": "id call_id action environment caller status",
        "shell_call_output": "id call_id output max_output_length caller status",
        "shell_call_output.output": "stdout stderr outcome",
        "*.environment.local.skills": "name description",
        "web_search_call": "id? action? status-",
        "*.action.search": "query queries",
    },
    types={
        "*.call_id": CALL_ID,
        "function_call.name": NAME,
        "*.parsed_arguments": v.AnyJson(),
        "*.async_": v.Rejected(),
        "custom_tool_call.status": STATUS,
        "custom_tool_call_output.status": STATUS,
        "reasoning.status": v.Rejected(),
        "local_shell_call_output.id": CALL_ID,
        "mcp_approval_response.approval_request_id": v.Identifier(),
        "*.results.attributes": ANY_OBJECT,
        "*.text.format.json_schema.name": NAME,
        "*.action.search.sources": v.Array(v.Object({"type!": STRING, "url!": STRING})),
        "multi_agent_call_output.output": v.Array(content_part("output_text")),
        "computer_call_output.output": v.Object(
            {"type!": v.StringEnum("computer_screenshot"), "file_id": STRING, "image_url": STRING}
        ),
        "custom_tool_call_output.output": TOOL_OUTPUT,
        "function_call_output.output": TOOL_OUTPUT,
        "agent_message.content": v.Array(AGENT_PART),
        "additional_tools.tools": TOOLS,
        "tool_search_output.tools": TOOLS,
    }
    | {f"{type}.id": v.Identifier(prefix=prefix) for type, prefix in ID_PREFIXES.items()}
    | {"*.id": v.Identifier()},
).build("responses", "items")
ITEM_TABLES["mcp_call"]["error?"] = v.TypeUnion(
    "one of an object or string",
    {str: STRING, dict: v.as_validator(ITEM_TABLES["mcp_call"]["error?"])},
)

INPUT_MESSAGE: v.Members = {
    "type": STRING,
    "id?": v.Identifier(prefix=ID_PREFIXES["message"]),
    "content!": INPUT_CONTENT,
    "status?": STATUS,
}
ASSISTANT_MESSAGE = INPUT_MESSAGE | {
    "content!": OUTPUT_CONTENT,
    "phase?": v.StringEnum("commentary", "final_answer"),
}
MESSAGE = v.TaggedUnion(
    {
        "assistant": ASSISTANT_MESSAGE,
        **dict.fromkeys(("system", "developer", "user"), INPUT_MESSAGE | {"phase~": v.Rejected()}),
    },
    tag="role",
    error_on_object=True,
)
ITEM_REFERENCE = v.Object({"type?": STRING, "id!": v.Identifier()})
SDK_MEMBERS: v.Members = {"created_by~": STRING}
ITEM_TYPES: Mapping[str, v.Validator | v.Members] = dict(
    sorted(
        {
            **{type: table | SDK_MEMBERS for type, table in ITEM_TABLES.items()},
            "message": MESSAGE,
            "item_reference": ITEM_REFERENCE,
        }.items()
    )
)
"""Every item type, in the order of the live API's own list."""


class InputItem(v.TaggedUnion):
    """An item of the type that it names; without a type, a message or a reference."""

    def check(self, value: Any, path: v.JsonPath) -> None:
        """Find the item's type and check its members."""
        item = cast("dict[str, Any]", value)
        if type(value) is not dict or item.get("type") is not None:
            v.TaggedUnion.check(self, value, path)
        elif "id" in item and item.keys() <= {"type", "id"}:
            ITEM_REFERENCE.check(item, path)
        else:
            MESSAGE.check(item, path)


ITEM = InputItem(
    ITEM_TYPES,
    error_on_object=True,
    # In the openai package, but not in the live API's list.
    unlisted=("configuration_update",),
    expected="an input item",
)
ITEMS = v.Array(ITEM, of="input items")
