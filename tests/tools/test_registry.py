"""A toolbox holds tools by name."""

import pytest

from kedge.errors import InvalidTool, KedgeError, UnknownTool
from kedge.tools import Toolbox, tool


def get_weather(city: str) -> str:
    """The weather."""
    return city


@tool(name="get_time")
async def clock() -> str:
    """The time."""
    return "12:00"


def test_functions_and_tools_keep_their_order() -> None:
    """A toolbox is a mapping of names to tools; plain functions become tools."""
    box = Toolbox(get_weather, clock)
    assert list(box) == ["get_weather", "get_time"]
    assert len(box) == 2
    assert box["get_time"] is clock
    assert "get_weather" in box
    assert box.get("nothing") is None
    assert [d["name"] for d in box.definitions()] == ["get_weather", "get_time"]
    assert repr(box) == "<Toolbox get_weather, get_time>"
    assert repr(Toolbox()) == "<Toolbox empty>"


def test_two_tools_of_one_name_are_refused() -> None:
    """A model could not say which it means."""
    with pytest.raises(InvalidTool, match="already has a tool of that name"):
        Toolbox(get_weather, tool(clock.function, name="get_weather"))


def test_an_unknown_name_brings_a_suggestion() -> None:
    """The error names the nearest tool and all there are, and it is a ``KeyError``."""
    box = Toolbox(get_weather, clock)
    with pytest.raises(UnknownTool) as error:
        box["functions.get_wether"]
    assert str(error.value) == (
        "there is no tool 'functions.get_wether'; did you mean get_weather? "
        "The tools are: get_weather, get_time."
    )
    assert error.value.known == ("get_weather", "get_time")
    assert isinstance(error.value, KedgeError)
    assert isinstance(error.value, KeyError)
    with pytest.raises(UnknownTool, match=r"there is no tool 'zzz'\. The tools are: get_w"):
        box["zzz"]
    with pytest.raises(UnknownTool, match=r"There are no tools\."):
        Toolbox()["zzz"]


def test_toolboxes_are_made_from_others() -> None:
    """More tools or fewer, in a new toolbox; the tools themselves are the same."""
    box = Toolbox(get_weather)
    more = box.with_tools(clock)
    assert (list(box), list(more)) == (["get_weather"], ["get_weather", "get_time"])
    assert more["get_weather"] is box["get_weather"]
    assert list(more.without("get_weather")) == ["get_time"]
    with pytest.raises(UnknownTool):
        more.without("nothing")
