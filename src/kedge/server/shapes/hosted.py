"""The calls that a provider answers by itself: searches, code, images, MCP, other agents.

This server makes none of them, but a conversation that began elsewhere may carry them along, so
each is checked as strictly as the rest. Members follow the types of the openai package.
"""

from kedge.server.shapes.branches import Array, Either, Nullable, Object, Tagged
from kedge.server.shapes.calls import CALL_ID, STATUS, item
from kedge.server.shapes.leaves import Anything, Choice, Decimal, Id, Integer
from kedge.server.shapes.parts import AGENT_OUTPUT_PART, AGENT_PART, MAYBE_TEXT, STRINGS, TEXT
from kedge.server.shapes.tools import EXECUTION, FLAG, OBJECT, TOOLS, tool

SEARCH_STATUS = Choice(("in_progress", "searching", "completed", "incomplete", "failed"))
AGENT = Nullable(Object({"agent_name": TEXT}, required=("agent_name",)))


WEB_SEARCH_CALL = item(
    "ws",
    {
        "action": Nullable(
            Tagged(
                {
                    "search": tool(
                        {
                            "query": TEXT,
                            "queries": STRINGS,
                            "sources": Array(tool({"url": TEXT}, required=("type", "url"))),
                        }
                    ),
                    "open_page": tool({"url": MAYBE_TEXT}),
                    "find_in_page": tool(
                        {"pattern": TEXT, "url": TEXT}, required=("pattern", "url")
                    ),
                }
            )
        ),
        "status": SEARCH_STATUS,
    },
)
FILE_SEARCH_CALL = item(
    "fs",
    {
        "queries": STRINGS,
        "status": SEARCH_STATUS,
        "results": Nullable(
            Array(
                Object(
                    {
                        "attributes": Nullable(OBJECT),
                        "file_id": TEXT,
                        "filename": TEXT,
                        "score": Decimal(),
                        "text": TEXT,
                    }
                )
            )
        ),
    },
    required=("id", "queries", "status"),
)
CODE_INTERPRETER_CALL = item(
    "ci",
    {
        "code": MAYBE_TEXT,
        "container_id": TEXT,
        "outputs": Nullable(
            Array(
                Tagged(
                    {
                        "logs": tool({"logs": TEXT}, required=("logs",)),
                        "image": tool({"url": TEXT}, required=("url",)),
                    }
                )
            )
        ),
        "status": Choice(("in_progress", "completed", "incomplete", "interpreting", "failed")),
    },
    required=("id", "container_id", "status"),
)
IMAGE_GENERATION_CALL = item(
    "ig",
    {
        "result": MAYBE_TEXT,
        "status": Choice(("in_progress", "completed", "generating", "failed")),
        "action": Nullable(Choice(("generate", "edit", "auto"))),
        "background": Nullable(Choice(("transparent", "opaque", "auto"))),
        "error": Object(
            {
                "type": TEXT,
                "code": MAYBE_TEXT,
                "message": TEXT,
                "param": MAYBE_TEXT,
                "moderation_details": Object(
                    {
                        "categories": STRINGS,
                        "moderation_stage": Choice(("input", "output", "unknown")),
                    },
                    required=("categories", "moderation_stage"),
                ),
            },
            required=("type", "message"),
        ),
        "output_format": Nullable(Choice(("png", "webp", "jpeg", "gif", "svg"))),
        "quality": Nullable(Choice(("low", "medium", "high", "xhigh", "max", "auto"))),
        "revised_prompt": MAYBE_TEXT,
        "size": MAYBE_TEXT,
        "svg_usage": Object(
            {
                "model": TEXT,
                "input_tokens": Integer(),
                "output_tokens": Integer(),
                "reasoning_tokens": Integer(),
                "total_tokens": Integer(),
            }
        ),
    },
    required=("id", "result", "status"),
)

MCP_LIST_TOOLS = item(
    "mcpl",
    {
        "server_label": TEXT,
        "tools": Array(
            Object(
                {
                    "name": TEXT,
                    "input_schema": Anything(),
                    "annotations": Anything(),
                    "description": MAYBE_TEXT,
                },
                required=("name", "input_schema"),
            )
        ),
        "error": MAYBE_TEXT,
    },
    required=("id", "server_label", "tools"),
)
MCP_APPROVAL_REQUEST = item(
    "mcpr",
    {"server_label": TEXT, "name": TEXT, "arguments": TEXT},
    required=("id", "server_label", "name", "arguments"),
)
MCP_APPROVAL_RESPONSE = item(
    "mcpr",
    {"approval_request_id": Id(), "approve": FLAG, "reason": MAYBE_TEXT},
    required=("approval_request_id", "approve"),
)
CODE_AND_MESSAGE = tool({"code": Integer(), "message": TEXT}, required=("code", "message"))
MCP_CALL = item(
    "mcp",
    {
        "server_label": TEXT,
        "name": TEXT,
        "arguments": TEXT,
        "approval_request_id": MAYBE_TEXT,
        "output": MAYBE_TEXT,
        "error": Nullable(
            Either(
                "one of an object or string",
                text=TEXT,
                record=Tagged(
                    {
                        "mcp_protocol_error": CODE_AND_MESSAGE,
                        "mcp_tool_execution_error": tool(
                            {"content": Anything()}, required=("content",)
                        ),
                        "http_error": CODE_AND_MESSAGE,
                    }
                ),
            )
        ),
        "status": Choice(("in_progress", "completed", "incomplete", "calling", "failed")),
    },
    required=("id", "server_label", "name", "arguments"),
)

TOOL_SEARCH_CALL = item(
    None,
    {
        "call_id": Nullable(CALL_ID),
        "arguments": Anything(),
        "execution": EXECUTION,
        "status": STATUS,
    },
    required=("arguments",),
)
TOOL_SEARCH_OUTPUT = item(
    None,
    {"call_id": Nullable(CALL_ID), "tools": TOOLS, "execution": EXECUTION, "status": STATUS},
    required=("tools",),
)
AGENT_MESSAGE = item(
    None,
    {"author": TEXT, "recipient": TEXT, "content": Array(AGENT_PART), "agent": AGENT},
    required=("author", "recipient", "content"),
)
AGENT_ACTION = Choice(
    (
        "spawn_agent",
        "interrupt_agent",
        "list_agents",
        "send_message",
        "followup_task",
        "wait_agent",
    )
)
MULTI_AGENT_CALL = item(
    None,
    {"call_id": CALL_ID, "action": AGENT_ACTION, "arguments": TEXT, "agent": AGENT},
    required=("call_id", "action", "arguments"),
)
MULTI_AGENT_CALL_OUTPUT = item(
    None,
    {
        "call_id": CALL_ID,
        "action": AGENT_ACTION,
        "output": Array(AGENT_OUTPUT_PART),
        "agent": AGENT,
    },
    required=("call_id", "action", "output"),
)

PROGRAM = item(
    None,
    {"call_id": CALL_ID, "code": TEXT, "fingerprint": TEXT},
    required=("id", "call_id", "code", "fingerprint"),
)
PROGRAM_OUTPUT = item(
    None,
    {"call_id": CALL_ID, "result": TEXT, "status": Choice(("completed", "incomplete"))},
    required=("id", "call_id", "result", "status"),
)
