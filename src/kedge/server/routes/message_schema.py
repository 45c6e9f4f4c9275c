"""Parameters of ``POST /v1/messages``, as in the anthropic package and the live API.

Tools that run at the provider, their calls and their results are accepted as they are. The models of this server
do not have them.
"""

from collections.abc import Mapping
from re import compile as pattern

from kedge.server.schema import validators as v
from kedge.server.schema.tables import ANY_OBJECT, BOOLEAN, STRING, Rules, list_opaque

NAME = v.String(min_length=1, max_length=128, pattern=pattern("^[a-zA-Z0-9_-]{1,128}$"))
MIN_THINKING_BUDGET = 1024
THINKING_TYPES = ("thinking", "redacted_thinking")

CACHE_CONTROL = v.Object({"type!": v.StringEnum("ephemeral"), "ttl": v.StringEnum("5m", "1h")})
CALL_ID = v.String(min_length=1, pattern=pattern("^[a-zA-Z0-9_-]+$"))


ORDER: Mapping[str, str] = {
    "*": "cache_control media_type",
    "search_result": "cache_control source title content citations?",
    "tool_use": "cache_control id name input caller?",
    "tool_result": "cache_control tool_use_id content? is_error?",
    "thinking": "thinking",
}
TYPES: v.Members = {
    "*.cache_control": CACHE_CONTROL,
    "text.citations": v.Array(ANY_OBJECT),
    "*.source.base64.data": STRING,
    "image.transformations": ANY_OBJECT,
    "tool_use.id": CALL_ID,
    "tool_use.name": v.String(min_length=1, max_length=200),
    "tool_use.caller": ANY_OBJECT,
    "tool_result.tool_use_id": CALL_ID,
}
HOSTED_BLOCKS = list_opaque("messages", "content")
"""The blocks of tools and other features that run at the provider, which no model here sees."""


def text_or_blocks(types: Mapping[str, v.Validator | v.Members]) -> v.TypeUnion:
    """Build the schema of a content: a text, or a list of blocks of these types."""
    blocks = v.TaggedUnion(types, unlisted=HOSTED_BLOCKS)
    return v.TypeUnion("a string or list", {str: STRING, list: v.Array(blocks)})


TEXT_BLOCKS = Rules(ORDER, TYPES).build("messages", "texts")
TEXT_BLOCK = TEXT_BLOCKS["text"]
RESULT_TABLES = Rules(
    ORDER,
    TYPES
    | {
        "document.source.content.content": text_or_blocks(
            {name: TEXT_BLOCKS[name] for name in ("text", "image")}
        ),
        "search_result.content": v.Array(v.TaggedUnion({"text": TEXT_BLOCK})),
    },
).build("messages", "results")
RESULT_BLOCKS = {
    name: RESULT_TABLES[name]
    for name in ("text", "image", "document", "tool_reference", "search_result")
}
OTHER_BLOCKS = Rules(ORDER, TYPES | {"tool_result.content": text_or_blocks(RESULT_BLOCKS)}).build(
    "messages", "content"
)
BLOCK_TYPES: Mapping[str, v.Validator | v.Members] = {
    **{name: RESULT_BLOCKS[name] for name in RESULT_BLOCKS if name != "tool_reference"},
    **{name: OTHER_BLOCKS[name] for name in ("tool_use", "tool_result", *THINKING_TYPES)},
    **dict.fromkeys(HOSTED_BLOCKS, ANY_OBJECT),
}
MESSAGE = v.Object(
    {
        "role!": v.StringEnum("user", "assistant", "system"),
        "content!": text_or_blocks(BLOCK_TYPES),
    }
)

PROVIDER_TOOLS = list_opaque("messages", "tools")
"""The tools that the provider defines."""
CLIENT_TOOLS = pattern("(bash|computer|memory|text_editor)_[0-9]+")
"""The names of those that the client runs."""
HOSTED_TOOLS = tuple(name for name in PROVIDER_TOOLS if not CLIENT_TOOLS.fullmatch(name))
"""The tools that run at the provider, which no model here has."""

CUSTOM_TOOL: v.Members = {
    "type?": v.StringEnum("custom"),
    "name!": NAME,
    "description": STRING,
    "input_schema!": v.TaggedUnion({"object": ANY_OBJECT}),
    "strict": BOOLEAN,
    "cache_control?": CACHE_CONTROL,
    "defer_loading": BOOLEAN,
    "eager_input_streaming?": BOOLEAN,
    "allowed_callers": v.Array(STRING, of="strings"),
    "input_examples": v.Array(ANY_OBJECT),
}

OWN_MEMBERS = ("type?", "description", "input_schema!", "eager_input_streaming?")
"""Those that a tool of the provider does not have."""
CLIENT_TOOL: v.Members = {
    **{name: rule for name, rule in CUSTOM_TOOL.items() if name not in OWN_MEMBERS},
    "max_characters?": v.Integer(minimum=0),
    "display_width_px": v.Integer(minimum=1),
    "display_height_px": v.Integer(minimum=1),
    "display_number?": v.Integer(minimum=0),
    "enable_zoom": BOOLEAN,
}

PARALLEL_MEMBERS: v.Members = {"disable_parallel_tool_use": BOOLEAN}
TOOL_CHOICE = v.TaggedUnion(
    {
        "auto": PARALLEL_MEMBERS,
        "any": PARALLEL_MEMBERS,
        "tool": PARALLEL_MEMBERS | {"name!": STRING},
        "none": {},
    }
)
THINKING_DISPLAY = v.StringEnum("summarized", "omitted")
BLOCK_BINDING: v.Members = {
    "prefix_mismatch_behavior!": v.StringEnum("error", "drop_block"),
}
"""What becomes of thinking that is sent back after something before it changed."""
NO_THINKING_TYPE = ""
THINKING = v.TaggedUnion(
    {
        "enabled": {
            "budget_tokens!": v.Integer(minimum=MIN_THINKING_BUDGET),
            "display?": THINKING_DISPLAY,
            "block_binding?": BLOCK_BINDING,
        },
        "adaptive": {"display?": THINKING_DISPLAY, "block_binding?": BLOCK_BINDING},
        "between_tools": {"block_binding?": BLOCK_BINDING},
        "disabled": {},
        NO_THINKING_TYPE: {"block_binding!": BLOCK_BINDING},  # the default of the model thinks
    },
    unlisted=(NO_THINKING_TYPE,),
    default=NO_THINKING_TYPE,
)
OUTPUT_CONFIG: v.Members = {
    "effort?": v.StringEnum("low", "medium", "high", "xhigh", "max"),
    "format?": v.TaggedUnion({"json_schema": {"schema!": ANY_OBJECT}}),
    "task_budget?": {
        "type!": v.StringEnum("tokens"),
        "total!": v.Integer(minimum=1),
        "remaining?": v.Integer(),
    },
}

COUNT_TOKENS: v.Members = {
    "model!": v.String(min_length=1),
    "messages!": v.Array(MESSAGE),
    "system": text_or_blocks({"text": TEXT_BLOCK}),
    "tools": v.Array(
        v.TaggedUnion(
            {
                "custom": CUSTOM_TOOL,
                **dict.fromkeys(PROVIDER_TOOLS, CLIENT_TOOL),
                **dict.fromkeys(HOSTED_TOOLS, ANY_OBJECT),
            },
            default="custom",
            unlisted=PROVIDER_TOOLS,
        ),
    ),
    "mcp_servers": v.Array(ANY_OBJECT),
    "context_management?": ANY_OBJECT,
    "tool_choice": TOOL_CHOICE,
    "thinking": THINKING,
    "output_config": OUTPUT_CONFIG,
    "cache_control?": CACHE_CONTROL,
    "speed?": v.StringEnum("standard", "fast"),
}
"""``POST /v1/messages/count_tokens``."""

CREATE_MESSAGE: v.Members = {
    **COUNT_TOKENS,
    "max_tokens!": v.Integer(minimum=1),
    "stream": BOOLEAN,
    "stop_sequences": v.Array(v.String(min_length=1), of="strings"),
    "metadata": {"user_id?": STRING},
    "service_tier": v.StringEnum("auto", "standard_only"),
    "container?": v.TypeUnion("a string or object", {str: STRING, dict: ANY_OBJECT}),
    "diagnostics?": ANY_OBJECT,
    "inference_geo?": STRING,
    "thread?": ANY_OBJECT,
    "user_profile_id": STRING,
    "workspace_id": STRING,
}
"""``POST /v1/messages``."""

SAMPLING_PARAMETERS: v.Members = {
    "temperature": v.Number(minimum=0, maximum=1),
    "top_p": v.Number(minimum=0, maximum=1),
    "top_k": v.Integer(minimum=0),
}
"""Parameters of ``POST /v1/messages`` before version 2026-10-21."""
