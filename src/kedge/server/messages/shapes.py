"""The parameters of ``POST /v1/messages``, as the anthropic package and the live API know them.

Only what a client's own tools need: server tools and their results are not known here, and are
refused by their type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from re import compile as pattern
from typing import Any, cast

from kedge.server.shapes.branches import Array, Either, Nullable, Object, Tagged
from kedge.server.shapes.language import At, Shape
from kedge.server.shapes.leaves import Choice, Decimal, Integer, Text
from kedge.server.shapes.parts import MAYBE_TEXT, TEXT
from kedge.server.shapes.tools import FLAG, OBJECT

NAME = Text(least=1, most=128, matching=pattern("^[a-zA-Z0-9_-]{1,128}$"))
LEAST_BUDGET = 1024


def block(members: dict[str, Shape], required: tuple[str, ...] = ()) -> Object:
    """Make the shape of a block with these members besides its type and its cache control."""
    return Object({"type": TEXT, "cache_control": CACHE} | members, required)


CACHE = Nullable(
    Object({"type": Choice(("ephemeral",)), "ttl": Choice(("5m", "1h"))}, required=("type",))
)
TEXT_BLOCK = block({"text": TEXT, "citations": Nullable(Array(OBJECT))}, required=("text",))


def source(members: dict[str, Shape]) -> Object:
    """Make the shape of a source, all of whose members are required."""
    return Object({"type": TEXT} | members, tuple(members))


URL = source({"url": TEXT})
FILE = source({"file_id": TEXT})
IMAGE_BLOCK = block(
    {
        "source": Tagged(
            {
                "base64": source(
                    {
                        "media_type": Choice(
                            ("image/jpeg", "image/png", "image/gif", "image/webp")
                        ),
                        "data": TEXT,
                    }
                ),
                "url": URL,
                "file": FILE,
            }
        ),
        "transformations": Nullable(OBJECT),
    },
    required=("source",),
)
TEXT_OR_IMAGES = Either(
    "a string or list",
    text=TEXT,
    array=Array(Tagged({"text": TEXT_BLOCK, "image": IMAGE_BLOCK})),
)
DOCUMENT_BLOCK = block(
    {
        "source": Tagged(
            {
                "base64": source({"media_type": Choice(("application/pdf",)), "data": TEXT}),
                "text": source({"media_type": Choice(("text/plain",)), "data": TEXT}),
                "content": source({"content": TEXT_OR_IMAGES}),
                "url": URL,
                "file": FILE,
            }
        ),
        "citations": Nullable(Object({"enabled": FLAG})),
        "context": MAYBE_TEXT,
        "title": MAYBE_TEXT,
    },
    required=("source",),
)
TOOL_USE_BLOCK = block(
    {
        "id": Text(least=1, matching=pattern("^[a-zA-Z0-9_-]+$")),
        "name": Text(least=1, most=200),
        "input": OBJECT,
        "caller": OBJECT,
        "toolset_name": MAYBE_TEXT,
    },
    required=("id", "name", "input"),
)
SEARCH_RESULT_BLOCK = block(
    {
        "source": TEXT,
        "title": TEXT,
        "content": Array(Tagged({"text": TEXT_BLOCK})),
        "citations": Nullable(Object({"enabled": FLAG})),
    },
    required=("source", "title", "content"),
)
RESULT_PART = Tagged(
    {
        "text": TEXT_BLOCK,
        "image": IMAGE_BLOCK,
        "document": DOCUMENT_BLOCK,
        "search_result": SEARCH_RESULT_BLOCK,
    }
)
TOOL_RESULT_BLOCK = block(
    {
        "tool_use_id": Text(least=1, matching=pattern("^[a-zA-Z0-9_-]+$")),
        "content": Nullable(Either("a string or list", text=TEXT, array=Array(RESULT_PART))),
        "is_error": Nullable(FLAG),
        "toolset_name": MAYBE_TEXT,
    },
    required=("tool_use_id",),
)
BLOCK = Tagged(
    {
        "text": TEXT_BLOCK,
        "image": IMAGE_BLOCK,
        "document": DOCUMENT_BLOCK,
        "search_result": SEARCH_RESULT_BLOCK,
        "tool_use": TOOL_USE_BLOCK,
        "tool_result": TOOL_RESULT_BLOCK,
        "thinking": Object(
            {"type": TEXT, "thinking": TEXT, "signature": TEXT},
            required=("thinking", "signature"),
        ),
        "redacted_thinking": Object({"type": TEXT, "data": TEXT}, required=("data",)),
    }
)
MESSAGE = Object(
    {
        "role": Choice(("user", "assistant", "system")),
        "content": Either("a string or list", text=TEXT, array=Array(BLOCK)),
    },
    required=("role", "content"),
)

CUSTOM_TOOL = Object(
    {
        "type": Nullable(Choice(("custom",))),
        "name": NAME,
        "description": TEXT,
        "input_schema": Tagged({"object": OBJECT}),
        "strict": FLAG,
        "cache_control": CACHE,
        "defer_loading": FLAG,
        "eager_input_streaming": Nullable(FLAG),
        "allowed_callers": Array(TEXT, of="strings"),
        "input_examples": Array(OBJECT),
    },
    required=("name", "input_schema"),
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: of the client's own, unless it names another type."""

    typed: Tagged
    expected: str = "an object"

    def check(self, value: Any, at: At) -> None:
        """Find the tool's type and check its members."""
        if type(value) is dict and cast("dict[str, Any]", value).get("type") is None:
            CUSTOM_TOOL.check(value, at)
        else:
            self.typed.check(value, at)


PARALLEL: dict[str, Shape] = {"type": TEXT, "disable_parallel_tool_use": FLAG}
TOOL_CHOICE = Tagged(
    {
        "auto": Object(PARALLEL),
        "any": Object(PARALLEL),
        "tool": Object(PARALLEL | {"name": TEXT}, required=("name",)),
        "none": Object({"type": TEXT}),
    }
)
DISPLAY = Nullable(Choice(("summarized", "omitted")))
THINKING = Tagged(
    {
        "enabled": Object(
            {"type": TEXT, "budget_tokens": Integer(least=LEAST_BUDGET), "display": DISPLAY},
            required=("budget_tokens",),
        ),
        "adaptive": Object({"type": TEXT, "display": DISPLAY}),
        "between_tools": Object({"type": TEXT}),
        "disabled": Object({"type": TEXT}),
    }
)
OUTPUT_CONFIG = Object(
    {
        "effort": Nullable(Choice(("low", "medium", "high", "xhigh", "max"))),
        "format": Nullable(
            Tagged({"json_schema": Object({"type": TEXT, "schema": OBJECT}, required=("schema",))})
        ),
    }
)

COUNT: Mapping[str, Shape] = {
    "model": Text(least=1),
    "messages": Array(MESSAGE),
    "system": Either("a string or list", text=TEXT, array=Array(Tagged({"text": TEXT_BLOCK}))),
    "tools": Array(Tool(Tagged({"custom": CUSTOM_TOOL}))),
    "tool_choice": TOOL_CHOICE,
    "thinking": THINKING,
    "output_config": OUTPUT_CONFIG,
    "cache_control": CACHE,
    "speed": Nullable(Choice(("standard", "fast"))),
}
"""``POST /v1/messages/count_tokens``."""

CREATE: Mapping[str, Shape] = {
    **COUNT,
    "max_tokens": Integer(least=1),
    "stream": FLAG,
    "stop_sequences": Array(Text(least=1), of="strings"),
    "metadata": Object({"user_id": MAYBE_TEXT}),
    "service_tier": Choice(("auto", "standard_only")),
    "container": Nullable(Either("a string or object", text=TEXT, record=OBJECT)),
    "diagnostics": Nullable(OBJECT),
    "inference_geo": MAYBE_TEXT,
    "user_profile_id": TEXT,
    "workspace_id": TEXT,
}
"""``POST /v1/messages``."""

SAMPLING: Mapping[str, Shape] = {
    "temperature": Decimal(least=0, most=1),
    "top_p": Decimal(least=0, most=1),
    "top_k": Integer(least=0),
}
"""What ``POST /v1/messages`` took before version 2026-10-21."""
