"""Large JSON is the same value as any JSON, and its values are counted before they are created."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge._internal import large_json
from kedge._internal.large_json import TooManyValues, count_values, decode_strict

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture(autouse=True)
def _in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "LARGE_BYTES", 20)
    monkeypatch.setattr(large_json, "PIECE_BYTES", 4)


def count_by_walk(value: Any) -> int:
    """Count a value and all values in it; an empty list or object counts twice."""
    if isinstance(value, dict):
        return 1 + (sum(map(count_by_walk, value.values())) or 1)
    if isinstance(value, list):
        return 1 + (sum(map(count_by_walk, value)) or 1)
    return 1


@given(VALUES, st.booleans())
def test_a_value_is_the_same_in_pieces(value: Any, indented: bool) -> None:
    """Any JSON is decoded as at once, also with escapes and blanks between its tokens."""
    text = json.dumps(value, indent=2 if indented else None, ensure_ascii=not indented)
    data = text.encode("utf-8", "surrogatepass")
    try:
        expected = json.loads(data.decode())
    except ValueError:
        return
    assert decode_strict(b" " + data + b"\n") == expected


@given(VALUES)
def test_values_are_counted(value: Any) -> None:
    """The count does not depend on the contents of strings, wherever a piece ends."""
    assert count_values(json.dumps(value).encode()) == count_by_walk(value)


@for_each(
    "text",
    [
        '{"a": [1, 2, 3, 4, 5, 6, 7, 8, ]}',
        '{"a": [1, 2, 3, 4, 5, 6, 7, 8, NaN]}',
        '{"a": [1, 2, 3, 4, 5, 6, 7, 8]} 9',
        '{"a": [1, 2, 3, 4, 5, 6, 7, 8}',
        '["a long text without an end',
        "                                    ",
    ],
)
def test_what_is_not_json_is_an_error(text: str) -> None:
    """Errors inside a piece, between pieces and after the value are found."""
    with pytest.raises(ValueError, match=r"."):
        decode_strict(text.encode())


def test_invalid_utf_8_is_an_error() -> None:
    """It is found in pieces that are decoded later, too."""
    with pytest.raises(ValueError, match=r"."):
        decode_strict(b'{"a": [1, 2, "\xff\xff\xff\xff\xff\xff"]}')


def test_too_many_values_are_rejected_before_they_are_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is exact, and applies to what is large only."""
    monkeypatch.setattr(large_json, "MAX_VALUES", 11)
    data = json.dumps(list(range(10))).encode()
    assert decode_strict(data) == list(range(10))
    with pytest.raises(TooManyValues):
        decode_strict(json.dumps(list(range(11))).encode())
    monkeypatch.setattr(large_json, "LARGE_BYTES", 1_000)
    assert decode_strict(json.dumps(list(range(11))).encode()) == list(range(11))


def test_commas_and_brackets_in_strings_are_no_values() -> None:
    """A text, also one with JSON and escapes in it, is one value."""
    text = json.dumps({"a": [1, 2, {"b": '",[{'}], "c": "\\"}) * 50
    assert count_values(json.dumps(text).encode()) == 1
    assert count_values(json.dumps([text, "\\", text]).encode()) == 4
