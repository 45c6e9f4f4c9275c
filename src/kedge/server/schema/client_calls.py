"""Calls that a client answers, and their outputs: functions, custom tools, shells, patches.

Members follow the types of the openai package. ``coherence`` pairs outputs with calls; this module
has only their schemas.
"""

from collections.abc import Mapping

from kedge.server.schema.base import Validator
from kedge.server.schema.containers import Array, Map, Nullable, Object, TaggedUnion
from kedge.server.schema.content import NULLABLE_STRING, STRING, STRING_ARRAY, TOOL_OUTPUT
from kedge.server.schema.scalars import Identifier, Integer, String, StringEnum
from kedge.server.schema.tools import (
    BOOLEAN,
    CONTAINER_REFERENCE,
    LOCAL_ENVIRONMENT,
    NAME,
    typed_object,
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
