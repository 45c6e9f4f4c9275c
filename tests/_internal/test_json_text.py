"""JSON text: encoded deterministically and without loss, decoded as by the standard library."""

import enum
import json
import math
import struct
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge._internal.json_text import decode, encode, encode_sorted, encode_text, reject_constant
from kedge.engines.request_body import encode_body

COMPACT: Any = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - a plain tuple of the standard library


class Name(str):
    """A subclass of str, which msgspec does not encode."""

    __slots__ = ()


class Color(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


texts = st.text(st.characters(codec=None), max_size=12) | st.sampled_from(
    ["\ud83d", "\ude00\ud83d", "\x00\x1f\x7f", "\u2028", '"\\/\b\f\n\r\t', "1.5", "[1e16,NaN]"]
)
floats = st.floats() | st.builds(
    lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0], st.integers(0, 2**64 - 1)
)
integers = st.integers(-(2**70), 2**70) | st.integers(-(10**400), 10**400)
scalars = st.none() | st.booleans() | integers | floats | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts, inner, max_size=4)
    ),
    max_leaves=12,
)

CORNERS: list[Any] = [
    *(1e16, 1e15, 9999999999999998.0, 1e-4, 9.999999999999999e-05, 1e-05, 1e22, 1e100, 5e-324),
    *(1.7976931348623157e308, -0.0, 0.0, 1.0, -1.5, -1e-7, math.nan, math.inf, -math.inf),
    *(2**63, 2**64, 2**64 - 1, -(2**63), -(2**63) - 1, 2**2048, 10**4299, 10**5000),
    *("\ud800", "\x7f\x00\x1f\u2028é😀", {"\udc00": 1}, {"b": 1, "a": {"d": 1, "c": 2}}),
    *({1: 2}, {True: 1}, {None: 1}, {1.5: 2}, {1e16: 2}, {"1": 1, 1: 2}, {"é": 1, "z": 2, "😀": 3}),
    *({(1,): 2}, object(), b"bytes", [object()], {"a": b""}, 1j, ValueError("x")),
    *(Name("x"), {Name("k"): Name("v")}, Color.RED, Level.HIGH, {Color.RED: Level.HIGH}),
    *(OrderedDict(b=1, a=2), Pair(1, [2.5]), (1, (2, ())), [True, 1, 1.0], [[[[[[[[[1e16]]]]]]]]]),
]

DOCUMENTS: list[bytes] = [
    *(b"NaN", b"[Infinity,-Infinity]", b"1e400", b"-1e400", b"-0", b"-0.0", b"1E5", b"0.1e+16"),
    *(b"18446744073709551616", b"9" * 400, b"9" * 5000, b"2.2250738585072011e-308"),
    *(b"0.1000000000000000055511151231257827021181583404541015625", b"123456789.123456789e-30"),
    *(rb'"\ud800"', rb'"\ud83d\ude00"', rb'"\uD83D\uDE00"', rb'"\ud83d\u0041"', rb'"\ude00\ud83d"'),
    *(b'"\xff"', b'"\xed\xa0\x80"', b'{"\xff":1}', b'{"a":1,"b":2,"a":3}', b'"a\x01b"', b'"a\tb"'),
    *(b" [1 ,2 ] \r\n\t", b"[1,]", b"01", b"1.", b".5", b"-", b"", b" ", b"[1] x", b"\x0b1", b"+1"),
    *(b"\xef\xbb\xbf1", '{"a":"é"}'.encode("utf-16"), '"é"'.encode("utf-32"), b'"\x7f"', b"tru"),
    *(rb'"\u0000"', rb'"\x"', rb'"\u12"', b'{"a" 1}', b"{a:1}", b"{'a':1}", b'"', b"[", b"]"),
    *(b"[" * 500 + b"]" * 500, b"[" * 100_000, b'{"a":' * 100_000),
]


def outcome(work: Callable[[], Any]) -> Any:
    """Return the ``repr`` of the result (NaN equals itself, true is not 1), or the type of the error."""
    try:
        return repr(work())
    except (ValueError, TypeError, RecursionError) as error:
        return UnicodeError if isinstance(error, UnicodeError) else type(error)


@given(values)
def test_encoded_values_are_read_back(value: Any) -> None:
    """Every encoder writes compact text of the same value as ``json.dumps``, and fails where it fails."""
    check_encoded(value)


@for_each("value", CORNERS)
def test_encoded_corner_cases_are_read_back(value: Any) -> None:
    """Floats with exponents, huge integers, odd keys, subclasses and surrogates are encoded, or refused."""
    check_encoded(value)
    check_encoded([value])
    check_encoded({"a": {"b": [value, "text"]}})


def check_encoded(value: Any) -> None:
    expected = outcome(lambda: json.loads(json.dumps(value, **COMPACT).encode()))
    assert outcome(lambda: json.loads(encode(value))) == expected
    as_text = outcome(lambda: json.loads(json.dumps(value, **COMPACT)))
    assert outcome(lambda: json.loads(encode_text(value))) == as_text
    body = {"model": "m", "x": value, "input": value}
    expected = outcome(lambda: json.loads(json.dumps(body, **COMPACT).encode()))
    assert outcome(lambda: json.loads(encode_body(body))) == expected


@given(values)
def test_sorted_text_depends_only_on_the_value(value: Any) -> None:
    """The input of digests is compact, has sorted keys, and refuses what is not JSON."""
    expected = outcome(lambda: json.loads(json.dumps(value, sort_keys=True, **COMPACT).encode()))
    found = outcome(lambda: json.loads(encode_sorted(value)))
    assert found == expected
    if not isinstance(found, type):
        text = encode_sorted(value)
        assert encode_sorted(json.loads(text)) == text


@for_each("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(number: float) -> None:
    """No encoder writes NaN or an infinite number, at any depth, although msgspec writes them as null."""
    nested: Any = number
    for _ in range(12):
        for write in (encode, encode_text, encode_sorted):
            with pytest.raises(ValueError, match="not JSON compliant"):
                write([None, nested])
        nested = {"a": [nested]}


GOLDEN = [
    (1e16, b"1e16"),
    (1e-05, b"0.00001"),
    (1e-07, b"1e-7"),
    (1.5e300, b"1.5e300"),
    (-0.0, b"-0.0"),
    (0.1, b"0.1"),
    (100.0, b"100.0"),
    (2**70, b"1180591620717411303424"),
    ("é\n\x1f\u2028", '"é\\n\\u001f\u2028"'.encode()),
    ({"b": [None, True], "a": {"é": 1, "z": 2, "B": 3}}, '{"a":{"B":3,"z":2,"é":1},"b":[null,true]}'.encode()),
]  # fmt: skip


@for_each(("value", "text"), GOLDEN)
def test_sorted_text_is_pinned(value: Any, text: bytes) -> None:
    """The text of numbers, strings and objects in the input of digests never changes."""
    assert encode_sorted(value) == text


@given(
    values.map(json.dumps) | st.from_regex(r"-?[0-9]{1,30}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?")
)
def test_decoded_values_match_the_standard_library(text: str) -> None:
    """Text written by ``json.dumps`` with escapes, and any number, is decoded as by ``json.loads``."""
    check_decoded(text)
    check_decoded(text.encode())


@given(values, st.data())
def test_damaged_text_is_decoded_like_the_standard_library(value: Any, data: st.DataObject) -> None:
    """Text with a few bytes replaced, removed or repeated is decoded as by ``json.loads``."""
    text = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 3)))
    check_decoded(text[:start] + data.draw(st.binary(max_size=3)) + text[stop:])


@for_each("document", DOCUMENTS)
def test_decoded_corner_cases_match_the_standard_library(document: bytes) -> None:
    """Special numbers, repeated keys, surrogates, encodings, nesting and errors match ``json.loads``."""
    check_decoded(document)
    check_decoded(bytearray(document))
    assert outcome(lambda: decode(memoryview(document))) == outcome(lambda: json.loads(document))
    check_decoded(document.decode(errors="surrogateescape"))


def check_decoded(data: str | bytes | bytearray) -> None:
    assert outcome(lambda: decode(data)) == outcome(lambda: json.loads(data))
    strict = outcome(lambda: json.loads(data, parse_constant=reject_constant))
    assert outcome(lambda: decode(data, parse_constant=reject_constant)) == strict


def test_threads_may_encode_first_at_the_same_time() -> None:
    """The codec's types are analyzed when it is imported, because msgspec does not lock that."""
    script = """
import sys, threading
from kedge._internal.json_text import encode

sys.setswitchinterval(1e-6)
barrier = threading.Barrier(4)

def work():
    barrier.wait()
    for _ in range(50):
        encode({"a": [0.1, 1.5, {"b": "c"}]})

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=300, check=False)
    assert done.returncode == 0
