"""Tools of a request, and ``tool_choice``.

Members follow the types of the openai package. Hosted tools are accepted by their type: this server
never runs them, but a request with one is valid.
"""

from re import compile as pattern

from kedge.server.schema.content import STRING, STRING_ARRAY
from kedge.server.schema.validators import (
    AnyJson,
    Array,
    Boolean,
    Integer,
    Members,
    Number,
    Object,
    String,
    StringEnum,
    TaggedUnion,
    TypeUnion,
)

BOOLEAN = Boolean()
ANY_OBJECT = AnyJson(only_objects=True)
NAME = String(min_length=1, max_length=128, pattern=pattern("^[a-zA-Z0-9_-]+$"))

ALLOWED_CALLERS = Array(StringEnum("direct", "programmatic"), of="strings")
EXECUTION = StringEnum("server", "client")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

FUNCTION: Members = {
    "name!": NAME,
    "description?": STRING,
    "parameters?": ANY_OBJECT,
    "strict?": BOOLEAN,
    "async": BOOLEAN,
    "allowed_callers?": ALLOWED_CALLERS,
    "defer_loading": BOOLEAN,
    "output_schema?": ANY_OBJECT,
}

CUSTOM: Members = {
    "name!": NAME,
    "description": STRING,
    "format": TaggedUnion(
        {
            "text": {},
            "grammar": {"definition!": STRING, "syntax!": StringEnum("lark", "regex")},
        }
    ),
    "async": BOOLEAN,
    "allowed_callers?": ALLOWED_CALLERS,
    "defer_loading": BOOLEAN,
}

NAMESPACE: Members = {
    "name!": STRING,
    "description!": STRING,
    "tools!": Array(TaggedUnion({"function": FUNCTION, "custom": CUSTOM})),
}

FILE_SEARCH: Members = {
    "vector_store_ids!": STRING_ARRAY,
    # A compound filter contains filters: only its nesting is bounded.
    "filters?": ANY_OBJECT,
    "max_num_results": Integer(minimum=1, maximum=50),
    "ranking_options": {
        "hybrid_search": {"embedding_weight!": Number(), "text_weight!": Number()},
        "ranker": StringEnum("auto", "default-2024-11-15"),
        "score_threshold": Number(minimum=0, maximum=1),
    },
}

USER_LOCATION: Members = {
    "type": StringEnum("approximate"),
    "city?": STRING,
    "country?": STRING,
    "region?": STRING,
    "timezone?": STRING,
}
CONTEXT_SIZE = StringEnum("low", "medium", "high")
WEB_SEARCH: Members = {
    "external_web_access": BOOLEAN,
    "filters?": {"allowed_domains?": STRING_ARRAY},
    "search_context_size": CONTEXT_SIZE,
    "user_location?": USER_LOCATION,
}
WEB_SEARCH_PREVIEW: Members = {
    "search_content_types": Array(StringEnum("text", "image"), of="strings"),
    "search_context_size": CONTEXT_SIZE,
    "user_location?": USER_LOCATION,
}

TOOL_FILTER = Object({"read_only": BOOLEAN, "tool_names": STRING_ARRAY})
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
MCP: Members = {
    "server_label!": STRING,
    "server_url": STRING,
    "server_description": STRING,
    "connector_id": StringEnum(*CONNECTORS),
    "tunnel_id": STRING,
    "authorization": STRING,
    "headers?": ANY_OBJECT,
    "allowed_callers?": ALLOWED_CALLERS,
    "allowed_tools?": TypeUnion(
        "one of an array of strings or object", array=STRING_ARRAY, record=TOOL_FILTER
    ),
    "require_approval?": TypeUnion(
        "one of an object or 'always' or 'never'",
        string=StringEnum("always", "never"),
        record=Object({"always": TOOL_FILTER, "never": TOOL_FILTER}),
    ),
    "defer_loading": BOOLEAN,
}

NETWORK_POLICY = TaggedUnion(
    {
        "disabled": {},
        "allowlist": {
            "allowed_domains!": STRING_ARRAY,
            "domain_secrets": Array({"domain!": STRING, "name!": STRING, "value!": STRING}),
        },
    }
)
CONTAINER_MEMBERS: Members = {
    "file_ids": STRING_ARRAY,
    "memory_limit?": StringEnum("1g", "4g", "16g", "64g"),
    "network_policy": NETWORK_POLICY,
}
CODE_INTERPRETER: Members = {
    "container!": TypeUnion(
        "one of a string or object",
        string=STRING,
        record=TaggedUnion({"auto": CONTAINER_MEMBERS}),
    ),
    "allowed_callers?": ALLOWED_CALLERS,
}

LOCAL_ENVIRONMENT: Members = {
    "skills": Array({"name!": STRING, "description!": STRING, "path!": STRING})
}
CONTAINER_REFERENCE: Members = {"container_id!": STRING}
SKILL = TaggedUnion(
    {
        "skill_reference": {"skill_id!": STRING, "version": STRING},
        "inline": {
            "name!": STRING,
            "description!": STRING,
            "source!": {
                "type!": STRING,
                "data!": STRING,
                "media_type!": StringEnum("application/zip"),
            },
        },
    }
)
SHELL: Members = {
    "environment?": TaggedUnion(
        {
            "container_auto": CONTAINER_MEMBERS | {"skills": Array(SKILL)},
            "local": LOCAL_ENVIRONMENT,
            "container_reference": CONTAINER_REFERENCE,
        }
    ),
    "allowed_callers?": ALLOWED_CALLERS,
}

IMAGE_GENERATION: Members = {
    "action": StringEnum("generate", "edit", "auto"),
    "background": StringEnum("transparent", "opaque", "auto"),
    "complexity": StringEnum("low", "medium", "high"),
    "frame_count": Integer(minimum=1),
    "frame_duration_ms": Integer(minimum=1),
    "input_fidelity?": StringEnum("high", "low"),
    "input_image_mask": {"file_id": STRING, "image_url": STRING},
    "model": STRING,
    "moderation": StringEnum("auto", "low"),
    "output_compression": Integer(minimum=0, maximum=100),
    "output_format": StringEnum("png", "webp", "jpeg", "gif", "svg"),
    "partial_images": Integer(minimum=0, maximum=3),
    "quality": StringEnum("low", "medium", "high", "xhigh", "max", "auto"),
    "size": STRING,
    "svg": {
        "model": STRING,
        "reasoning?": {"effort": StringEnum(*REASONING_EFFORTS)},
    },
}

COMPUTER_USE_PREVIEW: Members = {
    "display_height!": Integer(minimum=1),
    "display_width!": Integer(minimum=1),
    "environment!": StringEnum("windows", "mac", "linux", "ubuntu", "browser"),
}

TOOL = TaggedUnion(
    {
        "apply_patch": {"allowed_callers?": ALLOWED_CALLERS},
        "code_interpreter": CODE_INTERPRETER,
        "computer": {},
        "computer_use_preview": COMPUTER_USE_PREVIEW,
        "custom": CUSTOM,
        "file_search": FILE_SEARCH,
        "function": FUNCTION,
        "image_generation": IMAGE_GENERATION,
        "local_shell": {},
        "mcp": MCP,
        "namespace": NAMESPACE,
        "programmatic_tool_calling": {},
        "shell": SHELL,
        "tool_search": {
            "description?": STRING,
            "execution": EXECUTION,
            "parameters?": ANY_OBJECT,
        },
        "web_search": WEB_SEARCH,
        "web_search_2025_08_26": WEB_SEARCH,
        "web_search_preview": WEB_SEARCH_PREVIEW,
        "web_search_preview_2025_03_11": WEB_SEARCH_PREVIEW,
    },
    expected="a tool",
)
TOOLS = Array(TOOL, of="tools")

NAMED_TOOL_CHOICE: Members = {"name!": STRING}
TOOL_CHOICE = TypeUnion(
    "one of an object or 'none', 'auto', or 'required'",
    string=StringEnum("none", "auto", "required"),
    record=TaggedUnion(
        {
            "allowed_tools": {
                "mode!": StringEnum("auto", "required"),
                "tools!": Array(ANY_OBJECT),
            },
            "function": NAMED_TOOL_CHOICE,
            "custom": NAMED_TOOL_CHOICE,
            "mcp": {"server_label!": STRING, "name?": STRING},
            **dict.fromkeys(
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
                Members(),
            ),
        }
    ),
)
