"""Tests of ``Tool``: a function with its definition for a model and its execution options."""

import dataclasses
import json
from typing import Any

import pytest
from openai.types.responses import Tool as WireTool
from pydantic import TypeAdapter

from for_each import for_each
from kedge.errors import InvalidTool
from kedge.tools import Grammar, Tool, tool
from kedge.turns import tool_call

ON_THE_WIRE: TypeAdapter[Any] = TypeAdapter(WireTool)


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
    """
    return a + b


def test_a_decorated_function_can_still_be_called() -> None:
    """The name and description come from the function, and calling the tool calls the function."""
    assert isinstance(add, Tool)
    assert (add.name, add.description) == ("add", "Add two numbers.")
    assert add(2, b=3) == 5
    assert repr(add) == "<tool add>"


def test_the_definition_matches_the_responses_api() -> None:
    """A function tool always has ``strict``, because the API treats a missing value as true."""
    assert add.definition() == {
        "type": "function",
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first."},
                "b": {"type": "integer", "default": 1},
            },
            "required": ["a"],
            "additionalProperties": False,
        },
        "strict": False,
    }


def test_options_may_be_passed_to_the_decorator_or_the_function() -> None:
    """``@tool(…)`` and ``tool(f, …)`` accept the same options."""

    @tool(name="plus", description="Sum.", timeout=2.5, retries=1, strict=True)
    def one(a: int, b: int = 1) -> int:
        return a + b

    other = tool(add.function, name="plus", description="Sum.", timeout=2.5, retries=1, strict=True)
    for each in (one, other):
        assert (each.name, each.description, each.timeout, each.retries) == ("plus", "Sum.", 2.5, 1)
    assert one.definition()["strict"] is True
    assert one.definition()["parameters"]["required"] == ["a", "b"]


def test_a_tool_is_immutable() -> None:
    """A tool is changed by ``replace``, and changes of its definition do not affect it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        add.timeout = 3  # pyright: ignore[reportAttributeAccessIssue]
    patient = dataclasses.replace(add, timeout=3, concurrency=2)
    assert (add.timeout, add.concurrency) == (None, None)
    assert (patient.timeout, patient.concurrency) == (3, 2)
    add.definition()["parameters"]["properties"].clear()
    assert list(add.parameters["properties"]) == ["a", "b"]


def test_a_custom_tool_takes_free_text() -> None:
    """The definition of a custom tool contains the grammar if there is one."""

    @tool(custom=True)
    def shout(text: str) -> str:
        """Say it loud."""
        return text.upper()

    @tool(grammar=Grammar("regex", "[a-z]+"))
    def whisper(text: str) -> str:
        return text.lower()

    assert shout.definition() == {
        "type": "custom",
        "name": "shout",
        "description": "Say it loud.",
    }
    assert whisper.custom
    assert whisper.definition() == {
        "type": "custom",
        "name": "whisper",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"},
    }


def test_a_tool_may_have_an_explicit_schema() -> None:
    """An explicit schema is sent unchanged, and the function receives the arguments as keywords."""
    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}

    def remote(**arguments: Any) -> str:
        return json.dumps(arguments)

    remote_tool = tool(remote, name="search", description="Search.", parameters=schema)
    assert remote_tool.definition()["parameters"] == schema
    assert remote_tool.reader.parse_arguments(tool_call("search", {"q": "x"})) == {"q": "x"}
    with pytest.raises(InvalidTool, match="has no parameters"):
        tool(remote, parameters=schema, custom=True)


@pytest.mark.parametrize(
    "function_tool",
    [
        add,
        tool(add.function, strict=True),
        tool(lambda: None, name="nothing", description="Do nothing."),
        tool(add.function, parameters={"type": "object"}),
        tool(lambda: None, name="a-b_C9"),
    ],
)
def test_the_openai_sdk_parses_every_definition(function_tool: Tool[..., Any]) -> None:
    """The types of the openai package parse the definition without loss."""
    definition = function_tool.definition()
    read = ON_THE_WIRE.validate_python(definition)
    assert ON_THE_WIRE.dump_python(read, exclude_unset=True) == definition


@for_each(
    ("options", "message"),
    [
        ({"name": "two words"}, "its name must be 1 to 64 letters"),
        ({"name": "x" * 65}, "its name must be"),
        ({"timeout": 0}, "its timeout must be a positive number of seconds"),
        ({"timeout": float("inf")}, "its timeout must be"),
        ({"retries": -1}, "its retries must be 0 or more"),
        ({"retries": True}, "its retries must be"),
        ({"retry_wait": -1}, "its retry_wait must be 0 or more seconds"),
        ({"concurrency": 0}, "its concurrency must be at least 1"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    """Invalid options are rejected when the tool is created, not when it is called."""
    with pytest.raises(InvalidTool) as error:
        tool(add.function, **options)
    assert message in str(error.value)


def test_a_lambda_needs_a_name() -> None:
    """A function without a usable name requires the ``name`` option."""
    with pytest.raises(InvalidTool, match="set name="):
        tool(lambda: None)


def test_a_tool_is_not_wrapped_again() -> None:
    """Passing a tool to ``tool`` raises an error that suggests ``dataclasses.replace``."""
    with pytest.raises(InvalidTool, match=r"dataclasses\.replace"):
        tool(add)
