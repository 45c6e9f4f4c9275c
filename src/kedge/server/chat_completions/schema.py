"""Parameters of ``POST /v1/chat/completions``, as in the openai package.

``functions``, ``function_call`` and the role ``function``, which tools have replaced, are not supported.
An assistant's ``reasoning_content`` is not part of OpenAI's API, but many open servers send it, and clients
that replay messages send it back.
"""

from collections.abc import Mapping

from kedge.server.schema import requests
from kedge.server.schema.content import CACHE_BREAKPOINT, REFUSAL, STRING
from kedge.server.schema.tools import ANY_OBJECT, BOOLEAN, NAME, REASONING_EFFORTS
from kedge.server.schema.validators import (
    AnyJson,
    Array,
    Integer,
    Map,
    Members,
    Number,
    Object,
    String,
    StringEnum,
    TaggedUnion,
    TypeUnion,
)

NAMED_TOOL = Object({"name!": NAME})

TEXT_PART: Members = {"text!": STRING, "prompt_cache_breakpoint?": CACHE_BREAKPOINT}
IMAGE_URL = Object({"url!": STRING, "detail": StringEnum("auto", "low", "high", "original")})


def text_or_parts(
    types: Mapping[str, Members],
    foreign: Mapping[str, Members] | None = None,
    *,
    skips_unknown: bool = False,
) -> TypeUnion:
    """Build the schema of a content: a text, or a list of parts of these types."""
    parts = Array(TaggedUnion(types, foreign=foreign or {}), skips_unknown=skips_unknown)
    return TypeUnion("one of a string or array of objects", string=STRING, array=parts)


TEXT_CONTENT = text_or_parts({"text": TEXT_PART})
USER_CONTENT = text_or_parts(
    {
        "text": TEXT_PART,
        "image_url": {"image_url!": IMAGE_URL, "prompt_cache_breakpoint?": CACHE_BREAKPOINT},
        "input_audio": {
            "input_audio!": {"data!": STRING, "format!": StringEnum("wav", "mp3")},
            "prompt_cache_breakpoint?": CACHE_BREAKPOINT,
        },
        "file": {
            "file!": {"file_data": STRING, "file_id": STRING, "filename": STRING},
            "prompt_cache_breakpoint?": CACHE_BREAKPOINT,
        },
    },
    foreign={"video_url": {"video_url!": {"url!": STRING}}},
)
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

MESSAGE = TaggedUnion(
    {
        "system": {"name": STRING, "content!": TEXT_CONTENT},
        "assistant": {
            "name": STRING,
            "content?": text_or_parts({"text": TEXT_PART, "refusal": REFUSAL}, skips_unknown=True),
            "refusal?": STRING,
            "reasoning_content?": STRING,
            "annotations?": Array(ANY_OBJECT),
            "parsed~": AnyJson(),
            "audio?": {
                "id!": STRING,
                "data~": STRING,
                "expires_at~": Integer(),
                "transcript~": STRING,
            },
            "function_call?": ANY_OBJECT,
            "tool_calls?": Array(TOOL_CALL, min_length=1),
        },
        "user": {"name": STRING, "content!": USER_CONTENT},
        "tool": {"name": STRING, "content!": TEXT_CONTENT, "tool_call_id!": STRING},
        "developer": {"name": STRING, "content!": TEXT_CONTENT},
    },
    tag="role",
)

FUNCTION_TOOL: Members = {
    "function!": {
        "name!": NAME,
        "description": STRING,
        "parameters": ANY_OBJECT,
        "strict?": BOOLEAN,
    }
}
GRAMMAR = Object({"definition!": STRING, "syntax!": StringEnum("lark", "regex")})
CUSTOM_TOOL: Members = {
    "custom!": {
        "name!": NAME,
        "description": STRING,
        "format": TaggedUnion({"text": {}, "grammar": {"grammar!": GRAMMAR}}),
    }
}
TOOL_CHOICE = TypeUnion(
    "one of an object or 'none', 'auto', or 'required'",
    string=StringEnum("none", "auto", "required", foreign=("any",)),
    record=TaggedUnion(
        {
            "function": {"function!": NAMED_TOOL},
            "custom": {"custom!": NAMED_TOOL},
            "allowed_tools": {
                "allowed_tools!": {
                    "mode!": StringEnum("auto", "required"),
                    "tools!": Array(ANY_OBJECT),
                }
            },
        }
    ),
)
JSON_SCHEMA: Members = {
    "name!": NAME,
    "description": STRING,
    "schema": ANY_OBJECT,
    "strict?": BOOLEAN,
}
RESPONSE_FORMAT = TaggedUnion(
    {"text": {}, "json_object": {}, "json_schema": {"json_schema!": JSON_SCHEMA}}
)
STOP = TypeUnion(
    "one of a string or array of strings",
    string=String(min_length=1),
    array=Array(String(min_length=1), of="strings", max_length=4),
)
PREDICTION = TaggedUnion({"content": {"content!": TEXT_CONTENT}})

CREATE_COMPLETION: Members = {
    "model!": STRING,
    "messages!": Array(MESSAGE, min_length=1),
    "tools": Array(
        TaggedUnion({"function": FUNCTION_TOOL, "custom": CUSTOM_TOOL}, foreign_default="function"),
        skips_unknown=True,
    ),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": BOOLEAN,
    "response_format": RESPONSE_FORMAT,
    "max_completion_tokens?": Integer(minimum=1),
    "max_tokens?": Integer(minimum=1),
    "stop?": STOP,
    "stream?": BOOLEAN,
    "stream_options?": {"include_usage": BOOLEAN, "include_obfuscation": BOOLEAN},
    "n?": Integer(minimum=1, maximum=128),
    "temperature?": Number(minimum=0, maximum=2),
    "top_p?": Number(minimum=0, maximum=1),
    "presence_penalty?": requests.PENALTY,
    "frequency_penalty?": requests.PENALTY,
    "logit_bias?": Map(Integer(minimum=-100, maximum=100)),
    "logprobs?": BOOLEAN,
    "top_logprobs?": Integer(minimum=0, maximum=20),
    "seed?": Integer(),
    "reasoning_effort?": StringEnum(*REASONING_EFFORTS),
    "verbosity?": StringEnum("low", "medium", "high"),
    "metadata?": requests.METADATA,
    "modalities?": Array(StringEnum("text", "audio"), of="strings", min_length=1),
    "audio?": ANY_OBJECT,
    "moderation?": requests.MODERATION,
    "prediction?": PREDICTION,
    "prompt_cache_key?": requests.CACHE_KEY,
    "prompt_cache_options": requests.CACHE_OPTIONS,
    "prompt_cache_retention?": requests.CACHE_RETENTION,
    "safety_identifier?": String(max_length=128),
    "service_tier?": requests.SERVICE_TIER,
    "store?": BOOLEAN,
    "user": STRING,
    "web_search_options": ANY_OBJECT,
}
"""``POST /v1/chat/completions``."""
