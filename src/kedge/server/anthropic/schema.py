"""Parameters of ``POST /v1/messages``, as in the anthropic package and the live API.

Server tools and their results are not supported and are rejected by their type.
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
)

NAME = String(min_length=1, max_length=128, pattern=pattern("^[a-zA-Z0-9_-]{1,128}$"))
MIN_THINKING_BUDGET = 1024


CACHE_CONTROL = Object({"type!": StringEnum("ephemeral"), "ttl": StringEnum("5m", "1h")})
CITATIONS = Object({"enabled": BOOLEAN})
CALL_ID = String(min_length=1, pattern=pattern("^[a-zA-Z0-9_-]+$"))


def text_or_blocks(types: Mapping[str, Members]) -> TypeUnion:
    """Build the schema of a content: a text, or a list of blocks of these types."""
    return TypeUnion("a string or list", string=STRING, array=Array(TaggedUnion(types)))


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
    "search_result": {
        "cache_control?": CACHE_CONTROL,
        "source!": STRING,
        "title!": STRING,
        "content!": Array(TaggedUnion({"text": TEXT_BLOCK})),
        "citations?": CITATIONS,
    },
}
"""The blocks that the result of a tool may contain."""

BLOCK_TYPES: Mapping[str, Members] = {
    **RESULT_TYPES,
    "tool_use": {
        "cache_control?": CACHE_CONTROL,
        "id!": CALL_ID,
        "name!": String(min_length=1, max_length=200),
        "input!": ANY_OBJECT,
        "caller": ANY_OBJECT,
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
}
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
}

COUNT_TOKENS: Members = {
    "model!": String(min_length=1),
    "messages!": Array(MESSAGE),
    "system": text_or_blocks({"text": TEXT_BLOCK}),
    "tools": Array(TaggedUnion({"custom": CUSTOM_TOOL}, default="custom")),
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
