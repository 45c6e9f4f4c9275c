"""Calls that a provider executes itself: searches, code, images, MCP, other agents.

This server executes none of them, but a conversation that was started with another server may contain
them, so each is checked as strictly as the rest. Members follow the types of the openai package.
"""

from kedge.server.schema.client_calls import CALL_ID, STATUS, item_object
from kedge.server.schema.containers import Array, Nullable, Object, TaggedUnion, TypeUnion
from kedge.server.schema.content import (
    AGENT_OUTPUT_PART,
    AGENT_PART,
    NULLABLE_STRING,
    STRING,
    STRING_ARRAY,
)
from kedge.server.schema.scalars import AnyJson, Identifier, Integer, Number, StringEnum
from kedge.server.schema.tools import ANY_OBJECT, BOOLEAN, EXECUTION, TOOLS, typed_object

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
