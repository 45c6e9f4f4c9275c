"""Tests of editing members of a JSON object in place, without changing the rest of the text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.incremental.json_splice import (
    normalize_json,
    replace_array,
    scan_elements,
    scan_object,
)
from strategies import json_values

objects = st.dictionaries(st.text(), json_values(), max_size=6)
indents = st.sampled_from([None, 1, 4])


@given(objects, st.lists(json_values(), max_size=5), indents, st.booleans())
def test_scanning_matches_json_loads(
    members: dict[str, Any], items: list[Any], indent: int | None, ascii_only: bool
) -> None:
    """Values equal those of `json.loads`, and each span is the text of its value."""
    body = {**members, "input": items}
    text = json.dumps(body, indent=indent, ensure_ascii=ascii_only)
    try:
        content = text.encode()
    except UnicodeEncodeError:  # a lone surrogate outside of an escape cannot be encoded
        return
    scanned = scan_object(content)
    assert {name: member.value for name, member in scanned.members.items()} == json.loads(text)
    for member in scanned.members.values():
        part = scanned.text[member.span.start : member.span.end]
        assert json.loads(part) == member.value
    spans = scan_elements(scanned.text, scanned.members["input"].span)
    assert [json.loads(scanned.text[span.start : span.end]) for span in spans] == items


@pytest.mark.parametrize("element", [r'"\ud83d"', r'"\ude00\ud83d"', "1e400", "-0", "[[], {}]"])
def test_lone_surrogates_and_unusual_numbers_are_elements(element: str) -> None:
    """Elements that the standard library must parse are found at the same positions, also after another."""
    text = f'{{"input":[{element} ,{element}]}}'
    scanned = scan_object(text.encode())
    array = scanned.members["input"].span
    spans = scan_elements(text, array)
    assert [text[span.start : span.end] for span in spans] == [element, element]
    assert scan_elements(text, array, spans[0].end) == spans[1:]
    assert scan_elements(text, array, spans[1].end) == []


@given(objects, st.lists(json_values(), min_size=1, max_size=5), indents, st.data())
def test_slice_retains_rest_of_body(
    members: dict[str, Any], items: list[Any], indent: int | None, data: st.DataObject
) -> None:
    """Only the array and the new member change; the order and text of the other members do not."""
    members.pop("previous_response_id", None)
    body = {"model": "m", "input": items, **{k: v for k, v in members.items() if k != "input"}}
    if data.draw(st.booleans()):  # an existing member gets the new value
        first = data.draw(st.booleans())
        null = {"previous_response_id": None}
        body = {**null, **body} if first else {**body, **null}
    text = json.dumps(body, indent=indent)
    scanned = scan_object(text.encode())
    start = data.draw(st.integers(0, len(items)))
    spans = scan_elements(scanned.text, scanned.members["input"].span)[start:]
    content = replace_array(scanned, "input", spans, {"previous_response_id": "r"})
    edited = {name: member.value for name, member in scan_object(content).members.items()}
    assert edited == {**body, "input": items[start:], "previous_response_id": "r"}
    names = [name for name in edited if name in body]
    assert names == list(body)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a":1', '{"a":1}x', '{"a":1,"a":2}', '{"a":NaN}', '{"a" 1}', "{,}", "{1:2}"],
)
def test_text_that_is_not_one_object_is_rejected(text: str) -> None:
    """Text that is not exactly one JSON object raises a ``ValueError``."""
    with pytest.raises(ValueError, match=r"."):
        scan_object(text.encode())


@pytest.mark.parametrize(
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
