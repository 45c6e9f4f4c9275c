"""Parameters of ``POST /v1/messages``, as in the anthropic package and the live API.

Tools that run at the provider, their calls and their results are accepted as they are. The models of this server
do not have them.
"""

from collections.abc import Mapping
from re import compile as pattern

from kedge.server.schema.content import STRING
from kedge.server.schema.tools import ANY_OBJECT, BOOLEAN
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


HOSTED_BLOCKS = (
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "container_upload",
    "compaction",
    "fallback",
    "tool_addition",
    "tool_removal",
)
"""The blocks of tools and other features that run at the provider, which no model here sees."""
CLIENT_TOOLS = (
    "bash_20241022",
    "bash_20250124",
    "computer_20241022",
    "computer_20250124",
    "computer_20251124",
    "memory_20250818",
    "text_editor_20241022",
    "text_editor_20250124",
    "text_editor_20250429",
    "text_editor_20250728",
)
"""The tools that the provider defines and the client runs."""
HOSTED_TOOLS = (
    "advisor_20260301",
    "browser_toolset_20260801",
    "code_execution_20250522",
    "code_execution_20250825",
    "code_execution_20260120",
    "code_execution_20260521",
    "computer_toolset_20260801",
    "mcp_toolset",
    "tool_search_tool_bm25",
    "tool_search_tool_bm25_20251119",
    "tool_search_tool_regex",
    "tool_search_tool_regex_20251119",
    "web_fetch_20250910",
    "web_fetch_20260209",
    "web_fetch_20260309",
    "web_fetch_20260318",
    "web_search_20250305",
    "web_search_20260209",
    "web_search_20260318",
)
"""The tools that run at the provider, which no model here has."""

CACHE_CONTROL = Object({"type!": StringEnum("ephemeral"), "ttl": StringEnum("5m", "1h")})
CITATIONS = Object({"enabled": BOOLEAN})
CALL_ID = String(min_length=1, pattern=pattern("^[a-zA-Z0-9_-]+$"))


def text_or_blocks(types: Mapping[str, Validator | Members]) -> TypeUnion:
    """Build the schema of a content: a text, or a list of blocks of these types."""
    blocks = TaggedUnion(types, unlisted=HOSTED_BLOCKS)
    return TypeUnion("a string or list", string=STRING, array=Array(blocks))


TEXT_BLOCK: Members = {
    "cache_control?": CACHE_CONTROL,
    "text!": STRING,
    "citations?": Array(ANY_OBJECT),
}
URL_SOURCE: Members = {"url!": STRING}
FILE_SOURCE: Members = {"file_id!": STRING}
IMAGE_TYPE = StringEnum("image/jpeg", "image/png", "image/gif", "image/webp")
IMAGE_BLOCK: Members = {
    "cache_control?": CACHE_CONTROL,
    "source!": TaggedUnion(
        {
            "base64": {"media_type!": IMAGE_TYPE, "data!": STRING},
            "url": URL_SOURCE,
            "file": FILE_SOURCE,
        }
    ),
    "transformations?": ANY_OBJECT,
}
DOCUMENT_BLOCK: Members = {
    "cache_control?": CACHE_CONTROL,
    "source!": TaggedUnion(
        {
            "base64": {"media_type!": StringEnum("application/pdf"), "data!": STRING},
            "text": {"media_type!": StringEnum("text/plain"), "data!": STRING},
            "content": {"content!": text_or_blocks({"text": TEXT_BLOCK, "image": IMAGE_BLOCK})},
            "url": URL_SOURCE,
            "file": FILE_SOURCE,
        }
    ),
    "citations?": CITATIONS,
    "context?": STRING,
    "title?": STRING,
}
RESULT_TYPES: Mapping[str, Members] = {
    "text": TEXT_BLOCK,
    "image": IMAGE_BLOCK,
    "document": DOCUMENT_BLOCK,
    "tool_reference": {"cache_control?": CACHE_CONTROL, "tool_name!": STRING},
    "search_result": {
        "cache_control?": CACHE_CONTROL,
        "source!": STRING,
        "title!": STRING,
        "content!": Array(TaggedUnion({"text": TEXT_BLOCK})),
        "citations?": CITATIONS,
    },
}
"""The blocks that the result of a tool may contain."""

BLOCK_TYPES: Mapping[str, Validator | Members] = {
    **{name: RESULT_TYPES[name] for name in RESULT_TYPES if name != "tool_reference"},
    "tool_use": {
        "cache_control?": CACHE_CONTROL,
        "id!": CALL_ID,
        "name!": String(min_length=1, max_length=200),
        "input!": ANY_OBJECT,
        "caller?": ANY_OBJECT,
        "toolset_name?": STRING,
    },
    "tool_result": {
        "cache_control?": CACHE_CONTROL,
        "tool_use_id!": CALL_ID,
        "content?": text_or_blocks(RESULT_TYPES),
        "is_error?": BOOLEAN,
        "toolset_name?": STRING,
    },
    "thinking": {"thinking!": STRING, "signature!": STRING},
    "redacted_thinking": {"data!": STRING},
    **dict.fromkeys(HOSTED_BLOCKS, ANY_OBJECT),
}
THINKING_TYPES = ("thinking", "redacted_thinking")
MESSAGE = Object(
    {
        "role!": StringEnum("user", "assistant", "system"),
        "content!": text_or_blocks(BLOCK_TYPES),
    }
)

CUSTOM_TOOL: Members = {
    "type?": StringEnum("custom"),
    "name!": NAME,
    "description": STRING,
    "input_schema!": TaggedUnion({"object": ANY_OBJECT}),
    "strict": BOOLEAN,
    "cache_control?": CACHE_CONTROL,
    "defer_loading": BOOLEAN,
    "eager_input_streaming?": BOOLEAN,
    "allowed_callers": Array(STRING, of="strings"),
    "input_examples": Array(ANY_OBJECT),
}

CLIENT_TOOL: Members = {
    "name!": NAME,
    "strict": BOOLEAN,
    "cache_control?": CACHE_CONTROL,
    "defer_loading": BOOLEAN,
    "allowed_callers": Array(STRING, of="strings"),
    "input_examples": Array(ANY_OBJECT),
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
                **dict.fromkeys(CLIENT_TOOLS, CLIENT_TOOL),
                **dict.fromkeys(HOSTED_TOOLS, ANY_OBJECT),
            },
            default="custom",
            unlisted=(*CLIENT_TOOLS, *HOSTED_TOOLS),
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
