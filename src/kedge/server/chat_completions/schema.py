"""Parameters of ``POST /v1/chat/completions``, as in the openai package.

``functions``, ``function_call`` and the role ``function``, which tools have replaced, are not supported.
An assistant's ``reasoning_content`` is not part of OpenAI's API, but many open servers send it, and clients
that replay messages send it back.
"""

from collections.abc import Mapping

from kedge.server.schema.items import NAME
from kedge.server.schema.requests import CREATE_RESPONSE, SHARED_TYPES
from kedge.server.schema.tables import ANY_OBJECT, STRING, Rules
from kedge.server.schema.validators import (
    AnyJson,
    Array,
    Integer,
    Map,
    Members,
    String,
    StringEnum,
    TaggedUnion,
    TypeUnion,
)

PARTS = Rules(
    order={
        "text": "text prompt_cache_breakpoint?",
        "image_url": "image_url prompt_cache_breakpoint?",
        "input_audio": "input_audio prompt_cache_breakpoint?",
        "file": "file prompt_cache_breakpoint?",
    }
).build("chat", "content")


def text_or_parts(
    *types: str, foreign: Mapping[str, Members] | None = None, skips_unknown: bool = False
) -> TypeUnion:
    """Build the schema of a content: a text, or a list of parts of these types."""
    union = TaggedUnion({type: PARTS[type] for type in types}, foreign=foreign or {})
    parts = Array(union, skips_unknown=skips_unknown)
    return TypeUnion("one of a string or array of objects", string=STRING, array=parts)


TEXT_CONTENT = text_or_parts("text")
TOOL_CALL = TaggedUnion(
    {
        "function": {
            "id!": STRING,
            "index~": Integer(),
            "function!": {"name!": NAME, "arguments!": STRING, "parsed_arguments~": AnyJson()},
        },
        "custom": {
            "id!": STRING,
            "index~": Integer(),
            "custom!": {"name!": NAME, "input!": STRING},
        },
    },
    foreign_default="function",
)
MESSAGES = Rules(
    order={
        "assistant": (
            "name content refusal reasoning_content? annotations? parsed~ audio function_call tool_calls?"
        ),
        "assistant.audio": "id data~ expires_at~ transcript~",
        "user": "name",
        "system": "name",
        "developer": "name",
        "tool": "name content tool_call_id",
    },
    types={
        "*.name": STRING,
        "*.content": TEXT_CONTENT,
        "user.content": text_or_parts(
            "text",
            "image_url",
            "input_audio",
            "file",
            foreign={"video_url": {"video_url!": {"url!": STRING}}},
        ),
        "assistant.content": text_or_parts("text", "refusal", skips_unknown=True),
        "assistant.reasoning_content": STRING,
        "assistant.annotations": Array(ANY_OBJECT),
        "assistant.parsed": AnyJson(),
        "assistant.audio.data": STRING,
        "assistant.audio.expires_at": Integer(),
        "assistant.audio.transcript": STRING,
        "assistant.function_call": ANY_OBJECT,
        "assistant.tool_calls": Array(TOOL_CALL, min_length=1),
    },
).build("chat", "messages")
ROLES = ("system", "assistant", "user", "tool", "developer")

NAMES = Rules(types={"function.function.name": NAME, "custom.custom.name": NAME})
TOOL_TABLES = NAMES.build("chat", "tools")
CHOICE_TABLES = NAMES.build("chat", "tool_choices")
TOOL = TaggedUnion(
    {type: TOOL_TABLES[type] for type in ("function", "custom")}, foreign_default="function"
)
TOOL_CHOICE = TypeUnion(
    "one of an object or 'none', 'auto', or 'required'",
    string=StringEnum("none", "auto", "required", foreign=("any",)),
    record=TaggedUnion(
        {type: CHOICE_TABLES[type] for type in ("function", "custom", "allowed_tools")}
    ),
)
STOP = TypeUnion(
    "one of a string or array of strings",
    string=String(min_length=1),
    array=Array(String(min_length=1), of="strings", max_length=4),
)

CREATE_COMPLETION = Rules(
    order={
        "create": (
            "model messages tools tool_choice parallel_tool_calls response_format "
            "max_completion_tokens max_tokens stop stream? stream_options n temperature top_p "
            "presence_penalty frequency_penalty logit_bias logprobs top_logprobs seed "
            "reasoning_effort verbosity metadata modalities audio moderation prediction "
            "prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
            "service_tier store user web_search_options"
        ),
        "create.response_format": "text json_object json_schema",
        "create.stream_options": "include_usage",
    },
    types={
        **SHARED_TYPES,
        "*.messages": Array(
            TaggedUnion({role: MESSAGES[role] for role in ROLES}, tag="role"), min_length=1
        ),
        "*.tools": Array(TOOL, skips_unknown=True),
        "*.tool_choice": TOOL_CHOICE,
        "*.response_format.json_schema.json_schema.name": NAME,
        "*.max_completion_tokens": Integer(minimum=1),
        "*.max_tokens": Integer(minimum=1),
        "*.stop": STOP,
        "*.n": Integer(minimum=1, maximum=128),
        "*.logit_bias": Map(Integer(minimum=-100, maximum=100)),
        "*.modalities": Array(StringEnum("text", "audio"), of="strings", min_length=1),
        "*.audio": ANY_OBJECT,
        "*.prediction.content.content": TEXT_CONTENT,
        "*.prompt_cache_options": CREATE_RESPONSE["prompt_cache_options?"],
        "*.web_search_options": ANY_OBJECT,
    },
).build("chat", "parameters")["create"]
"""``POST /v1/chat/completions``."""
