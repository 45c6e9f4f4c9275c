"""Calls and their outputs: those that a client answers, and those that a provider executes itself.

This server executes no hosted call, but a conversation that was started with another server may contain
them, so each is checked as strictly as the rest. Members follow the types of the openai package. ``coherence``
pairs outputs with calls; this module has only their schemas.
"""

from collections.abc import Mapping

from kedge.server.schema.content import (
    AGENT_OUTPUT_PART,
    AGENT_PART,
    NULLABLE_STRING,
    STRING,
    STRING_ARRAY,
    TOOL_OUTPUT,
)
from kedge.server.schema.tools import (
    ANY_OBJECT,
    BOOLEAN,
    CONTAINER_REFERENCE,
    EXECUTION,
    LOCAL_ENVIRONMENT,
    NAME,
    TOOLS,
    typed_object,
)
from kedge.server.schema.validators import (
    AnyJson,
    Array,
    Identifier,
    Integer,
    Map,
    Nullable,
    Number,
    Object,
    String,
    StringEnum,
    TaggedUnion,
    TypeUnion,
    Validator,
)

CALL_ID = String(min_length=1, max_length=64)
STATUS = Nullable(StringEnum(("in_progress", "completed", "incomplete")))
CALLER = Nullable(
    TaggedUnion(
        {
            "direct": typed_object(),
            "program": typed_object({"caller_id!": STRING}),
        }
    )
)


def item_object(
    prefix: str | None, members: Mapping[str, Validator], *, needs_id: bool = False
) -> Object:
    """Build the schema of an item whose id, if it has one, starts with ``prefix``."""
    item_id = Nullable(Identifier(prefix or ""))
    return Object({"type": STRING, "id!" if needs_id else "id": item_id} | dict(members))


FUNCTION_CALL = item_object(
    "fc",
    {
        "call_id!": CALL_ID,
        "name!": NAME,
        "arguments!": STRING,
        "namespace": NULLABLE_STRING,
        "async": BOOLEAN,
        "caller": CALLER,
        "status": STATUS,
    },
)
FUNCTION_CALL_OUTPUT = item_object(
    "fc",
    {
        "call_id!": CALL_ID,
        "output!": TOOL_OUTPUT,
        "name": NULLABLE_STRING,
        "namespace": NULLABLE_STRING,
        "caller": CALLER,
        "status": STATUS,
    },
)
CUSTOM_TOOL_CALL = item_object(
    "ctc",
    {
        "call_id!": CALL_ID,
        "name!": STRING,
        "input!": STRING,
        "namespace": NULLABLE_STRING,
        "async": BOOLEAN,
        "caller": CALLER,
        "status": STATUS,
    },
)
CUSTOM_TOOL_CALL_OUTPUT = item_object(
    "ctc", {"call_id!": CALL_ID, "output!": TOOL_OUTPUT, "caller": CALLER, "status": STATUS}
)

LOCAL_SHELL_CALL = item_object(
    "lsh",
    {
        "call_id!": CALL_ID,
        "action!": TaggedUnion(
            {
                "exec": typed_object(
                    {
                        "command!": STRING_ARRAY,
                        "env!": Map(STRING),
                        "timeout_ms": Nullable(Integer()),
                        "user": NULLABLE_STRING,
                        "working_directory": NULLABLE_STRING,
                    }
                )
            }
        ),
        "status!": STATUS,
    },
)
LOCAL_SHELL_CALL_OUTPUT = item_object(None, {"id!": CALL_ID, "output!": STRING, "status": STATUS})
SHELL_CALL = item_object(
    "sh",
    {
        "call_id!": CALL_ID,
        "action!": Object(
            {
                "commands!": STRING_ARRAY,
                "max_output_length": Nullable(Integer()),
                "timeout_ms": Nullable(Integer()),
            }
        ),
        "environment": Nullable(
            TaggedUnion({"local": LOCAL_ENVIRONMENT, "container_reference": CONTAINER_REFERENCE})
        ),
        "caller": CALLER,
        "status": STATUS,
    },
)
SHELL_CALL_OUTPUT = item_object(
    "sh",
    {
        "call_id!": CALL_ID,
        "output!": Array(
            Object(
                {
                    "stdout!": STRING,
                    "stderr!": STRING,
                    "outcome!": TaggedUnion(
                        {
                            "timeout": typed_object(),
                            "exit": typed_object({"exit_code!": Integer()}),
                        }
                    ),
                }
            )
        ),
        "max_output_length": Nullable(Integer()),
        "caller": CALLER,
        "status": STATUS,
    },
)
FILE_DIFF = typed_object({"path!": STRING, "diff!": STRING})
APPLY_PATCH_CALL = item_object(
    "apc",
    {
        "call_id!": CALL_ID,
        "operation!": TaggedUnion(
            {
                "create_file": FILE_DIFF,
                "delete_file": typed_object({"path!": STRING}),
                "update_file": FILE_DIFF,
            }
        ),
        "caller": CALLER,
        "status!": StringEnum(("in_progress", "completed")),
    },
)
APPLY_PATCH_CALL_OUTPUT = item_object(
    "apc",
    {
        "call_id!": CALL_ID,
        "output": NULLABLE_STRING,
        "caller": CALLER,
        "status!": StringEnum(("completed", "failed")),
    },
)

SAFETY_CHECKS = Array(Object({"id!": STRING, "code": NULLABLE_STRING, "message": NULLABLE_STRING}))
POINT_MEMBERS: dict[str, Validator] = {"x!": Integer(), "y!": Integer()}
KEYS_MEMBER: dict[str, Validator] = {"keys": Nullable(STRING_ARRAY)}
COMPUTER_ACTION = TaggedUnion(
    {
        "click": typed_object(
            {"button!": StringEnum(("left", "right", "wheel", "back", "forward"))}
            | POINT_MEMBERS
            | KEYS_MEMBER
        ),
        "double_click": typed_object(POINT_MEMBERS | KEYS_MEMBER),
        "drag": typed_object({"path!": Array(Object(POINT_MEMBERS))} | KEYS_MEMBER),
        "keypress": typed_object({"keys!": STRING_ARRAY}),
        "move": typed_object(POINT_MEMBERS | KEYS_MEMBER),
        "screenshot": typed_object(),
        "scroll": typed_object(
            {"scroll_x!": Integer(), "scroll_y!": Integer()} | POINT_MEMBERS | KEYS_MEMBER
        ),
        "type": typed_object({"text!": STRING}),
        "wait": typed_object(),
    }
)
COMPUTER_CALL = item_object(
    "cu",
    {
        "call_id!": CALL_ID,
        "action": Nullable(COMPUTER_ACTION),
        "actions": Nullable(Array(COMPUTER_ACTION)),
        "pending_safety_checks!": SAFETY_CHECKS,
        "status": STATUS,
    },
)
COMPUTER_CALL_OUTPUT = item_object(
    None,
    {
        "call_id!": CALL_ID,
        "output!": typed_object(
            {"type!": StringEnum(("computer_screenshot",)), "file_id": STRING, "image_url": STRING}
        ),
        "acknowledged_safety_checks": Nullable(SAFETY_CHECKS),
        "status": STATUS,
    },
)


SEARCH_STATUS = StringEnum(("in_progress", "searching", "completed", "incomplete", "failed"))
AGENT = Nullable(Object({"agent_name!": STRING}))


WEB_SEARCH_CALL = item_object(
    "ws",
    {
        "action": Nullable(
            TaggedUnion(
                {
                    "search": typed_object(
                        {
                            "query": STRING,
                            "queries": STRING_ARRAY,
                            "sources": Array(Object({"type!": STRING, "url!": STRING})),
                        }
                    ),
                    "open_page": typed_object({"url": NULLABLE_STRING}),
                    "find_in_page": typed_object({"pattern!": STRING, "url!": STRING}),
                }
            )
        ),
        "status": SEARCH_STATUS,
    },
)
FILE_SEARCH_CALL = item_object(
    "fs",
    {
        "queries!": STRING_ARRAY,
        "status!": SEARCH_STATUS,
        "results": Nullable(
            Array(
                Object(
                    {
                        "attributes": Nullable(ANY_OBJECT),
                        "file_id": STRING,
                        "filename": STRING,
                        "score": Number(),
                        "text": STRING,
                    }
                )
            )
        ),
    },
    needs_id=True,
)
CODE_INTERPRETER_CALL = item_object(
    "ci",
    {
        "code": NULLABLE_STRING,
        "container_id!": STRING,
        "outputs": Nullable(
            Array(
                TaggedUnion(
                    {
                        "logs": typed_object({"logs!": STRING}),
                        "image": typed_object({"url!": STRING}),
                    }
                )
            )
        ),
        "status!": StringEnum(("in_progress", "completed", "incomplete", "interpreting", "failed")),
    },
    needs_id=True,
)
IMAGE_GENERATION_CALL = item_object(
    "ig",
    {
        "result!": NULLABLE_STRING,
        "status!": StringEnum(("in_progress", "completed", "generating", "failed")),
        "action": Nullable(StringEnum(("generate", "edit", "auto"))),
        "background": Nullable(StringEnum(("transparent", "opaque", "auto"))),
        "error": Object(
            {
                "type!": STRING,
                "code": NULLABLE_STRING,
                "message!": STRING,
                "param": NULLABLE_STRING,
                "moderation_details": Object(
                    {
                        "categories!": STRING_ARRAY,
                        "moderation_stage!": StringEnum(("input", "output", "unknown")),
                    }
                ),
            }
        ),
        "output_format": Nullable(StringEnum(("png", "webp", "jpeg", "gif", "svg"))),
        "quality": Nullable(StringEnum(("low", "medium", "high", "xhigh", "max", "auto"))),
        "revised_prompt": NULLABLE_STRING,
        "size": NULLABLE_STRING,
        "svg_usage": Object(
            {
                "model": STRING,
                "input_tokens": Integer(),
                "output_tokens": Integer(),
                "reasoning_tokens": Integer(),
                "total_tokens": Integer(),
            }
        ),
    },
    needs_id=True,
)

MCP_LIST_TOOLS = item_object(
    "mcpl",
    {
        "server_label!": STRING,
        "tools!": Array(
            Object(
                {
                    "name!": STRING,
                    "input_schema!": AnyJson(),
                    "annotations": AnyJson(),
                    "description": NULLABLE_STRING,
                }
            )
        ),
        "error": NULLABLE_STRING,
    },
    needs_id=True,
)
MCP_APPROVAL_REQUEST = item_object(
    "mcpr", {"server_label!": STRING, "name!": STRING, "arguments!": STRING}, needs_id=True
)
MCP_APPROVAL_RESPONSE = item_object(
    "mcpr", {"approval_request_id!": Identifier(), "approve!": BOOLEAN, "reason": NULLABLE_STRING}
)
CODED_ERROR = typed_object({"code!": Integer(), "message!": STRING})
MCP_CALL = item_object(
    "mcp",
    {
        "server_label!": STRING,
        "name!": STRING,
        "arguments!": STRING,
        "approval_request_id": NULLABLE_STRING,
        "output": NULLABLE_STRING,
        "error": Nullable(
            TypeUnion(
                "one of an object or string",
                string=STRING,
                record=TaggedUnion(
                    {
                        "mcp_protocol_error": CODED_ERROR,
                        "mcp_tool_execution_error": typed_object({"content!": AnyJson()}),
                        "http_error": CODED_ERROR,
                    }
                ),
            )
        ),
        "status": StringEnum(("in_progress", "completed", "incomplete", "calling", "failed")),
    },
    needs_id=True,
)

TOOL_SEARCH_CALL = item_object(
    None,
    {
        "call_id": Nullable(CALL_ID),
        "arguments!": AnyJson(),
        "execution": EXECUTION,
        "status": STATUS,
    },
)
TOOL_SEARCH_OUTPUT = item_object(
    None, {"call_id": Nullable(CALL_ID), "tools!": TOOLS, "execution": EXECUTION, "status": STATUS}
)
AGENT_MESSAGE = item_object(
    None, {"author!": STRING, "recipient!": STRING, "content!": Array(AGENT_PART), "agent": AGENT}
)
AGENT_ACTION = StringEnum(
    (
        "spawn_agent",
        "interrupt_agent",
        "list_agents",
        "send_message",
        "followup_task",
        "wait_agent",
    )
)
MULTI_AGENT_CALL = item_object(
    None, {"call_id!": CALL_ID, "action!": AGENT_ACTION, "arguments!": STRING, "agent": AGENT}
)
MULTI_AGENT_CALL_OUTPUT = item_object(
    None,
    {
        "call_id!": CALL_ID,
        "action!": AGENT_ACTION,
        "output!": Array(AGENT_OUTPUT_PART),
        "agent": AGENT,
    },
)

PROGRAM = item_object(
    None, {"call_id!": CALL_ID, "code!": STRING, "fingerprint!": STRING}, needs_id=True
)
PROGRAM_OUTPUT = item_object(
    None,
    {"call_id!": CALL_ID, "result!": STRING, "status!": StringEnum(("completed", "incomplete"))},
    needs_id=True,
)
