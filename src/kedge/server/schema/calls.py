"""Calls and their outputs: those that a client answers, and those that a provider executes itself.

This server executes no hosted call, but a conversation that was started with another server may contain
them, so each is checked as strictly as the rest. Members follow the types of the openai package. ``coherence``
pairs outputs with calls; this module has only their schemas.
"""

from collections.abc import Mapping

from kedge.server.schema.content import (
    AGENT_OUTPUT_PART,
    AGENT_PART,
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
    Null,
    Number,
    Object,
    String,
    StringEnum,
    TaggedUnion,
    TypeUnion,
)

CALL_ID = String(min_length=1, max_length=64)
STATUS = StringEnum("in_progress", "completed", "incomplete")
CALLER = TaggedUnion(
    {
        "direct": {},
        "program": {"caller_id!": STRING},
    }
)
ITEM_ID = Identifier()
FILE_DIFF: Members = {"path!": STRING, "diff!": STRING}
SAFETY_CHECKS = Array({"id!": STRING, "code?": STRING, "message?": STRING})
POINT_MEMBERS: Members = {"x!": Integer(), "y!": Integer()}
KEYS_MEMBER: Members = {"keys?": STRING_ARRAY}
COMPUTER_ACTION = TaggedUnion(
    {
        "click": {"button!": StringEnum("left", "right", "wheel", "back", "forward")}
        | POINT_MEMBERS
        | KEYS_MEMBER,
        "double_click": POINT_MEMBERS | KEYS_MEMBER,
        "drag": {"path!": Array(POINT_MEMBERS)} | KEYS_MEMBER,
        "keypress": {"keys!": STRING_ARRAY},
        "move": POINT_MEMBERS | KEYS_MEMBER,
        "screenshot": {},
        "scroll": {"scroll_x!": Integer(), "scroll_y!": Integer()} | POINT_MEMBERS | KEYS_MEMBER,
        "type": {"text!": STRING},
        "wait": {},
    }
)
SEARCH_STATUS = StringEnum("in_progress", "searching", "completed", "incomplete", "failed")
AGENT = Object({"agent_name!": STRING})
CODED_ERROR: Members = {"code!": Integer(), "message!": STRING}
AGENT_ACTION = StringEnum(
    "spawn_agent", "interrupt_agent", "list_agents", "send_message", "followup_task", "wait_agent"
)
CALL_TYPES: Mapping[str, Members] = {
    "function_call": {
        "id?": Identifier(prefix="fc"),
        "call_id!": CALL_ID,
        "name!": NAME,
        "arguments!": STRING,
        "parsed_arguments~": AnyJson(),
        "namespace?": STRING,
        "async?": BOOLEAN,
        "async_~": Null(),
        "caller?": CALLER,
        "status?": STATUS,
    },
    "function_call_output": {
        "id?": Identifier(prefix="fc"),
        "call_id!": CALL_ID,
        "output!": TOOL_OUTPUT,
        "name?": STRING,
        "namespace?": STRING,
        "caller?": CALLER,
        "status?": STATUS,
    },
    "custom_tool_call": {
        "id?": Identifier(prefix="ctc"),
        "call_id!": CALL_ID,
        "name!": STRING,
        "input!": STRING,
        "namespace?": STRING,
        "async?": BOOLEAN,
        "async_~": Null(),
        "caller?": CALLER,
        "status?": STATUS,
    },
    "custom_tool_call_output": {
        "id?": Identifier(prefix="ctc"),
        "call_id!": CALL_ID,
        "output!": TOOL_OUTPUT,
        "caller?": CALLER,
        "status?": STATUS,
    },
    "local_shell_call": {
        "id?": Identifier(prefix="lsh"),
        "call_id!": CALL_ID,
        "action!": TaggedUnion(
            {
                "exec": {
                    "command!": STRING_ARRAY,
                    "env!": Map(STRING),
                    "timeout_ms?": Integer(),
                    "user?": STRING,
                    "working_directory?": STRING,
                }
            }
        ),
        "status!?": STATUS,
    },
    "local_shell_call_output": {
        "id?": ITEM_ID,
        "id!": CALL_ID,
        "output!": STRING,
        "status?": STATUS,
    },
    "shell_call": {
        "id?": Identifier(prefix="sh"),
        "call_id!": CALL_ID,
        "action!": {
            "commands!": STRING_ARRAY,
            "max_output_length?": Integer(),
            "timeout_ms?": Integer(),
        },
        "environment?": TaggedUnion(
            {"local": LOCAL_ENVIRONMENT, "container_reference": CONTAINER_REFERENCE}
        ),
        "caller?": CALLER,
        "status?": STATUS,
    },
    "shell_call_output": {
        "id?": Identifier(prefix="sh"),
        "call_id!": CALL_ID,
        "output!": Array(
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
        ),
        "max_output_length?": Integer(),
        "caller?": CALLER,
        "status?": STATUS,
    },
    "apply_patch_call": {
        "id?": Identifier(prefix="apc"),
        "call_id!": CALL_ID,
        "operation!": TaggedUnion(
            {
                "create_file": FILE_DIFF,
                "delete_file": {"path!": STRING},
                "update_file": FILE_DIFF,
            }
        ),
        "caller?": CALLER,
        "status!": StringEnum("in_progress", "completed"),
    },
    "apply_patch_call_output": {
        "id?": Identifier(prefix="apc"),
        "call_id!": CALL_ID,
        "output?": STRING,
        "caller?": CALLER,
        "status!": StringEnum("completed", "failed"),
    },
    "computer_call": {
        "id?": Identifier(prefix="cu"),
        "call_id!": CALL_ID,
        "action?": COMPUTER_ACTION,
        "actions?": Array(COMPUTER_ACTION),
        "pending_safety_checks!": SAFETY_CHECKS,
        "status?": STATUS,
    },
    "computer_call_output": {
        "id?": ITEM_ID,
        "call_id!": CALL_ID,
        "output!": {
            "type!": StringEnum("computer_screenshot"),
            "file_id": STRING,
            "image_url": STRING,
        },
        "acknowledged_safety_checks?": SAFETY_CHECKS,
        "status?": STATUS,
    },
    "web_search_call": {
        "id?": Identifier(prefix="ws"),
        "action?": TaggedUnion(
            {
                "search": {
                    "query": STRING,
                    "queries": STRING_ARRAY,
                    "sources": Array({"type!": STRING, "url!": STRING}),
                },
                "open_page": {"url?": STRING},
                "find_in_page": {"pattern!": STRING, "url!": STRING},
            }
        ),
        "status": SEARCH_STATUS,
    },
    "file_search_call": {
        "id!?": Identifier(prefix="fs"),
        "queries!": STRING_ARRAY,
        "status!": SEARCH_STATUS,
        "results?": Array(
            {
                "attributes?": ANY_OBJECT,
                "file_id": STRING,
                "filename": STRING,
                "score": Number(),
                "text": STRING,
            }
        ),
    },
    "code_interpreter_call": {
        "id!?": Identifier(prefix="ci"),
        "code?": STRING,
        "container_id!": STRING,
        "outputs?": Array(
            TaggedUnion(
                {
                    "logs": {"logs!": STRING},
                    "image": {"url!": STRING},
                }
            )
        ),
        "status!": StringEnum("in_progress", "completed", "incomplete", "interpreting", "failed"),
    },
    "image_generation_call": {
        "id!?": Identifier(prefix="ig"),
        "result?": STRING,
        "status": StringEnum("in_progress", "completed", "generating", "failed"),
        "action?": StringEnum("generate", "edit", "auto"),
        "background?": StringEnum("transparent", "opaque", "auto"),
        "error": {
            "type!": STRING,
            "code?": STRING,
            "message!": STRING,
            "param?": STRING,
            "moderation_details": {
                "categories!": STRING_ARRAY,
                "moderation_stage!": StringEnum("input", "output", "unknown"),
            },
        },
        "output_format?": StringEnum("png", "webp", "jpeg", "gif", "svg"),
        "quality?": StringEnum("low", "medium", "high", "xhigh", "max", "auto"),
        "revised_prompt?": STRING,
        "size?": STRING,
        "svg_usage": {
            "model": STRING,
            "input_tokens": Integer(),
            "output_tokens": Integer(),
            "reasoning_tokens": Integer(),
            "total_tokens": Integer(),
        },
    },
    "mcp_list_tools": {
        "id!?": Identifier(prefix="mcpl"),
        "server_label!": STRING,
        "tools!": Array(
            {
                "name!": STRING,
                "input_schema!": AnyJson(),
                "annotations": AnyJson(),
                "description?": STRING,
            }
        ),
        "error?": STRING,
    },
    "mcp_approval_request": {
        "id!?": Identifier(prefix="mcpr"),
        "server_label!": STRING,
        "name!": STRING,
        "arguments!": STRING,
    },
    "mcp_approval_response": {
        "id?": Identifier(prefix="mcpr"),
        "approval_request_id!": Identifier(),
        "approve!": BOOLEAN,
        "reason?": STRING,
    },
    "mcp_call": {
        "id!?": Identifier(prefix="mcp"),
        "server_label!": STRING,
        "name!": STRING,
        "arguments!": STRING,
        "approval_request_id?": STRING,
        "output?": STRING,
        "error?": TypeUnion(
            "one of an object or string",
            string=STRING,
            record=TaggedUnion(
                {
                    "mcp_protocol_error": CODED_ERROR,
                    "mcp_tool_execution_error": {"content!": AnyJson()},
                    "http_error": CODED_ERROR,
                }
            ),
        ),
        "status": StringEnum("in_progress", "completed", "incomplete", "calling", "failed"),
    },
    "tool_search_call": {
        "id?": ITEM_ID,
        "call_id?": CALL_ID,
        "arguments!": AnyJson(),
        "execution": EXECUTION,
        "status?": STATUS,
    },
    "tool_search_output": {
        "id?": ITEM_ID,
        "call_id?": CALL_ID,
        "tools!": TOOLS,
        "execution": EXECUTION,
        "status?": STATUS,
    },
    "agent_message": {
        "id?": ITEM_ID,
        "author!": STRING,
        "recipient!": STRING,
        "content!": Array(AGENT_PART),
        "agent?": AGENT,
    },
    "multi_agent_call": {
        "id?": ITEM_ID,
        "call_id!": CALL_ID,
        "action!": AGENT_ACTION,
        "arguments!": STRING,
        "agent?": AGENT,
    },
    "multi_agent_call_output": {
        "id?": ITEM_ID,
        "call_id!": CALL_ID,
        "action!": AGENT_ACTION,
        "output!": Array(AGENT_OUTPUT_PART),
        "agent?": AGENT,
    },
    "program": {"id!?": ITEM_ID, "call_id!": CALL_ID, "code!": STRING, "fingerprint!": STRING},
    "program_output": {
        "id!?": ITEM_ID,
        "call_id!": CALL_ID,
        "result!": STRING,
        "status!": StringEnum("completed", "incomplete"),
    },
}
"""Calls, their outputs and what agents exchange, by the type of the item."""
