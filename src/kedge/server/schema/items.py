"""Items of a conversation: every type that a request's ``input`` may contain, with its members.

Types are those that the live API lists, members those of the openai package. An item without a type is
a message or, if it has only an id, a reference to another item.

Item ids are optional if a replay may omit them; they are required if they are the only key that
connects two items.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kedge.server.schema.calls import CALL_TYPES, ITEM_ID, STATUS, item_id
from kedge.server.schema.content import (
    INPUT_CONTENT,
    NULLABLE_STRING,
    OUTPUT_CONTENT,
    REASONING_PART,
    STRING,
    SUMMARY_PART,
)
from kedge.server.schema.tools import ANY_OBJECT, BOOLEAN, NAME, REASONING_EFFORTS, TOOLS
from kedge.server.schema.validators import (
    Array,
    Identifier,
    JsonPath,
    Members,
    Nullable,
    Object,
    StringEnum,
    TaggedUnion,
    Validator,
)

INPUT_MESSAGE: Members = {
    "type": STRING,
    "id": item_id("msg"),
    "content!": INPUT_CONTENT,
    "status": STATUS,
}
ASSISTANT_MESSAGE = INPUT_MESSAGE | {
    "content!": OUTPUT_CONTENT,
    "phase": Nullable(StringEnum(("commentary", "final_answer"))),
}
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

JSON_SCHEMA_FORMAT: Members = {
    "name!": NAME,
    "schema!": ANY_OBJECT,
    "description": STRING,
    "strict": Nullable(BOOLEAN),
}
TEXT_FORMAT = TaggedUnion({"json_object": {}, "text": {}, "json_schema": JSON_SCHEMA_FORMAT})

OTHER_TYPES: Mapping[str, Validator | Members] = {
    "message": MESSAGE,
    "item_reference": ITEM_REFERENCE,
    # No status: the live API sends one with reasoning items and rejects it as input.
    "reasoning": {
        "id": item_id("rs"),
        "summary!": Array(SUMMARY_PART),
        "content": Nullable(Array(REASONING_PART)),
        "encrypted_content": NULLABLE_STRING,
    },
    "compaction": {"id": item_id("cmp"), "encrypted_content!": STRING},
    "compaction_trigger": {"id": ITEM_ID},
    "additional_tools": {"id": ITEM_ID, "role!": StringEnum(("developer",)), "tools!": TOOLS},
    "configuration_update": {
        "id": ITEM_ID,
        "reasoning": Object({"effort": Nullable(StringEnum(REASONING_EFFORTS))}),
        "text": Object({"format!": TaggedUnion({"text": {}, "json_schema": JSON_SCHEMA_FORMAT})}),
    },
}
ITEM_TYPES = dict(sorted({**CALL_TYPES, **OTHER_TYPES}.items()))
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
