"""Tests of ``Tool``, a function with its definition and options, and of ``Toolbox``, a mapping of names to tools."""

import json
from typing import Any

import pytest
from openai.types.responses import Tool as WireTool
from pydantic import TypeAdapter

from for_each import for_each
from kedge.errors import InvalidTool, UnknownTool
from kedge.tools import Grammar, Tool, Toolbox, ToolSource, tool
from kedge.turns import tool_call

ON_THE_WIRE: TypeAdapter[Any] = TypeAdapter(WireTool)


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
    """
    return a + b


def test_the_definition_matches_the_responses_api() -> None:
    """A function tool always has ``strict``, because the API treats a missing value as true."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "default": 1},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    definition = add.definition()
    assert (definition.pop("parameters"), definition.pop("strict")) == (schema, False)
    described = {"type": "function", "name": "add", "description": "Add two numbers."}
    assert definition == described


def test_a_custom_tool_takes_free_text() -> None:
    """The definition of a custom tool contains the grammar if there is one."""

    @tool(custom=True)
    def shout(text: str) -> str:
        """Say it loud."""
        return text.upper()

    @tool(grammar=Grammar("regex", "[a-z]+"))
    def whisper(text: str) -> str:
        return text.lower()

    said = {"type": "custom", "name": "shout", "description": "Say it loud."}
    assert shout.definition() == said
    assert whisper.custom
    format_ = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    assert whisper.definition() == {"type": "custom", "name": "whisper", "format": format_}


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


@for_each(
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
        ({"timeout": 0}, "its timeout must be a positive number of seconds"),
        ({"retries": -1}, "its retries must be 0 or more"),
        ({"retry_wait": -1}, "its retry_wait must be 0 or more seconds"),
        ({"concurrency": 0}, "its concurrency must be at least 1"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    """Invalid options are rejected when the tool is created, not when it is called."""
    with pytest.raises(InvalidTool) as error:
        tool(add.function, **options)
    assert message in str(error.value)


def test_functions_without_a_name_and_tools_are_rejected() -> None:
    """A lambda requires the ``name`` option, and a tool is changed with ``dataclasses.replace``."""
    with pytest.raises(InvalidTool, match="set name="):
        tool(lambda: None)
    with pytest.raises(InvalidTool, match=r"dataclasses\.replace"):
        tool(add)


def get_weather(city: str) -> str:
    """The weather."""
    return city


@tool(name="get_time")
async def clock() -> str:
    """The time."""
    return "12:00"


def test_a_toolbox_preserves_the_order_of_its_tools() -> None:
    """A toolbox is a mapping of unique names to tools; plain functions become tools."""
    toolbox = Toolbox(get_weather, clock)
    assert (list(toolbox), len(toolbox)) == (["get_weather", "get_time"], 2)
    assert toolbox["get_time"] is clock
    assert "get_weather" in toolbox
    assert [d["name"] for d in toolbox.definitions()] == ["get_weather", "get_time"]
    with pytest.raises(InvalidTool, match="already has a tool of that name"):
        Toolbox(get_weather, tool(clock.function, name="get_weather"))


def test_an_unknown_name_has_a_suggestion() -> None:
    """The error suggests the nearest tool, lists all tools and is a ``KeyError``."""
    toolbox = Toolbox(get_weather, clock)
    with pytest.raises(UnknownTool) as error:
        toolbox["functions.get_wether"]
    assert str(error.value) == (
        "there is no tool 'functions.get_wether'; did you mean get_weather? "
        "The tools are: get_weather, get_time."
    )
    assert error.value.known == ("get_weather", "get_time")
    assert isinstance(error.value, KeyError)
    with pytest.raises(UnknownTool, match=r"there is no tool 'zzz'\. The tools are: get_w"):
        toolbox["zzz"]
    with pytest.raises(UnknownTool, match=r"There are no tools\."):
        Toolbox()["zzz"]


def test_a_toolbox_is_derived_from_another() -> None:
    """``with_tools`` and ``without`` return a new toolbox with the same tool objects."""
    toolbox = Toolbox(get_weather)
    more = toolbox.with_tools(clock)
    assert (list(toolbox), list(more)) == (["get_weather"], ["get_weather", "get_time"])
    assert more["get_weather"] is toolbox["get_weather"]
    assert list(more.without("get_weather")) == ["get_time"]
    with pytest.raises(UnknownTool):
        more.without("nothing")


class Remote(ToolSource):
    """A tool source whose tools are set by the test."""

    def __init__(self, name: str, *names: str) -> None:
        self.name = name
        self.set(*names)

    def set(self, *names: str) -> None:
        """Replace the tools."""
        self.tools = tuple(
            tool(get_weather, name=name, description=f"{name} of {self.name}") for name in names
        )


def test_a_toolbox_follows_the_tools_of_its_sources() -> None:
    """Every toolbox made from a source has the tools that the source has now."""
    remote = Remote("files")
    toolbox = Toolbox(remote)
    more = Toolbox(clock, toolbox)
    assert (list(toolbox), bool(toolbox), toolbox.sources) == ([], False, (remote,))
    remote.set("read", "write")
    assert (list(toolbox), list(more)) == (["read", "write"], ["get_time", "read", "write"])
    assert toolbox["read"] is more["read"] is remote.tools[0]
    remote.set("read")
    assert list(more.with_tools(get_weather)) == ["get_time", "get_weather", "read"]
    with pytest.raises(UnknownTool):
        toolbox["write"]


def test_names_used_by_several_sources_are_prefixed() -> None:
    """Functions keep their names, and every source that shares a name gets its prefix."""
    files, web = Remote("files", "search", "read", "get_time"), Remote("web", "search", "fetch")
    toolbox = Toolbox(clock, files, web)
    names = ["get_time", "files_search", "read", "files_get_time", "web_search", "fetch"]
    assert list(toolbox) == names
    assert toolbox["get_time"] is clock
    assert toolbox["web_search"].description == "search of web"
    web.set("fetch")
    assert list(toolbox) == ["get_time", "search", "read", "files_get_time", "fetch"]


def test_prefixed_names_in_use_are_numbered() -> None:
    """Two sources may have the same name, and a source may have a tool with a prefixed name."""
    toolbox = Toolbox(Remote("a", "x"), Remote("a", "x"), Remote("b", "a_x", "y" * 64))
    assert list(toolbox) == ["a_x", "a_x_2", "a_x_3", "y" * 64]
    long = Toolbox(Remote("b", "y" * 64), Remote("c", "y" * 64))
    assert list(long) == ["b_" + "y" * 62, "c_" + "y" * 62]
    same = Toolbox(Remote("b", "y" * 64), Remote("b", "y" * 64))
    assert list(same) == ["b_" + "y" * 62, "b_" + "y" * 58 + "_2"]


def test_a_removed_tool_of_a_source_stays_removed() -> None:
    """A removed tool is not restored by a change of its source, and other sources keep theirs."""
    files, web = Remote("files", "search", "read"), Remote("web", "search")
    toolbox = Toolbox(get_weather, files, web).without("files_search", "get_weather")
    assert list(toolbox) == ["read", "search"]
    assert toolbox["search"] is web.tools[0]
    files.set("search", "read", "write")
    assert list(toolbox) == ["read", "write", "search"]


def test_descriptions_of_sources_are_edited() -> None:
    """The filter is applied to all descriptions of a source's tools, but not to the program's own tools."""
    remote = Remote("files")
    choice = {"anyOf": [{"type": "string", "title": "secret b"}, {"type": "null"}]}
    properties = {"description": {"type": "string", "description": "secret a"}, "list": choice}
    schema = {"type": "object", "properties": properties}
    remote.tools = (tool(get_weather, name="read", description="a secret tool", parameters=schema),)

    def hide(text: str) -> str:
        return text.replace("secret", "***")

    own = tool(get_weather, description="our secret")
    ours, theirs = Toolbox(own, remote).definitions(hide)
    assert ours["description"] == "our secret"
    assert (theirs["name"], theirs["description"]) == ("read", "a *** tool")
    properties = theirs["parameters"]["properties"]
    assert properties["description"] == {"type": "string", "description": "*** a"}
    assert properties["list"]["anyOf"][0]["title"] == "*** b"


def test_definitions_are_offered_and_not_run() -> None:
    """A definition is offered after the tools, also by copies; one without a type is an error."""
    search = {"type": "web_search"}
    for box in (
        Toolbox(add, search),
        Toolbox(Toolbox(add, search)),
        Toolbox(search).with_tools(add),
    ):
        assert list(box) == ["add"]
        assert [each["type"] for each in box.definitions()] == ["function", "web_search"]
    assert Toolbox(add, search).without("add").definitions() == [search]
    with pytest.raises(InvalidTool, match="look_up cannot be a tool: it has no type; write"):
        Toolbox({"name": "look_up"})
