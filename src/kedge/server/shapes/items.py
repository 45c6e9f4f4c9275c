"""The items of a conversation: every type a request's ``input`` may hold, and its members.

Types are those the live API lists, members those of the openai package. An item without a type is
a message, as it has always been, or, if it has nothing but an id, a reference to another item.

Item ids are optional here wherever a replay may leave them out; they are required where they are
the only key by which two items find each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kedge.server.shapes.branches import Array, Nullable, Object, Tagged
from kedge.server.shapes.calls import (
    APPLY_PATCH_CALL,
    APPLY_PATCH_CALL_OUTPUT,
    COMPUTER_CALL,
    COMPUTER_CALL_OUTPUT,
    CUSTOM_TOOL_CALL,
    CUSTOM_TOOL_CALL_OUTPUT,
    FUNCTION_CALL,
    FUNCTION_CALL_OUTPUT,
    LOCAL_SHELL_CALL,
    LOCAL_SHELL_CALL_OUTPUT,
    SHELL_CALL,
    SHELL_CALL_OUTPUT,
    STATUS,
    item,
)
from kedge.server.shapes.hosted import (
    AGENT_MESSAGE,
    CODE_INTERPRETER_CALL,
    FILE_SEARCH_CALL,
    IMAGE_GENERATION_CALL,
    MCP_APPROVAL_REQUEST,
    MCP_APPROVAL_RESPONSE,
    MCP_CALL,
    MCP_LIST_TOOLS,
    MULTI_AGENT_CALL,
    MULTI_AGENT_CALL_OUTPUT,
    PROGRAM,
    PROGRAM_OUTPUT,
    TOOL_SEARCH_CALL,
    TOOL_SEARCH_OUTPUT,
    WEB_SEARCH_CALL,
)
from kedge.server.shapes.language import At, Shape
from kedge.server.shapes.leaves import Choice, Id
from kedge.server.shapes.parts import (
    INPUT_CONTENT,
    MAYBE_TEXT,
    OUTPUT_CONTENT,
    REASONING_PART,
    SUMMARY_PART,
    TEXT,
)
from kedge.server.shapes.tools import EFFORTS, FLAG, NAME, OBJECT, TOOLS, tool

MESSAGE_MEMBERS: dict[str, Shape] = {"role": TEXT, "content": INPUT_CONTENT, "status": STATUS}
SAID_TO_MODEL = item("msg", MESSAGE_MEMBERS, required=("content",))
SAID_BY_MODEL = item(
    "msg",
    MESSAGE_MEMBERS
    | {"content": OUTPUT_CONTENT, "phase": Nullable(Choice(("commentary", "final_answer")))},
    required=("content",),
)
MESSAGE = Tagged(
    {
        "assistant": SAID_BY_MODEL,
        "system": SAID_TO_MODEL,
        "developer": SAID_TO_MODEL,
        "user": SAID_TO_MODEL,
    },
    tag="role",
    blames_whole=True,
)
REFERENCE = Object({"type": Nullable(TEXT), "id": Id()}, required=("id",))

REASONING = item(
    "rs",
    # No status: the live API sends one on reasoning items and refuses to take it back.
    {
        "summary": Array(SUMMARY_PART),
        "content": Nullable(Array(REASONING_PART)),
        "encrypted_content": MAYBE_TEXT,
    },
    required=("summary",),
)

ADDITIONAL_TOOLS = item(
    None, {"role": Choice(("developer",)), "tools": TOOLS}, required=("role", "tools")
)

SCHEMA_FORMAT = tool(
    {"name": NAME, "schema": OBJECT, "description": TEXT, "strict": Nullable(FLAG)},
    required=("name", "schema"),
)
FORMAT = Tagged({"json_object": tool(), "text": tool(), "json_schema": SCHEMA_FORMAT})
CONFIGURATION_UPDATE = item(
    None,
    {
        "reasoning": Object({"effort": Nullable(Choice(EFFORTS))}),
        "text": Object(
            {"format": Tagged({"text": tool(), "json_schema": SCHEMA_FORMAT})},
            required=("format",),
        ),
    },
)

ITEM_TYPES: Mapping[str, Shape] = {
    "additional_tools": ADDITIONAL_TOOLS,
    "agent_message": AGENT_MESSAGE,
    "apply_patch_call": APPLY_PATCH_CALL,
    "apply_patch_call_output": APPLY_PATCH_CALL_OUTPUT,
    "code_interpreter_call": CODE_INTERPRETER_CALL,
    "compaction": item("cmp", {"encrypted_content": TEXT}, required=("encrypted_content",)),
    "compaction_trigger": item(None, {}),
    "computer_call": COMPUTER_CALL,
    "computer_call_output": COMPUTER_CALL_OUTPUT,
    "configuration_update": CONFIGURATION_UPDATE,
    "custom_tool_call": CUSTOM_TOOL_CALL,
    "custom_tool_call_output": CUSTOM_TOOL_CALL_OUTPUT,
    "file_search_call": FILE_SEARCH_CALL,
    "function_call": FUNCTION_CALL,
    "function_call_output": FUNCTION_CALL_OUTPUT,
    "image_generation_call": IMAGE_GENERATION_CALL,
    "item_reference": REFERENCE,
    "local_shell_call": LOCAL_SHELL_CALL,
    "local_shell_call_output": LOCAL_SHELL_CALL_OUTPUT,
    "mcp_approval_request": MCP_APPROVAL_REQUEST,
    "mcp_approval_response": MCP_APPROVAL_RESPONSE,
    "mcp_call": MCP_CALL,
    "mcp_list_tools": MCP_LIST_TOOLS,
    "message": MESSAGE,
    "multi_agent_call": MULTI_AGENT_CALL,
    "multi_agent_call_output": MULTI_AGENT_CALL_OUTPUT,
    "program": PROGRAM,
    "program_output": PROGRAM_OUTPUT,
    "reasoning": REASONING,
    "shell_call": SHELL_CALL,
    "shell_call_output": SHELL_CALL_OUTPUT,
    "tool_search_call": TOOL_SEARCH_CALL,
    "tool_search_output": TOOL_SEARCH_OUTPUT,
    "web_search_call": WEB_SEARCH_CALL,
}
"""Every item type, in the order of the live API's own list."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item: of the type it names, or a message or a reference if it names none."""

    typed: Tagged
    expected: str = "an input item"

    def check(self, value: Any, at: At) -> None:
        """Find the item's type and check its members."""
        if type(value) is dict:
            held = cast("dict[str, Any]", value)
            if held.get("type") is None:
                shape = REFERENCE if "id" in held and held.keys() <= {"type", "id"} else MESSAGE
                return shape.check(held, at)
        return self.typed.check(value, at)


ITEM = Item(
    Tagged(
        ITEM_TYPES,
        blames_whole=True,
        # In the openai package, but not in the list that the live API prints.
        also=("configuration_update",),
        expected="an input item",
    )
)
ITEMS = Array(ITEM, of="input items")
