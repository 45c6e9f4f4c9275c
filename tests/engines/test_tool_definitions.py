"""Definitions of tools in requests cannot be changed, and are encoded once."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.engines import Request, anthropic, chat_completions
from kedge.engines.request_options import convert_tool, to_definition
from kedge.engines.transport import encode_body
from kedge.errors import InvalidSetting
from kedge.memory.tokens import hash_settings
from kedge.tools import Toolbox, tool

COMPACT: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)
objects = st.dictionaries(texts, values, max_size=4)


def make_definition() -> dict[str, Any]:
    return {"type": "function", "name": "add", "parameters": {"required": ["a"], "properties": {}}}


@tool
def add(a: int) -> int:
    """Add one."""
    return a + 1


@given(st.lists(objects, max_size=3), objects)
def test_the_body_and_its_hash_do_not_change(tools: list[Any], settings: dict[str, Any]) -> None:
    """Cached forms give the bytes of ``json.dumps``, and the fingerprints of stored token counts."""
    request = Request(tools=tuple(tools))
    for _ in range(2):  # the second time from the cached forms
        body = {"model": "m", "stream": True, **settings, "tools": list(request.tools)}
        plain = {**body, "tools": tools}
        assert encode_body(body) == json.dumps(plain, **COMPACT).encode()
        relevant = {
            name: plain[name] for name in sorted(plain) if name not in ("stream", "input", "store")
        }
        assert hash_settings(body) == hash_settings(relevant)


def test_later_changes_of_the_caller_have_no_effect() -> None:
    """A request copies definitions and parameters."""
    definition, params = make_definition(), {"reasoning": {"effort": "low"}}
    request = Request(tools=(definition,), params=params)
    definition["parameters"]["required"].append("b")
    params["reasoning"]["effort"] = "high"
    assert request.tools == (make_definition(),)
    assert request.params == {"reasoning": {"effort": "low"}}


def test_the_requests_of_a_toolbox_share_their_definitions() -> None:
    """Requests contain the same object, which equals the definition of the tool."""
    toolbox = Toolbox(add)
    [first] = Request(tools=toolbox.frozen_definitions()).tools
    [second] = Request(tools=toolbox.frozen_definitions()).tools
    assert first is second
    assert first == add.definition() == toolbox.definitions()[0]


@pytest.mark.parametrize("map_tool", [anthropic.map_tool, chat_completions.map_tool])
def test_the_form_of_another_api_is_computed_once(map_tool: Any) -> None:
    """The converted form is cached and can be encoded beside other definitions."""
    definition = add.frozen_definition
    converted = convert_tool(definition, map_tool)
    assert converted == map_tool(add.definition())
    assert convert_tool(definition, map_tool) is converted
    assert json.loads(encode_body({"tools": [converted, {"type": "x"}]})) == {
        "tools": [map_tool(add.definition()), {"type": "x"}]
    }


def test_a_definition_that_contains_itself_is_rejected() -> None:
    """A cycle is reported as an invalid setting."""
    definition = make_definition()
    definition["parameters"]["properties"]["a"] = definition
    with pytest.raises(InvalidSetting, match="tools cannot be sent as JSON"):
        to_definition(definition)


def test_a_definition_that_is_not_json_is_rejected() -> None:
    """Another object in a definition is reported when it is encoded."""
    definition = to_definition({**make_definition(), "x": object()})
    with pytest.raises(InvalidSetting, match="tools cannot be sent as JSON"):
        encode_body({"tools": [definition]})
