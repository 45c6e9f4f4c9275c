"""Items of a conversation: every type that a request's ``input`` may contain, with its members.

Types are those that the live API lists, members those of the openai package. An item without a type is
a message or, if it has only an id, a reference to another item.

Item ids are optional if a replay may omit them; they are required if they are the only key that
connects two items.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kedge.server.schema.calls import (
    AGENT_MESSAGE,
    APPLY_PATCH_CALL,
    APPLY_PATCH_CALL_OUTPUT,
    CODE_INTERPRETER_CALL,
    COMPUTER_CALL,
    COMPUTER_CALL_OUTPUT,
    CUSTOM_TOOL_CALL,
    CUSTOM_TOOL_CALL_OUTPUT,
    FILE_SEARCH_CALL,
    FUNCTION_CALL,
    FUNCTION_CALL_OUTPUT,
    IMAGE_GENERATION_CALL,
    LOCAL_SHELL_CALL,
    LOCAL_SHELL_CALL_OUTPUT,
    MCP_APPROVAL_REQUEST,
    MCP_APPROVAL_RESPONSE,
    MCP_CALL,
    MCP_LIST_TOOLS,
    MULTI_AGENT_CALL,
    MULTI_AGENT_CALL_OUTPUT,
    PROGRAM,
    PROGRAM_OUTPUT,
    SHELL_CALL,
    SHELL_CALL_OUTPUT,
    STATUS,
    TOOL_SEARCH_CALL,
    TOOL_SEARCH_OUTPUT,
    WEB_SEARCH_CALL,
    item_object,
)
from kedge.server.schema.content import (
    INPUT_CONTENT,
    NULLABLE_STRING,
    OUTPUT_CONTENT,
    REASONING_PART,
    STRING,
    SUMMARY_PART,
)
from kedge.server.schema.tools import (
    ANY_OBJECT,
    BOOLEAN,
    NAME,
    REASONING_EFFORTS,
    TOOLS,
    typed_object,
)
from kedge.server.schema.validators import (
    Array,
    Identifier,
    JsonPath,
    Nullable,
    Object,
    StringEnum,
    TaggedUnion,
    Validator,
)

MESSAGE_MEMBERS: dict[str, Validator] = {
    "role": STRING,
    "content!": INPUT_CONTENT,
    "status": STATUS,
}
INPUT_MESSAGE = item_object("msg", MESSAGE_MEMBERS)
ASSISTANT_MESSAGE = item_object(
    "msg",
    MESSAGE_MEMBERS
    | {"content!": OUTPUT_CONTENT, "phase": Nullable(StringEnum(("commentary", "final_answer")))},
)
MESSAGE = TaggedUnion(
    {
        "assistant": ASSISTANT_MESSAGE,
        "system": INPUT_MESSAGE,
        "developer": INPUT_MESSAGE,
        "user": INPUT_MESSAGE,
    },
    tag="role",
    error_on_object=True,
)
ITEM_REFERENCE = Object({"type": Nullable(STRING), "id!": Identifier()})

REASONING = item_object(
    "rs",
    # No status: the live API sends one with reasoning items and rejects it as input.
    {
        "summary!": Array(SUMMARY_PART),
        "content": Nullable(Array(REASONING_PART)),
        "encrypted_content": NULLABLE_STRING,
    },
)

ADDITIONAL_TOOLS = item_object(None, {"role!": StringEnum(("developer",)), "tools!": TOOLS})

JSON_SCHEMA_FORMAT = typed_object(
    {"name!": NAME, "schema!": ANY_OBJECT, "description": STRING, "strict": Nullable(BOOLEAN)}
)
TEXT_FORMAT = TaggedUnion(
    {"json_object": typed_object(), "text": typed_object(), "json_schema": JSON_SCHEMA_FORMAT}
)
CONFIGURATION_UPDATE = item_object(
    None,
    {
        "reasoning": Object({"effort": Nullable(StringEnum(REASONING_EFFORTS))}),
        "text": Object(
            {"format!": TaggedUnion({"text": typed_object(), "json_schema": JSON_SCHEMA_FORMAT})}
        ),
    },
)

ITEM_TYPES: Mapping[str, Validator] = {
    "additional_tools": ADDITIONAL_TOOLS,
    "agent_message": AGENT_MESSAGE,
    "apply_patch_call": APPLY_PATCH_CALL,
    "apply_patch_call_output": APPLY_PATCH_CALL_OUTPUT,
    "code_interpreter_call": CODE_INTERPRETER_CALL,
    "compaction": item_object("cmp", {"encrypted_content!": STRING}),
    "compaction_trigger": item_object(None, {}),
    "computer_call": COMPUTER_CALL,
    "computer_call_output": COMPUTER_CALL_OUTPUT,
    "configuration_update": CONFIGURATION_UPDATE,
    "custom_tool_call": CUSTOM_TOOL_CALL,
    "custom_tool_call_output": CUSTOM_TOOL_CALL_OUTPUT,
    "file_search_call": FILE_SEARCH_CALL,
    "function_call": FUNCTION_CALL,
    "function_call_output": FUNCTION_CALL_OUTPUT,
    "image_generation_call": IMAGE_GENERATION_CALL,
    "item_reference": ITEM_REFERENCE,
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
class InputItem:
    """An item of the type that it names; without a type, a message or a reference."""

    union: TaggedUnion
    expected: str = "an input item"

    def check(self, value: Any, path: JsonPath) -> None:
        """Find the item's type and check its members."""
        if type(value) is dict:
            item = cast("dict[str, Any]", value)
            if item.get("type") is None:
                is_reference = "id" in item and item.keys() <= {"type", "id"}
                return (ITEM_REFERENCE if is_reference else MESSAGE).check(item, path)
        return self.union.check(value, path)


ITEM = InputItem(
    TaggedUnion(
        ITEM_TYPES,
        error_on_object=True,
        # In the openai package, but not in the live API's list.
        unlisted=("configuration_update",),
        expected="an input item",
    )
)
ITEMS = Array(ITEM, of="input items")
