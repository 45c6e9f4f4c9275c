"""The tools a request may offer, and how it may choose among them.

Members follow the types of the openai package. The hosted tools are taken by their type: this
server never runs them, but a request that offers one is as valid here as it is there.
"""

from re import compile as pattern

from kedge.server.shapes.branches import Array, Either, Nullable, Object, Tagged
from kedge.server.shapes.language import Shape
from kedge.server.shapes.leaves import Anything, Choice, Decimal, Flag, Integer, Text
from kedge.server.shapes.parts import MAYBE_TEXT, STRINGS, TEXT

FLAG = Flag()
OBJECT = Anything(only_objects=True)
NAME = Text(least=1, most=128, matching=pattern("^[a-zA-Z0-9_-]+$"))

CALLERS = Nullable(Array(Choice(("direct", "programmatic")), of="strings"))
EXECUTION = Choice(("server", "client"))
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def tool(members: dict[str, Shape] | None = None, required: tuple[str, ...] = ()) -> Object:
    """Make the shape of a tool with these members besides its type."""
    return Object({"type": TEXT} | (members or {}), required)


FUNCTION = tool(
    {
        "name": NAME,
        "description": MAYBE_TEXT,
        "parameters": Nullable(OBJECT),
        "strict": Nullable(FLAG),
        "async": FLAG,
        "allowed_callers": CALLERS,
        "defer_loading": FLAG,
        "output_schema": Nullable(OBJECT),
    },
    required=("name",),
)

CUSTOM = tool(
    {
        "name": NAME,
        "description": TEXT,
        "format": Tagged(
            {
                "text": tool(),
                "grammar": tool(
                    {"definition": TEXT, "syntax": Choice(("lark", "regex"))},
                    required=("definition", "syntax"),
                ),
            }
        ),
        "async": FLAG,
        "allowed_callers": CALLERS,
        "defer_loading": FLAG,
    },
    required=("name",),
)

NAMESPACE = tool(
    {
        "name": TEXT,
        "description": TEXT,
        "tools": Array(Tagged({"function": FUNCTION, "custom": CUSTOM})),
    },
    required=("name", "description", "tools"),
)

FILE_SEARCH = tool(
    {
        "vector_store_ids": STRINGS,
        # A compound filter holds filters that hold filters: its nesting is bounded, not its form.
        "filters": Nullable(OBJECT),
        "max_num_results": Integer(least=1, most=50),
        "ranking_options": Object(
            {
                "hybrid_search": Object(
                    {"embedding_weight": Decimal(), "text_weight": Decimal()},
                    required=("embedding_weight", "text_weight"),
                ),
                "ranker": Choice(("auto", "default-2024-11-15")),
                "score_threshold": Decimal(least=0, most=1),
            }
        ),
    },
    required=("vector_store_ids",),
)

LOCATION = Nullable(
    Object(
        {
            "type": Choice(("approximate",)),
            "city": MAYBE_TEXT,
            "country": MAYBE_TEXT,
            "region": MAYBE_TEXT,
            "timezone": MAYBE_TEXT,
        }
    )
)
CONTEXT_SIZE = Choice(("low", "medium", "high"))
WEB_SEARCH = tool(
    {
        "external_web_access": FLAG,
        "filters": Nullable(Object({"allowed_domains": Nullable(STRINGS)})),
        "search_context_size": CONTEXT_SIZE,
        "user_location": LOCATION,
    }
)
WEB_SEARCH_PREVIEW = tool(
    {
        "search_content_types": Array(Choice(("text", "image")), of="strings"),
        "search_context_size": CONTEXT_SIZE,
        "user_location": LOCATION,
    }
)

TOOL_FILTER = Object({"read_only": FLAG, "tool_names": STRINGS})
CONNECTORS = tuple(
    f"connector_{name}"
    for name in (
        "dropbox",
        "gmail",
        "googlecalendar",
        "googledrive",
        "microsoftteams",
        "outlookcalendar",
        "outlookemail",
        "sharepoint",
    )
)
MCP = tool(
    {
        "server_label": TEXT,
        "server_url": TEXT,
        "server_description": TEXT,
        "connector_id": Choice(CONNECTORS),
        "tunnel_id": TEXT,
        "authorization": TEXT,
        "headers": Nullable(OBJECT),
        "allowed_callers": CALLERS,
        "allowed_tools": Nullable(
            Either("one of an array of strings or object", array=STRINGS, record=TOOL_FILTER)
        ),
        "require_approval": Nullable(
            Either(
                "one of an object or 'always' or 'never'",
                text=Choice(("always", "never")),
                record=Object({"always": TOOL_FILTER, "never": TOOL_FILTER}),
            )
        ),
        "defer_loading": FLAG,
    },
    required=("server_label",),
)

NETWORK_POLICY = Tagged(
    {
        "disabled": tool(),
        "allowlist": tool(
            {
                "allowed_domains": STRINGS,
                "domain_secrets": Array(
                    Object(
                        {"domain": TEXT, "name": TEXT, "value": TEXT},
                        required=("domain", "name", "value"),
                    )
                ),
            },
            required=("allowed_domains",),
        ),
    }
)
CONTAINER: dict[str, Shape] = {
    "file_ids": STRINGS,
    "memory_limit": Nullable(Choice(("1g", "4g", "16g", "64g"))),
    "network_policy": NETWORK_POLICY,
}
CODE_INTERPRETER = tool(
    {
        "container": Either(
            "one of a string or object", text=TEXT, record=Tagged({"auto": tool(CONTAINER)})
        ),
        "allowed_callers": CALLERS,
    },
    required=("container",),
)

LOCAL_ENVIRONMENT = tool(
    {
        "skills": Array(
            Object(
                {"name": TEXT, "description": TEXT, "path": TEXT},
                required=("name", "description", "path"),
            )
        )
    }
)
CONTAINER_REFERENCE = tool({"container_id": TEXT}, required=("container_id",))
SKILL = Tagged(
    {
        "skill_reference": tool({"skill_id": TEXT, "version": TEXT}, required=("skill_id",)),
        "inline": tool(
            {
                "name": TEXT,
                "description": TEXT,
                "source": tool(
                    {"data": TEXT, "media_type": Choice(("application/zip",))},
                    required=("type", "data", "media_type"),
                ),
            },
            required=("name", "description", "source"),
        ),
    }
)
SHELL = tool(
    {
        "environment": Nullable(
            Tagged(
                {
                    "container_auto": tool(CONTAINER | {"skills": Array(SKILL)}),
                    "local": LOCAL_ENVIRONMENT,
                    "container_reference": CONTAINER_REFERENCE,
                }
            )
        ),
        "allowed_callers": CALLERS,
    }
)

IMAGE_GENERATION = tool(
    {
        "action": Choice(("generate", "edit", "auto")),
        "background": Choice(("transparent", "opaque", "auto")),
        "complexity": Choice(("low", "medium", "high")),
        "frame_count": Integer(least=1),
        "frame_duration_ms": Integer(least=1),
        "input_fidelity": Nullable(Choice(("high", "low"))),
        "input_image_mask": Object({"file_id": TEXT, "image_url": TEXT}),
        "model": TEXT,
        "moderation": Choice(("auto", "low")),
        "output_compression": Integer(least=0, most=100),
        "output_format": Choice(("png", "webp", "jpeg", "gif", "svg")),
        "partial_images": Integer(least=0, most=3),
        "quality": Choice(("low", "medium", "high", "xhigh", "max", "auto")),
        "size": TEXT,
        "svg": Object({"model": TEXT, "reasoning": Nullable(Object({"effort": Choice(EFFORTS)}))}),
    }
)

COMPUTER_USE_PREVIEW = tool(
    {
        "display_height": Integer(least=1),
        "display_width": Integer(least=1),
        "environment": Choice(("windows", "mac", "linux", "ubuntu", "browser")),
    },
    required=("display_height", "display_width", "environment"),
)

TOOL = Tagged(
    {
        "apply_patch": tool({"allowed_callers": CALLERS}),
        "code_interpreter": CODE_INTERPRETER,
        "computer": tool(),
        "computer_use_preview": COMPUTER_USE_PREVIEW,
        "custom": CUSTOM,
        "file_search": FILE_SEARCH,
        "function": FUNCTION,
        "image_generation": IMAGE_GENERATION,
        "local_shell": tool(),
        "mcp": MCP,
        "namespace": NAMESPACE,
        "programmatic_tool_calling": tool(),
        "shell": SHELL,
        "tool_search": tool(
            {"description": MAYBE_TEXT, "execution": EXECUTION, "parameters": Nullable(OBJECT)}
        ),
        "web_search": WEB_SEARCH,
        "web_search_2025_08_26": WEB_SEARCH,
        "web_search_preview": WEB_SEARCH_PREVIEW,
        "web_search_preview_2025_03_11": WEB_SEARCH_PREVIEW,
    },
    expected="a tool",
)
TOOLS = Array(TOOL, of="tools")

NAMED = tool({"name": TEXT}, required=("name",))
TOOL_CHOICE = Either(
    "one of an object or 'none', 'auto', or 'required'",
    text=Choice(("none", "auto", "required")),
    record=Tagged(
        {
            "allowed_tools": tool(
                {"mode": Choice(("auto", "required")), "tools": Array(OBJECT)},
                required=("mode", "tools"),
            ),
            "function": NAMED,
            "custom": NAMED,
            "mcp": tool({"server_label": TEXT, "name": MAYBE_TEXT}, required=("server_label",)),
        }
        | dict.fromkeys(
            (
                "apply_patch",
                "code_interpreter",
                "computer",
                "computer_use",
                "computer_use_preview",
                "file_search",
                "image_generation",
                "programmatic_tool_calling",
                "shell",
                "web_search_preview",
                "web_search_preview_2025_03_11",
            ),
            tool(),
        )
    ),
)
