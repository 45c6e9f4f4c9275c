"""The calls that a client must answer, and its answers: functions, custom tools, shells, patches.

Members follow the types of the openai package. ``coherence`` tells which answer belongs to which
call; here is only what each of them looks like.
"""

from collections.abc import Mapping

from kedge.server.shapes.branches import Array, Dictionary, Nullable, Object, Tagged
from kedge.server.shapes.language import Shape
from kedge.server.shapes.leaves import Choice, Id, Integer, Text
from kedge.server.shapes.parts import MAYBE_TEXT, STRINGS, TEXT, TOOL_OUTPUT
from kedge.server.shapes.tools import CONTAINER_REFERENCE, FLAG, LOCAL_ENVIRONMENT, NAME, tool

CALL_ID = Text(least=1, most=64)
STATUS = Nullable(Choice(("in_progress", "completed", "incomplete")))
CALLER = Nullable(
    Tagged({"direct": tool(), "program": tool({"caller_id": TEXT}, required=("caller_id",))})
)


def item(
    prefix: str | None, members: Mapping[str, Shape], required: tuple[str, ...] = ()
) -> Object:
    """Make the shape of an item whose id, if it has one, begins with ``prefix``."""
    own: dict[str, Shape] = {"type": TEXT, "id": Nullable(Id(prefix or ""))}
    return Object(own | dict(members), required)


FUNCTION_CALL = item(
    "fc",
    {
        "call_id": CALL_ID,
        "name": NAME,
        "arguments": TEXT,
        "namespace": MAYBE_TEXT,
        "async": FLAG,
        "caller": CALLER,
        "status": STATUS,
    },
    required=("call_id", "name", "arguments"),
)
FUNCTION_CALL_OUTPUT = item(
    "fc",
    {
        "call_id": CALL_ID,
        "output": TOOL_OUTPUT,
        "name": MAYBE_TEXT,
        "namespace": MAYBE_TEXT,
        "caller": CALLER,
        "status": STATUS,
    },
    required=("call_id", "output"),
)
CUSTOM_TOOL_CALL = item(
    "ctc",
    {
        "call_id": CALL_ID,
        "name": TEXT,
        "input": TEXT,
        "namespace": MAYBE_TEXT,
        "async": FLAG,
        "caller": CALLER,
        "status": STATUS,
    },
    required=("call_id", "name", "input"),
)
CUSTOM_TOOL_CALL_OUTPUT = item(
    "ctc",
    {"call_id": CALL_ID, "output": TOOL_OUTPUT, "caller": CALLER, "status": STATUS},
    required=("call_id", "output"),
)

LOCAL_SHELL_CALL = item(
    "lsh",
    {
        "call_id": CALL_ID,
        "action": Tagged(
            {
                "exec": tool(
                    {
                        "command": STRINGS,
                        "env": Dictionary(TEXT),
                        "timeout_ms": Nullable(Integer()),
                        "user": MAYBE_TEXT,
                        "working_directory": MAYBE_TEXT,
                    },
                    required=("command", "env"),
                )
            }
        ),
        "status": STATUS,
    },
    required=("call_id", "action", "status"),
)
LOCAL_SHELL_CALL_OUTPUT = item(
    None, {"id": CALL_ID, "output": TEXT, "status": STATUS}, required=("id", "output")
)
SHELL_CALL = item(
    "sh",
    {
        "call_id": CALL_ID,
        "action": Object(
            {
                "commands": STRINGS,
                "max_output_length": Nullable(Integer()),
                "timeout_ms": Nullable(Integer()),
            },
            required=("commands",),
        ),
        "environment": Nullable(
            Tagged({"local": LOCAL_ENVIRONMENT, "container_reference": CONTAINER_REFERENCE})
        ),
        "caller": CALLER,
        "status": STATUS,
    },
    required=("call_id", "action"),
)
SHELL_CALL_OUTPUT = item(
    "sh",
    {
        "call_id": CALL_ID,
        "output": Array(
            Object(
                {
                    "stdout": TEXT,
                    "stderr": TEXT,
                    "outcome": Tagged(
                        {
                            "timeout": tool(),
                            "exit": tool({"exit_code": Integer()}, required=("exit_code",)),
                        }
                    ),
                },
                required=("stdout", "stderr", "outcome"),
            )
        ),
        "max_output_length": Nullable(Integer()),
        "caller": CALLER,
        "status": STATUS,
    },
    required=("call_id", "output"),
)
DIFF = tool({"path": TEXT, "diff": TEXT}, required=("path", "diff"))
APPLY_PATCH_CALL = item(
    "apc",
    {
        "call_id": CALL_ID,
        "operation": Tagged(
            {
                "create_file": DIFF,
                "delete_file": tool({"path": TEXT}, required=("path",)),
                "update_file": DIFF,
            }
        ),
        "caller": CALLER,
        "status": Choice(("in_progress", "completed")),
    },
    required=("call_id", "operation", "status"),
)
APPLY_PATCH_CALL_OUTPUT = item(
    "apc",
    {
        "call_id": CALL_ID,
        "output": MAYBE_TEXT,
        "caller": CALLER,
        "status": Choice(("completed", "failed")),
    },
    required=("call_id", "status"),
)

SAFETY_CHECKS = Array(
    Object({"id": TEXT, "code": MAYBE_TEXT, "message": MAYBE_TEXT}, required=("id",))
)
POINT: dict[str, Shape] = {"x": Integer(), "y": Integer()}
KEYS: dict[str, Shape] = {"keys": Nullable(STRINGS)}
ACTION = Tagged(
    {
        "click": tool(
            {"button": Choice(("left", "right", "wheel", "back", "forward"))} | POINT | KEYS,
            required=("button", "x", "y"),
        ),
        "double_click": tool(POINT | KEYS, required=("x", "y")),
        "drag": tool(
            {"path": Array(Object(POINT, required=("x", "y")))} | KEYS, required=("path",)
        ),
        "keypress": tool({"keys": STRINGS}, required=("keys",)),
        "move": tool(POINT | KEYS, required=("x", "y")),
        "screenshot": tool(),
        "scroll": tool(
            {"scroll_x": Integer(), "scroll_y": Integer()} | POINT | KEYS,
            required=("scroll_x", "scroll_y", "x", "y"),
        ),
        "type": tool({"text": TEXT}, required=("text",)),
        "wait": tool(),
    }
)
COMPUTER_CALL = item(
    "cu",
    {
        "call_id": CALL_ID,
        "action": Nullable(ACTION),
        "actions": Nullable(Array(ACTION)),
        "pending_safety_checks": SAFETY_CHECKS,
        "status": STATUS,
    },
    required=("call_id", "pending_safety_checks"),
)
COMPUTER_CALL_OUTPUT = item(
    None,
    {
        "call_id": CALL_ID,
        "output": tool(
            {"type": Choice(("computer_screenshot",)), "file_id": TEXT, "image_url": TEXT},
            required=("type",),
        ),
        "acknowledged_safety_checks": Nullable(SAFETY_CHECKS),
        "status": STATUS,
    },
    required=("call_id", "output"),
)
