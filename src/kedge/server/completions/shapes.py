"""The parameters of ``POST /v1/chat/completions``, as the openai package knows them.

Left out are ``functions``, ``function_call`` and the role ``function``, which tools have replaced.
An assistant's ``reasoning_content`` is no part of OpenAI's API, but of every server that thinks
aloud, and comes back to them from the clients that replay it.
"""

from collections.abc import Mapping

from kedge.server.shapes import parameters
from kedge.server.shapes.branches import Array, Dictionary, Either, Nullable, Object, Tagged
from kedge.server.shapes.language import Shape
from kedge.server.shapes.leaves import Anything, Choice, Decimal, Integer, Text
from kedge.server.shapes.parts import BREAKPOINT, MAYBE_TEXT, REFUSAL, TEXT
from kedge.server.shapes.tools import EFFORTS, FLAG, NAME, OBJECT, tool

NAMED = Object({"name": NAME}, required=("name",))

TEXT_PART = Object(
    {"type": TEXT, "text": TEXT, "prompt_cache_breakpoint": BREAKPOINT}, required=("text",)
)
IMAGE_PART = tool(
    {
        "image_url": Object(
            {"url": TEXT, "detail": Choice(("auto", "low", "high", "original"))}, required=("url",)
        ),
        "prompt_cache_breakpoint": BREAKPOINT,
    },
    required=("image_url",),
)
AUDIO_PART = tool(
    {
        "input_audio": Object(
            {"data": TEXT, "format": Choice(("wav", "mp3"))}, required=("data", "format")
        ),
        "prompt_cache_breakpoint": BREAKPOINT,
    },
    required=("input_audio",),
)
FILE_PART = tool(
    {
        "file": Object({"file_data": TEXT, "file_id": TEXT, "filename": TEXT}),
        "prompt_cache_breakpoint": BREAKPOINT,
    },
    required=("file",),
)

TEXT_OR_PARTS = "one of a string or array of objects"
SAID_TEXT = Either(
    TEXT_OR_PARTS, text=TEXT, array=Array(Tagged({"text": TEXT_PART}, expected="an object"))
)
SAID_ANYTHING = Either(
    TEXT_OR_PARTS,
    text=TEXT,
    array=Array(
        Tagged(
            {
                "text": TEXT_PART,
                "image_url": IMAGE_PART,
                "input_audio": AUDIO_PART,
                "file": FILE_PART,
            }
        )
    ),
)
SAID_BY_MODEL = Nullable(
    Either(TEXT_OR_PARTS, text=TEXT, array=Array(Tagged({"text": TEXT_PART, "refusal": REFUSAL})))
)

FUNCTION_CALL = Object(
    {
        "id": TEXT,
        "type": TEXT,
        "function": Object({"name": NAME, "arguments": TEXT}, required=("name", "arguments")),
    },
    required=("id", "function"),
)
CUSTOM_CALL = Object(
    {
        "id": TEXT,
        "type": TEXT,
        "custom": Object({"name": NAME, "input": TEXT}, required=("name", "input")),
    },
    required=("id", "custom"),
)


def message(members: dict[str, Shape], required: tuple[str, ...] = ("content",)) -> Object:
    """Make the shape of a message with these members besides its role and its name."""
    return Object({"role": TEXT, "name": TEXT} | members, required)


MESSAGE = Tagged(
    {
        "system": message({"content": SAID_TEXT}),
        "assistant": message(
            {
                "content": SAID_BY_MODEL,
                "refusal": MAYBE_TEXT,
                "reasoning_content": MAYBE_TEXT,
                "annotations": Nullable(Array(OBJECT)),
                "audio": Nullable(Object({"id": TEXT}, required=("id",))),
                "function_call": Nullable(OBJECT),
                "tool_calls": Nullable(
                    Array(Tagged({"function": FUNCTION_CALL, "custom": CUSTOM_CALL}), least=1)
                ),
            },
            required=(),
        ),
        "user": message({"content": SAID_ANYTHING}),
        "tool": message(
            {"content": SAID_TEXT, "tool_call_id": TEXT}, required=("content", "tool_call_id")
        ),
        "developer": message({"content": SAID_TEXT}),
    },
    tag="role",
)

FUNCTION_TOOL = tool(
    {
        "function": Object(
            {
                "name": NAME,
                "description": TEXT,
                "parameters": OBJECT,
                "strict": Nullable(FLAG),
            },
            required=("name",),
        )
    },
    required=("function",),
)
GRAMMAR = Object(
    {"definition": TEXT, "syntax": Choice(("lark", "regex"))}, required=("definition", "syntax")
)
CUSTOM_TOOL = tool(
    {
        "custom": Object(
            {
                "name": NAME,
                "description": TEXT,
                "format": Tagged(
                    {"text": tool(), "grammar": tool({"grammar": GRAMMAR}, required=("grammar",))}
                ),
            },
            required=("name",),
        )
    },
    required=("custom",),
)
TOOL_CHOICE = Either(
    "one of an object or 'none', 'auto', or 'required'",
    text=Choice(("none", "auto", "required")),
    record=Tagged(
        {
            "function": tool({"function": NAMED}, required=("function",)),
            "custom": tool({"custom": NAMED}, required=("custom",)),
            "allowed_tools": tool(
                {
                    "allowed_tools": Object(
                        {"mode": Choice(("auto", "required")), "tools": Array(OBJECT)},
                        required=("mode", "tools"),
                    )
                },
                required=("allowed_tools",),
            ),
        }
    ),
)
JSON_SCHEMA = Object(
    {"name": NAME, "description": TEXT, "schema": OBJECT, "strict": Nullable(FLAG)},
    required=("name",),
)
RESPONSE_FORMAT = Tagged(
    {
        "text": tool(),
        "json_object": tool(),
        "json_schema": tool({"json_schema": JSON_SCHEMA}, required=("json_schema",)),
    }
)
STOP = Either(
    "one of a string or array of strings",
    text=Text(least=1),
    array=Array(Text(least=1), of="strings", most=4),
)
PREDICTION = Tagged({"content": tool({"content": SAID_TEXT}, required=("content",))})

CREATE: Mapping[str, Shape] = {
    "model": TEXT,
    "messages": Array(MESSAGE, least=1),
    "tools": Array(Tagged({"function": FUNCTION_TOOL, "custom": CUSTOM_TOOL}), of="objects"),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": FLAG,
    "response_format": RESPONSE_FORMAT,
    "max_completion_tokens": Nullable(Integer(least=1)),
    "max_tokens": Nullable(Integer(least=1)),
    "stop": Nullable(STOP),
    "stream": Nullable(FLAG),
    "stream_options": Nullable(Object({"include_usage": FLAG, "include_obfuscation": FLAG})),
    "n": Nullable(Integer(least=1, most=128)),
    "temperature": Nullable(Decimal(least=0, most=2)),
    "top_p": Nullable(Decimal(least=0, most=1)),
    "presence_penalty": parameters.PENALTY,
    "frequency_penalty": parameters.PENALTY,
    "logit_bias": Nullable(Dictionary(Integer(least=-100, most=100))),
    "logprobs": Nullable(FLAG),
    "top_logprobs": Nullable(Integer(least=0, most=20)),
    "seed": Nullable(Integer()),
    "reasoning_effort": Nullable(Choice(EFFORTS)),
    "verbosity": Nullable(Choice(("low", "medium", "high"))),
    "metadata": Nullable(parameters.METADATA),
    "modalities": Nullable(Array(Choice(("text", "audio")), of="strings", least=1)),
    "audio": Nullable(OBJECT),
    "moderation": Nullable(parameters.MODERATION),
    "prediction": Nullable(PREDICTION),
    "prompt_cache_key": parameters.CACHE_KEY,
    "prompt_cache_options": parameters.CACHE_OPTIONS,
    "prompt_cache_retention": parameters.RETENTION,
    "safety_identifier": Nullable(Text(most=128)),
    "service_tier": parameters.SERVICE_TIER,
    "store": Nullable(FLAG),
    "user": TEXT,
    "web_search_options": Anything(only_objects=True),
}
"""``POST /v1/chat/completions``."""
