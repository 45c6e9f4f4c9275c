"""Tests of splitting a JSON object and an array into the text of their members, and of joining them again."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.incremental.rewrite import join_object, normalize_json, split_array, split_object
from strategies import json_values

objects = st.dictionaries(st.text(), json_values(), max_size=6)
indents = st.sampled_from([None, 1, 4])


@given(objects, st.lists(json_values(), max_size=5), indents, st.booleans())
def test_members_are_those_of_json_loads(
    members: dict[str, Any], items: list[Any], indent: int | None, ascii_only: bool
) -> None:
    """Each text has the value of its member or element, and the order is that of the object."""
    body = {**members, "input": items}
    text = json.dumps(body, indent=indent, ensure_ascii=ascii_only)
    try:
        content = text.encode()
    except UnicodeEncodeError:  # a lone surrogate outside of an escape cannot be encoded
        return
    found = split_object(content)
    assert list(found) == list(json.loads(text))
    assert {name: json.loads(value) for name, value in found.items()} == json.loads(text)
    assert all(value in content for value in found.values())
    assert [json.loads(value) for value in split_array(found["input"])] == items


@for_each(
    "element",
    [
        r'"\ud83d"',
        r'"\uDE00\ud83d"',
        r'"\ud83d\ude00"',
        r'"\\ud83d"',
        "1e400",
        "-0",
        "[[], {}]",
        r'{"\"a\ud800": "]}"}',
    ],
)
def test_surrogates_and_unusual_numbers_are_copied(element: str) -> None:
    """Half of a surrogate pair, a large number and every escape are returned as they are written."""
    text = f'{{ "a\\ud800":{element},"input":[{element} , {element}]\n}}'
    members = split_object(text.encode())
    assert members == {"a\ud800": element.encode(), "input": members["input"]}
    assert split_array(members["input"]) == (element.encode(), element.encode())
    assert split_object(join_object(members)) == members


@given(objects, json_values())
def test_a_joined_object_has_its_members(members: dict[str, Any], value: Any) -> None:
    """A replaced member has the new text, and the order and text of the others do not change."""
    found = split_object(json.dumps(members, indent=1).encode())
    changed = {**found, "input": json.dumps(value).encode()}
    joined = split_object(join_object(changed))
    assert joined == changed
    assert list(joined) == list(changed)


@for_each(
    "text",
    [
        *("", "[]", "{", '{"a":1', '{"a":1}x', '{"a":NaN}', '{"a" 1}', "{,}", "{1:2}", "null"),
        *('{"a":1,"a":2}', '{"a":1,"a":1}', '{"a":12,"a":1}', '{"a":1,"b":1,"a":1}'),
        *('{"a":1,"a":1,"b":1}', '{"a":{},"\\u0061":{}}', '{"a":"x","a":"x,"}'),
    ],
)
def test_text_that_is_not_one_object_is_rejected(text: str) -> None:
    """Text that is not exactly one JSON object, or has a member twice, raises a ``ValueError``."""
    with pytest.raises(ValueError, match=r"."):
        split_object(text.encode())


@pytest.mark.parametrize("content", [b'{"a":"\xff"}', b'{"\xff":1}', b"\xef\xbb\xbf{}"])
def test_only_utf_8_is_accepted(content: bytes) -> None:
    """Other bytes, also inside of values, and a byte order mark raise a ``ValueError``."""
    with pytest.raises(ValueError, match=r"."):
        split_object(content)


@pytest.mark.parametrize("content", [b"{}", b" { } ", b"[]", b"[ ]"])
def test_empty_objects_and_arrays(content: bytes) -> None:
    """An object or an array without members is valid."""
    split = split_array if b"[" in content else split_object
    assert not split(content)


@for_each(
    ("one", "other", "equal"),
    [
        ('{"x": 2}', '{"x":2}', True),
        ('{"x":"é"}', '{"x":"\\u00e9"}', True),
        ('{"a":1,"b":2}', '{"b":2,"a":1}', False),
        ('{"x":1}', '{"x":1.0}', False),
        ('{"x":12345678901234567890123}', '{"x": 12345678901234567890123}', True),
        ('{"x":[1, {"y": null}]}', '{"x":[1,{"y":null}]}', True),
        ("not json", "not  json", False),
    ],
)
def test_arguments_are_equal_up_to_whitespace_and_escapes(
    one: str, other: str, equal: bool
) -> None:
    """A different key order or a different notation of a number makes arguments unequal."""
    assert (normalize_json(one) == normalize_json(other)) is equal
