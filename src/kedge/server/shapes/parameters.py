"""The parameters of the endpoints, in the order in which the live API walks them.

The order matters: of two wrong parameters the one that stands first here is answered. It follows
the observed order (moderation, include; input before the rest; tools, metadata, text, temperature,
top_p, …, stream, stream_options, background, …, truncation, instructions, store, service_tier,
top_logprobs, context_management). Null is taken wherever the openai package or the Open Responses
specification allows it.
"""

from collections.abc import Mapping

from kedge.server.shapes.branches import Array, Dictionary, Either, Nullable, Object, Present
from kedge.server.shapes.items import FORMAT, ITEMS
from kedge.server.shapes.language import Shape
from kedge.server.shapes.leaves import Choice, Decimal, Id, Integer, Text
from kedge.server.shapes.parts import INPUT_PART, MAYBE_TEXT, TEXT
from kedge.server.shapes.tools import EFFORTS, FLAG, TOOL_CHOICE, TOOLS

MOVED: Mapping[str, str] = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Parameters of Chat Completions that the live API recognises, and where they live now."""

MAX_ITEMS_AT_ONCE = 20
"""How many items a conversation takes in one request."""

INPUT = Either("one of a string or array of input items", text=TEXT, array=ITEMS)
INCLUDABLE = Choice(
    (
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
        "message.output_text.logprobs",
    )
)
INCLUDE = Array(INCLUDABLE, of=INCLUDABLE.expected)
METADATA = Dictionary(Text(most=512), most=16, longest_key=64, expected="a metadata object")
CONVERSATION = Either(
    "one of a string or object", text=Id(most=256), record=Object({"id": Id(most=256)}, ("id",))
)
PROMPT = Object(
    {
        "id": TEXT,
        "variables": Nullable(
            Dictionary(Either("one of a string or object", text=TEXT, record=INPUT_PART))
        ),
        "version": MAYBE_TEXT,
    },
    required=("id",),
)
TEXT_CONFIG = Object(
    {"format": Nullable(FORMAT), "verbosity": Nullable(Choice(("low", "medium", "high")))}
)
REASONING = Object(
    {
        "effort": Nullable(Choice(EFFORTS)),
        "summary": Nullable(Choice(("concise", "detailed", "auto"))),
        "context": Nullable(Choice(("auto", "current_turn", "all_turns"))),
        "mode": TEXT,
    }
)
MODERATION_MODE = Nullable(Object({"mode": Choice(("score", "block"))}, required=("mode",)))
MODERATION = Object(
    {
        "model": TEXT,
        "policy": Nullable(Object({"input": MODERATION_MODE, "output": MODERATION_MODE})),
    },
    required=("model",),
)
CACHE_OPTIONS = Object(
    {
        "comparison_response_id": MAYBE_TEXT,
        "mode": Choice(("implicit", "explicit")),
        "prewarm": FLAG,
        "ttl": Choice(("30m", "12h")),
    }
)
CONTEXT_MANAGEMENT = Array(
    Object({"type": TEXT, "compact_threshold": Nullable(Integer(least=1000))}, required=("type",)),
    least=1,
)
IMAGE = Object({"context_compression": Choice(("auto", "enabled", "disabled"))})
ACCESS_PROGRAMS = Object({"cyber": Choice(("standard", "daybreak_blue", "daybreak_red"))})

MODEL = TEXT
PREVIOUS = Nullable(Id(most=256))
PENALTY = Nullable(Decimal(least=-2, most=2))
CACHE_KEY = MAYBE_TEXT
RETENTION = Nullable(Choice(("in_memory", "24h")))
SERVICE_TIER = Nullable(
    Choice(("auto", "default", "fast", "flex", "priority"), also=("scale", "ultrafast"))
)
TRUNCATION = Nullable(Choice(("auto", "disabled")))

CREATE: Mapping[str, Shape] = {
    "moderation": Nullable(MODERATION),
    "include": Nullable(INCLUDE),
    "model": Present(MODEL),
    "input": Present(INPUT),
    "previous_response_id": PREVIOUS,
    "conversation": Nullable(CONVERSATION),
    "prompt": Nullable(PROMPT),
    "tools": Nullable(TOOLS),
    "tool_choice": Nullable(TOOL_CHOICE),
    "metadata": Nullable(METADATA),
    "text": Nullable(TEXT_CONFIG),
    "temperature": Nullable(Decimal(least=0, most=2)),
    "top_p": Nullable(Decimal(least=0, most=1)),
    # In the Open Responses specification, though not in the openai package.
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "parallel_tool_calls": Nullable(FLAG),
    "stream": Nullable(FLAG),
    "stream_options": Nullable(Object({"include_obfuscation": FLAG})),
    "background": Nullable(FLAG),
    "max_output_tokens": Nullable(Integer(least=16)),
    "max_tool_calls": Nullable(Integer(least=1)),
    "reasoning": Nullable(REASONING),
    "user": Nullable(TEXT),
    "safety_identifier": Nullable(Text(most=128)),
    "prompt_cache_options": Nullable(CACHE_OPTIONS),
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_retention": RETENTION,
    "truncation": TRUNCATION,
    "instructions": MAYBE_TEXT,
    "store": Nullable(FLAG),
    "service_tier": SERVICE_TIER,
    "top_logprobs": Nullable(Integer(least=0, most=20)),
    "context_management": Nullable(CONTEXT_MANAGEMENT),
    "image": IMAGE,
    "access_programs": ACCESS_PROGRAMS,
}
"""``POST /v1/responses``."""

MESSAGE: Mapping[str, Shape] = {**CREATE, "generate": Nullable(FLAG)}
"""``response.create`` on a WebSocket, without what names the message and its lane."""

INPUT_TOKENS: Mapping[str, Shape] = {
    "model": Nullable(MODEL),
    "input": Nullable(INPUT),
    "previous_response_id": PREVIOUS,
    "conversation": Nullable(CONVERSATION),
    "tools": Nullable(TOOLS),
    "tool_choice": Nullable(TOOL_CHOICE),
    "text": Nullable(TEXT_CONFIG),
    "parallel_tool_calls": Nullable(FLAG),
    "reasoning": Nullable(REASONING),
    "truncation": TRUNCATION,
    "instructions": MAYBE_TEXT,
    "personality": Text(most=64),
}
"""``POST /v1/responses/input_tokens``."""

COMPACT: Mapping[str, Shape] = {
    "model": Nullable(MODEL),
    "input": Nullable(INPUT),
    "previous_response_id": PREVIOUS,
    "instructions": MAYBE_TEXT,
    "prompt_cache_options": Nullable(CACHE_OPTIONS),
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_retention": RETENTION,
    "service_tier": SERVICE_TIER,
    "image": IMAGE,
}
"""``POST /v1/responses/compact``."""

CONVERSATION_CREATE: Mapping[str, Shape] = {
    "items": Nullable(Array(ITEMS.item, of="input items", most=MAX_ITEMS_AT_ONCE)),
    "metadata": Nullable(METADATA),
}
"""``POST /v1/conversations``."""

CONVERSATION_UPDATE: Mapping[str, Shape] = {"metadata": Nullable(METADATA)}
"""``POST /v1/conversations/{id}``."""

CONVERSATION_ITEMS: Mapping[str, Shape] = {
    "items": Array(ITEMS.item, of="input items", most=MAX_ITEMS_AT_ONCE),
    "include": Nullable(INCLUDE),
}
"""``POST /v1/conversations/{id}/items``."""
