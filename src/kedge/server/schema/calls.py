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
)
from kedge.server.schema.validators import (
    AnyJson,
    Array,
    Identifier,
    Integer,
    Map,
    Members,
    Nullable,
    Number,
    Object,
    String,
    StringEnum,
    TaggedUnion,
    TypeUnion,
)

CALL_ID = String(min_length=1, max_length=64)
STATUS = Nullable(StringEnum(("in_progress", "completed", "incomplete")))
CALLER = Nullable(
    TaggedUnion(
        {
            "direct": {},
            "program": {"caller_id!": STRING},
        }
    )
)


def item_id(prefix: str) -> Nullable:
    """Build the schema of an item's id, which starts with ``prefix``."""
    return Nullable(Identifier(prefix=prefix))


ITEM_ID = item_id("")
FILE_DIFF: Members = {"path!": STRING, "diff!": STRING}
SAFETY_CHECKS = Array(Object({"id!": STRING, "code": NULLABLE_STRING, "message": NULLABLE_STRING}))
POINT_MEMBERS: Members = {"x!": Integer(), "y!": Integer()}
KEYS_MEMBER: Members = {"keys": Nullable(STRING_ARRAY)}
COMPUTER_ACTION = TaggedUnion(
    {
        "click": {"button!": StringEnum(("left", "right", "wheel", "back", "forward"))}
        | POINT_MEMBERS
        | KEYS_MEMBER,
        "double_click": POINT_MEMBERS | KEYS_MEMBER,
        "drag": {"path!": Array(Object(POINT_MEMBERS))} | KEYS_MEMBER,
        "keypress": {"keys!": STRING_ARRAY},
        "move": POINT_MEMBERS | KEYS_MEMBER,
        "screenshot": {},
        "scroll": {"scroll_x!": Integer(), "scroll_y!": Integer()} | POINT_MEMBERS | KEYS_MEMBER,
        "type": {"text!": STRING},
        "wait": {},
    }
)
SEARCH_STATUS = StringEnum(("in_progress", "searching", "completed", "incomplete", "failed"))
AGENT = Nullable(Object({"agent_name!": STRING}))
CODED_ERROR: Members = {"code!": Integer(), "message!": STRING}
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
CALL_TYPES: Mapping[str, Members] = {
    "function_call": {
        "id": item_id("fc"),
        "call_id!": CALL_ID,
        "name!": NAME,
        "arguments!": STRING,
        "namespace": NULLABLE_STRING,
        "async": BOOLEAN,
        "caller": CALLER,
        "status": STATUS,
    },
    "function_call_output": {
        "id": item_id("fc"),
        "call_id!": CALL_ID,
        "output!": TOOL_OUTPUT,
        "name": NULLABLE_STRING,
        "namespace": NULLABLE_STRING,
        "caller": CALLER,
        "status": STATUS,
    },
    "custom_tool_call": {
        "id": item_id("ctc"),
        "call_id!": CALL_ID,
        "name!": STRING,
        "input!": STRING,
        "namespace": NULLABLE_STRING,
        "async": BOOLEAN,
        "caller": CALLER,
        "status": STATUS,
    },
    "custom_tool_call_output": {
        "id": item_id("ctc"),
        "call_id!": CALL_ID,
        "output!": TOOL_OUTPUT,
        "caller": CALLER,
        "status": STATUS,
    },
    "local_shell_call": {
        "id": item_id("lsh"),
        "call_id!": CALL_ID,
        "action!": TaggedUnion(
            {
                "exec": {
                    "command!": STRING_ARRAY,
                    "env!": Map(STRING),
                    "timeout_ms": Nullable(Integer()),
                    "user": NULLABLE_STRING,
                    "working_directory": NULLABLE_STRING,
                }
            }
        ),
        "status!": STATUS,
    },
    "local_shell_call_output": {"id": ITEM_ID, "id!": CALL_ID, "output!": STRING, "status": STATUS},
    "shell_call": {
        "id": item_id("sh"),
        "call_id!": CALL_ID,
        "action!": {
            "commands!": STRING_ARRAY,
            "max_output_length": Nullable(Integer()),
            "timeout_ms": Nullable(Integer()),
        },
        "environment": Nullable(
            TaggedUnion({"local": LOCAL_ENVIRONMENT, "container_reference": CONTAINER_REFERENCE})
        ),
        "caller": CALLER,
        "status": STATUS,
    },
    "shell_call_output": {
        "id": item_id("sh"),
        "call_id!": CALL_ID,
        "output!": Array(
            Object(
                {
                    "stdout!": STRING,
                    "stderr!": STRING,
                    "outcome!": TaggedUnion(
                        {
                            "timeout": {},
                            "exit": {"exit_code!": Integer()},
                        }
                    ),
                }
            )
        ),
        "max_output_length": Nullable(Integer()),
        "caller": CALLER,
        "status": STATUS,
    },
    "apply_patch_call": {
        "id": item_id("apc"),
        "call_id!": CALL_ID,
        "operation!": TaggedUnion(
            {
                "create_file": FILE_DIFF,
                "delete_file": {"path!": STRING},
                "update_file": FILE_DIFF,
            }
        ),
        "caller": CALLER,
        "status!": StringEnum(("in_progress", "completed")),
    },
    "apply_patch_call_output": {
        "id": item_id("apc"),
        "call_id!": CALL_ID,
        "output": NULLABLE_STRING,
        "caller": CALLER,
        "status!": StringEnum(("completed", "failed")),
    },
    "computer_call": {
        "id": item_id("cu"),
        "call_id!": CALL_ID,
        "action": Nullable(COMPUTER_ACTION),
        "actions": Nullable(Array(COMPUTER_ACTION)),
        "pending_safety_checks!": SAFETY_CHECKS,
        "status": STATUS,
    },
    "computer_call_output": {
        "id": ITEM_ID,
        "call_id!": CALL_ID,
        "output!": {
            "type!": StringEnum(("computer_screenshot",)),
            "file_id": STRING,
            "image_url": STRING,
        },
        "acknowledged_safety_checks": Nullable(SAFETY_CHECKS),
        "status": STATUS,
    },
    "web_search_call": {
        "id": item_id("ws"),
        "action": Nullable(
            TaggedUnion(
                {
                    "search": {
                        "query": STRING,
                        "queries": STRING_ARRAY,
                        "sources": Array(Object({"type!": STRING, "url!": STRING})),
                    },
                    "open_page": {"url": NULLABLE_STRING},
                    "find_in_page": {"pattern!": STRING, "url!": STRING},
                }
            )
        ),
        "status": SEARCH_STATUS,
    },
    "file_search_call": {
        "id!": item_id("fs"),
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
    "code_interpreter_call": {
        "id!": item_id("ci"),
        "code": NULLABLE_STRING,
        "container_id!": STRING,
        "outputs": Nullable(
            Array(
                TaggedUnion(
                    {
                        "logs": {"logs!": STRING},
                        "image": {"url!": STRING},
                    }
                )
            )
        ),
        "status!": StringEnum(("in_progress", "completed", "incomplete", "interpreting", "failed")),
    },
    "image_generation_call": {
        "id!": item_id("ig"),
        "result!": NULLABLE_STRING,
        "status!": StringEnum(("in_progress", "completed", "generating", "failed")),
        "action": Nullable(StringEnum(("generate", "edit", "auto"))),
        "background": Nullable(StringEnum(("transparent", "opaque", "auto"))),
        "error": {
            "type!": STRING,
            "code": NULLABLE_STRING,
            "message!": STRING,
            "param": NULLABLE_STRING,
            "moderation_details": {
                "categories!": STRING_ARRAY,
                "moderation_stage!": StringEnum(("input", "output", "unknown")),
            },
        },
        "output_format": Nullable(StringEnum(("png", "webp", "jpeg", "gif", "svg"))),
        "quality": Nullable(StringEnum(("low", "medium", "high", "xhigh", "max", "auto"))),
        "revised_prompt": NULLABLE_STRING,
        "size": NULLABLE_STRING,
        "svg_usage": {
            "model": STRING,
            "input_tokens": Integer(),
            "output_tokens": Integer(),
            "reasoning_tokens": Integer(),
            "total_tokens": Integer(),
        },
    },
    "mcp_list_tools": {
        "id!": item_id("mcpl"),
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
    "mcp_approval_request": {
        "id!": item_id("mcpr"),
        "server_label!": STRING,
        "name!": STRING,
        "arguments!": STRING,
    },
    "mcp_approval_response": {
        "id": item_id("mcpr"),
        "approval_request_id!": Identifier(),
        "approve!": BOOLEAN,
        "reason": NULLABLE_STRING,
    },
    "mcp_call": {
        "id!": item_id("mcp"),
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
                        "mcp_tool_execution_error": {"content!": AnyJson()},
                        "http_error": CODED_ERROR,
                    }
                ),
            )
        ),
        "status": StringEnum(("in_progress", "completed", "incomplete", "calling", "failed")),
    },
    "tool_search_call": {
        "id": ITEM_ID,
        "call_id": Nullable(CALL_ID),
        "arguments!": AnyJson(),
        "execution": EXECUTION,
        "status": STATUS,
    },
    "tool_search_output": {
        "id": ITEM_ID,
        "call_id": Nullable(CALL_ID),
        "tools!": TOOLS,
        "execution": EXECUTION,
        "status": STATUS,
    },
    "agent_message": {
        "id": ITEM_ID,
        "author!": STRING,
        "recipient!": STRING,
        "content!": Array(AGENT_PART),
        "agent": AGENT,
    },
    "multi_agent_call": {
        "id": ITEM_ID,
        "call_id!": CALL_ID,
        "action!": AGENT_ACTION,
        "arguments!": STRING,
        "agent": AGENT,
    },
    "multi_agent_call_output": {
        "id": ITEM_ID,
        "call_id!": CALL_ID,
        "action!": AGENT_ACTION,
        "output!": Array(AGENT_OUTPUT_PART),
        "agent": AGENT,
    },
    "program": {"id!": ITEM_ID, "call_id!": CALL_ID, "code!": STRING, "fingerprint!": STRING},
    "program_output": {
        "id!": ITEM_ID,
        "call_id!": CALL_ID,
        "result!": STRING,
        "status!": StringEnum(("completed", "incomplete")),
    },
}
"""Calls, their outputs and what agents exchange, by the type of the item."""
