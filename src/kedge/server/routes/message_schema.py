"""Parameters of ``POST /v1/messages``, as in the anthropic package and the live API.

Tools that run at the provider, their calls and their results are accepted as they are. The models of this server
do not have them.
"""

from collections.abc import Mapping
from re import compile as pattern

from kedge.server.schema.tables import (
    ANY_OBJECT,
    BOOLEAN,
    STRING,
    STRING_ARRAY,
    Rules,
    list_opaque,
)
from kedge.server.schema.validators import (
    Array,
    Integer,
    Members,
    Number,
    Object,
    String,
    StringEnum,
    TaggedUnion,
    TypeUnion,
    Validator,
)

NAME = String(min_length=1, max_length=128, pattern=pattern("^[a-zA-Z0-9_-]{1,128}$"))
MIN_THINKING_BUDGET = 1024
THINKING_TYPES = ("thinking", "redacted_thinking")

CACHE_CONTROL = Object({"type!": StringEnum("ephemeral"), "ttl": StringEnum("5m", "1h")})
CALL_ID = String(min_length=1, pattern=pattern("^[a-zA-Z0-9_-]+$"))


ORDER: Mapping[str, str] = {
    "*": "cache_control media_type",
    "search_result": "cache_control source title content citations?",
    "tool_use": "cache_control id name input caller?",
    "tool_result": "cache_control tool_use_id content? is_error?",
    "thinking": "thinking",
}
TYPES: Members = {
    "*.cache_control": CACHE_CONTROL,
    "text.citations": Array(ANY_OBJECT),
    "*.source.base64.data": STRING,
    "image.transformations": ANY_OBJECT,
    "tool_use.id": CALL_ID,
    "tool_use.name": String(min_length=1, max_length=200),
    "tool_use.caller": ANY_OBJECT,
    "tool_result.tool_use_id": CALL_ID,
}
HOSTED_BLOCKS = list_opaque("messages", "content")
"""The blocks of tools and other features that run at the provider, which no model here sees."""


def text_or_blocks(types: Mapping[str, Validator | Members]) -> TypeUnion:
    """Build the schema of a content: a text, or a list of blocks of these types."""
    blocks = TaggedUnion(types, unlisted=HOSTED_BLOCKS)
    return TypeUnion("a string or list", string=STRING, array=Array(blocks))


TEXT_BLOCKS = Rules(ORDER, TYPES).build("messages", "texts")
TEXT_BLOCK = TEXT_BLOCKS["text"]
RESULT_TABLES = Rules(
    ORDER,
    TYPES
    | {
        "document.source.content.content": text_or_blocks(
            {name: TEXT_BLOCKS[name] for name in ("text", "image")}
        ),
        "search_result.content": Array(TaggedUnion({"text": TEXT_BLOCK})),
    },
).build("messages", "results")
RESULT_BLOCKS = {
    name: RESULT_TABLES[name]
    for name in ("text", "image", "document", "tool_reference", "search_result")
}
OTHER_BLOCKS = Rules(ORDER, TYPES | {"tool_result.content": text_or_blocks(RESULT_BLOCKS)}).build(
    "messages", "content"
)
BLOCK_TYPES: Mapping[str, Validator | Members] = {
    **{name: RESULT_BLOCKS[name] for name in RESULT_BLOCKS if name != "tool_reference"},
    **{name: OTHER_BLOCKS[name] for name in ("tool_use", "tool_result", *THINKING_TYPES)},
    **dict.fromkeys(HOSTED_BLOCKS, ANY_OBJECT),
}
MESSAGE = Object(
    {
        "role!": StringEnum("user", "assistant", "system"),
        "content!": text_or_blocks(BLOCK_TYPES),
    }
)

PROVIDER_TOOLS = list_opaque("messages", "tools")
"""The tools that the provider defines."""
CLIENT_TOOLS = pattern("(bash|computer|memory|text_editor)_[0-9]+")
"""The names of those that the client runs."""
HOSTED_TOOLS = tuple(name for name in PROVIDER_TOOLS if not CLIENT_TOOLS.fullmatch(name))
"""The tools that run at the provider, which no model here has."""

CUSTOM_TOOL: Members = {
    "type?": StringEnum("custom"),
    "name!": NAME,
    "description": STRING,
    "input_schema!": TaggedUnion({"object": ANY_OBJECT}),
    "strict": BOOLEAN,
    "cache_control?": CACHE_CONTROL,
    "defer_loading": BOOLEAN,
    "eager_input_streaming?": BOOLEAN,
    "allowed_callers": STRING_ARRAY,
    "input_examples": Array(ANY_OBJECT),
}

OWN_MEMBERS = ("type?", "description", "input_schema!", "eager_input_streaming?")
"""Those that a tool of the provider does not have."""
CLIENT_TOOL: Members = {
    **{name: each for name, each in CUSTOM_TOOL.items() if name not in OWN_MEMBERS},
    "max_characters?": Integer(minimum=0),
    "display_width_px": Integer(minimum=1),
    "display_height_px": Integer(minimum=1),
    "display_number?": Integer(minimum=0),
    "enable_zoom": BOOLEAN,
}

PARALLEL_MEMBERS: Members = {"disable_parallel_tool_use": BOOLEAN}
TOOL_CHOICE = TaggedUnion(
    {
        "auto": PARALLEL_MEMBERS,
        "any": PARALLEL_MEMBERS,
        "tool": PARALLEL_MEMBERS | {"name!": STRING},
        "none": {},
    }
)
THINKING_DISPLAY = StringEnum("summarized", "omitted")
THINKING = TaggedUnion(
    {
        "enabled": {
            "budget_tokens!": Integer(minimum=MIN_THINKING_BUDGET),
            "display?": THINKING_DISPLAY,
        },
        "adaptive": {"display?": THINKING_DISPLAY},
        "between_tools": {},
        "disabled": {},
    }
)
OUTPUT_CONFIG: Members = {
    "effort?": StringEnum("low", "medium", "high", "xhigh", "max"),
    "format?": TaggedUnion({"json_schema": {"schema!": ANY_OBJECT}}),
    "task_budget?": {
        "type!": StringEnum("tokens"),
        "total!": Integer(minimum=1),
        "remaining?": Integer(),
    },
}

COUNT_TOKENS: Members = {
    "model!": String(min_length=1),
    "messages!": Array(MESSAGE),
    "system": text_or_blocks({"text": TEXT_BLOCK}),
    "tools": Array(
        TaggedUnion(
            {
                "custom": CUSTOM_TOOL,
                **dict.fromkeys(PROVIDER_TOOLS, CLIENT_TOOL),
                **dict.fromkeys(HOSTED_TOOLS, ANY_OBJECT),
            },
            default="custom",
            unlisted=PROVIDER_TOOLS,
        ),
    ),
    "mcp_servers": Array(ANY_OBJECT),
    "context_management?": ANY_OBJECT,
    "tool_choice": TOOL_CHOICE,
    "thinking": THINKING,
    "output_config": OUTPUT_CONFIG,
    "cache_control?": CACHE_CONTROL,
    "speed?": StringEnum("standard", "fast"),
}
"""``POST /v1/messages/count_tokens``."""

CREATE_MESSAGE: Members = {
    **COUNT_TOKENS,
    "max_tokens!": Integer(minimum=1),
    "stream": BOOLEAN,
    "stop_sequences": Array(String(min_length=1), of="strings"),
    "metadata": {"user_id?": STRING},
    "service_tier": StringEnum("auto", "standard_only"),
    "container?": TypeUnion("a string or object", string=STRING, record=ANY_OBJECT),
    "diagnostics?": ANY_OBJECT,
    "inference_geo?": STRING,
    "thread?": ANY_OBJECT,
    "user_profile_id": STRING,
    "workspace_id": STRING,
}
"""``POST /v1/messages``."""

SAMPLING_PARAMETERS: Members = {
    "temperature": Number(minimum=0, maximum=1),
    "top_p": Number(minimum=0, maximum=1),
    "top_k": Integer(minimum=0),
}
"""Parameters of ``POST /v1/messages`` before version 2026-10-21."""
