"""Parameters of ``POST /v1/messages``, as in the anthropic package and the live API.

Server tools and their results are not supported and are rejected by their type.
"""

from collections.abc import Mapping
from re import compile as pattern

from kedge.server.schema.content import NULLABLE_STRING, STRING
from kedge.server.schema.tools import ANY_OBJECT, BOOLEAN
from kedge.server.schema.validators import (
    Array,
    Integer,
    Members,
    Nullable,
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


def block_object(members: Members) -> Object:
    """Build the schema of a block with these members, its type and its cache control."""
    return Object({"type": STRING, "cache_control": CACHE_CONTROL} | members)


CACHE_CONTROL = Nullable(
    Object({"type!": StringEnum(("ephemeral",)), "ttl": StringEnum(("5m", "1h"))})
)
TEXT_BLOCK = block_object({"text!": STRING, "citations": Nullable(Array(ANY_OBJECT))})


def source_object(members: Members) -> Object:
    """Build the schema of a source, all of whose members are required."""
    return Object({"type": STRING} | {f"{name}!": members[name] for name in members})


URL_SOURCE = source_object({"url": STRING})
FILE_SOURCE = source_object({"file_id": STRING})
IMAGE_BLOCK = block_object(
    {
        "source!": TaggedUnion(
            {
                "base64": source_object(
                    {
                        "media_type": StringEnum(
                            ("image/jpeg", "image/png", "image/gif", "image/webp")
                        ),
                        "data": STRING,
                    }
                ),
                "url": URL_SOURCE,
                "file": FILE_SOURCE,
            }
        ),
        "transformations": Nullable(ANY_OBJECT),
    }
)
TEXT_OR_IMAGES = TypeUnion(
    "a string or list",
    string=STRING,
    array=Array(TaggedUnion({"text": TEXT_BLOCK, "image": IMAGE_BLOCK})),
)
DOCUMENT_BLOCK = block_object(
    {
        "source!": TaggedUnion(
            {
                "base64": source_object(
                    {"media_type": StringEnum(("application/pdf",)), "data": STRING}
                ),
                "text": source_object({"media_type": StringEnum(("text/plain",)), "data": STRING}),
                "content": source_object({"content": TEXT_OR_IMAGES}),
                "url": URL_SOURCE,
                "file": FILE_SOURCE,
            }
        ),
        "citations": Nullable(Object({"enabled": BOOLEAN})),
        "context": NULLABLE_STRING,
        "title": NULLABLE_STRING,
    }
)
TOOL_USE_BLOCK = block_object(
    {
        "id!": String(min_length=1, pattern=pattern("^[a-zA-Z0-9_-]+$")),
        "name!": String(min_length=1, max_length=200),
        "input!": ANY_OBJECT,
        "caller": ANY_OBJECT,
        "toolset_name": NULLABLE_STRING,
    }
)
SEARCH_RESULT_BLOCK = block_object(
    {
        "source!": STRING,
        "title!": STRING,
        "content!": Array(TaggedUnion({"text": TEXT_BLOCK})),
        "citations": Nullable(Object({"enabled": BOOLEAN})),
    }
)
RESULT_BLOCK = TaggedUnion(
    {
        "text": TEXT_BLOCK,
        "image": IMAGE_BLOCK,
        "document": DOCUMENT_BLOCK,
        "search_result": SEARCH_RESULT_BLOCK,
    }
)
TOOL_RESULT_BLOCK = block_object(
    {
        "tool_use_id!": String(min_length=1, pattern=pattern("^[a-zA-Z0-9_-]+$")),
        "content": Nullable(
            TypeUnion("a string or list", string=STRING, array=Array(RESULT_BLOCK))
        ),
        "is_error": Nullable(BOOLEAN),
        "toolset_name": NULLABLE_STRING,
    }
)
BLOCK = TaggedUnion(
    {
        "text": TEXT_BLOCK,
        "image": IMAGE_BLOCK,
        "document": DOCUMENT_BLOCK,
        "search_result": SEARCH_RESULT_BLOCK,
        "tool_use": TOOL_USE_BLOCK,
        "tool_result": TOOL_RESULT_BLOCK,
        "thinking": {"thinking!": STRING, "signature!": STRING},
        "redacted_thinking": {"data!": STRING},
    }
)
MESSAGE = Object(
    {
        "role!": StringEnum(("user", "assistant", "system")),
        "content!": TypeUnion("a string or list", string=STRING, array=Array(BLOCK)),
    }
)

CUSTOM_TOOL = Object(
    {
        "type": Nullable(StringEnum(("custom",))),
        "name!": NAME,
        "description": STRING,
        "input_schema!": TaggedUnion({"object": ANY_OBJECT}),
        "strict": BOOLEAN,
        "cache_control": CACHE_CONTROL,
        "defer_loading": BOOLEAN,
        "eager_input_streaming": Nullable(BOOLEAN),
        "allowed_callers": Array(STRING, of="strings"),
        "input_examples": Array(ANY_OBJECT),
    }
)


PARALLEL_MEMBERS: Members = {"type": STRING, "disable_parallel_tool_use": BOOLEAN}
TOOL_CHOICE = TaggedUnion(
    {
        "auto": Object(PARALLEL_MEMBERS),
        "any": Object(PARALLEL_MEMBERS),
        "tool": Object(PARALLEL_MEMBERS | {"name!": STRING}),
        "none": {},
    }
)
THINKING_DISPLAY = Nullable(StringEnum(("summarized", "omitted")))
THINKING = TaggedUnion(
    {
        "enabled": {
            "budget_tokens!": Integer(minimum=MIN_THINKING_BUDGET),
            "display": THINKING_DISPLAY,
        },
        "adaptive": {"display": THINKING_DISPLAY},
        "between_tools": {},
        "disabled": {},
    }
)
OUTPUT_CONFIG = Object(
    {
        "effort": Nullable(StringEnum(("low", "medium", "high", "xhigh", "max"))),
        "format": Nullable(TaggedUnion({"json_schema": {"schema!": ANY_OBJECT}})),
    }
)

COUNT_TOKENS: Mapping[str, Validator] = {
    "model!": String(min_length=1),
    "messages!": Array(MESSAGE),
    "system": TypeUnion(
        "a string or list", string=STRING, array=Array(TaggedUnion({"text": TEXT_BLOCK}))
    ),
    "tools": Array(TaggedUnion({"custom": CUSTOM_TOOL}, default="custom")),
    "tool_choice": TOOL_CHOICE,
    "thinking": THINKING,
    "output_config": OUTPUT_CONFIG,
    "cache_control": CACHE_CONTROL,
    "speed": Nullable(StringEnum(("standard", "fast"))),
}
"""``POST /v1/messages/count_tokens``."""

CREATE_MESSAGE: Mapping[str, Validator] = {
    **COUNT_TOKENS,
    "max_tokens!": Integer(minimum=1),
    "stream": BOOLEAN,
    "stop_sequences": Array(String(min_length=1), of="strings"),
    "metadata": Object({"user_id": NULLABLE_STRING}),
    "service_tier": StringEnum(("auto", "standard_only")),
    "container": Nullable(TypeUnion("a string or object", string=STRING, record=ANY_OBJECT)),
    "diagnostics": Nullable(ANY_OBJECT),
    "inference_geo": NULLABLE_STRING,
    "thread": Nullable(ANY_OBJECT),
    "user_profile_id": STRING,
    "workspace_id": STRING,
}
"""``POST /v1/messages``."""

SAMPLING_PARAMETERS: Mapping[str, Validator] = {
    "temperature": Number(minimum=0, maximum=1),
    "top_p": Number(minimum=0, maximum=1),
    "top_k": Integer(minimum=0),
}
"""Parameters of ``POST /v1/messages`` before version 2026-10-21."""
