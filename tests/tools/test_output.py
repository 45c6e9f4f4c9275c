"""Tests of the parts of a result that a return value becomes, and of the descriptions of exceptions."""

import datetime as dt
import enum
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from for_each import for_each
from kedge import turns
from kedge.tools.errors import MAX_MESSAGE_CHARS, describe_error, locate_error, redact_secrets
from kedge.tools.invoke import MAX_ATTACHMENT, to_parts, truncate_parts
from kedge.turns import FilePart, ImagePart, Part, RefusalPart, TextPart, file, image, tool_result

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8
WEBP = b"RIFF\0\0\0\0WEBPVP8 "


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


class Size(enum.Enum):
    SMALL = "small"


class Tone(str, enum.Enum):  # noqa: UP042 - the older form is still used
    LOW = "low"


@dataclass
class Point:
    x: int
    size: Size


class Place(BaseModel):
    name: str
    at: Point


class Span(msgspec.Struct):
    size: Size
    ends: list[Point]


class Odd:
    def __str__(self) -> str:
        return "an odd thing"


@for_each(
    ("value", "text"),
    [
        ("plain", "plain"),
        (Tone.LOW, "low"),
        (RefusalPart("no"), "no"),
        (None, "null"),
        (2**70, str(2**70)),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        ({"é": "🙂"}, '{"é":"🙂"}'),
        (Point(1, Size.SMALL), '{"x":1,"size":"small"}'),
        (
            Place(name="Rome", at=Point(1, Size.SMALL)),
            '{"name":"Rome","at":{"x":1,"size":"small"}}',
        ),
        (
            [Span(Size.SMALL, [Point(1, Size.SMALL)])],
            '[{"size":"small","ends":[{"x":1,"size":"small"}]}]',
        ),
        ([dt.date(2026, 1, 2)], '["2026-01-02"]'),
        ({"odd": Odd()}, '{"odd":"an odd thing"}'),
        (math.nan, '"NaN"'),
        (b"bytes of text", "bytes of text"),
        (b"\xff\xfe\x00", "[3 bytes, neither text nor an image]"),
        ("half \ud800 pair", "half \ufffd pair"),
        ("whole \ud83d\ude42 pair", "whole 🙂 pair"),
        ({"names": ["a\udcff", {"\udcfe": 1}]}, '{"names":["a\ufffd",{"\ufffd":1}]}'),
        ([Path("a\udcff"), ("b\udcff", math.nan)], '["a\ufffd",["b\ufffd","NaN"]]'),
        (Place.model_construct(name="\ud800"), '{"name":"\ufffd"}'),
        (CYCLE, "[[...]]"),
    ],
)
def test_values_other_than_images_become_text(value: Any, text: str) -> None:
    """Strings are unchanged, other values become JSON, and values without JSON become their ``str``."""
    assert to_parts(value) == (TextPart(text),)


@for_each(
    ("content", "part"),
    [
        (PNG, image(PNG, media_type="image/png")),
        (b"\xff\xd8\xff\xe0", image(b"\xff\xd8\xff\xe0", media_type="image/jpeg")),
        (b"GIF89a..", image(b"GIF89a..", media_type="image/gif")),
        (WEBP, image(WEBP, media_type="image/webp")),
        (b"%PDF-1.7", file(b"%PDF-1.7", filename="result.pdf")),
    ],
)
def test_bytes_of_images_and_pdfs_become_parts(content: bytes, part: Part) -> None:
    """The type of an image is detected from its first bytes; a PDF is a file."""
    assert to_parts(content) == (part,)


def test_lists_with_images_become_parts() -> None:
    """A list with an image becomes several parts, and a list without one becomes JSON."""
    part = ImagePart("https://kedge.example/a.png")
    assert to_parts(part) == (part,)
    assert to_parts(["look:", PNG, 3]) == (TextPart("look:"), image(PNG), TextPart("3"))
    assert to_parts((part, "there")) == (part, TextPart("there"))
    assert to_parts(tool_result("other", [part])) == (part,)
    assert to_parts(turns.ToolResultBlock("other", ())) == (TextPart(""),)
    assert to_parts(["a", "b"]) == (TextPart('["a","b"]'),)


def test_text_is_truncated_at_the_limit_with_a_note() -> None:
    """The limit applies to all text of a result together; a larger attachment is omitted completely."""
    assert truncate_parts((TextPart("12345"),), 5) == (TextPart("12345"),)
    part = ImagePart("https://kedge.example/a.png")
    huge = FilePart(data="data:," + "x" * MAX_ATTACHMENT)
    parts = (TextPart("123"), part, TextPart("456"), TextPart("7"), huge)
    assert truncate_parts(parts, 5) == (
        TextPart("123"),
        part,
        TextPart("45\n[truncated: 2 of 3 characters are shown]"),
        TextPart("\n[truncated: 0 of 1 characters are shown]"),
        TextPart(f"[omitted: an attachment of {MAX_ATTACHMENT + 6:,} characters]"),
    )


@for_each(
    ("text", "expected"),
    [
        ("no such city", "no such city"),
        ("key sk-proj-abcdefgh12345 is bad", "key [redacted] is bad"),
        ("xai-abcdefgh12345", "[redacted]"),
        ("github_pat_11ABCDEFG0123", "[redacted]"),
        ("AKIAIOSFODNN7EXAMPLE is denied", "[redacted] is denied"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer [redacted]"),
        ('Cookie: a=1; b="2 3"; c=4\nno', "Cookie: [redacted]\nno"),
        ("set-cookie: sid=abc; Path=/; HttpOnly", "set-cookie: [redacted]"),
        ("{'Cookie': 'a=1; b=\\'2', 'Host': 'x'}", "{'Cookie': [redacted], 'Host': 'x'}"),
        ('{"cookie":"a=\\"1\\"; b=2","host":"x"}', '{"cookie":[redacted],"host":"x"}'),
        ("no cookie: the session ended", "no cookie: the session ended"),
        ("sent bearer abcdefghijklmnop, refused", "sent bearer [redacted], refused"),
        ("a basic understanding of bearer tokens", "a basic understanding of bearer tokens"),
        ("postgres://kedge:hunter2@db/x refused", "postgres://[redacted]@db/x refused"),
        ("GET /x?api_key=hunter2&q=1", "GET /x?api_key=[redacted]&q=1"),
        ("{'password': 'hunter 2', 'n': 1}", "{'password': [redacted], 'n': 1}"),
        ("ACCESS_TOKEN=hunter2; n=1", "ACCESS_TOKEN=[redacted]; n=1"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "[redacted]"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- end",
            "[redacted] end",
        ),
        ("remote: Traceback (most recent call last):\n  File", "remote: [traceback left out]"),
        ("expected 3 tokens, got 4", "expected 3 tokens, got 4"),
        ("see https://kedge.example/@someone", "see https://kedge.example/@someone"),
    ],
)
def test_secrets_are_redacted(text: str, expected: str) -> None:
    """Keys, tokens, passwords and tracebacks in a message do not reach the model."""
    assert redact_secrets(text) == expected


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


@for_each(
    ("error", "expected"),
    [
        (ValueError("no such city"), "ValueError: no such city"),
        (ValueError(), "ValueError"),
        (Mute(), "Mute"),
        (
            ExceptionGroup("several", [ValueError("a"), ExceptionGroup("b", [OSError("c")])]),
            "ValueError: a; OSError: c",
        ),
        (ExceptionGroup("twice", [ValueError("a"), ValueError("a")]), "ValueError: a"),
        (ValueError("x" * 10**6), f"ValueError: {'x' * MAX_MESSAGE_CHARS} [cut]"),
    ],
)
def test_an_exception_is_described_by_type_and_message(error: Exception, expected: str) -> None:
    """An exception group is described by its exceptions; a long message is truncated."""
    assert describe_error(error) == expected


def test_locate_error_returns_the_source_location() -> None:
    """The location has the file name, line and function, without the message and the directory."""

    def fail() -> None:
        raise ValueError("hush")

    with pytest.raises(ValueError, match="hush") as error:
        fail()
    place = r"test_output\.py:\d+ in fail"
    assert re.fullmatch(place, locate_error(error.value))
    assert locate_error(ValueError("hush")) == "an unknown location"
